"""Plans side by side: a table for 80 columns, and what is said below it."""

from dataclasses import replace

import pytest

from anabranch.cli.comparison import Contender, remarks, side_by_side
from anabranch.cli.output import print_table
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.plans.stages import Stage
from anabranch.solve import plan as search
from tests.cli.examples import a_plan, four


def test_a_row_by_eye():
    """8 samples in a step of 2 s, the slowest stage computes for 1 s; 0.5 s of 3.5 were search."""
    headings, rows = side_by_side({Contender("even"): a_plan(Stage(("a",), (0,), 4), step_s=2.0)})
    shown = dict(zip((" ".join(h.split()) for h in headings), rows[0], strict=True))
    assert shown == {
        "planner": "even",
        "step ms": "2000",
        "over best": "1.00",
        "samples per s": "4.00",
        "slowest stage ms": "1000",
        "depth": "1",
        "bubble": "25.0%",
        "peak GiB": "1.00",
        "search s": "0.500",
        "total s": "3.500",
    }


@pytest.mark.parametrize("step_s", [1e-6, 1.0, 999.9996])
def test_the_table_fits_80_columns(step_s, capsys):
    """With the longest name of a planner and figures from microseconds to a quarter of an hour."""
    slow = a_plan(Stage(("a",), (0,), 1), step_s=step_s)
    fast = a_plan(Stage(("a",), (0,), 1), step_s=step_s / 100)
    slow = replace(slow, search_s=4000.0)
    table = side_by_side(
        {
            Contender("data-parallel"): slow,
            Contender("dapple"): fast,
            Contender("piper"): BudgetError("too many states"),
        }
    )
    print_table("title", *table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 3
    assert max(map(len, lines)) <= 80
    assert {len(line.split()) for line in lines[3:5]} == {10}


def test_what_holds_for_all_is_said_once():
    """Then what is special about each plan, and why there is none."""
    both = "a remark on the profile"
    plain = a_plan(Stage(("a",), (0,), 4), notes=(both,))
    special = a_plan(
        Stage(("a",), (0, 1), 2, k=2, recompute=True),
        Stage(("b",), (2,), 4),
        notes=(both, "interrupted: the best of the first 2 proposals"),
    )
    found = {
        Contender("even"): plain,
        Contender("piper"): special,
        Contender("dapple"): InfeasiblePlanError("nothing fits"),
    }
    assert remarks(found, "measured, cpu") == [
        "costs: measured, cpu",
        "k: forwards that a stage makes one after another, then as many backwards",
        both,
        "even: 1 stage, micro-batch 4, 1f1b",
        "piper: 2 stages, micro-batch 2,4, k 1,2, 1 recompute, 1f1b; "
        "interrupted: the best of the first 2 proposals",
        "dapple: nothing fits",
    ]


def test_policies_side_by_side_fit_80_columns(capsys):
    """With the longest name of one, the most that a pipeline of ten stages reads, and none."""
    stages = tuple(Stage((f"{s}",), (s,), 8, in_flight=10 - s) for s in range(10))
    plan = a_plan(*stages, step_s=123.4)
    plan = replace(plan, mode="async")
    names = ("naive", "stash", "basis-rotation", "predict-stash")
    results = {Contender("auto", name): replace(plan, policy=name) for name in names}
    results[Contender("auto", "asyncpp")] = InfeasiblePlanError("another optimizer")
    print_table("title", *side_by_side(results))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 5
    assert max(map(len, lines)) <= 80
    assert "-9 +9 -9 +9" in "".join(lines)


def test_a_row_without_a_plan_beside_one_with():
    """Both have a cell under every heading, with several planners and with one."""
    cost = four()
    plan = search(cost.profile, cost.cluster, 4, mode="async", policy="stash", max_replicas=1)
    error = InfeasiblePlanError("too big")
    for found in (
        {Contender("graphpipe", "stash"): plan, Contender("graphpipe", "2bw"): error},
        {Contender("graphpipe", "stash"): plan, Contender("piper", "stash"): error},
    ):
        headings, rows = side_by_side(found)
        assert [len(row) for row in rows] == [len(headings)] * 2
        assert "no plan" in rows[1]
