"""Bytes of tensors that are alive at once."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anabranch
from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.graph.opgraph import Precision
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import Profile
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.measurement.peak_memory import PeakMemory
from anabranch.runtime.pipeline import Pipeline
from anabranch.solve.simulation import foreseen
from anabranch.workload import NamedParameters, Workload, adamw
from tests.runtime.small import batch, built
from tests.runtime.small import plan as small_plan
from tests.runtime.training import begin_again

CPU = torch.device("cpu")
KB = 1024


def kilobytes(count: int = 1) -> Tensor:
    return torch.ones(count * KB // 4)


def test_what_is_held_counts_and_what_is_ignored_does_not() -> None:
    held, ignored = kilobytes(3), kilobytes(5)
    gauge = PeakMemory(CPU, [held, held[:2]], [ignored])
    with gauge.measuring():
        ignored.sum()
    assert 3 * KB <= gauge.peak_bytes < 4 * KB


def test_the_peak_is_of_what_is_alive_at_once() -> None:
    """A hundred tensors of 1 KB one after the other are two at once: the next, and the one before
    it. Views cost nothing; what somebody else made counts from when it is read.
    """
    ignored, received = kilobytes(), kilobytes(7)
    gauge = PeakMemory(CPU, [], [ignored])
    with gauge.measuring():
        for _ in range(100):
            made = ignored * 2
            made.view(-1, 2)
    assert gauge.peak_bytes == 2 * KB
    gauge = PeakMemory(CPU, [], [ignored])
    with gauge.measuring():
        received[:4].neg()
    assert 7 * KB <= gauge.peak_bytes < 8 * KB


def test_what_autograd_keeps_is_alive() -> None:
    """Four tanh keep their outputs until the backward has passed; then the gradient is left."""
    weight = kilobytes().requires_grad_()
    gauge = PeakMemory(CPU, [weight])
    with gauge.measuring():
        h = weight
        for _ in range(4):
            h = torch.tanh(h)
        total = h.sum()
        del h
        kept = gauge_now(gauge)
        total.backward()
        after = gauge_now(gauge)
    assert kept == 5 * KB + 4
    assert after == 2 * KB + 4


def gauge_now(gauge: PeakMemory) -> int:
    storages = gauge.storages
    assert storages is not None
    return storages.now


class Deep(nn.Module):
    """Activations of a micro-batch take several times as much as all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


SAMPLES = {"x": torch.randn(4, 256, 32, generator=torch.Generator().manual_seed(0))}


@cache
def deep() -> tuple[Captured, Profile]:
    """The model, and a profile that is estimated: stages of equal work, whatever the machine does
    meanwhile.
    """
    captured = capture(Deep(), SAMPLES)
    return captured, anabranch.estimate(captured, "v100", (2, 4))


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


@pytest.mark.dist
def test_the_prediction_is_near_the_measurement() -> None:
    """Two stages, Adam, schedules with whole and with split backwards; the step trains as it would
    have.
    """
    captured, profile = deep()
    cluster = replace(Cluster.preset("local:2"), cores=0)
    options: dict[str, Any] = {"planner": "even", "microbatch_size": 4}
    plans = [
        anabranch.plan(profile, cluster, 32, schedule=schedule, **options)
        for schedule in ("gpipe", "1f1b", "1f1b-split", "zb-h2")
    ]
    assert all(len(plan.stage_graph) == 2 for plan in plans)
    samples = {"x": torch.randn(32, 256, 32)}
    start = {name: value.clone() for name, value in captured.module.state_dict().items()}

    def rank() -> list[tuple[Any, float, float]]:
        results = []
        for plan in plans:
            begin_again(captured.module, start)
            workload = Workload(captured.module, SAMPLES, optimizer=adam)
            pipe = Pipeline(workload, plan, captured=captured, check_gradients=False, timeout=30.0)
            first, last = pipe.step(samples), pipe.step(samples, weigh=True)
            results.append((pipe.peak_bytes, first, last))
            pipe.close()
        return results

    first_rank, second_rank = launch.run(rank, 2, timeout=60.0)
    assert first_rank == second_rank
    # A message that was reckoned with may not be there, nor all kinds of gradients at once, nor
    # an output that was sent.
    activation = 4 * 256 * 32 * 4
    for plan, (peaks, first, last) in zip(plans, first_rank, strict=True):
        assert last < first
        for measured, said in zip(peaks, plan.predicted.device_peak_bytes, strict=True):
            assert said > 10 * activation
            assert said - 3 * activation <= measured <= said + 4 * KB


