"""The verb compare: a table for 80 columns, a reason per planner, interrupts, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from anabranch import planner as planners
from anabranch.cli.comparing import comparison, remarks
from anabranch.cli.inputs import options_by_planner
from anabranch.cli.output import print_table
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError, SearchStoppedError
from anabranch.files import save_cluster, save_profile
from anabranch.planner.even import Even
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from tests.simulator.helpers import chain, cluster, cost_model


@pytest.fixture
def written(tmp_path):
    """Write a chain's profile and a cluster of its own; the arguments that name both."""

    def write(*seconds: float, devices: int = 2, memory_bytes: int = 10**9) -> tuple[str, ...]:
        machines = replace(cluster(devices, memory_bytes=memory_bytes), name="my box")
        times = list(seconds or (1.0, 1.0, 1.0))
        cost = cost_model(
            chain(len(times)), times, times, machines,
            value_bytes=8, parameter_bytes=100, kept_bytes=100,
        )  # fmt: skip
        save_profile(cost.profile, tmp_path / "chain.json")
        save_cluster(machines, tmp_path / "box.json")
        return ("chain.json", "--cluster", "box.json", "--batch-size", "8")

    return write


def planners_of(out: str) -> list[str]:
    """The first words of the rows of a table with two lines of headings below the title."""
    rows = out[: out.index("costs:")].splitlines()[3:]
    return [row.split()[0] for row in rows]


def a_plan(*stages: Stage, step_s: float = 1.0, notes: tuple[str, ...] = ()) -> Plan:
    """A plan by hand, as far as the table looks."""
    edges = tuple((i, i + 1) for i in range(len(stages) - 1))
    graph = StageGraph(stages, edges, 8)
    predicted = Prediction(step_s, step_s / 16, 0.25, (2**30,) * len(graph.devices))
    return Plan(
        graph, "1f1b", "even", "m", "c", "p", 0.5, 1.0, predicted, notes=notes, improve_s=2.0
    )


