"""Checkpoints that are written while training goes on."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint import Checkpoint, Progress, RankPart, load_state_dict, newest
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.series import checkpoints, keep_newest
from anabranch.checkpoint.writing import Target, begin, tidy, write_part
from anabranch.errors import TrainingError


def target(folder: Path, num_ranks: int = 1, step: int = 4) -> Target:
    return Target(folder, f"{step:016x}", num_ranks, Progress(step=step))


def saving(chosen: Target, rank: int, value: float = 1.0, **options: object) -> Saving:
    """One rank's tensor, which says whose it is."""
    part = RankPart({f"model/w{rank}": torch.full((3,), value)})
    settings: dict[str, object] = {"keep": None, "timeout": 5.0, **options}
    return Saving(chosen, rank, part, **settings)


def test_ranks_meet_in_the_folder(tmp_path: Path):
    """Nobody waits for another to begin, and in the end the folder has the parts of all."""
    chosen = target(tmp_path / "step-4", 3)
    others = [saving(chosen, rank, float(rank)) for rank in (2, 1)]
    first = saving(chosen, 0, 0.0)
    first.confirm()
    for each in (first, *others):
        each.wait()
    saved = Checkpoint(tmp_path / "step-4")
    saved.verify()
    assert [saved.tensor(f"model/w{rank}")[0].item() for rank in range(3)] == [0.0, 1.0, 2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_step_that_was_not_good_leaves_no_checkpoint(tmp_path: Path):
    """Its parts may be on the disk when that is known: they never get the name."""
    first = saving(target(tmp_path / "step-4"), 0)
    first.give_up()
    first.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_write_is_told_by_the_first(tmp_path: Path):
    """Which would wait for its part for ever; with the reason, as the user reads what it says."""
    chosen = target(tmp_path / "step-4", 2)
    first = saving(chosen, 0)
    chosen.file(1).mkdir()  # where the second rank wants to write a file
    second = saving(chosen, 1)
    for each in (second, first):
        with pytest.raises(
            TrainingError, match=r"rank-1.safetensors cannot be written: .*directory"
        ):
            each.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_room_for_its_reason_has_a_full_disk(tmp_path: Path):
    """Its mark is empty, as nothing fits any more."""
    chosen = target(tmp_path / "step-4", 2)
    first = saving(chosen, 0)
    (chosen.partial / "rank-1.failed").touch()
    with pytest.raises(TrainingError, match="rank-1 failed, without room to say why; make"):
        first.wait()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path):
    """On several machines the folder may not be the same one."""
    first = saving(target(tmp_path / "step-4", 2), 0, timeout=0.05)
    with pytest.raises(TrainingError, match=r"for 0.05 s no rank has written anything"):
        first.wait()


def test_older_checkpoints_are_removed_when_a_newer_one_is_there(tmp_path: Path):
    """Of those that are named by their steps, and of nothing else."""
    (tmp_path / "step-x").mkdir()
    for step in (4, 8, 12):
        last = saving(target(tmp_path / f"step-{step}", step=step), 0, keep=2)
        last.confirm()
        last.wait()
    assert [step for step, _ in checkpoints(tmp_path)] == [8, 12]
    assert newest(tmp_path) == tmp_path / "step-12"
    assert (tmp_path / "step-x").exists()
    keep_newest(tmp_path, 1)
    assert [step for step, _ in checkpoints(tmp_path)] == [12]


def test_what_a_killed_run_left_is_removed_by_the_next_checkpoint(tmp_path: Path):
    """Its half-written folder; not that of a run that is still writing, nor the user's own."""
    mine = tmp_path / ".notes.partial"
    mine.mkdir()
    alive = target(tmp_path / "step-1", step=1)
    lock = begin(alive)
    killed = target(tmp_path / "step-2", step=2)
    if (pid := os.fork()) == 0:
        begin(killed)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert killed.partial.exists()
    last = saving(target(tmp_path / "step-3", step=3), 0)
    last.confirm()
    last.wait()
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, alive.partial.name, "step-3"}
    os.close(lock)
    tidy(tmp_path)
    assert not alive.partial.exists()


def test_no_name_without_all_parts(tmp_path: Path):
    """A checkpoint that was begun is none: it has no manifest."""
    chosen = target(tmp_path / "step-4", 2)
    begin(chosen)
    part = RankPart({"model/w": torch.zeros(1)})
    write_part(chosen, 0, part)
    assert newest(tmp_path) is None


def test_numbers_that_no_file_can_have_are_refused():
    """It was a KeyError of safetensors, at the first save."""
    with pytest.raises(TrainingError, match="model/w cannot be saved"):
        RankPart({"model/w": torch.zeros(1, dtype=torch.complex128)})


def test_names_that_a_module_shares_come_with_its_weights(tmp_path: Path):
    """``state_dict`` has every name of a tied weight, and no buffer that is not to be saved."""
    tensors = {"model/a": torch.ones(2), "model/mask": torch.ones(1)}
    part = RankPart(tensors, aliases={"b": "a"}, transient=["mask"])
    chosen = target(tmp_path / "c")
    last = Saving(chosen, 0, part, keep=None, timeout=5.0)
    last.confirm()
    last.wait()
    assert load_state_dict(tmp_path / "c").keys() == {"a", "b"}


def test_moving_average_that_the_optimizer_keeps_comes_as_weights(tmp_path: Path):
    """In place of the parameters it is kept for; frozen ones and buffers come as they are."""
    tensors = {
        "model/trained": torch.ones(2),
        "model/frozen": torch.ones(2),
        "optimizer/average/trained": torch.zeros(2),
        "optimizer/exp_avg/trained": torch.full((2,), 5.0),
    }
    part = RankPart(tensors, aliases={"tied": "trained"})
    last = Saving(target(tmp_path / "c"), 0, part, keep=None, timeout=5.0)
    last.confirm()
    last.wait()
    found = load_state_dict(tmp_path / "c", optimizer_state="average")
    assert {name: float(value[0]) for name, value in found.items()} == {
        "trained": 0.0,
        "tied": 0.0,
        "frozen": 1.0,
    }
    with pytest.raises(ValueError, match="no state 'ema'; it has average, exp_avg"):
        load_state_dict(tmp_path / "c", optimizer_state="ema")


def test_no_thread_stays(tmp_path: Path):
    last = saving(target(tmp_path / "step-4"), 0)
    last.confirm()
    last.wait()
    assert not any(t.name.startswith("anabranch save") for t in threading.enumerate())
