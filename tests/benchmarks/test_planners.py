"""The benchmark of planners: cases, the file of results, and what is read from it."""

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from anabranch.cluster import Cluster
from benchmarks.planners import cases as case_list
from benchmarks.planners import results, tables
from benchmarks.planners.__main__ import GROUPS, main
from benchmarks.planners.cases import CHANGES, Case, cases, changed, synthetic
from benchmarks.planners.common import processor_s, profile_of
from benchmarks.planners.contestants import measure
from benchmarks.planners.evaluator import population_steps


def row(case: str, planner: str, step_s: float | None, by: str = "anabranch") -> dict[str, Any]:
    """A row of results; without a step, an error."""
    found = {"case": case, "planner": planner, "by": by, "group": "map", "date": "2026-11-22"}
    found |= {"floor_s": 0.5}
    if step_s is None:
        return found | {"error": "InfeasiblePlanError", "message": "needs 20 GiB"}
    return found | {"step_s": step_s, "stages": 1, "depth": 1}


def plan(step_s: float, stages: int, depth: int) -> dict[str, Any]:
    """The shape of a plan, and its step."""
    return {"step_s": step_s, "stages": stages, "depth": depth}


def test_seconds_of_a_processor_are_those_of_other_processes_as_well():
    """A search anneals in several, of which this one only waits for the result."""
    before, own = processor_s(), time.process_time()
    code = "import time\nwhile time.process_time() < 0.05: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert processor_s() - before > time.process_time() - own + 0.04


NONE = {"error": "InfeasiblePlanError", "message": "needs 20 GiB"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((plan(3, 1, 1), plan(2, 4, 4), plan(1, 5, 3)), "graph 2.00x"),
        # Both pipelines fell back to data parallelism.
        ((plan(1, 1, 1), plan(1, 1, 1), plan(1, 1, 1)), "data parallelism"),
        # A row of stages is a chain, whoever has found it.
        ((plan(3, 1, 1), plan(2.5, 4, 4), plan(2, 6, 6)), "chain 1.50x"),
        # 0.4 % count as equal, and the simpler plan wins.
        ((plan(3, 1, 1), plan(1.004, 4, 4), plan(1, 5, 3)), "chain 2.99x"),
        ((NONE, plan(1, 4, 4), NONE), "chain"),
        ((NONE, NONE, NONE), "nothing fits"),
    ],
)
def test_the_winner_is_the_simplest_of_the_best(rows, expected):
    """By the shape of the plan, over the best plan that is simpler."""
    assert tables.verdict(rows) == expected


def test_cases_change_one_thing():
    """The network between the nodes, or the memory of a device."""
    base = Cluster.preset("summit:8x4")
    fast, slow, large = (changed(base, change) for change in CHANGES)
    assert fast.levels[1].bandwidth == 16 * slow.levels[1].bandwidth
    assert fast.levels[0] == slow.levels[0] == base.levels[0]
    assert (large.levels, large.memory_bytes) == (base.levels, 80 * 10**9)


def test_cases_have_names_of_their_own():
    """A result belongs to one case."""
    found = list(cases(None))
    assert len({(case.group, case.name) for case in found}) == len(found)


def test_results_of_others_stay(tmp_path):
    """A new row of ours takes the place of our old one, not of somebody else's."""
    file = tmp_path / "results.json"
    results.save([row("a", "auto", 2.0), row("a", "auto", 1.5, "someone")], file)
    both = results.merged(results.load(file), [row("a", "auto", 1.0), row("b", "auto", None)])
    results.save(both, file)
    found = {(r["case"], r["by"]): r.get("step_s") for r in results.load(file)}
    assert found == {("a", "anabranch"): 1.0, ("a", "someone"): 1.5, ("b", "anabranch"): None}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"schema": "other/1", "rows": []}, "schema is not"),
        ({"schema": results.SCHEMA, "rows": [{"case": "a"}]}, "row 0 lacks planner, by"),
        (
            {"schema": results.SCHEMA, "rows": [row("a", "auto", 1.0) | {"error": "no"}]},
            "one of step_s and error",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, document, said):
    """With what is wrong, and where."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=said):
        results.load(file)


def test_a_planner_is_measured_against_the_best():
    """Two cases: the best of each is 1, whoever has it; a planner of others has their name."""
    rows = [row("a", "auto", 1.0), row("a", "even", 2.0), row("b", "auto", 3.0)]
    rows += [row("b", "new", 1.5, "someone"), row("b", "even", None)]
    assert tables.ratios(rows) == {
        "auto": [("map", 1.0), ("map", 2.0)],
        "even": [("map", 2.0)],
        "new (someone)": [("map", 1.0)],
    }


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "table4"])
def test_a_group_is_measured_and_shown(group, tmp_path, monkeypatch, capsys):
    """Its first case by data parallelism, a second time from the file, and a picture, for models
    of few operators. Those of Table 4 need public profiles.
    """
    monkeypatch.setattr(case_list, "BATCHES", {"two-branch": {4: 64, 32: 256}})
    monkeypatch.setattr(case_list, "profile_of", partial(profile_of, layers="1"))
    monkeypatch.setattr(case_list, "synthetic", lambda branches, _: synthetic(branches, 20))
    file, picture = tmp_path / "results.json", tmp_path / "page.svg"
    command = f"planners --groups {group} --planners data-parallel --first 1 --detail {group}"
    paths = ["--results", str(file), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", [*command.split(), *paths])
    main()
    (first,) = results.load(file)
    assert first["group"] == group
    assert f"## {group}" in capsys.readouterr().out
    assert picture.exists()
    main()
    assert results.load(file) == [first]


def test_measures_a_small_case():
    """A row has what the file asks for, and no step is below the floor."""
    found = measure(Case("small", "random 0", "flat", 8), "even", None)
    assert all(name in found for name in results.NEEDED)
    assert found["step_s"] >= found["floor_s"] > 0


def test_a_population_steps_as_pipelines_do():
    """Two drafts at once, rows of two stages with forwards of 1 s and backwards of 2 s, four
    micro-batches: the second waits for the first on the way there and back, (4 + 1) * 3 s. Without
    an edge both stages work side by side.
    """
    forward, edges = np.ones((2, 2)), np.zeros((2, 2, 2), dtype=bool)
    edges[0, 0, 1] = True
    assert population_steps(forward, 2 * forward, edges, 0.0, 4).tolist() == [15.0, 12.0]