def test_a_row_by_eye():
    """8 samples in a step of 2 s, the slowest stage computes for 1 s; 0.5 s of 3.5 were search."""
    headings, rows = comparison({"even": a_plan(Stage(("a",), (0,), 4), step_s=2.0)})
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
    table = comparison(
        {"data-parallel": slow, "dapple": fast, "piper": BudgetError("too many states")}
    )
    print_table("title", *table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 3
    assert max(map(len, lines)) <= 80
    assert {len(line.split()) for line in lines[3:5]} == {10}


def test_a_title_stays_on_its_line(capsys):
    """It is cut, not wrapped into the table."""
    print_table("a long title " * 50, ["name", "s"], [["x", "1"]])
    title, _, row = capsys.readouterr().out.splitlines()
    assert title.endswith("…")
    assert row.split() == ["x", "1"]


def test_what_holds_for_all_is_said_once():
    """Then what is special about each plan, and why there is none."""
    both = "a remark on the profile"
    plain = a_plan(Stage(("a",), (0,), 4), notes=(both,))
    special = a_plan(
        Stage(("a",), (0, 1), 2, k=2, recompute=True, tensor=2),
        Stage(("b",), (2,), 4),
        notes=(both, "interrupted: the best of the first 2 proposals"),
    )
    found = {"even": plain, "piper": special, "dapple": InfeasiblePlanError("nothing fits")}
    assert remarks(found, "measured, cpu") == [
        "costs: measured, cpu",
        both,
        "even: 1 stage, micro-batch 4, 1f1b",
        "piper: 2 stages, micro-batch 2,4, k 1,2, tensor 1,2, 1 recompute, 1f1b; "
        "interrupted: the best of the first 2 proposals",
        "dapple: nothing fits",
    ]


def test_exhaustive_only_where_it_has_an_answer(run, written):
    """8 operators are its most; beyond, it is compared if it is asked for, and says why not."""
    code, out, err = run("compare", *written(*[1.0] * 8))
    assert code == 0, err
    assert planners_of(out) == list(planners.PLANNERS)
    nine = written(*[1.0] * 9)
    assert planners_of(run("compare", *nine)[1]) == list(planners.PLANNERS)[:-1]
    code, out, _ = run("compare", *nine, "--planner", "exhaustive", "--planner", "even")
    assert code == 0
    assert planners_of(out) == ["exhaustive", "even"]
    assert "too big" in out
    assert "exhaustive: planner exhaustive takes up to 8 operators" in out


def test_no_plan_at_all_is_a_failure(run, written):
    """Exit code 1 and a paragraph; with --json the rows and the reason are one document."""
    arguments = ("compare", *written(memory_bytes=10), "--planner", "even", "--planner", "dapple")
    code, out, err = run(*arguments)
    assert code == 1
    assert planners_of(out) == ["even", "dapple"]
    assert "InfeasiblePlanError: no planner compared has a plan: " in err
    code, out, err = run(*arguments, "--json", "-o", "rows.json")
    document = json.loads(out)
    assert code == 1
    assert [row["planner"] for row in document["plans"]] == ["even", "dapple"]
    assert document["error"] == "InfeasiblePlanError"
    assert document["message"].startswith("no planner compared has a plan")
    assert json.loads(Path("rows.json").read_text()) == document


def test_even_says_whether_other_stages_would_fit(run, written):
    """So that its line agrees with the other rows. An operator has 400 bytes of weights, and keeps
    100 per sample: a stage of the three quick ones is too much, one of two is not.
    """
    some = ("--planner", "even", "--planner", "sequential")
    _, out, _ = run("compare", *written(memory_bytes=10), *some)
    assert "nor with other stages in a row" in out
    code, out, _ = run("compare", *written(1.0, 1.0, 1.0, 3.0, memory_bytes=1350), *some)
    assert code == 0
    assert "planners sequential and graphpipe have stages that fit" in out
    assert "sequential: 2 stages" in out


KNOWN = {
    "graphpipe": {"kfkb": "bool", "recompute": "bool"},
    "data-parallel": {"recompute": "bool"},
    "even": {},
}


def test_planner_options_by_planner():
    """For all that have it, or for one, whose value then counts there."""
    chosen = list(KNOWN)
    assert options_by_planner(["kfkb=true"], chosen, KNOWN) == {"graphpipe": {"kfkb": True}}
    assert options_by_planner(
        ["data-parallel.recompute=true", "recompute=false"], chosen, KNOWN
    ) == {"graphpipe": {"recompute": False}, "data-parallel": {"recompute": True}}
    assert options_by_planner(None, chosen, KNOWN) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("speed=2", "speed: no planner compared has that option; graphpipe has kfkb, recompute; "),
        ("even.kfkb=true", r"even\.kfkb: no planner compared has that option; even has none"),
        ("piper.pairs=2", r"piper\.pairs: .* data-parallel has recompute; even has none"),
        ("kfkb", "write NAME=VALUE"),
    ],
)
def test_wrong_planner_options(value, message):
    """The message lists what there is."""
    with pytest.raises(typer.BadParameter, match=message):
        options_by_planner([value], list(KNOWN), KNOWN)
    with pytest.raises(typer.BadParameter, match="kfkb is given twice"):
        options_by_planner(["kfkb=true", "kfkb=false"], list(KNOWN), KNOWN)


def test_planner_options_reach_the_planners(run, written):
    """Without replicas there is a stage per device; the others keep their freedom."""
    code, out, err = run(
        "compare", *written(), "--planner", "sequential", "--planner", "pipedream",
        "--planner-option", "sequential.max_replicas=1", "--json",
    )  # fmt: skip
    assert code == 0, err
    sequential, _ = json.loads(out)["plans"]
    assert [len(stage["devices"]) for stage in sequential["stages"]] == [1, 1]


def test_the_limit_on_replicas_is_given_once(run, written):
    """Neither of the two wins silently, in plan or in compare."""
    for verb in ("plan", "compare"):
        code, _, err = run(
            verb, *written(), "--planner", "sequential", "--max-replicas", "2",
            "--planner-option", "max_replicas=1",
        )  # fmt: skip
        assert code == 2
        assert "given twice, 2 for every planner and 1 as an option of planner sequential" in err


