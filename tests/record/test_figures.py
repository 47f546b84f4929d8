"""What is told of a run: terminal, JSON and page say the same, because they tell one document."""

import json
import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from anabranch.cli.output import answering
from anabranch.cli.training.run_results import keeping, say_run
from anabranch.errors import FileFormatError, TrainingError
from anabranch.plans.plan import memory_text, time_text
from anabranch.record import Evaluation, Run, StepPart, load_run, save_run
from anabranch.record.figures import shown_figures, tables
from anabranch.timeline import Timeline
from anabranch.training import EvaluationEvent, PlanEvent, StepEvent
from tests.record.test_folder import PLAN, RUN, SPANS

TIMES = tuple(replace(span, start=span.start / 8, end=span.end / 8) for span in SPANS)
STEPS = replace(
    RUN,
    timelines=(("predicted", Timeline(TIMES, (0,), "predicted", 0.5, {})), *RUN.timelines),
    period_s=4.25,
    gradients="right: loss and 2 gradients",
    restarts=2,
    recoveries=("step 6: rank 1 was killed",),
    others_share=0.25,
    parts=(StepPart("work", 0.3, "evenly"), StepPart("warm-up", 0.2)),
)
ORDER = replace(
    RUN,
    plan=replace(PLAN, mode="async", policy="stash"),
    policy="stash",
    version_difference=(1, 0),
    peak_versions=(2, 1),
    weight_bytes=(4096, 12),
    device_peak_bytes=(),
    period_s=0.25,
)


def on_page(html: str) -> dict[str, str]:
    """Name -> value and what stands below it, in one line."""
    pattern = r'<dt>(.*?)</dt><dd><div class="value">(.*?)</div><div class="more">(.*?)</div>'
    return {
        unescape(name): unescape(f"{value}{', ' if more else ''}{more}")
        for name, value, more in re.findall(pattern, html)
    }


def in_terminal(out: str) -> dict[str, str]:
    """Name -> what stands beside it, its lines joined."""
    rows: dict[str, str] = {}
    for line in out.splitlines():
        name, text = line[2:24].strip(), line[25:].strip()
        if line.startswith("  ") and name:
            rows[name] = text
        elif line.startswith("  "):
            rows[list(rows)[-1]] += f" {text}"
    return rows


