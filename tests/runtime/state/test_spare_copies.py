"""Copies in memory: which of them count, and what comes back."""

import sys

import pytest
import torch
from torch import Tensor

from anabranch.checkpoint import Progress, RankPart
from anabranch.checkpoint.manifest import OptimizerState
from anabranch.errors import TrainingError
from anabranch.runtime.state.spare_copies import Moment, SpareCopies


def keep(copies: SpareCopies, rank: int, step: int, size: int = 2, value: float = 0.0) -> None:
    part = RankPart({f"model/{rank}": torch.full((3,), value or float(step))})
    copies.keep(rank, size, part, Progress(step=step), {"rank": rank})()


def newest(copies: SpareCopies) -> int | None:
    return None if copies.newest is None else copies.newest.step


def value(copies: SpareCopies, rank: int) -> float:
    saved, _ = copies.read()
    assert saved is not None
    return float(saved.tensor(f"model/{rank}")[0])


def test_the_newest_step_counts_of_which_all_ranks_have_a_copy():
    copies = SpareCopies(2, 1)
    assert newest(copies) is None
    assert copies.read() == (None, None)
    keep(copies, 0, 0)
    assert newest(copies) is None
    keep(copies, 1, 0)
    assert newest(copies) == 0
    keep(copies, 0, 5)
    assert newest(copies) == 0
    keep(copies, 1, 5)
    assert newest(copies) == 5
    assert value(copies, 1) == 5.0
    copies.close()


def test_the_copy_that_counts_is_never_written_over():
    """However far one rank is ahead: it has to write over its newer one."""
    copies = SpareCopies(2, 1)
    for rank in range(2):
        keep(copies, rank, 0)
    for step in (1, 2, 3):
        keep(copies, 0, step)
        assert newest(copies) == 0
    keep(copies, 1, 3)
    assert newest(copies) == 3
    assert [value(copies, rank) for rank in range(2)] == [3.0, 3.0]


def test_a_copy_counts_only_once_its_step_is_known_to_be_good():
    copies = SpareCopies(1, 1)
    keep(copies, 0, 0, size=1)
    confirm = copies.keep(0, 1, RankPart({}), Progress(step=1), {})
    assert newest(copies) == 0
    confirm()
    assert newest(copies) == 1


def test_copies_of_two_attempts_are_not_mixed():
    """The second has other stages, so the same step has other parts."""
    copies = SpareCopies(3, 1)
    for rank in range(3):
        keep(copies, rank, 4, size=3)
    keep(copies, 0, 6, size=3)
    copies.attempt.value = 1
    keep(copies, 1, 6, size=2)
    assert newest(copies) == 4
    keep(copies, 0, 6, size=2)
    assert copies.newest == Moment(6, 1, 2)


def test_moments_fit_in_one_integer():
    for moment in (Moment(0, 0, 1), Moment(2**35, 2000, 65_535)):
        assert Moment.unpacked(moment.packed) == moment
        assert moment.packed < 2**63
    assert Moment.unpacked(0) is None


def test_state_comes_back_bit_for_bit():
    """All types and shapes, growing from copy to copy; joined over the ranks."""
    tensors: dict[str, Tensor] = {
        "model/a": torch.randn(3, 5, dtype=torch.float64).t(),
        "model/b": torch.randn(7).to(torch.bfloat16),
        "model/c": torch.tensor([True, False]),
        "model/d": torch.empty(0, 4),
        "optimizer/step/a": torch.tensor(3.0),
    }
    state = {"kind": "Adam", "groups": [{"options": {"lr": 0.1}, "parameters": ["a"]}]}
    optimizer = OptimizerState.model_validate({**state, "scalars": {}})
    copies = SpareCopies(2, 1)
    for step, size in enumerate((1, 40_000)):
        part = RankPart(
            {**tensors, "model/e": torch.randn(size)},
            optimizer=optimizer,
            scheduler={"last_epoch": step},
        )
        progress = Progress(step=step, epoch=1, position=2, seed=3, data={"at": 4})
        copies.keep(0, 2, part, progress, {"first_step": 7})()
        keep(copies, 1, step)
        saved, further = copies.read()
        assert saved is not None
        assert saved.progress == progress
        assert saved.optimizer == optimizer
        assert saved.scheduler == {"last_epoch": step}
        assert further == {"first_step": 7}
        for key, tensor in part.tensors.items():
            assert torch.equal(saved.tensor(key, like=tensor), tensor)


def test_losses_are_noted_by_their_number():
    copies = SpareCopies(1, 1)
    for index, loss in ((0, 0.5), (1, 0.25), (1, 0.125)):
        copies.note_loss(index, loss, 16)
    assert copies.losses() == [(0.5, 16), (0.125, 16)]


def test_other_systems_are_told_what_to_do_instead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TrainingError, match="which only Linux has; train without --survive"):
        SpareCopies(2, 1)
