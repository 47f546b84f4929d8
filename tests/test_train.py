"""The ready training loop."""

from __future__ import annotations

import pytest

from anabranch import launch
from anabranch.record import Run
from anabranch.train import StepProgress, train, train_async
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, num_ranks, plan, train_alone, with_options

pytestmark = pytest.mark.dist

SIZES = [16, 16, 16, 16, 10]


def data(batch_size: int, epoch: int) -> list[dict[str, object]]:
    return [dict(batch(n, 10 * epoch + i)) for i, n in enumerate(SIZES)]


def trained(model: Built, workload: Workload, steps: int) -> tuple[Run, list[StepProgress]]:
    """The run of the first rank, and what it told."""
    chosen = plan(model, 2)

    def rank() -> tuple[Run, list[StepProgress]]:
        seen: list[StepProgress] = []
        run = train(
            workload,
            chosen,
            steps=steps,
            captured=model.captured,
            check_gradients=False,
            watch=seen.append,
        )
        return run, seen

    result: tuple[Run, list[StepProgress]] = launch.run(rank, num_ranks(chosen), timeout=60.0)[0]
    return result


def test_single_steps_come_first_and_the_rest_follow_each_other() -> None:
    """Nine steps: five alone, of which three leave a timeline, then four without a barrier; losses
    are those of the plain loop, and every step is told with its samples.
    """
    model = built("TwoBranch")
    workload = with_options(model, data=data)
    run, seen = trained(model, workload, 9)
    batches = [each for epoch in range(2) for each in data(16, epoch)][:9]
    expected, _ = launch.run(train_alone, 1, model.workload, batches, 4, timeout=60.0)[0]
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert len(run.step_s) == 5
    assert run.period_s > 0
    assert [title for title, _ in run.timelines] == ["measured"]
    assert [progress.step for progress in seen] == list(range(1, 10))
    assert [progress.samples for progress in seen] == [*SIZES, *SIZES[:4]]
    assert [progress.loss for progress in seen] == list(run.losses)


def test_few_steps_have_no_period() -> None:
    """Two of three have a timeline; nothing is known of steps that follow each other."""
    model = built("TwoBranch")
    run, _ = trained(model, with_options(model, data=data), 3)
    assert (len(run.losses), len(run.step_s), run.period_s) == (3, 3, 0.0)


def test_without_a_flush_a_longer_run_has_a_timeline() -> None:
    """Of some mini-batches of all devices, while the pipeline is full."""
    model = built("TwoBranch")
    workload, chosen = with_options(model, data=data), plan(model, 3, microbatch_size=16)

    def rank() -> Run:
        options = {"policy": "stash", "captured": model.captured, "check_gradients": False}
        return train_async(workload, chosen, steps=30, **options)

    run = launch.run(rank, num_ranks(chosen), timeout=60.0)[0]
    ((heading, timeline),) = run.timelines
    assert heading == timeline.source == "measured"
    assert {span.device for span in timeline.spans} == set(chosen.stage_graph.devices)


def test_without_a_flush_losses_follow_each_other_and_a_short_run_has_no_timeline() -> None:
    """A plan of one micro-batch per step; every loss is told with its samples, two epochs end with
    a drain, and the run says how stale the stages were.
    """
    model = built("TwoBranch")
    workload = with_options(model, data=data)
    chosen = plan(model, 3, microbatch_size=16)

    def rank() -> tuple[Run, list[StepProgress]]:
        seen: list[StepProgress] = []
        run = train_async(
            workload,
            chosen,
            policy="stash",
            epochs=2,
            captured=model.captured,
            check_gradients=False,
            watch=seen.append,
        )
        return run, seen

    run, seen = launch.run(rank, num_ranks(chosen), timeout=60.0)[0]
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
