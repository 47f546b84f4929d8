"""How often the host waits for the device in a step."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.cost import buckets
from anabranch.device import accelerator
from anabranch.errors import NonFiniteError
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.guards import same_batch
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Batch, NamedParameters, Workload
from tests.runtime.asynchronous.models import batches, cut
from tests.runtime.asynchronous.running import fresh, on_ranks, pipeline, plan_of, start_of
from tests.runtime.host_waits import host_waits, late_device
from tests.runtime.small import WIDTH, Built, batch, built, on_devices, plan, with_programs
from tests.runtime.training import run, run_each, sgd

__all__ = ["late_device"]  # a fixture


@pytest.fixture(autouse=True)
def _batches_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests leave out the values of such batches."""
    monkeypatch.setattr(same_batch, "_some_values", lambda leaf: b"")


MOST = 3
"""Flags of all buckets, whether all gradients are finite, and losses with metrics."""


class Everything(nn.Module):
    """Whatever has made the host wait once: buffers that change, dropout, metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        scores = self.head(self.drop(torch.tanh(self.second(h))))
        accuracy = (scores.argmax(1) == label).float().mean()
        return {"loss": F.cross_entropy(scores, label), "accuracy": accuracy}


def waits(model: Built, chosen: Any, *ways: bool, **options: Any) -> list[int]:
    """Of the second and the third step, by rank; the first one sets things up. Each way is by
    ``steps``, or step by step.
    """

    def work(pipeline: Pipeline, steps: bool) -> int:
        pipeline.step(batch(16))
        leaves = [batch(16, seed) for seed in (1, 2)]
        state = pipeline._state
        on_device = [
            *state.parameters.values(),
            *state.buffers.values(),
            *(tensor for leaf in leaves for tensor in leaf.values()),
        ]
        with host_waits(on_device) as counting:
            if steps:
                list(pipeline.steps(leaves))
            else:
                for leaf in leaves:
                    pipeline.step(leaf)
        assert len(counting.found) <= 2 * MOST, counting.found
        return len(counting.found)

    every = run_each(model, chosen, *((partial(work, steps=way), options) for way in ways))
    return [count for counts in every for count in counts]


@cache
def everything() -> Built:
    torch.manual_seed(0)
    module, example = Everything(), batch(4)
    return Built(capture(module, example), Workload(module, example))


@contextmanager
def small_buckets() -> Iterator[None]:
    """One parameter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 1)
        yield


@pytest.mark.dist
def test_replicas_wait_three_times_a_step() -> None:
    """However many micro-batches, metrics, buckets, buffers and random operations there are."""
    model = everything()
    chosen = plan(model, 1, microbatch_size=4, replicas=[2], recompute=True)
    with small_buckets():
        options = ComputeOptions(dropout="sample")
        counts = waits(model, chosen, False, True, compute=options)
    assert max(counts) <= 2 * MOST


@pytest.mark.dist
def test_a_pipeline_waits_three_times_a_step() -> None:
    """Of stages that exchange messages, with a norm that is clipped over all of them, and in half
    precision, whose overflows count.
    """
    model = built("TwoBranch")
    workload = replace(model.workload, clip_norm=1.0)
    options = ComputeOptions(precision="fp16")
    chosen = plan(model, 2, microbatch_size=2)
    counts = waits(model, chosen, False, workload=workload, compute=options)
    assert max(counts) <= 2 * MOST


@pytest.mark.usefixtures("late_device")
def test_steps_give_the_device_its_update_before_they_wait() -> None:
    """Whether numbers are finite is decided on the device, so that it has something to do while the
    host looks; ``step`` looks first, because other ranks have a say.
    """
    model = built("TwoBranch")
    workload = replace(model.workload, module=deepcopy(model.module))
    pipeline = Pipeline(workload, plan(model, 1), check_gradients=False)
    leaves = [batch(16, seed) for seed in range(3)]
    pipeline.step(leaves[0])
    state = pipeline._state
    seen: list[int] = []
    tensors = [*state.parameters.values(), *(t for leaf in leaves for t in leaf.values())]
    with host_waits(tensors) as counting:
        assert pipeline.optimizer is not None
        pipeline.optimizer.register_step_pre_hook(lambda *_: seen.append(len(counting.found)))
        list(pipeline.steps(leaves[1:]))
    assert seen[0] == 0
    assert len(seen) == 2
    assert seen[1] <= 2