class Widened(nn.Module):
    """The first layer makes 1024 numbers of 8, which a frozen layer does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(8, 1024), nn.Linear(8, 1)
        self.frozen = nn.Linear(1024, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.wide(x))).square().mean()


@pytest.mark.dist
def test_outputs_are_kept_no_longer_than_they_are_sent() -> None:
    """Eight micro-batches are in flight, each with an output of 256 KiB."""
    torch.manual_seed(0)
    module, samples = Widened(), {"x": torch.randn(512, 8)}
    example = {"x": samples["x"][:64]}
    captured = capture(module, example)
    profile = anabranch.estimate(captured, "v100", (32, 64))
    first, *others = (op.name for op in profile.graph.ops)
    stages = Stage((first,), (0,), 64), Stage(tuple(others), (1,), 64)
    cluster = replace(Cluster.preset("local:2"), cores=0)
    plan = anabranch.plan(profile, cluster, 512, planner="even", microbatch_size=64)
    plan = replace(plan, stage_graph=StageGraph(stages, ((0, 1),), 512))
    plan, _ = foreseen(plan, profile, schedule="gpipe")

    def rank() -> tuple[int, ...] | None:
        workload = Workload(module, example)
        pipe = Pipeline(workload, plan, captured=captured, check_gradients=False, timeout=30.0)
        pipe.step(samples)
        pipe.step(samples, weigh=True)
        return pipe.peak_bytes

    measured, _ = launch.run(rank, 2, timeout=60.0)[0]
    assert measured <= plan.figures.device_peak_bytes[0] < 4 * 256 * KB


@pytest.mark.dist
def test_replicas_hold_terms_of_others_while_they_sum() -> None:
    """Two of four add the terms of the others to their own one by one, two have added up some
    before: as predicted of each.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), Mean())
    example = torch.randn(4, 4)
    captured = capture(module, (example,))
    cluster = replace(Cluster.preset("local:4"), cores=0)
    profile = anabranch.estimate(captured, "v100", (1, 4))
    options: dict[str, Any] = {"planner": "data-parallel", "shard_optimizer": False}
    plan = anabranch.plan(profile, cluster, 4, microbatch_size=4, **options)
    assert [stage.replicas for stage in plan.stage_graph.stages] == [4]

    def rank() -> Any:
        workload = Workload(module, (example,), optimizer=adamw)
        pipe = Pipeline(workload, plan, captured=captured, check_gradients=False, timeout=30.0)
        for weigh in (False, False, True):
            pipe.step((example,), weigh=weigh)
        return pipe.peak_bytes

    peaks, gradients = launch.run(rank, 4, timeout=60.0)[0], 4 * 256 * (5 + 257)
    assert peaks[2] - peaks[0] == pytest.approx(gradients, rel=0.02)
    assert peaks == pytest.approx(plan.predicted.device_peak_bytes, rel=0.02)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Halved(nn.Module):
    """Layers, perhaps under autocast, whose weights take more than a sample's activations."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.half = half
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.half else nullcontext():
            return self.layers(x).float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_casts_of_weights_are_predicted_for_every_micro_batch_in_flight(
    precision: Precision,
) -> None:
    """Eight micro-batches of two samples keep 5 x 32 KiB of them each: a backward of the first
    layer needs none. Alike where the model has autocast, and where the plan has it.
    """
    torch.manual_seed(0)
    module, samples = Halved(half=precision == "fp32"), {"x": torch.randn(16, 128)}
    example = {"x": samples["x"][:4]}
    captured = capture(module, example).under_autocast(precision, "cpu")
    profile = anabranch.estimate(captured, "v100", (2, 4))
    plan = anabranch.plan(
        profile, Cluster.preset("local:1"), 16, microbatch_size=2, schedule="gpipe"
    )
    assert plan.precision == precision
    workload = Workload(module, example, optimizer=partial(torch.optim.AdamW, fused=True))
    pipe = Pipeline(workload, plan, captured=captured)
    pipe.step(samples)
    pipe.step(samples, weigh=True)
    assert plan.predicted is not None
    (said,), (measured,) = plan.predicted.device_peak_bytes, pipe.peak_bytes
    assert measured > 8 * 5 * 32 * KB
    assert said == pytest.approx(measured, rel=0.1)


class MaskedWords(nn.Module):
    """Scores for each of 512 words at each of 16 places are most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(512, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 512)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.body(self.words(tokens))))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("source", ["estimated", "measured"])
def test_the_gradients_of_scores_are_predicted(source: str) -> None:
    """The logarithms of a sample's scores, 16 x 512 x 4 bytes, are kept; the backward of the loss
    makes their gradient and that of the scores, while nothing has been given back yet.
    """
    torch.manual_seed(0)
    module, tokens = MaskedWords(), torch.randint(0, 512, (16, 16))
    samples = {"tokens": tokens, "labels": tokens.masked_fill(torch.rand(16, 16) < 0.5, -100)}
    example = {name: tensor[:4] for name, tensor in samples.items()}
    captured = capture(module, example)
    if source == "estimated":
        profile = anabranch.estimate(captured, "v100", (2, 4))
    else:
        profile = anabranch.measure(captured, (2, 4), repeats=1)
    scores = 16 * 512 * 4
    loss = profile.costs[-1]
    assert scores <= loss.kept_bytes < 1.1 * scores
    assert 2 * scores <= loss.working_bytes < 2.1 * scores
    plan = anabranch.plan(
        profile, Cluster.preset("local:1"), 16, microbatch_size=4, schedule="1f1b"
    )
    workload = Workload(module, example, optimizer=partial(torch.optim.AdamW, fused=True))
    pipe = Pipeline(workload, plan, captured=captured, check_gradients=False)
    pipe.step(samples)
    pipe.step(samples, weigh=True)
    assert pipe.peak_bytes is not None
    (measured,), (said,) = pipe.peak_bytes, plan.predicted.device_peak_bytes
    assert 0.9 * said <= measured <= said


@pytest.mark.dist
def test_compiled_stages_on_a_cpu_are_not_weighed() -> None:
    """The step is the same as ever."""
    model = built("Chain")

    def rank() -> tuple[bool, object]:
        options = ComputeOptions(compile="eager")
        pipe = Pipeline(
            model.workload,
            small_plan(model, 2),
            captured=model.captured,
            compute=options,
            timeout=30.0,
        )
        return pipe.step(batch(16), weigh=True) > 0, pipe.peak_bytes

    assert launch.run(rank, 2, timeout=120.0) == [(True, None)] * 2