@pytest.mark.parametrize("run", [STEPS, ORDER, replace(RUN, timelines=())])
def test_terminal_document_and_page_say_the_same(run: Run, tmp_path: Path, capsys) -> None:
    """Every row of the terminal is a figure of the page, word by word, and the other way round;
    and each number is the document's.
    """
    save_run(run, tmp_path / "run")
    say_run(run, tmp_path / "run", {})
    rows = in_terminal(capsys.readouterr().out)
    tiles = on_page((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    del tiles["depth"]  # of the plan, which the terminal has told before
    assert rows == tiles
    with answering(as_json=True):
        say_run(run, tmp_path / "run", {})
    document = json.loads(capsys.readouterr().out)
    assert rows["loss"].startswith(f"{document['last_loss']:.4f}, ")
    assert rows["held-out accuracy"].startswith(f"{document['metrics']['accuracy']:.4f}")
    assert rows["samples per second"] == f"{document['samples_per_s']:,.0f}"
    if run.policy:
        assert rows["mini-batch"].startswith(time_text(document["period_s"]))
        assert time_text(document["predicted_period_s"]) in rows["mini-batch"]
    else:
        assert rows["step"].startswith(time_text(document["step_s"]))
        assert time_text(document["predicted_step_s"]) in rows["step"]
        assert rows["peak memory"].startswith(memory_text(max(document["device_peak_bytes"])))
    assert document["restarts"] == run.restarts
    assert document["recoveries"] == list(run.recoveries)
    assert rows.get("went on", "") == "from step 6, rank 1 was killed" * bool(run.recoveries)
    assert rows.get("restarts", "0").startswith(str(run.restarts))
    taken = rows.get("other processes", "0%")
    assert taken.startswith(f"{document['others_share']:.0%}")


@pytest.mark.parametrize("period_s", [0.25, 0.502, 0.75])
def test_why_steps_in_a_row_take_longer_is_told(period_s: float) -> None:
    """Where that is predicted: one takes 0.5 s alone."""
    plan = replace(PLAN, predicted=replace(PLAN.figures, period_s=period_s))
    figures = {
        figure.name: figure.more for figure in shown_figures(replace(STEPS, plan=plan).figures())
    }
    said = figures["steps in a row"]
    assert said.startswith(f"predicted {time_text(period_s)} each")
    assert ("longer than one alone" in said) == (period_s > 0.51)


def test_the_picture_shows_the_steps_that_are_told(tmp_path: Path) -> None:
    """The headings of the timelines, step and bubble, are figures of the document."""
    save_run(STEPS, tmp_path / "run")
    svg = (tmp_path / "run" / "timeline.svg").read_text(encoding="utf-8")
    figures = STEPS.figures()
    for step_s, bubble in (
        (figures["predicted_step_s"], figures["predicted_bubble"]),
        (figures["step_s"], figures["bubble"]),
    ):
        assert f"step {time_text(step_s)} \u00b7 bubble {bubble:.1%}" in svg


def test_the_parts_add_up() -> None:
    """Predicted against measured by phases, and the causes of the predicted step: 500 and 4500
    ms.
    """
    against, causes = tables(STEPS.figures())
    assert [row[0] for row in against.rows] == [
        *("until the first action", "compute", "messages and waiting", "after the last action"),
        "the step",
    ]
    for column, total in ((1, 500.0), (2, 4500.0)):
        *parts, whole = (float(row[column]) for row in against.rows)
        assert sum(parts) == pytest.approx(total)
        assert whole == total
    assert [row[:3] for row in causes.rows] == [
        ("work", "300.00", "60.0%"),
        ("warm-up", "200.00", "40.0%"),
        ("together", "500.00", "100.0%"),
    ]
    assert tables(ORDER.figures()) == []


def test_a_metric_that_is_not_finite_is_told(tmp_path: Path, capsys) -> None:
    """Such as a precision without positives: JSON has no number for it, and the run is kept."""
    run = replace(RUN, metrics={"loss": 0.5, "precision": math.nan})
    save_run(run, tmp_path / "run")
    assert math.isnan(load_run(tmp_path / "run").metrics["precision"])
    with answering(as_json=True):
        say_run(run, tmp_path / "run", {})
    assert json.loads(capsys.readouterr().out)["metrics"] == {"loss": 0.5, "precision": None}
    (said,) = (f.line for f in shown_figures(run.figures()) if f.name == "held-out precision")
    assert said == "not finite"


def test_metrics_of_training_are_told_to_be_of_one_step() -> None:
    """They stand below a loss that is a mean of ten; held-out means are of all batches."""
    run = replace(RUN, metrics={"accuracy": 0.5}, chance={"accuracy": 0.25})
    (said,) = (f.line for f in shown_figures(run.figures()) if f.name == "accuracy")
    assert said == "0.5000, of the last step; chance 0.25"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"losses": (1.0,) * 3}, "the run was too short: memory is measured in step 5"),
        ({"losses": (1.0,) * 9}, "compiled stages and batches of other sizes than the plan's"),
        ({"losses": ()}, "emulated devices hold nothing"),
    ],
)
def test_why_no_memory_was_measured(change: dict[str, tuple[float, ...]], why: str) -> None:
    """Not measured says nothing without the reason."""
    run = replace(STEPS, device_peak_bytes=(), **change)
    (said,) = (
        figure.line for figure in shown_figures(run.figures()) if figure.name == "peak memory"
    )
    assert said.startswith("not measured, predicted 7 B; ")
    assert why in said


def test_an_evaluation_alone_that_fails_has_made_no_steps(capsys, tmp_path):
    """Neither the figures nor the line in the terminal speak of steps."""
    run = replace(RUN, losses=(), failure="the disk is on fire")
    assert shown_figures(run.figures())[0].line == "in the evaluation, the disk is on fire"

    def evaluate() -> None:
        with keeping(lambda kept: (kept, Path("kept")), tmp_path) as so_far:
            so_far.begin(RUN)
            so_far(run)
            raise TrainingError("no more")

    with pytest.raises(TrainingError):
        evaluate()
    assert capsys.readouterr().err == "kept has this failure\n"


def test_a_record_that_cannot_be_kept_does_not_hide_the_failure(capsys):
    """As on a full disk, where a checkpoint cannot be written either."""

    def full(run: Run) -> tuple[Run, Path]:
        raise FileFormatError("run.json cannot be written")

    def train() -> None:
        with keeping(full, None) as so_far:
            so_far.begin(RUN)
            so_far(RUN)
            raise TrainingError("no more")

    with pytest.raises(TrainingError, match="no more"):
        train()
    assert "is not complete: run.json cannot be written" in capsys.readouterr().err


def test_a_run_that_fails_is_one_of_the_plan_that_it_had_changed_to(tmp_path: Path) -> None:
    """With the evaluations that were made, and the steps."""
    other, kept = replace(PLAN, planner="other"), list[Run]()

    def train() -> None:
        with keeping(lambda run: (kept.append(run) or run, Path("kept")), None) as so_far:
            so_far.begin(replace(RUN, losses=()))
            for step in (1, 2):
                so_far(StepEvent(step, step, None, 0, 1.0 / step, {}, 0.1, 4))
            so_far(EvaluationEvent(2, {"loss": 0.5, "precision": math.nan}, 0.1))
            so_far(PlanEvent(2, "it is better", None, other))
            raise TrainingError("no more")

    with pytest.raises(TrainingError):
        train()
    (run,) = kept
    assert run.plan == other
    assert run.plan_changes == ("step 2: it is better",)
    assert run.evaluations == (Evaluation(2, {"loss": 0.5, "precision": None}),)
    assert (run.losses, run.failure) == ((1.0, 0.5), "no more")
