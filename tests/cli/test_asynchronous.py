"""``--mode async`` of plan, compare, check and simulate: documents, tables, and mistakes."""

from __future__ import annotations

import json

import pytest

from anabranch.cli import options
from anabranch.cli.comparing_async import comparison_async
from anabranch.errors import InfeasiblePlanError
from anabranch.files import save_cluster, save_profile
from anabranch.solve import plan as search
from anabranch.solve_async import MODES
from anabranch.weights import OPTIMIZERS, POLICIES
from tests.simulator.helpers import chain, cluster, cost_model


@pytest.fixture
def written(tmp_path) -> tuple[str, ...]:
    """Four equal operators of 1 + 2 s per sample and a cluster of four; arguments for both."""
    save_profile(four().profile, tmp_path / "chain.json")
    save_cluster(four().cluster, tmp_path / "box.json")
    return ("chain.json", "--cluster", "box.json", "--batch-size", "4", "--max-replicas", "1")


def four(memory_bytes: int = 10**9):
    """The costs of ``written``."""
    machines = cluster(4, memory_bytes=memory_bytes)
    return cost_model(chain(4), [1.0] * 4, [2.0] * 4, machines, parameter_bytes=100)


def test_choices_are_the_tables():
    """They are spelled out for a fast --help, so something must hold them together."""
    assert {each.value for each in options.Mode} == set(MODES)
    assert {each.value for each in options.Policy} == {"auto", *POLICIES}
    assert {each.value for each in options.Optimizer} == {*OPTIMIZERS}


