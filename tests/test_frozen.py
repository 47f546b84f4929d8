"""Frozen parts of a model, from the estimate to the trace: nothing goes backward through them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import launch, solve
from anabranch.cluster import Cluster
from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.profile.estimate import estimate
from anabranch.profile.profile import Profile
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule.schedule import Kind
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, num_ranks, on_devices, plan
from tests.runtime.training import LIMIT_S

WIDTH = 512
FROZEN = (0, 2, 3)
"""Steps in which something is frozen for a while."""
CLUSTER = Cluster.preset("summit:1x4")


def tower(depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


class Towers(nn.Module):
    """Two towers and a head; the first tower may be frozen."""

    def __init__(self, *, frozen: bool, depths: tuple[int, int] = (12, 6), width: int = WIDTH):
        super().__init__()
        self.left, self.right = (tower(depth, width) for depth in depths)
        self.head = nn.Linear(2 * width, 1)
        self.left.requires_grad_(not frozen)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(y)], 1)).square().mean()


def profile(*, frozen: bool) -> Profile:
    module = Towers(frozen=frozen).to("meta")
    example = (torch.empty(4, WIDTH, device="meta"), torch.empty(4, WIDTH, device="meta"))
    return estimate(capture(module, example), "v100", [1 << i for i in range(11)])


def test_a_frozen_tower_is_planned_without_its_backward() -> None:
    """It has forwards alone, and keeps and sends back nothing; so its twelve layers get fewer
    devices than in a plan that does not know, whose step is longer: 1.81 ms against 1.55.
    """
    blind, aware = profile(frozen=False), profile(frozen=True)
    for op, cost in zip(aware.graph.ops, aware.costs, strict=True):
        is_frozen = op.name.startswith("left")
        assert (max(cost.backward_s) == 0) == is_frozen
        assert (cost.kept_bytes == 0) == is_frozen
    assert not any(v.grad for v in aware.graph.values if aware.graph.ops[v.producer].name[0] == "l")
    plans = {
        known: solve.plan(known_profile, CLUSTER, 1024, max_replicas=1, improve=False)
        for known, known_profile in (("blind", blind), ("aware", aware))
    }
    step_s = {name: solve.simulate(p, aware, CLUSTER).step_s for name, p in plans.items()}
    assert step_s["aware"] < 0.9 * step_s["blind"]
    holders = {
        known: sum(any(n.startswith("left") for n in s.operators) for s in p.stage_graph.stages)
        for known, p in plans.items()
    }
    assert holders == {"blind": 3, "aware": 2}
    timeline = solve.simulate(plans["aware"], aware, CLUSTER)
    frozen_stage = next(
        s
        for s, stage in enumerate(plans["aware"].stage_graph.stages)
        if all(name.startswith("left") for name in stage.operators)
    )
    spans = [span for span in timeline.spans if span.action.stage == frozen_stage]
    assert {span.action.kind for span in spans if span.end > span.start} <= {
        Kind.FORWARD,
        Kind.SEND_FORWARD,
    }


def test_a_frozen_tower_runs_without_a_graph() -> None:
    """Its stage makes values without a gradient, none comes back to it, and no parameter of it has
    one afterwards; the others have those of one process.
    """
    torch.manual_seed(0)
    module = Towers(frozen=True, depths=(2, 2), width=8)
    given = (torch.randn(8, 8), torch.randn(8, 8))
    captured = capture(module, given)
    model = Built(captured, Workload(module, given))
    cut = on_devices(plan(model, 3, batch_size=8, microbatch_size=2), [(0,), (0,), (0,)])
    pipeline = Pipeline(model.workload, cut, captured=captured)
    parts = pipeline._session.parts
    assert not any(port.grad for port in parts.ports if port.source == 0)
    loss, gradients = pipeline.gradients(given)
    expected = reference(module, given, [(0, 8)])
    assert gradients.keys() == expected.gradients.keys()
    assert not any(name.startswith("left") for name in gradients)
    assert abs(loss - expected.loss) < 1e-6 * expected.loss


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Classifier(nn.Module):
    """Adapters on a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapted(8) for _ in range(4)))
        self.head = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)), label)


