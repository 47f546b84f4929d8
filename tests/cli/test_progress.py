"""Progress of training, in the terms of the rows that follow it."""

from __future__ import annotations

from anabranch.cli.progress import TrainingProgress
from anabranch.training import LookEvent, PlanEvent, StepEvent


def shown(capsys, seconds: list[float], *, is_async: bool) -> str:
    """The last line after steps of so many seconds, whose losses are their numbers."""
    progress = TrainingProgress(0.5, is_async=is_async)
    for step, taken in enumerate(seconds, 1):
        # The last one is short.
        samples = 3 if step == len(seconds) else 8
        progress(StepEvent(step, step, len(seconds), 0, float(step), {}, taken, samples))
    return capsys.readouterr().err.strip()


def test_progress_without_a_flush_is_that_of_the_final_rows(capsys):
    """The mean of what took time, 2 s for mini-batches of 8 samples, and of the last ten losses."""
    line = shown(capsys, [0.0, 0.0, 1.0, 1.0, 4.0, *[0.0] * 7], is_async=True)
    assert line.startswith("mini-batch 12/12, ")
    assert line.endswith("loss 7.5000, 4 samples/s, mini-batch 2000.00 ms (predicted 500.00)")


def test_progress_before_any_time_is_known(capsys):
    """A run that never fills its pipeline has no time per mini-batch."""
    assert shown(capsys, [0.0, 0.0], is_async=True).endswith("loss 1.5000")


def test_progress_with_a_flush_has_steps(capsys):
    """Their median, which the first one does not disturb."""
    line = shown(capsys, [9.0, 1.0, 1.0], is_async=False)
    assert line.startswith("step 3/3, ")
    assert line.endswith("loss 2.0000, 8 samples/s, step 1000.00 ms (predicted 500.00)")


def test_what_is_slow_and_another_plan_are_in_the_line(capsys):
    """The prediction is that of the plan under which training goes on, and so are the times."""
    progress = TrainingProgress(0.5)
    progress(StepEvent(1, 1, 3, 0, 1.0, {}, 1.0, 8))
    progress(LookEvent(1, ("device 1 takes twice as long", "link 0-1 as well")))
    progress(StepEvent(3, 3, 3, 0, 1.0, {}, 1.0, 8))
    assert capsys.readouterr().err.endswith("; device 1 takes twice as long\n")
    progress(PlanEvent(3, "a better plan", 0.25))
    progress(StepEvent(3, 3, 3, 0, 1.0, {}, 0.5, 8))
    assert capsys.readouterr().err.endswith("step 500.00 ms (predicted 250.00)\n")
