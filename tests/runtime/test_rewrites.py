"""Training by a plan with rewrites is training of the model as it was written."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from anabranch import AsyncPipeline, Cluster, Pipeline, Workload, launch, plan
from anabranch.checkpoint import load_state_dict
from anabranch.errors import InvalidPlanError, TrainingError
from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.estimate import estimate
from anabranch.verification import verify
from tests.runtime.small import Built, with_programs

BATCH, STEPS = 16, 4
REWRITES = {"none": (), "join": ("join-split",), "both": ("join-split", "tensor-split")}


class Towers(nn.Module):
    """Three branches and a head on their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, inputs: list[Tensor], target: Tensor) -> Tensor:
        joined = torch.cat([tower(x) for tower, x in zip(self.towers, inputs, strict=True)], -1)
        return nn.functional.mse_loss(self.head(joined).squeeze(-1), target)


def batches(samples: int, epoch: int) -> list[dict[str, object]]:
    draw = torch.Generator().manual_seed(epoch)
    inputs = [[torch.randn(samples, 6, generator=draw) for _ in range(3)] for _ in range(STEPS)]
    return [{"inputs": several, "target": several[0][:, 0]} for several in inputs]


def adam_of_weights_and_biases(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups by name and by shape, as transformers' recipes make them."""
    matrices = [p for name, p in named if p.dim() > 1 and "head.0" not in name]
    others = [p for name, p in named if p.dim() < 2 or "head.0" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def workload() -> Workload:
    torch.manual_seed(0)
    return Workload(
        Towers(), batches(8, 0)[0], batches, optimizer=adam_of_weights_and_biases, clip_norm=0.5
    )


@cache
def job(name: str) -> tuple[Workload, Captured]:
    """A workload of its own for every rewrite, captured once for all ranks, which inherit both."""
    made = workload()
    captured = capture(made.module, made.example, rewrites=REWRITES[name])
    with_programs(Built(captured, made), 8, BATCH)
    return made, captured


@cache
def planned(name: str, devices: int = 3) -> Plan:
    profile = estimate(job(name)[1], "v100", (2, 4, 8, 16))
    return plan(profile, Cluster.preset(f"local:{devices}"), BATCH, planner="graphpipe")


def run(
    name: str,
    start: int,
    stop: int,
    load: Path | None = None,
    save: Path | None = None,
    by: Plan | None = None,
    is_evaluated: bool = False,
) -> list[float]:
    """Losses of some steps, and perhaps of held-out batches."""
    by = by or planned(name)

    def rank() -> list[float]:
        made, captured = job(name)
        if load is None:
            pipe = Pipeline(made, by, captured=captured)
        else:
            pipe = Pipeline.resume(load, made, by, captured=captured)
        losses = [float(pipe.step(batch)) for batch in batches(BATCH, 0)[start:stop]]
        if save is not None:
            pipe.save(save)
        return [*losses, pipe.evaluate(batches(BATCH, 1))["loss"]] if is_evaluated else losses

    return launch.run(rank, len(by.stage_graph.devices), timeout=60.0)[0]


@cache
def curve(name: str) -> list[float]:
    """All steps in one run, and the mean over held-out batches."""
    with_programs(Built(job(name)[1], job(name)[0]), 8, BATCH, evaluation=True)
    return run(name, 0, STEPS, is_evaluated=True)


@pytest.mark.dist
def test_the_curve_is_that_of_the_model_as_written() -> None:
    """With parameter groups, weight decay and clipping by the norm of whole gradients."""
    assert curve("both") == pytest.approx(curve("none"), rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize(("before", "after"), [("none", "both"), ("both", "join")])
def test_a_run_goes_on_with_other_rewrites(before: str, after: str, tmp_path: Path) -> None:
    """Weights and the optimizer's state are those of the model, whatever was cut."""
    first = run(before, 0, 2, save=tmp_path / "saved")
    rest = run(after, 2, STEPS, load=tmp_path / "saved")
    assert first + rest == pytest.approx(curve("none")[:-1], rel=1e-5)
    # Names and shapes of the checkpoint are those of the module's own ``state_dict``.
    saved, module = load_state_dict(tmp_path / "saved"), workload().module
    assert {n: t.shape for n, t in saved.items()} == {
        n: t.shape for n, t in module.state_dict().items()
    }


@pytest.mark.dist
def test_verify_compares_slices_with_the_module() -> None:
    """Each with its part of the gradient of one process; bitwise it cannot be. The model is
    captured anew, as the plan says. What is counted are the module's own parameters.
    """
    result = verify(workload(), planned("both"))
    assert result.num_parameters == len(list(workload().module.parameters()))
    assert result.is_good
    assert result.max_gradient_error < 1e-5
    assert not result.exact


@pytest.mark.dist
def test_replicas_share_the_state_of_slices(tmp_path: Path) -> None:
    """ZeRO-1 of two stages with two replicas each, one of which holds slices; saved and gone on
    with, without a rewrite and without replicas.
    """
    by = planned("join", devices=4)
    stages = by.stage_graph.stages
    first = [name for stage in stages[:-1] for name in stage.operators]
    cut = [replace(stages[0], operators=tuple(first), devices=(0, 1), microbatch_size=8, k=1)]
    cut.append(replace(stages[-1], devices=(2, 3), microbatch_size=8, k=1))
    graph = StageGraph(tuple(cut), ((0, 1),), BATCH)
    shared = replace(by, stage_graph=graph, schedule="1f1b", shard_optimizer=True)
    first_losses = run("join", 0, 2, save=tmp_path / "saved", by=shared)
    rest = run("none", 2, STEPS, load=tmp_path / "saved")
    assert first_losses + rest == pytest.approx(curve("none")[:-1], rel=1e-5)


@pytest.mark.dist
def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    """Its update of a slice would be another one."""

    def rank() -> None:
        made, captured = job("join")
        object.__setattr__(made, "optimizer", lambda named: torch.optim.Adafactor(named))
        Pipeline(made, by, captured=captured)

    by = planned("join")
    with pytest.raises(TrainingError, match=r"cuts head\.0\.weight.*--rewrite none"):
        launch.run(rank, len(by.stage_graph.devices), timeout=60.0)


@pytest.mark.dist
def test_training_without_a_flush_refuses_rewrites() -> None:
    """Slices of one parameter would be of different age."""
    by = planned("join")
    stages = tuple(replace(s, microbatch_size=BATCH, k=1) for s in by.stage_graph.stages)
    by = replace(by, schedule="1f1b", stage_graph=replace(by.stage_graph, stages=stages))
    made, captured = job("join")
    made = replace(made, clip_norm=None)

    def rank() -> None:
        AsyncPipeline(made, by, captured=captured)

    with pytest.raises(InvalidPlanError, match=r"cuts head\.0\.weight.*--rewrite none"):
        launch.run(rank, len(by.stage_graph.devices), timeout=60.0)


def test_exact_gradients_refuse_rewrites() -> None:
    """A sum of products is added up in another order."""
    with pytest.raises(ValueError, match="adds in another order"):
        Pipeline(workload(), planned("join", devices=1), exact=True)