def test_adapters_on_a_frozen_model_are_trained_as_in_one_process() -> None:
    """Gradients pass frozen layers, which have none of their own; the optimizer holds adapters."""
    torch.manual_seed(0)
    module = Classifier()
    given = {"x": torch.randn(8, 8), "label": torch.randint(0, 3, (8,))}
    captured = capture(module, given)
    model = Built(captured, Workload(module, given))
    cut = on_devices(plan(model, 3, batch_size=8, microbatch_size=2), [(0,), (0,), (0,)])
    pipeline = Pipeline(model.workload, cut, captured=captured)
    _, gradients = pipeline.gradients(given)
    expected = reference(module, given, [(0, 8)])
    assert gradients.keys() == expected.gradients.keys()
    assert all("down" in name or "up" in name for name in gradients)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected.gradients[name], atol=1e-7)
    held = [p for group in pipeline.optimizer.param_groups for p in group["params"]]
    assert len(held) == 8


class Routed(nn.Module):
    """Samples whose first number is positive go through an expert, the others through another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.expert, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        mixed = torch.where(x[:, :1] > 0, self.expert(h), self.other(h))
        return self.head(mixed).square().mean()


@pytest.mark.dist
def test_gradients_that_are_sometimes_absent_are_those_of_a_plain_loop() -> None:
    """An expert without samples in some micro-batches, and in all of step 3, has gradients of zero,
    by which Adam moves it on; the body, frozen from the first step on and again in steps 2 and 3,
    has none, and stays as it is.
    """
    torch.manual_seed(0)
    module, batches = Routed().double(), torch.randn(6, 8, 4, dtype=torch.float64)
    batches[0, 1:, 0], batches[3, :, 0] = -1.0, -1.0
    workload = Workload(module, (batches[0],), optimizer=torch.optim.Adam)
    model = Built(capture(module, workload.example), workload)
    chosen = plan(model, 2, batch_size=8, microbatch_size=2, replicas=[2, 1])
    alone = copy.deepcopy(module)

    def rank() -> dict[str, Tensor]:
        pipeline = Pipeline(workload, chosen, captured=model.captured, timeout=20.0)
        for step, x in enumerate(batches):
            module.body.requires_grad_(step not in FROZEN)
            pipeline.step((x,))
        return {name: p.detach() for name, p in pipeline._state.parameters.items()}

    ranks = launch.run(rank, num_ranks(chosen), timeout=LIMIT_S)
    optimizer = torch.optim.Adam(alone.parameters())
    for step, x in enumerate(batches):
        alone.body.requires_grad_(step not in FROZEN)
        optimizer.zero_grad()
        alone(x).backward()
        optimizer.step()
    trained = {name: p for mine in ranks for name, p in mine.items()}
    for name, parameter in alone.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("name", "frozen"), [("Tied", "words"), ("Chain", "body")], ids=["tied", "a whole stage"]
)
def test_exact_mode_and_another_plan_leave_alone_what_is_frozen_for_a_while(
    name: str, frozen: str
) -> None:
    """Adam would move a tied parameter on by a gradient of zero. A batch of a new size, of which a
    program is made while all of a stage is frozen, and a change of the plan then change nothing.
    """
    model = built(name, torch.float64)
    module = copy.deepcopy(model.module)
    workload = Workload(module, batch(2, 0, torch.float64), optimizer=torch.optim.Adam)
    model = Built(capture(module, workload.example), workload)
    plans = [
        on_devices(plan(model, stages, batch_size=8, microbatch_size=2), [(0,)] * stages)
        for stages in (2, 3)
    ]
    alone = copy.deepcopy(module)
    optimizer = torch.optim.Adam(alone.parameters())
    pipeline = Pipeline(workload, plans[0], captured=model.captured, exact=True)
    for step, size in enumerate([8, 8, 7, 7, 8, 7]):
        given = batch(size, step, torch.float64)
        for part in (module, alone):
            part.get_submodule(frozen).requires_grad_(step not in FROZEN)
        if step == 3:
            pipeline.change_plan(plans[1])
        pipeline.step(given)
        optimizer.zero_grad()
        alone(**given).backward()
        optimizer.step()
    for found, expected in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_part_that_was_frozen_at_capture_cannot_be_trained_later() -> None:
    """Stages after it were told to send it no gradients, so it would not learn, without a word."""
    module = Towers(frozen=True, depths=(1, 1), width=4)
    model = Built(capture(module, (x := torch.ones(4, 4), x)), Workload(module, (x, x)))
    pipeline = Pipeline(model.workload, plan(model, 1), captured=model.captured)
    pipeline.step((x, x))
    module.left.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"left\.0\.0\.weight, .* were frozen"):
        pipeline.step((x, x))
