"""Frozen encoders and low-rank adapters: planned, priced, scheduled, run and saved without what a
frozen parameter does not need.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import launch, solve
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.checkpoint.export import WEIGHTS, export
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import FileFormatError
from anabranch.graph.capture import capture
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.estimate import estimate
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule import rule_named
from anabranch.schedule.schedule import Kind
from anabranch.verification import even_plan, verify
from anabranch.workload import Workload
from tests.runtime.small import Built
from tests.runtime.training import LIMIT_S, sgd

WIDTH, SAMPLES = 16, 8
FROZEN = 2
"""Layers of the encoder."""


class Low(nn.Module):
    """A frozen layer, and a product of rank 2 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Reader(nn.Module):
    """An encoder and a reader of what it makes; ``adapters`` are all that is trained of it."""

    def __init__(self, *, frozen: bool = True, adapters: bool = False) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(FROZEN))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.encoder.requires_grad_(not frozen)
        if adapters:
            self.head.requires_grad_(False)
            self.layers = nn.ModuleList(Low(layer) for layer in self.layers)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in (*self.encoder, *self.layers):
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), label)


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return {"x": torch.randn(SAMPLES, WIDTH, generator=generator), "label": label}


def made(seed: int = 0, **options: bool) -> Built:
    torch.manual_seed(seed)
    module = Reader(**options).train()
    workload = Workload(module, batch(), optimizer=sgd, save_frozen=False)
    return Built(capture(module, batch()), workload)


@cache
def adapted() -> Built:
    return made(adapters=True)


def cut(model: Built, replicas: int = 1) -> Plan:
    """The encoder, on devices of its own, then the rest; micro-batches of two samples each."""
    graph = model.captured.graph
    names = [op.name for op in graph.ops]
    parts = names[:FROZEN], names[FROZEN:]
    plan = even_plan(graph, 2, SAMPLES)
    devices = tuple(range(replicas)), (replicas,)
    stages = tuple(
        replace(stage, operators=tuple(part), devices=on, microbatch_size=2)
        for stage, part, on in zip(plan.stage_graph.stages, parts, devices, strict=True)
    )
    shaped: StageGraph = replace(plan.stage_graph, stages=stages)
    return replace(plan, stage_graph=rule_named("1f1b").warm_up(shaped), schedule="1f1b")


@pytest.mark.parametrize("adapters", [False, True])
def test_a_frozen_encoder_has_no_backward_and_keeps_nothing(adapters: bool) -> None:
    """Of its operators; no gradient goes back to it, and its device has its parameters alone: no
    gradients, no state of an optimizer, as a trained one has.
    """
    frozen, trained = made(adapters=adapters), made(frozen=False)
    profiles = [estimate(model.captured, "v100", (2, 4, 8)) for model in (frozen, trained)]
    costs = profiles[0].costs
    assert all(not any(cost.backward_s) for cost in costs[:FROZEN])
    assert not any(cost.kept_bytes for cost in costs[: FROZEN - 1])
    assert all(any(cost.backward_s) for cost in profiles[1].costs[:FROZEN])

    cluster, plan = Cluster.preset("summit:1x2"), cut(frozen)
    timeline = solve.simulate(plan, profiles[0], cluster)
    kinds = {span.action.kind for span in timeline.spans if span.device == 0}
    backwards = [
        span.end - span.start
        for span in timeline.spans
        if span.device == 0 and span.action.kind is Kind.BACKWARD
    ]
    assert Kind.RECEIVE_BACKWARD not in kinds
    assert not any(backwards)
    if not adapters:  # which take kernels of their own, more than such small layers
        assert timeline.step_s < solve.simulate(cut(trained), profiles[1], cluster).step_s

    weights = FROZEN * (WIDTH * WIDTH + WIDTH) * 4
    held, all_of_it = (
        stage_bytes(cut(m).stage_graph, CostModel(profile, cluster), 0, in_flight=1)
        for m, profile in zip((frozen, trained), profiles, strict=True)
    )
    assert weights <= held < weights + 8 * WIDTH * 4 * SAMPLES
    assert all_of_it >= 4 * weights


