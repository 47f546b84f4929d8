"""Plans made by hand: those of docs/plan-files.md, and what may be left out of them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_plan, plan_to_dict, save_plan
from anabranch.files.plans import _PlanFile, _PredictionEntry, _StageEntry
from anabranch.graph.capture import capture
from anabranch.models.names import resolve
from anabranch.plans.plan import NOT_PREDICTED, Plan
from anabranch.profile.estimate import estimate
from anabranch.profile.profile import Profile
from anabranch.record import Run
from anabranch.record.figures import shown_figures
from anabranch.report.html import page
from anabranch.solve import check_plan, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "plan-files.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
SYNC, ASYNC = EXAMPLES


@pytest.fixture
def load(tmp_path):
    """A document as a plan."""

    def call(document: dict[str, Any]) -> Plan:
        (tmp_path / "plan.json").write_text(json.dumps(document))
        return load_plan(tmp_path / "plan.json")

    return call


@pytest.fixture
def run(call):
    """As it is printed, line by line."""
    return call


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of the model that the examples name, as ``check --device v100`` estimates it."""
    options = dict(SYNC["options"])
    workload = resolve(SYNC["model"], preset=options.pop("preset"), options=options, meta=True)
    captured = capture(workload.module, workload.example, granularity="block")
    return estimate(captured, "v100", (1, 2, 4, 8, 16, 32))


@pytest.mark.parametrize("document", EXAMPLES)
def test_the_examples_of_the_page_suit_their_model(load, document, profile):
    """Structure, conditions C1 to C4 and memory, for the model that the plan names; simulated."""
    plan = load(document)
    assert plan.options == tuple(SYNC["options"].items())
    assert plan.machines is None
    assert check_plan(plan) == []
    cluster = Cluster.preset(plan.cluster)
    assert check_plan(plan, profile, cluster) == []
    assert simulate(plan, profile, cluster).step_s > 0


@pytest.mark.dist
@pytest.mark.parametrize(("document", "period"), [(SYNC, "step_s"), (ASYNC, "period_s")])
def test_the_examples_of_the_page_run(run, tmp_path, document, period):
    """Trained from the command line, as the page says."""
    (tmp_path / "towers.json").write_text(json.dumps(document))
    code, out, err = run(
        "train", "two-branch", "-o", "layers=2", "--plan", "towers.json", "--steps", "3", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert len(found["losses"]) == 3
    assert found[f"predicted_{period}"] is None


def test_what_may_be_left_out(load):
    """Counts are those of the schedule; nothing is predicted, and nobody says what it cost."""
    plan = load(SYNC)
    assert [stage.in_flight for stage in plan.stage_graph.stages] == [2, 2, 1]
    assert (plan.predicted, plan.planner, plan.profile, plan.search_s) == (None, "", "", 0.0)
    assert [stage.in_flight for stage in load(ASYNC).stage_graph.stages] == [2, 2, 1]


def test_counts_follow_the_schedule_and_the_mode(load):
    """A deep warm-up holds more; without a flush one mini-batch is no limit."""
    deep = load(SYNC | {"schedule": "1f1b-deep"})
    assert [stage.in_flight for stage in deep.stage_graph.stages] == [3, 3, 1]
    whole = [stage | {"microbatch_size": 32} for stage in SYNC["stages"]]
    assert [s.in_flight for s in load(SYNC | {"stages": whole}).stage_graph.stages] == [1, 1, 1]


def test_some_counts_but_not_all(load):
    """What was meant cannot be known."""
    first, *others = SYNC["stages"]
    with pytest.raises(FileFormatError, match=r"stages\[1\].in_flight is missing, but other"):
        load(SYNC | {"stages": [first | {"in_flight": 2}, *others]})


def test_an_unknown_schedule_is_for_the_check(load):
    """The file can be read all the same, so that check can say what there is."""
    assert "unknown schedule 'gpipee'" in check_plan(load(SYNC | {"schedule": "gpipee"}))[0]
    assert "name one of 1f1b, 1f1b-deep" in check_plan(load(SYNC | {"schedule": "auto"}))[0]


def test_without_a_prediction_a_plan_comes_back(load, tmp_path):
    """The key is left out, as it was."""
    plan = load(SYNC)
    save_plan(plan, tmp_path / "again.json")
    assert load_plan(tmp_path / "again.json") == plan
    assert "predicted" not in plan_to_dict(plan)


def test_everyone_says_not_predicted(load):
    """Summary, report and the lines of a run; in documents it is null."""
    plan = load(SYNC)
    lines = plan.summary().splitlines()
    assert (lines[0], lines[-1]) == (NOT_PREDICTED, "costs: none, the plan was made by hand")
    html = page(plan, [])
    assert NOT_PREDICTED in html
    assert "made by hand, 1f1b schedule" in html
    run = Run(plan, (1.0,), (0.5, 0.25), 0.0, device_peak_bytes=(3, 2, 1))
    figures = run.figures()
    assert figures["predicted_step_s"] is None
    assert figures["predicted_device_peak_bytes"] is None
    rows = {figure.name: figure.line for figure in shown_figures(figures)}
    assert rows["step"] == "250.00 ms, not predicted"
    assert rows["peak memory"] == "3 B, not predicted; of the fullest device"
    late = dataclasses.replace(run, plan=load(ASYNC), policy="pipeoptim", weight_bytes=(1,))
    assert late.figures()["predicted_period_s"] is None


def test_a_plan_without_figures_has_none(load):
    """Whoever needs them gets a reason instead of a crash elsewhere."""
    with pytest.raises(ValueError, match="made by hand"):
        _ = load(SYNC).figures


def test_the_page_has_every_field():
    """And no field that the format does not have."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    fields = {
        each.alias or name
        for model in (_PlanFile, _StageEntry, _PredictionEntry)
        for name, each in model.model_fields.items()
    }
    assert named == fields
