"""Progress of training, in the terms of the rows that follow it."""

import fcntl
import os
import re
import struct
import sys
import termios

import pytest

from anabranch.cli.progress import OtherLoad, TrainingProgress, measured, progress_bar
from anabranch.graph.capture import capture_workload
from anabranch.training import EvaluationEvent, LookEvent, PlanEvent, StepEvent
from tests.cli.models import towers
from tests.record.test_folder import PLAN


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
    assert line.endswith("loss 7.5000, 0:00 passed, 4 samples/s, 2,000.00 ms, predicted 500.00")


def test_a_log_has_no_empty_lines_of_bars(capsys):
    """A bar is for terminals: elsewhere a line says what takes long."""
    with progress_bar("measuring") as progress:
        progress(1, 2)
        progress(2, 2, "comparing")
    assert capsys.readouterr().err == "measuring ...\ncomparing ...\n"


def test_progress_before_any_time_is_known(capsys):
    """A run that never fills its pipeline has no time per mini-batch."""
    assert shown(capsys, [0.0, 0.0], is_async=True).endswith("loss 1.5000, 0:00 passed")


def test_progress_with_a_flush_has_steps(capsys):
    """Their median, which the first one does not disturb."""
    line = shown(capsys, [9.0, 1.0, 1.0], is_async=False)
    assert line.startswith("step 3/3, ")
    assert line.endswith("loss 2.0000, 0:00 passed, 8 samples/s, 1,000.00 ms, predicted 500.00")


def test_metrics_are_means_over_the_steps_of_the_loss(capsys):
    """Parts of a loss add up to it in the line: the first two of twelve steps no longer count."""
    progress = TrainingProgress(0.0)
    for step in range(1, 13):
        metrics = {"half": step / 2, "rest": step / 2}
        progress(StepEvent(step, step, 12, 0, float(step), metrics, 1.0, 8))
    said = "loss 7.5000, 0:00 passed, 8 samples/s, 1,000.00 ms, half 3.750, rest 3.750"
    assert capsys.readouterr().err.strip().endswith(said)


def test_an_evaluation_has_a_line(capsys):
    """Whoever asks for evaluations during training sees them then."""
    TrainingProgress(0.5)(EvaluationEvent(4, {"loss": 1.5, "error": 0.25}, 2.0, is_best=True))
    line = "step 4, held out: loss 1.5000, error 0.2500, the best so far\n"
    assert capsys.readouterr().err == line


def test_what_is_slow_and_another_plan_are_in_the_line(capsys):
    """The prediction is that of the plan under which training goes on, and so are the times."""
    progress = TrainingProgress(0.5)
    progress(StepEvent(1, 1, 3, 0, 1.0, {}, 1.0, 8))
    progress(LookEvent(1, ("device 1 takes twice as long", "link 0-1 as well")))
    progress(StepEvent(3, 3, 3, 0, 1.0, {}, 1.0, 8))
    assert capsys.readouterr().err.endswith("; device 1 takes twice as long\n")
    progress(PlanEvent(3, "a better plan", 0.25, PLAN))
    progress(StepEvent(3, 3, 3, 0, 1.0, {}, 0.5, 8))
    assert capsys.readouterr().err.endswith("500.00 ms, predicted 250.00\n")


def test_steps_are_counted_on_from_those_before_resume(capsys):
    """Twenty of a hundred were done before, or by an attempt that failed; eighty are to be done."""
    progress = TrainingProgress(0.5)
    progress._shown = 0
    progress(StepEvent(57, 37, 80, 0, 1.0, {}, 1.0, 8))
    assert capsys.readouterr().err.startswith("step 57/100, ")
    # Without an end they are counted on as well.
    progress._shown = 0
    progress(StepEvent(57, 37, None, 0, 1.0, {}, 1.0, 8))
    assert capsys.readouterr().err.startswith("step 57, ")


def train(total: int | None) -> None:
    """1,500 steps, of which a device is slow in one."""
    progress = TrainingProgress(0.03)
    for step in range(1, 1501):
        if step % 500 == 0:
            progress._shown = 0
            progress(LookEvent(step, ("device 1 takes twice as long",)))
        metrics = {"accuracy": 0.75, "recall": 0.5}
        progress(StepEvent(step, step, total, 0, 0.4321, metrics, 0.031, 64))


def on_terminal(columns: int, total: int | None) -> list[str]:
    """The lines of a process whose terminal has so many columns, each drawn one of them."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    if (child := os.fork()) == 0:
        for stream in range(3):
            os.dup2(theirs, stream)
        os.environ.update(TERM="xterm")
        os.environ.pop("COLUMNS", None)
        with open(2, "w", closefd=False) as sys.stderr:
            train(total)
        os._exit(0)
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 65536):
            written += block
    except OSError:  # the other end is closed
        os.close(ours)
    os.waitpid(child, 0)
    text = re.sub("\x1b\\[[0-9;]*m", "", written.decode())
    return [line for line in re.split("\r\n|\r\x1b\\[2K", text) if line]


@pytest.mark.parametrize(
    ("columns", "beside"),
    [
        (60, r"step 1500/1500 \S{8,} loss 0\.4321  0:\d\d passed"),
        (80, r"step 1500/1500 \S{8,} loss 0\.4321  0:\d\d passed  2,065 samples/s"),
        (
            140,
            r".*  0:\d\d passed  2,065 samples/s  31\.00 ms, predicted 30\.00  "
            r"accuracy 0\.750  recall 0\.500",
        ),
    ],
)
def test_a_terminal_has_one_line_that_is_no_longer_than_it(columns, beside):
    """Bar, steps, loss, samples per second and time left; more where there is room."""
    lines = on_terminal(columns, 1500)
    assert max(map(len, lines)) < columns
    assert re.fullmatch(beside, lines[-1])
    assert "device 1 takes twice as long" in lines


def test_a_terminal_without_an_end_has_no_bar():
    """Neither is the time known that is left."""
    assert re.fullmatch(
        r"step \d+ loss 0\.4321  0:\d\d passed  2,065 samples/s  31.00 ms, predicted 30.00",
        on_terminal(80, None)[-1],
    )


@pytest.mark.parametrize(("share", "is_noted"), [(0.05, False), (0.5, True)])
def test_a_profile_of_a_busy_machine_is_noted(share, is_noted, monkeypatch, capsys):
    """Its seconds, and with them the plan, change from one run to the next."""
    monkeypatch.setattr(OtherLoad, "share", lambda self: share)
    monkeypatch.setattr(OtherLoad, "cores", lambda self: 2 * share)
    job = towers()
    measured(job, (2,), capture_workload(job), "cpu", "towers")
    noted = f"others kept {2 * share:.1f} of the {os.cpu_count()} cores busy while towers was"
    assert (noted in capsys.readouterr().err) is is_noted