def test_plan_has_mode_and_policy(run, written):
    """12 s per mini-batch of 4 samples, 4 in flight at the first stage, both baselines alike."""
    code, out, err = run("plan", *written, "--mode", "async", "--policy", "stash", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["mode"], found["policy"], found["schedule"]) == ("async", "stash", "1f1b")
    assert found["predicted"]["step_s"] == pytest.approx(12.0)
    assert found["predicted"]["samples_per_s"] == pytest.approx(1 / 3)
    assert found["predicted"]["device_peak_bytes"] == [700, 600, 500, 400]
    assert [stage["in_flight"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert set(found["baselines"]) == {"sequential", "straight sequential"}
    assert all(each["mode"] == "async" for each in found["baselines"].values())


def test_a_plan_file_is_checked_and_simulated(run, written, tmp_path):
    """Written, valid with and without the model, simulated with trace and report."""
    assert run("plan", *written, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")[0] == 0
    assert run("check", "p.json") == (0, "p.json is valid\n", "")
    code, out, err = run("check", "p.json", "chain.json", "--json")
    assert (code, json.loads(out)) == (0, {"valid": True, "problems": []}), err
    code, out, err = run(
        "simulate", "p.json", "chain.json", "--json", "--trace", "t.json", "--report", "r.html"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["step_s"] == pytest.approx(12.0)
    assert found["bubble"] == pytest.approx(0.0, abs=1e-9)
    assert found["device_peak_bytes"] == [500, 500, 500, 400]
    assert (found["mode"], found["policy"], found["periodic"]) == ("async", "pipeoptim", True)
    assert found["staleness"][0] == {
        "difference": 3,
        "forward_delay": 3,
        "forward_ahead": 3,
        "backward_delay": 0,
        "backward_ahead": 0,
        "versions": 2,
    }
    assert found["timeline_s"] == pytest.approx(12.0 * (found["timeline_batches"] + 3))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "predicted time per mini-batch" in (tmp_path / "r.html").read_text()


def test_a_plan_is_simulated_in_another_mode_and_policy(run, written):
    """With a flush each mini-batch takes 4 * 12 s; under stash 4 versions are held."""
    run("plan", *written, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")
    _, out, _ = run("simulate", "p.json", "chain.json", "--mode", "sync", "--json")
    assert json.loads(out)["step_s"] == pytest.approx(48.0)
    assert "policy" not in json.loads(out)
    code, out, _ = run("simulate", "p.json", "chain.json", "--policy", "stash")
    assert code == 0
    assert "a batch every 12000.00 ms" in out
    assert "weights under policy stash" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "3", "-3", "-3", "4"] in rows


def test_a_synchronous_plan_is_simulated_without_its_flush(run, written):
    """The stages of the plan, each mini-batch in one piece."""
    run("plan", *written, "--microbatch-size", "1", "-o", "p.json")
    code, out, err = run("simulate", "p.json", "chain.json", "--mode", "async", "--json")
    assert code == 0, err
    assert json.loads(out)["step_s"] == pytest.approx(12.0)


def test_compare_puts_policies_side_by_side(run, written):
    """A row for each, with how old the weights are, and a document with every stage."""
    code, out, err = run("compare", *written, "--mode", "async", "--policy", "stash", "--policy",
                         "2bw", "--policy", "pipeoptim", "-o", "c.json")  # fmt: skip
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1:] for line in out[: out.index("costs:")].splitlines()}
    #                   ms       over    per s    depth between forward backward versions
    assert rows["stash"][:8] == ["12000", "1.00", "0.33", "4", "3", "-3", "-3", "4"]
    assert rows["2bw"][:8] == ["12000", "1.00", "0.33", "4", "1", "-1", "-1", "2"]
    assert rows["pipeoptim"][:7] == ["12000", "1.00", "0.33", "4", "3", "-3", "+3"]
    assert "graphpipe, stash, pipeoptim: 4 stages" in out
    assert "graphpipe, 2bw: 4 stages, 4 micro-batches of 1" in out


def test_compare_document(run, written):
    """Plans with policy and staleness; planners that are named each have their own."""
    code, out, err = run("compare", *written, "--mode", "async", "--planner", "pipedream",
                         "--planner", "sequential", "--policy", "naive", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["mode"] == "async"
    assert [(each["planner"], each["policy"]) for each in found["plans"]] == [
        ("pipedream", "naive"),
        ("sequential", "naive"),
    ]
    assert [each["difference"] for each in found["plans"][0]["staleness"]] == [3, 2, 1, 0]


def test_compare_without_any_plan(run, tmp_path, written):
    """A row that says so, a line with the reason, and exit code 1."""
    save_cluster(four(memory_bytes=450).cluster, tmp_path / "box.json")
    code, out, err = run("compare", *written, "--mode", "async", "--policy", "stash")
    assert code == 1
    assert "no plan" in out
    assert "policy stash" in err


def test_a_row_without_a_plan_beside_one_with():
    """Both have a cell under every heading, with several planners and with one."""
    cost = four()
    plan = search(cost.profile, cost.cluster, 4, mode="async", policy="stash", max_replicas=1)
    error = InfeasiblePlanError("too big")
    for found in (
        {("graphpipe", "stash"): plan, ("graphpipe", "2bw"): error},
        {("graphpipe", "stash"): plan, ("piper", "stash"): error},
    ):
        headings, rows = comparison_async(found)
        assert [len(row) for row in rows] == [len(headings)] * 2
        assert "no plan" in rows[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--policy", "stash"], "policy stash is for mode async"),
        (["compare", "--policy", "stash"], "--policy is for --mode async"),
        (["plan", "--mode", "async", "--schedule", "gpipe"], "schedule gpipe is for mode sync"),
        (["compare", "--mode", "async", "--schedule", "gpipe"], "schedule gpipe is for mode sync"),
        (["plan", "--mode", "async", "--policy", "hoard"], "'hoard' is not one of"),
        (
            ["plan", "--mode", "async", "--policy", "2bw", "--microbatch-size", "3"],
            "do not divide mini-batches of 4",
        ),
    ],
)
def test_wrong_usage(run, written, arguments, message):
    """Exit code 2 and what there is instead."""
    verb, *rest = arguments
    code, _, err = run(verb, *written, *rest)
    assert code == 2
    assert message in err


def test_too_few_micro_batches(run, written):
    """Two micro-batches in a chain of four under 2bw: no plan of four stages, and it is said."""
    run("plan", *written, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")
    code, _, err = run("simulate", "p.json", "chain.json", "--policy", "2bw")
    assert code == 1
    assert "1 < 4" in err
    assert "more micro-batches" in err


def test_plan_says_how_old_weights_are(run, written):
    """Per stage and with a policy whose age is not the version difference, as text and JSON."""
    arguments = ("plan", *written, "--mode", "async", "--policy", "vertical-sync")
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "stage version difference forward reads backward reads versions held" in " ".join(
        out.split()
    )
    rows = [line.split() for line in out.splitlines()]
    assert ["3", "0", "-3", "-3", "4"] in rows
    found = json.loads(run(*arguments, "--json")[1])
    assert [each["difference"] for each in found["staleness"]] == [3, 2, 1, 0]
    assert [each["forward_delay"] for each in found["staleness"]] == [3, 3, 3, 3]
    assert "staleness" not in json.loads(run("plan", *written, "--json")[1])


def test_compare_has_a_line_for_the_ages_of_every_stage(run, written):
    """Policies that read alike share it."""
    code, out, err = run("compare", *written, "--mode", "async", "--policy", "stash", "--policy",
                         "vertical-sync", "--policy", "pipeoptim")  # fmt: skip
    assert code == 0, err
    assert "graphpipe, stash: stage by stage, both read -3, -2, -1, 0" in out
    assert "graphpipe, vertical-sync: stage by stage, both read -3, -3, -3, -3" in out
    assert "forward reads -3 +3, -2 +2, -1 +1, 0; backward 0, 0, 0, 0" in out


def test_an_optimizer_by_name(run, written):
    """For a profile file, which has none: for what auto chooses, memory, and what is refused."""
    arguments = ("plan", *written, "--mode", "async")
    found = json.loads(run(*arguments, "--optimizer", "sgd", "--json")[1])
    assert (found["policy"], found["optimizer"]) == ("stash", "SGD")
    other = ("--policy", "pipeoptim", "--optimizer", "other")
    found = json.loads(run(*arguments, *other, "--json")[1])
    assert [each["versions"] for each in found["staleness"]] == [3, 3, 3, 1]
    assert found["predicted"]["device_peak_bytes"] == [600, 600, 600, 400]
    code, _, err = run(*arguments, "--policy", "spectrain", "--optimizer", "adamw")
    assert code == 1
    assert "the optimizer is AdamW" in err
    run(*arguments, "--policy", "pipeoptim", "-o", "p.json")
    found = json.loads(run("simulate", "p.json", "chain.json", "--optimizer", "other", "--json")[1])
    assert [each["versions"] for each in found["staleness"]] == [3, 3, 3, 1]
    assert run("check", "p.json", "chain.json", "--optimizer", "other")[0] == 0


def test_compare_refuses_per_policy_what_the_optimizer_cannot(run, written):
    """A row without a plan, and the others as ever."""
    code, out, err = run("compare", *written, "--mode", "async", "--policy", "stash", "--policy",
                         "spectrain", "--optimizer", "adamw", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["optimizer"] == "AdamW"
    assert [each.get("kind") for each in found["plans"]] == [None, "PolicyError"]


def test_an_optimizer_is_for_mode_async(run, written):
    """Steps with a flush read the same weights, whatever updates them."""
    for verb in ("plan", "compare"):
        code, _, err = run(verb, *written, "--optimizer", "sgd")
        assert code == 2
        assert "--optimizer is for --mode async" in err


def test_the_optimizer_of_the_model(run):
    """The recipe of a workload that is named; AdamW is the default, SGD its own choice."""
    where = ("--cluster", "summit:1x2", "--batch-size", "4", "--mode", "async", "--no-baselines")
    model = "tests.cli.models:towers"
    found = json.loads(run("plan", model, *where, "--json")[1])
    assert found["optimizer"] == "AdamW"
    code, _, err = run("plan", model, *where, "--policy", "spectrain")
    assert code == 1
    assert "the optimizer is AdamW" in err


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_is_planned_checked_and_simulated(run, written, policy):
    """The plan is valid, with and without the model, and its period is its own."""
    plan = ("plan", *written, "--mode", "async", "--policy", policy, "-o", "p.json", "--json")
    code, out, err = run(*plan)
    assert code == 0, err
    assert run("check", "p.json")[0] == run("check", "p.json", "chain.json")[0] == 0
    code, again, err = run("simulate", "p.json", "chain.json", "--json")
    assert code == 0, err
    assert json.loads(again)["step_s"] == json.loads(out)["predicted"]["step_s"]
    assert json.loads(again)["staleness"] == json.loads(out)["staleness"]
