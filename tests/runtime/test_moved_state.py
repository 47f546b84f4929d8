"""Training that changes its plan between two steps: bit for bit what a checkpoint would give."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import launch
from anabranch.errors import InvalidPlanError, TrainingError
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import (
    WIDTH,
    Built,
    batch,
    built,
    on_devices,
    plan,
    train_alone,
    with_options,
    with_programs,
)
from tests.runtime.training import LIMIT_S, begin_again, on_one_device, run, run_each

pytestmark = pytest.mark.dist

Told = tuple[list[float], dict[str, Tensor], int]


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Two tensors and a count per parameter."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Another learning rate at every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def plans(model: Built) -> list[Plan]:
    """Three ranks: a chain of stages, a stage with replicas, and stages in another order."""
    chain = plan(model, 3)
    return [chain, plan(model, 2, replicas=[1, 2]), on_devices(chain, [(2,), (0,), (1,)])]


def trained(
    model: Built, workload: Workload, chosen: Sequence[Plan], folder: Path, **options: Any
) -> list[tuple[Told, Told]]:
    """Two steps under each plan in turn, by changing it, and through checkpoints in a folder."""
    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def told(through_checkpoints: bool) -> Told:
        begin_again(model.module, start)
        pipe = Pipeline(
            workload, chosen[0], captured=model.captured, check_gradients=False, **options
        )
        losses = []
        for number, following in enumerate([*chosen[1:], None]):
            losses += list(pipe.steps(batch(16, 2 * number + i) for i in range(2)))
            if following is None:
                break
            if not through_checkpoints:
                pipe.change_plan(following)
                continue
            pipe.save(folder / str(number))
            pipe.close()
            begin_again(model.module, start)
            pipe = Pipeline.resume(
                folder / str(number),
                workload,
                following,
                captured=model.captured,
                check_gradients=False,
                **options,
            )
        held = {n: p.detach().clone() for n, p in pipe._state.parameters.items()}
        return losses, held, pipe.step_number

    return launch.run(lambda: (told(False), told(True)), 3, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Tied", {"shard_optimizer": True}),
        ("Norm", {}),
        ("Dropout", {"compute": ComputeOptions(dropout="sample", precision="bf16")}),
    ],
)
def test_a_change_is_bitwise_a_checkpoint_and_back(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, moments, running means, learning rates and random numbers go on, whoever has them:
    tied parameters, an optimizer state that replicas share, buffers, and what no stage reads.
    """
    model = with_programs(built(name), 16)
    workload = with_options(model, optimizer=adam, scheduler=falling)
    for mine, theirs in trained(model, workload, plans(model), tmp_path, **options):
        assert mine[0] == theirs[0]
        assert mine[2] == theirs[2] == 6
        assert mine[1].keys() == theirs[1].keys()
        assert all(torch.equal(mine[1][key], theirs[1][key]) for key in mine[1])


def test_a_change_in_a_row_of_steps_keeps_the_order_of_losses() -> None:
    """One is not yet told by then. What the first step was compared with is known afterwards."""
    model = built("Chain")
    other = plan(model, 3, microbatch_size=8)

    def losses(pipe: Pipeline, changes: bool) -> tuple[list[float], str]:
        told = []
        for loss in pipe.steps(batch(16, i) for i in range(6)):
            told.append(loss)
            if changes and len(told) == 3:
                pipe.change_plan(other)
        return told, pipe.gradient_verdict

    check = {"check_gradients": True}
    ways = ((partial(losses, changes=changes), check) for changes in (False, True))
    ((expected, verdict), *_), found = run_each(model, plan(model, 3), *ways)
    assert all(told == pytest.approx(expected, rel=1e-5) for told, _ in found)
    assert all(said == verdict for _, said in found)
    assert "nobody asked" not in verdict


class Numbers(nn.Module):
    """Parameters of complex numbers, and of whole ones, which are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.full((WIDTH // 2 + 1,), 1 + 1j))
        self.table = nn.Parameter(torch.arange(-3, 5, dtype=torch.int8), requires_grad=False)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x) * self.waves, n=WIDTH) * self.table
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), label)


def test_parameters_of_other_numbers_go_to_ranks_that_had_none() -> None:
    """Complex and whole ones, whose place another rank has kept without memory."""
    module = Numbers()
    model = Built(capture(module, batch(4)), Workload(module, batch(4), optimizer=adam))
    chain = plan(model, 2)
    moved = on_devices(chain, [(1,), (0,)])

    def losses(pipe: Pipeline) -> list[float]:
        first = pipe.step(batch(16))
        pipe.change_plan(moved)
        return [first, pipe.step(batch(16))]

    expected = pytest.approx(train_alone(model.workload, [batch(16)] * 2)[0])
    assert run(model, chain, losses) == [expected, expected]


def test_one_process_without_others_changes_its_plan() -> None:
    """There is nobody to tell, and no process group."""
    workload, pipe = on_one_device(built("Chain").module, batch, check_gradients=False)
    pipe.step(batch(8))
    model = Built(pipe._session.captured, workload)
    pipe.change_plan(plan(model, 1, batch_size=8, microbatch_size=4))
    assert pipe.step(batch(8)) > 0.0


def test_what_cannot_be_changed_to_is_refused() -> None:
    """In the middle of an update, and for other batches; training goes on as it was."""
    model = built("Chain")

    def work(pipe: Pipeline) -> float:
        pipe.step(batch(16))
        with pytest.raises(TrainingError, match="1 of 2 batches of an update are done"):
            pipe.change_plan(plan(model, 3))
        pipe.step(batch(16))
        with pytest.raises(InvalidPlanError, match="is for batches of 32 samples"):
            pipe.change_plan(plan(model, 3, batch_size=32))
        return pipe.step(batch(16))

    assert len(set(run(model, plan(model, 3), work, accumulate=2))) == 1