def fused(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, fused=True)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def on_device(pipeline: Pipeline, leaves: Sequence[Batch]) -> list[Tensor]:
    state = pipeline._state
    values = (tensor for leaf in leaves for tensor in leaf.values())
    return [*state.parameters.values(), *state.buffers.values(), *values]


LATE = {
    "one stage": (1, None),
    "two stages per device": (4, [(0,), (1,), (0,), (1,)]),
    "replicas": (2, [(0, 1), (2,)]),
}


@pytest.mark.dist
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize(
    ("case", "accumulate"), [("one stage", 2), ("two stages per device", 1), ("replicas", 1)]
)
def test_steps_ask_a_gpu_once_and_a_step_late(
    case: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has the passes of the next step; the update itself is not waited for. Losses and
    weights are those of steps that wait.
    """
    stages, devices = LATE[case]
    model = built("TwoBranch")
    workload = replace(model.workload, optimizer=fused, scheduler=halving)
    chosen = plan(model, stages, replicas=[2, 1] if case == "replicas" else None)
    if devices is not None:
        chosen = on_devices(chosen, devices)
    leaves = [batch(16, seed) for seed in range(6)]

    def work(pipeline: Pipeline) -> tuple[list[str], list[float], dict[str, Tensor], Any]:
        first = [pipeline.step(leaf) for leaf in leaves[:accumulate]]
        with host_waits(on_device(pipeline, leaves)) as counting:
            losses = [*first, *pipeline.steps(leaves[accumulate:])]
            count = len(counting.found)
        pipeline.update()
        weights = {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}
        scheduler = pipeline._state.scheduler
        return counting.found[:count], losses, weights, scheduler and scheduler.last_epoch

    def on_late_device(pipeline: Pipeline) -> Any:
        found = work(pipeline)
        monkeypatch.undo()  # in this rank
        return found

    options = {"accumulate": accumulate}
    results, expected = run_each(
        model, chosen, (on_late_device, options), (work, options), workload=workload
    )
    for (found, *late), (_, *plain) in zip(results, expected, strict=True):
        *before_last, last = found
        assert set(before_last) <= {"late"}, found
        assert last == "dry"  # nothing follows the last step
        assert len(found) <= len(leaves) - accumulate
        assert late[0] == plain[0]
        assert all(torch.equal(late[1][name], plain[1][name]) for name in plain[1])
        assert late[2] == plain[2]


@pytest.mark.dist
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize(("optimizer", "is_gradient"), [(fused, False), (sgd, True)])
def test_a_bad_step_on_a_gpu_is_the_one_that_is_named(
    optimizer: Any, is_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the parameter, on every rank, of which one alone may know; one rank alone can go on,
    with what it had before. What ranks exchange between steps comes in one order, whoever knows.
    """
    model = built("TwoBranch")
    workload = replace(model.workload, optimizer=optimizer, scheduler=halving)
    leaves = [batch(16, seed) for seed in range(5)]
    if not is_gradient:
        leaves[2]["x"][3, 1] = float("inf")

    def work(pipeline: Pipeline) -> tuple[list[float], str, dict[str, Tensor], Any]:
        losses, calls = [], []
        parameters = pipeline._state.parameters

        def overflow(gradient: Tensor) -> Tensor:
            calls.append(1)  # once per micro-batch, of which there are four
            return gradient * float("inf") if len(calls) == 4 * 2 + 2 else gradient

        if is_gradient and "left.0.0.weight" in parameters:
            parameters["left.0.0.weight"].register_hook(overflow)  # type: ignore[no-untyped-call]
        with pytest.raises(NonFiniteError) as caught:
            losses.extend(pipeline.steps(leaves))
        told = str(caught.value)
        if pipeline._mesh.size == 1:
            losses += [pipeline.step(leaf) for leaf in leaves[3:]]
        weights = {n: p.detach().clone() for n, p in parameters.items()}
        return losses, told, weights, pipeline._state.scheduler.state_dict()

    def on_late_device(pipeline: Pipeline) -> Any:
        found = work(pipeline)
        monkeypatch.setattr(accelerator, "has_streams", lambda device: False)  # in this rank
        monkeypatch.setattr(accelerator, "to_host", lambda tensor: (tensor, None))
        return found

    ways = [(each, {"check_copies": 1}) for each in (on_late_device, work)]
    for stages in (1, 2):
        results, expected = run_each(model, plan(model, stages), *ways, workload=workload)
        assert not is_gradient or all("left.0.0.weight" in late[1] for late in results)
        for late, plain in zip(results, expected, strict=True):
            assert late[:2] == plain[:2]
            if stages == 1:
                assert all(torch.equal(late[2][name], plain[2][name]) for name in plain[2])
                assert late[3] == plain[3]


@pytest.mark.dist
@pytest.mark.usefixtures("late_device")
def test_a_step_waits_twice_for_a_gpu() -> None:
    """At most: for gradients that this rank alone lacks, and for all numbers together."""
    model = built("TwoBranch")
    workloads = [replace(model.workload, optimizer=o, clip_norm=1.0) for o in (fused, sgd)]
    leaves = [batch(16, seed) for seed in range(4)]

    def work(pipeline: Pipeline) -> int:
        pipeline.step(leaves[0])
        with host_waits(on_device(pipeline, leaves)) as counting:
            for leaf in leaves[1:]:
                pipeline.step(leaf)
        return len(counting.found)

    chosen = on_devices(plan(model, 2, replicas=[2, 1]), [(0, 1), (2,)])
    counts = run_each(model, chosen, *((work, {"workload": workload}) for workload in workloads))
    assert max(map(max, counts)) <= 2 * 3


@pytest.mark.dist
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize(("replicas", "round_robin"), [((1, 1, 1), False), ((2, 1, 1), True)])
def test_mini_batches_without_a_flush_leave_no_gpu_idle(
    replicas: tuple[int, ...], round_robin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came of one is asked when the next is under way; losses are those of a CPU."""
    model, leaves = cut("chain 3"), batches(12)
    chosen = plan_of(model, replicas=replicas)

    def work() -> tuple[list[str], list[float]]:
        pipe = pipeline(model, chosen, round_robin=round_robin)
        losses = list(pipe.steps(leaves[:1]))
        state = pipe._state
        values = (tensor for leaf in leaves for tensor in leaf.values())
        found: list[str] = []
        with host_waits([*state.parameters.values(), *values]) as counting:
            steps, drain = pipe.steps(leaves[1:]), pipe.drain

            def noted() -> None:
                found.extend(counting.found)
                drain()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipe, "drain", noted)
                losses += steps
        return found, losses

    def both() -> tuple[list[str], list[float], list[float]]:
        start, (found, losses) = start_of(model), work()
        monkeypatch.undo()  # in this rank
        fresh(model, start)
        return found, losses, work()[1]

    for found, losses, plain in on_ranks(chosen, both):
        assert found
        assert set(found) == {"late"}
        assert losses == plain


@pytest.mark.dist
def test_evaluation_waits_once_a_batch() -> None:
    """For the loss and all metrics of its micro-batches."""
    model = with_programs(built("TwoBranch"), 4, evaluation=True)

    def work(pipeline: Pipeline) -> int:
        pipeline.evaluate([batch(16)])
        held_out = [batch(16, seed) for seed in range(3)]
        leaves = [tensor for leaf in held_out for tensor in leaf.values()]
        with host_waits([*pipeline._state.parameters.values(), *leaves]) as counting:
            pipeline.evaluate(held_out)
        return len(counting.found)

    assert run(model, plan(model, 2), work) == [0, 3]


def test_the_count_sees_what_waits() -> None:
    """And nothing else."""
    weight = torch.ones(3, requires_grad=True)
    with host_waits([weight]) as counting:
        loss = (weight * 2).sum()
        loss.backward()
        host = torch.tensor([1.0, 2.0])
        assert host.tolist() == [1.0, 2.0]
        assert not counting.found
        assert bool(loss > 0)
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3
        loss.item()
        torch.equal(weight, weight)
    assert len(counting.found) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("steps", [False, True])
def test_a_gpu_is_waited_for_three_times_a_step(steps: bool) -> None:
    """As PyTorch itself counts; batches are in memory of the host."""
    model = everything()
    workload = replace(model.workload, module=deepcopy(model.module))
    chosen = plan(model, 1, microbatch_size=4, recompute=True)
    options = ComputeOptions(dropout="sample")
    pipeline = Pipeline(workload, chosen, check_gradients=False, compute=options, device="cuda")
    pipeline.step(batch(16))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if steps:
                list(pipeline.steps([batch(16, 1), batch(16, 2)]))
            else:
                pipeline.step(batch(16, 1))
                pipeline.step(batch(16, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in found if "synchroniz" in str(warning.message)]
    assert len(waits) <= 2 * MOST, [str(warning) for warning in waits]
