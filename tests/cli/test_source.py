"""What the user may name as MODEL: here, profiles of other projects."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from anabranch.calibration.kept import keep
from anabranch.cli.clusters import remark_uncalibrated
from anabranch.cli.output import remarks_at_end
from anabranch.cli.source import ModelSource
from anabranch.cluster import Cluster
from anabranch.files import load_plan, load_profile
from anabranch.files.pipedream import read_profile
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from tests.calibration.examples import cluster
from tests.files.test_pipedream import node, write

GRAPH = [
    node("node1", "Input", 9, 0, 64),
    node("node2", "Left", 2, 4, 32, 80),
    node("node3", "Right", 2, 4, 32, 80),
    node("node4", "Join", 1, 2, 8, 8),
    *("\tnode1 -- node2", "\tnode1 -- node3", "\tnode2 -- node4", "\tnode3 -- node4"),
]


@pytest.fixture
def graph(tmp_path: Path) -> str:
    """A profile in PipeDream's format."""
    return str(write(tmp_path, GRAPH))


def test_published_profiles_are_files(tmp_path: Path) -> None:
    """By suffix, so that a misspelt path is not taken for a model, or because they are there."""
    (tmp_path / "profile").touch()
    assert ModelSource("nothing.txt").is_file
    assert ModelSource("nothing.json").is_file
    assert ModelSource(str(tmp_path / "profile")).is_file
    assert not ModelSource("mmt").is_file
    assert not ModelSource("package.module:function").is_file
    with pytest.raises(typer.BadParameter, match="is a run file, which `anabranch train` takes"):
        ModelSource("run.toml").workload()


def test_any_device_takes_an_imported_profile(graph: str, capsys) -> None:
    """Its times stay what they are; one line on standard error says whose they are."""
    found = ModelSource(graph).profile("v100", 8)
    assert found == read_profile(graph)
    out, err = capsys.readouterr()
    assert out == ""
    assert "its seconds are those of a GPU that PipeDream's format does not name" in err
    assert err.count("\n") == 1


def test_the_samples_of_its_mini_batch(graph: str) -> None:
    """Stated as an option of the model, or with --samples of the verb profile."""
    assert ModelSource(graph).profile("v100", 8).samples == (1,)
    assert ModelSource(graph, options={"samples": "16"}).profile("v100", 8).samples == (16,)
    assert ModelSource(graph).profile("v100", 8, samples=(32,)).samples == (32,)


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        ({"layers": "8"}, None, "its only option is samples, not layers"),
        ({"samples": "1,2"}, None, "how many samples that had, one number, not 1, 2"),
        ({"samples": "many"}, None, "write whole numbers"),
        ({"samples": "0"}, None, "sample counts start at 1"),
        ({"samples": str(2**41)}, None, "a mini-batch has between 1 and"),
        ({}, (1, 2, 4), "one number, not 1, 2, 4"),
    ],
)
def test_wrong_options(
    graph: str, options: dict[str, str], samples: tuple[int, ...] | None, message: str
) -> None:
    """Wrong usage, with a way on."""
    with pytest.raises(typer.BadParameter, match=message):
        ModelSource(graph, options=options).profile("v100", 8, samples)


def test_our_own_profiles_take_no_options(run, graph: str, tmp_path: Path) -> None:
    """Nothing is left to say about them, so nothing is ignored."""
    ours = str(tmp_path / "ours.json")
    assert run("profile", graph, "-o", ours)[0] == 0
    for source, samples in (
        (ModelSource(ours, options={"samples": "2"}), None),
        (ModelSource(ours), (2,)),
    ):
        with pytest.raises(typer.BadParameter, match="do nothing"):
            source.profile("v100", 8, samples)


def test_profile_turns_it_into_ours(run, graph: str, tmp_path: Path) -> None:
    """``anabranch profile FILE -o out.json`` is the converter; its file plans alike."""
    ours = str(tmp_path / "ours.json")
    code, out, err = run("profile", graph, "--samples", "4", "-o", ours, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert (document["operators"], document["samples"]) == (3, [4])
    assert (document["source"], document["file"]) == ("imported", ours)
    assert load_profile(ours) == read_profile(graph, 4)
    assert "is imported" in err


def test_a_plan_remembers_the_samples(run, graph: str, tmp_path: Path) -> None:
    """``simulate PLAN`` alone reads the same profile again."""
    file = str(tmp_path / "plan.json")
    code, out, err = run(
        "plan", graph, "--cluster", "summit:1x2", "--batch-size", "8", "--planner", "even",
        "-o", "samples=4", "-o", file, "--json",
    )  # fmt: skip
    assert code == 0, err
    made = json.loads(out)
    assert made["options"] == {"samples": "4"}
    code, out, err = run("simulate", file, "--json")
    assert code == 0, err
    assert json.loads(out)["step_s"] == pytest.approx(made["predicted"]["step_s"])


def test_a_plan_knows_how_its_model_was_built(run):
    """check, simulate and train build it again like that; what the user says goes before."""
    built = ("two-branch", "--preset", "small", "-o", "layers=1", "--granularity", "block")
    where = ("--cluster", "summit:1x2", "--batch-size", "8", "--no-baselines", "--planner", "even")
    code, _, err = run("plan", *built, *where, "-o", "plan.json")
    assert code == 0, err
    plan = load_plan("plan.json")
    source = ModelSource.of_plan(plan, "two-branch")
    assert source == ModelSource("two-branch", "small", {"layers": "1"}, "block")
    other = ModelSource.of_plan(plan, "two-branch", options={"layers": "2"})
    assert other.options == {"layers": "2"}
    code, out, _ = run("check", "plan.json", "two-branch", "-o", "layers=2")
    assert code == 1
    assert "operators are in no stage: branches.0.layers.1, branches.1.layers.1" in out


def simple_plan() -> Plan:
    return Plan(
        StageGraph((Stage(("a",), (0,), 1),), (), 1),
        schedule="1f1b",
        planner="",
        model="two-branch",
        cluster="local:1",
        profile="",
        search_s=0.0,
        simulate_s=0.0,
        predicted=None,
        options=(("preset", "small"), ("layers", "1")),
    )


def test_another_model_than_the_plans_is_built_as_the_user_says():
    """Options of the one mean nothing to the other."""
    plan = simple_plan()
    assert ModelSource.of_plan(plan, plan.model).recorded() == plan.options
    same = ModelSource.of_plan(plan, "two-branch", "published", {"layers": "2"})
    assert (same.preset, same.options) == ("published", {"layers": "2"})
    other = ModelSource.of_plan(plan, "mmt")
    assert (other.model, other.preset, other.options) == ("mmt", "published", {})


def test_a_plan_without_a_calibration_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Calibrate and plan again; plan again alone where the calibration is there by now."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    plan = replace(simple_plan(), machines=Cluster.preset("local:1"))
    with remarks_at_end():
        remark_uncalibrated(plan)
    keep(cluster(2))
    with remarks_at_end():
        remark_uncalibrated(plan)
    before, after = capsys.readouterr().err.splitlines()
    assert before.endswith("cost each other; anabranch cluster --calibrate, then plan again")
    assert after.endswith("this machine is calibrated by now: plan again")


def test_a_kept_capture_is_said(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, and in the document; --no-cache captures anew."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    words = "profile candle-uno --preset small -olayers=1 -obranches=2 --device v100 --json"
    said = [run(*words.split(), *more) for more in ((), (), ("--no-cache",))]
    assert [json.loads(out)["kept_capture"] for _, out, _ in said] == [False, True, False]
    assert ["by the capture that is kept" in err for _, _, err in said] == [False, True, False]
