"""``plan --rewrite``: what is tried, taken and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anabranch.cli import app

DLRM = [
    "dlrm",
    "--preset",
    "small",
    "-orows=100",
    "-olayers=1",
    "-odense_branches=2",
    "-osparse_branches=2",
]
CLUSTER = ["--cluster", "summit:2x4"]
FAST = [*CLUSTER, "--batch-size", "64", "--no-baselines", "--planner", "graphpipe"]


def planned(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_auto_takes_a_rewrite_for_its_gain(tmp_path: Path) -> None:
    """Both steps are told; the shorter one is taken if it is shorter by 2 %."""
    document = planned(*DLRM, *FAST, "-o", str(tmp_path / "plan.json"))
    tried, written = document["rewrites_tried"], document["as_written_step_s"]
    step_s = tried["join-split"]["step_s"]
    is_shorter = step_s < 0.98 * written
    assert document["predicted"]["step_s"] == (step_s if is_shorter else written)
    assert document["rewrites"] == (["join-split@top.layers.0.weight"] if is_shorter else [])


def test_compare_says_that_it_leaves_the_model_as_it_is_written() -> None:
    """Where ``plan`` would try a rewrite, unless the user has decided."""
    compared = ["compare", *DLRM, *CLUSTER, "--batch-size", "64", "--planner", "even"]
    told = "as it is written; plan tries join-split too, and --rewrite join-split compares it"
    for decided, is_told in (([], True), (["--rewrite", "none"], False)):
        result = CliRunner().invoke(app, [*compared, *decided])
        assert result.exit_code == 0, result.output
        assert (told in result.stdout) is is_told


def test_a_named_rewrite_is_taken_as_it_is(tmp_path: Path) -> None:
    """And the plan that has it is simulated and checked like any other."""
    file = tmp_path / "plan.json"
    document = planned(*DLRM, *FAST, "--rewrite", "join-split", "-o", str(file))
    assert document["rewrites"] == ["join-split@top.layers.0.weight"]
    assert "rewrites_tried" not in document
    for verb in (["check", str(file), "dlrm"], ["simulate", str(file)]):
        result = CliRunner().invoke(app, verb)
        assert result.exit_code == 0, result.output


def test_auto_cuts_a_table_that_holds_up_the_step() -> None:
    """Its update takes more than half of the step, and eight devices have little else to do."""
    sizes = ("dense_branches=1", "sparse_branches=1", "rows=1000000", "pooling=sum")
    model = ["dlrm", "--preset", "small", *(f"-o{size}" for size in sizes)]
    document = planned(*model, *FAST)
    assert document["rewrites"][-1] == "table-split=8@sparse.0.rows.weight"
    assert document["predicted"]["step_s"] < 0.8 * document["as_written_step_s"]
    said, gain = document["notes"][-2:]
    assert said == "rewritten by table-split=8 at sparse.0.rows.weight"
    assert gain.endswith("ms as the model is written")


def test_parameters_stay_whole_for_an_optimizer_that_may_need_them() -> None:
    """A plan that cuts them could not be trained, so none is made; that is said."""
    shared = ["--device", "v100", "--rewrite", "auto", *FAST, "--no-cache"]
    for name in ("towers", "with_own_optimizer"):
        document = planned(f"tests.cli.models:{name}", *shared)
        tried = document["rewrites_tried"]["join-split"]
        assert ("step_s" in tried) == (name == "towers")
    assert tried["error"].startswith("it cuts parameters, and the optimizer of the model is not")
    assert document["rewrites"] == []


def test_none_leaves_the_model_alone() -> None:
    """The plan is that of the operators as they are written."""
    assert planned(*DLRM, *FAST, "--rewrite", "none")["rewrites"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["transformer", "--preset", "small", "-olayers=1", "--rewrite", "join-split"],
            "changes nothing",
        ),
        ([*DLRM, "--rewrite", "join-split@top.weight"], "DLRM has no parameter top.weight"),
        (["mmt", "--rewrite", "split"], "none of join-split"),
        (["mmt", "--rewrite", "table-split=1"], "at least 2 parts"),
        (["mmt", "--rewrite", "join-split", "--mode", "async"], "--mode sync"),
        (["tests.cli.models:with_own_optimizer", "--rewrite", "join-split"], "cuts parameters"),
    ],
)
def test_rewrites_that_cannot_be_are_refused(arguments: list[str], said: str) -> None:
    """In one paragraph, which names the way on."""
    shared = ["--cluster", "summit:1x2", "--batch-size", "8"]
    result = CliRunner().invoke(app, ["plan", *arguments, *shared])
    assert result.exit_code in (1, 2)
    text = f"{result.output} {result.exception}"
    assert said in " ".join(text.split())
