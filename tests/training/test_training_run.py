"""Held-out data and checkpoints between steps."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.checkpoint import Checkpoint, RankPart, saving
from anabranch.checkpoint.series import best_evaluation, checkpoints
from anabranch.checkpoint.writing import Target, write_part
from anabranch.errors import DataError, TrainingError
from anabranch.training import Event, SaveEvery
from anabranch.training.training_run import require_evaluation
from tests.runtime.small import batch, built, plan, with_options, with_programs
from tests.runtime.training import sgd
from tests.training.running import data, runs


def held_out(batch_size: int) -> Iterator[dict[str, object]]:
    yield from (dict(batch(n, 100 + n)) for n in (16, 6))


def events_of(
    is_async: bool, steps: int | None, replicas: tuple[int, ...] | None = None, **options: Any
) -> tuple[tuple[float, ...], list[Event]]:
    """Losses and events of a run of two stages, and that other ranks are told nothing."""
    model = with_programs(built("TwoBranch"), 1, 2, 4, 6, 10, 16, evaluation=True)
    given = {"data": options.pop("data", data), "eval_data": held_out, "optimizer": sgd}
    workload = with_options(model, **given)
    chosen = plan(model, 2, microbatch_size=16 if is_async else 4, replicas=replicas)
    options |= {"policy": "stash"} if is_async else {}
    (run, told), *others = runs(model, chosen, workload, steps=steps, **options)
    assert all(seen == [] for _, seen in others)
    evaluated = [(event.step, event.metrics) for event in told if event.name == "evaluation"]
    assert [(each.step, each.metrics) for each in run.evaluations] == evaluated
    return run.losses, told


@pytest.mark.dist
@pytest.mark.parametrize(("is_async", "replicas"), [(False, (2, 1)), (True, None)], ids=str)
def test_evaluations_follow_the_loss_of_their_step_and_change_nothing(
    is_async: bool, replicas: tuple[int, ...] | None
):
    """Every third step of eleven, whether steps come alone, one after the other, with replicas or
    without a flush; the last one is evaluated once, at the end.
    """
    losses, seen = events_of(is_async, 11, replicas, evaluate_every=3)
    told = [(event.name, event.step) for event in seen]
    expected = []
    for step in range(1, 12):
        expected.append(("step", step))
        if step in (3, 6, 9, 11):
            expected.append(("evaluation", step))
    assert told == [*expected, ("end", 11)]
    if not is_async:  # where a drain changes which weights are read
        assert losses == events_of(is_async, 11, replicas)[0]
    means = [event.metrics["loss"] for event in seen if event.name == "evaluation"]
    assert len(set(means)) == 4
    assert seen[-1].metrics["loss"] == means[-1]


@pytest.mark.dist
def test_an_evaluation_at_the_last_step_of_the_data_is_made_once_behind_the_checkpoint(tmp_path):
    """Two batches of one epoch, evaluated each: the last one may fail, and loses nothing."""
    whole = batch(32, 0)
    samples = [{name: tensor[i] for name, tensor in whole.items()} for i in range(32)]
    options = {"epochs": 1, "evaluate_every": 1, "save": tmp_path / "saved"}
    _, seen = events_of(False, None, data=samples, **options)
    told = [f"{event.name} {event.step}" for event in seen if event.name != "step"]
    assert told == ["evaluation 1", "checkpoint 2", "evaluation 2", "end 2"]


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
def test_the_best_checkpoint_is_kept_and_known_after_a_resume(is_async: bool, tmp_path: Path):
    """By the metric that grows here, whichever direction is asked for: the least accuracy of a run
    is at one of its evaluations, however many checkpoints follow; a run that goes on compares with
    what the first one has found.
    """
    run = tmp_path / "run"
    every = SaveEvery(2, keep=1, best="loss")
    _, seen = events_of(is_async, 8, evaluate_every=2, save=run, save_every=every)
    losses = {e.step: e.metrics["loss"] for e in seen if e.name == "evaluation"}
    best = min(losses, key=losses.__getitem__)
    assert (run / "best").resolve().name == f"step-{best}"
    assert best_evaluation(run)["loss"] == losses[best]
    assert [step for step, _ in checkpoints(run)] == sorted({best, 8})
    Checkpoint(run / "best").verify()
    assert [e.step for e in seen if e.name == "checkpoint"] == [2, 4, 6, 8]
    marked = [e.step for e in seen if e.name == "evaluation" and e.is_best]
    assert marked == [s for s in losses if losses[s] == min(losses[t] for t in losses if t <= s)]
    options = {"evaluate_every": 2, "save": run, "save_every": SaveEvery(2, keep=1, best="loss")}
    _, later = events_of(is_async, 4, resume=run, **options)
    losses |= {e.step: e.metrics["loss"] for e in later if e.name == "evaluation"}
    assert best_evaluation(run)["loss"] == min(losses.values())


@pytest.mark.dist
def test_the_best_checkpoint_is_written_though_no_other_is_due(tmp_path: Path):
    """With no interval between checkpoints there are those that were best when they were made, as
    far as they are kept, and the last one.
    """
    run = tmp_path / "run"
    every = SaveEvery(keep=9, best="accuracy:min")
    _, seen = events_of(False, 6, evaluate_every=2, save=run, save_every=every)
    marked = {e.step for e in seen if e.name == "evaluation" and e.is_best}
    assert {step for step, _ in checkpoints(run)} == marked | {6}
    assert (run / "best").resolve().name == f"step-{max(marked)}"


def test_what_is_better_has_to_be_known():
    """Less loss is; of anything else the user says it. What is not a number is never better."""
    with pytest.raises(ValueError, match="accuracy:max or accuracy:min"):
        SaveEvery(best="accuracy")
    most, least = SaveEvery(best="accuracy:max"), SaveEvery(best="loss")
    assert most.score({"loss": 1.0, "accuracy": 0.5}) == 0.5
    assert least.score({"loss": 1.0, "accuracy": 0.5}) == -1.0
    assert least.score({"loss": math.nan}) == least.score({}) == -math.inf
    with pytest.raises(TrainingError, match="held-out means of this model are loss, error"):
        most.require_metric(["error"])
    most.require_metric(["accuracy"])


@pytest.mark.parametrize("field", ["steps", "seconds", "keep"])
def test_intervals_are_more_than_nothing(field: str):
    with pytest.raises(ValueError, match="are more than 0"):
        SaveEvery(**{field: 0})


def test_evaluations_need_held_out_data():
    """And an interval of at least one step."""
    workload = with_options(built("Chain"))
    with pytest.raises(DataError, match="without a step"):
        require_evaluation(workload, None, 0)
    with pytest.raises(DataError, match="every 5 steps, but the workload has none"):
        require_evaluation(workload, 5)
    with pytest.raises(ValueError, match="counts steps, from 1"):
        require_evaluation(workload, 0)
    require_evaluation(workload, None)


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("bad", ["raises", "too wide"])
def test_a_checkpoint_begun_before_bad_data_is_complete(
    bad: str, is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps follow each other without waiting, so nobody knows yet whether the step of the
    checkpoint was a good one, and its parts are not on the disk. Training goes on from it.
    """

    def broken(size: int, epoch: int) -> Iterator[dict[str, object]]:
        for count, each in enumerate(data(size, 0) + data(size, 1)):
            if count == 8 and bad == "raises":
                raise KeyError("user_id")
            yield {**each, "x": torch.zeros(16, 3)} if count == 8 else each

    def slowly(target: Target, rank: int, part: RankPart) -> None:
        time.sleep(0.2 + 0.2 * rank)
        write_part(target, rank, part)

    monkeypatch.setattr(saving, "write_part", slowly)
    options = {"save": tmp_path / "run", "save_every": SaveEvery(8)}
    with pytest.raises(DataError, match="batch 8"):
        events_of(is_async, 20, data=broken, **options)
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [8]
    Checkpoint(tmp_path / "run" / "step-8").verify()