@dataclass(frozen=True)
class Interrupted:
    """A planner that proposes what ``even`` would, or nothing, and then meets Ctrl-C."""

    proposes: bool
    schedules = ("1f1b",)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        if self.proposes:
            yield from Even()(cost, batch_size=batch_size, microbatch_size=batch_size)
        raise KeyboardInterrupt


def test_an_interrupt_ends_one_search(run, written, monkeypatch):
    """With the best so far or a row that says so; the planners behind it have their turn."""
    monkeypatch.setitem(planners.PLANNERS, "dapple", lambda: Interrupted(False))
    monkeypatch.setitem(planners.PLANNERS, "piper", lambda: Interrupted(True))
    three = ("--planner", "dapple", "--planner", "piper", "--planner", "even")
    code, out, err = run("compare", *written(), *three)
    assert code == 0, err
    assert planners_of(out) == ["dapple", "piper", "even"]
    assert out.splitlines()[3].split()[:3] == ["dapple", "stopped", "-"]
    assert "dapple: interrupted before it had proposed a plan" in out
    assert "piper: 2 stages, micro-batch 8, 1f1b; interrupted: the best of the first 1" in out
    assert "dapple interrupted piper interrupted" in err
    code, out, err = run("compare", *written(), "--planner", "dapple", "--json")
    assert code == 1
    assert json.loads(out)["plans"][0]["kind"] == SearchStoppedError.__name__


def test_an_interrupted_plan_is_compared_all_the_same(run, written, monkeypatch):
    """And where a baseline is better, the user learns how to get that one."""
    monkeypatch.setitem(planners.PLANNERS, "graphpipe", lambda: Interrupted(True))
    code, out, err = run("plan", *written(), "-o", "plan.json")
    assert code == 0, err
    assert "interrupted: the best of the first 1 proposals" in out
    assert "the sequential pipeline is faster than this plan: --planner sequential plans it" in out
    assert "Ctrl-C again leaves them out" in err
    assert Path("plan.json").exists()


def test_a_plan_interrupted_at_once_is_an_error(run, written, monkeypatch):
    """One paragraph, not a bare stop."""
    monkeypatch.setitem(planners.PLANNERS, "graphpipe", lambda: Interrupted(False))
    code, _, err = run("plan", *written())
    assert code == 1
    assert "SearchStoppedError: interrupted before planner graphpipe had proposed a plan" in err


def test_operators_that_take_no_time(run, written):
    """No figure is divided by a step of zero seconds, in plan, compare or simulate."""
    arguments = written(0.0, 0.0, devices=1)
    code, out, err = run("plan", *arguments, "-o", "plan.json")
    assert code == 0, err
    assert "against sequential (0.00 ms, depth 1, micro-batch 1, 1f1b): our plan takes no" in out
    code, out, err = run("plan", *arguments, "--json")
    assert json.loads(out)["gain"]["sequential"] is None
    code, out, err = run("simulate", "plan.json", "chain.json")
    assert (code, out.split(",")[:2]) == (0, ["step 0.00 ms", " 0 samples/s"])
    code, out, err = run("compare", *arguments, "--planner", "data-parallel")
    assert code == 0, err
    assert out.splitlines()[3].split()[:5] == ["data-parallel", "0.00", "-", "-", "0.00"]


def test_a_plan_for_a_cluster_file_knows_its_cluster(run, written):
    """``check`` and ``simulate`` need neither --cluster nor the file; an older plan says so."""
    arguments = written()
    code, made, err = run("plan", *arguments, "-o", "plan.json", "--planner", "sequential")
    assert code == 0, err
    Path("box.json").unlink()
    assert run("check", "plan.json", "chain.json")[:2] == (0, "plan.json is valid\n")
    code, out, err = run("simulate", "plan.json")
    assert code == 0, err
    assert out.splitlines()[0] == made.splitlines()[1], "the same units, too"
    older = json.loads(Path("plan.json").read_text())
    del older["machines"]
    Path("older.json").write_text(json.dumps(older))
    for verb in (("check", "older.json", "chain.json"), ("simulate", "older.json")):
        code, _, err = run(*verb)
        assert code == 1
        assert "older.json was made for a cluster called 'my box', which is no preset" in err
        assert "--cluster FILE" in err
        assert run(*verb, "--cluster", "summit:1x2")[0] == 0