@pytest.mark.dist
@pytest.mark.parametrize("options", [{"adapters": False}, {"adapters": True}])
def test_gradients_are_those_of_one_process(options: dict[str, bool]) -> None:
    """Also where the encoder has two replicas, whose ranks have nothing to sum and no optimizer;
    verify finds nothing either.
    """
    model = made(**options)
    expected = reference(model.module, batch(), [(0, SAMPLES)])

    def rank() -> tuple[float, dict[str, Tensor], bool]:
        pipe = Pipeline(model.workload, cut(model, 2), captured=model.captured, timeout=20.0)
        loss, gradients = pipe.gradients(batch())
        pipe.step(batch())
        return loss, {n: g.clone() for n, g in gradients.items()}, pipe.optimizer is None

    ranks = launch.run(rank, 3, timeout=LIMIT_S)
    assert [found[2] for found in ranks] == [True, True, False]
    gradients = {n: g for found in ranks for n, g in found[1].items()}
    assert gradients.keys() == expected.gradients.keys()
    assert ranks[0][0] == pytest.approx(expected.loss, rel=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
    result = verify(model.workload, 2, batch=batch(), captured=model.captured, timeout=LIMIT_S)
    assert result.is_good


def steps(model: Built, work: Callable[[Pipeline], Any], resume: Path | None = None) -> list[Any]:
    """Call a function with the pipeline of both ranks."""

    def rank() -> Any:
        options: dict[str, Any] = {"captured": model.captured, "timeout": 20.0}
        if resume is not None:
            return work(Pipeline.resume(resume, model.workload, cut(model), **options))
        return work(Pipeline(model.workload, cut(model), **options))

    return launch.run(rank, 2, timeout=LIMIT_S)


@pytest.mark.dist
def test_checkpoints_of_adapters_alone(tmp_path: Path) -> None:
    """They hold what is trained; a run goes on from one as it would have, with the base weights of
    the module; an export has the adapters, by a trained model's names.
    """

    def first(pipe: Pipeline) -> list[float]:
        losses = [pipe.step(batch(1))]
        pipe.save(tmp_path / "saved")
        return [*losses, pipe.step(batch(2)), pipe.step(batch(3))]

    losses = steps(adapted(), first)[0]
    saved = Checkpoint(tmp_path / "saved")
    learned = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("down", "up")}
    assert set(saved.keys("model")) == learned
    assert set(saved.frozen) == {n for n, _ in adapted().module.named_parameters()} - learned
    assert load_state_dict(tmp_path / "saved").keys() == learned

    again = made(adapters=True)
    resumed = steps(
        again, lambda pipe: [pipe.step(batch(2)), pipe.step(batch(3))], tmp_path / "saved"
    )
    assert resumed[0] == losses[1:]

    export(tmp_path / "saved", tmp_path / "plain")
    assert load_file(tmp_path / "plain" / WEIGHTS).keys() == learned


@pytest.mark.dist
def test_what_was_trained_before_it_was_frozen_is_saved(tmp_path: Path) -> None:
    """As in gradual freezing; the module that a run resumes with has other values."""
    model = adapted()

    def freezes(pipe: Pipeline) -> None:
        pipe.step(batch(1))
        model.module.get_parameter("layers.0.up.weight").requires_grad_(False)
        pipe.step(batch(2))
        pipe.save(tmp_path / "saved")

    steps(model, freezes)
    saved = Checkpoint(tmp_path / "saved")
    assert "layers.0.up.weight" in saved.keys("model")
    assert "layers.0.up.weight" not in saved.frozen


@pytest.mark.dist
def test_a_resume_with_other_base_weights_is_refused(tmp_path: Path) -> None:
    """Adapters were trained beside the weights of then."""
    steps(adapted(), lambda pipe: (pipe.step(batch(1)), pipe.save(tmp_path / "saved"))[0])
    with pytest.raises(FileFormatError, match=r"weight has other values in the module"):
        steps(made(1, adapters=True), lambda pipe: None, tmp_path / "saved")


@pytest.mark.dist
def test_a_whole_checkpoint_exports_adapters_if_asked(tmp_path: Path) -> None:
    """By default everything is saved, and exported."""
    model = made(adapters=True)
    whole = replace(model, workload=replace(model.workload, save_frozen=True))
    steps(whole, lambda pipe: (pipe.step(batch(1)), pipe.save(tmp_path / "saved"))[0])
    export(tmp_path / "saved", tmp_path / "all.safetensors")
    export(tmp_path / "saved", tmp_path / "adapters.safetensors", trained=True)
    names = {n for n, _ in model.module.named_parameters()}
    assert load_file(tmp_path / "all.safetensors").keys() == names
    adapters = load_file(tmp_path / "adapters.safetensors")
    assert adapters.keys() == {n for n in names if "down" in n or "up" in n}


class Follower(Reader):
    """A frozen parameter that the forward changes, as a teacher does."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        loss = super().forward(x, label)
        self.mean.copy_(0.9 * self.mean + 0.1 * self.head.weight.detach())
        return loss


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:the forward changes mean")
def test_what_a_forward_changes_is_saved_though_it_is_frozen(tmp_path: Path) -> None:
    """The module cannot know it."""
    torch.manual_seed(0)
    module = Follower().train()
    workload = Workload(module, batch(), optimizer=sgd, save_frozen=False)
    model = Built(capture(module, batch()), workload)
    steps(model, lambda pipe: (pipe.step(batch(1)), pipe.save(tmp_path / "saved"))[0])
    saved = Checkpoint(tmp_path / "saved")
    assert "mean" in saved.keys("model")
    assert set(saved.frozen) == {f"encoder.{i}.{n}" for i in range(2) for n in ("weight", "bias")}
