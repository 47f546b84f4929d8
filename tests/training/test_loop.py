"""The ready training loop."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import launch
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.checkpoint.series import checkpoints
from anabranch.errors import TrainingError
from anabranch.record import Run
from anabranch.runtime.pipeline import Pipeline
from anabranch.training import SaveEvery, require_place, train, train_async
from tests.runtime.small import batch, built, plan, train_alone, with_options, with_programs
from tests.runtime.training import begin_again, sgd
from tests.training.running import SIZES, data, runs, steps_of

pytestmark = pytest.mark.dist


def test_single_steps_come_first_and_the_rest_follow_each_other() -> None:
    """Nine steps: five alone, of which three leave a timeline, then four without a barrier; losses
    are those of the plain loop, and every step is told with its samples.
    """
    model = with_programs(built("TwoBranch"), 2, 10)
    workload = with_options(model, data=data)
    run, events = runs(model, plan(model, 2), workload, steps=9)[0]
    seen = steps_of(events)
    batches = [each for epoch in range(2) for each in data(16, epoch)][:9]
    expected, _ = train_alone(model.workload, batches)
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert len(run.step_s) == 5
    assert run.period_s > 0
    assert [title for title, _ in run.timelines] == ["measured"]
    assert [progress.step for progress in seen] == list(range(1, 10))
    assert [progress.samples for progress in seen] == [*SIZES, *SIZES[:4]]
    assert [progress.loss for progress in seen] == list(run.losses)


def test_batches_of_another_size_than_the_plans_are_noted() -> None:
    """So that nothing that was predicted is compared with them; a shorter last batch is none, and
    makes no others the plan's, as one larger batch does. Three steps have no period: nothing is
    known of steps that follow each other.
    """
    model, chosen = with_programs(built("TwoBranch"), 2, 3), plan(built("TwoBranch"), 2)
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    cases = {
        (16, 16, 15): (),
        (19, 19, 16): (16, 19),
        (16, 19, 16): (16, 19),
        (14, 14, 16): (14, 16),
    }

    def rank() -> list[Run]:
        found = []
        for sizes in cases:
            begin_again(model.module, start)
            workload = with_options(
                model, data=lambda *_, sizes=sizes: [dict(batch(n, n)) for n in sizes]
            )
            options: dict[str, Any] = {"captured": model.captured, "check_gradients": False}
            found.append(train(workload, chosen, steps=3, **options))
        return found

    every = launch.run(rank, 2, timeout=60.0)[0]
    assert {run.samples: run.other_samples for run in every} == cases
    for run in every:
        assert (len(run.losses), len(run.step_s), run.period_s) == (3, 3, 0.0)


def test_batches_may_be_mappings_of_another_library() -> None:
    """As collators of transformers make them: read, counted and trained on like a dict."""
    model = built("Chain")
    losses = []
    for kind in (dict, UserDict):
        workload = with_options(model, data=lambda *args, kind=kind: map(kind, data(*args)))
        [(run, _)] = runs(model, plan(model, 1), workload, epochs=1, steps=5)
        losses.append(run.losses)
    assert losses[0] == losses[1]


def test_epochs_after_a_loop_that_told_none_count_from_there(tmp_path: Path) -> None:
    """It read its batches itself, so its checkpoint has steps and no epoch; that is said."""
    model = built("TwoBranch")
    workload = with_options(model, data=data, optimizer=sgd)
    chosen = plan(model, 1)

    def rank() -> int:
        pipe = Pipeline(workload, chosen, captured=model.captured, check_gradients=False)
        pipe.step(batch(16))
        pipe.save(tmp_path / "own")
        with pytest.warns(UserWarning, match="of step 1, but of no epoch"):
            run = train(
                workload,
                chosen,
                epochs=1,
                captured=model.captured,
                resume=tmp_path / "own",
                check_gradients=False,
            )
        return len(run.losses)

    assert launch.run(rank, 1) == [len(SIZES)]


def test_without_a_flush_a_longer_run_has_a_timeline() -> None:
    """Of some mini-batches of all devices, while the pipeline is full."""
    model = with_programs(built("TwoBranch"), 2, 10)
    workload, chosen = with_options(model, data=data), plan(model, 3, microbatch_size=16)
    run, _ = runs(model, chosen, workload, policy="stash", steps=30)[0]
    ((heading, timeline),) = run.timelines
    assert heading == timeline.source == "measured"
    assert {span.device for span in timeline.spans} == set(chosen.stage_graph.devices)


def test_without_a_flush_losses_follow_each_other_and_a_short_run_has_no_timeline() -> None:
    """A plan of one micro-batch per step; every loss is told with its samples, two epochs end with
    a drain, and the run says how stale the stages were.
    """
    model = with_programs(built("TwoBranch"), 2, 10)
    workload = with_options(model, data=data)
    chosen = plan(model, 3, microbatch_size=16)
    run, events = runs(model, chosen, workload, policy="stash", epochs=2)[0]
    seen = steps_of(events)
    assert len(run.losses) == 10
    assert [progress.samples for progress in seen] == [*SIZES, *SIZES]
    assert [progress.loss for progress in seen] == list(run.losses)
    depth = chosen.stage_graph.depth
    # One loss per mini-batch once the pipeline is full, the others with the drain.
    assert len(run.step_s) == 10 - depth - 1
    assert run.period_s > 0
    assert run.policy == "stash"
    assert run.version_difference == chosen.stage_graph.height
    assert run.peak_versions == tuple(h + 1 for h in chosen.stage_graph.height)
    assert run.timelines == ()
    figures = run.figures()
    assert figures["predicted_period_s"] is None
    assert figures["policy"] == "stash"


def test_without_a_flush_something_must_say_how_long() -> None:
    model = built("TwoBranch")
    with pytest.raises(ValueError, match="steps or of epochs"):
        train_async(model.workload, plan(model, 2))


def test_a_misspelt_argument_is_said_with_the_one_that_is_meant() -> None:
    model = built("TwoBranch")
    said = r"train has no argument 'evaluate_evry' \(is evaluate_every meant\?\)"
    with pytest.raises(TypeError, match=said):
        train(model.workload, plan(model, 2), steps=1, evaluate_evry=2)


@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoints_during_training_are_those_of_their_steps(is_async: bool, tmp_path: Path):
    """The last three of a run, of which two were written while it went on; training that goes on
    from the first of them ends where the whole run did. Without a flush a checkpoint drains.
    """
    model = with_programs(built("TwoBranch"), 2, 10)
    workload = with_options(model, data=data, optimizer=sgd)
    chosen = plan(model, 2, microbatch_size=16 if is_async else 4)
    options: dict[str, Any] = {"save_every": SaveEvery(3, keep=3)}
    options |= {"policy": "stash"} if is_async else {}
    run = tmp_path / "run"
    whole, _ = runs(model, chosen, workload, steps=11, save=run, **options)[0]
    assert [step for step, _ in checkpoints(run)] == [6, 9, 11]
    for _, folder in checkpoints(run):
        Checkpoint(folder).verify()
    last = load_state_dict(run)
    options |= {"resume": str(run / "step-6"), "save": str(tmp_path / "b")}
    again, _ = runs(model, chosen, workload, steps=5, **options)[0]
    assert again.losses == whole.losses[6:]
    other = load_state_dict(tmp_path / "b")
    assert all(torch.equal(other[name], value) for name, value in last.items())


def test_checkpoints_by_time_are_of_one_step_on_all_ranks(tmp_path: Path):
    """The first rank's clock decides; here every look at it finds that it is time."""
    model = built("Chain")
    workload, chosen = with_options(model, data=data), plan(model, 2)
    every = SaveEvery(seconds=1e-9, keep=100)
    runs(model, chosen, workload, steps=9, save=tmp_path / "run", save_every=every)
    steps = [step for step, _ in checkpoints(tmp_path / "run")]
    assert len(steps) > 3
    assert steps[-1] == 9
    for _, folder in checkpoints(tmp_path / "run"):
        Checkpoint(folder).verify()


def test_folders_that_checkpoints_may_go_to(tmp_path: Path):
    """A new one; or the one with the checkpoint that training goes on from, if that is the last."""
    require_place(tmp_path / "new", None, is_series=False)
    for name in ("step-2", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    with pytest.raises(TrainingError, match=f"never written over, .* go on .* --resume {tmp_path}"):
        require_place(tmp_path, None, is_series=True)
    with pytest.raises(TrainingError, match="or add to those in it with --save-every"):
        require_place(tmp_path, tmp_path, is_series=False)
    require_place(tmp_path, tmp_path, is_series=True)
    require_place(tmp_path, tmp_path / "step-4", is_series=True)
    with pytest.raises(TrainingError, match="is not the last one"):
        require_place(tmp_path, tmp_path / "step-2", is_series=True)


def test_what_a_killed_run_began_is_no_checkpoint(tmp_path: Path):
    """The next attempt saves to the same folder."""
    (tmp_path / ".step-2.0123456789abcdef.partial").mkdir()
    require_place(tmp_path, None, is_series=True)
    (tmp_path / "notes").touch()
    with pytest.raises(TrainingError, match="exists"):
        require_place(tmp_path, None, is_series=True)
