"""The verb compare: rows, reasons, interrupts, documents and exit codes."""

import json
import re
from pathlib import Path

from anabranch import planner as planners
from anabranch.errors import SearchStoppedError
from anabranch.files import save_cluster
from tests.cli.examples import Interrupted, four, planners_of


def test_exhaustive_only_where_it_has_an_answer(run, write_chain):
    """8 operators are its most; beyond, it is compared if it is asked for, and says why not."""
    code, out, err = run("compare", *write_chain(*[1.0] * 8))
    assert code == 0, err
    assert sorted(planners_of(out)) == sorted(planners.PLANNERS)
    nine = write_chain(*[1.0] * 9)
    assert set(planners_of(run("compare", *nine)[1])) == set(planners.PLANNERS) - {"exhaustive"}
    code, out, _ = run("compare", *nine, "--planner", "exhaustive", "--planner", "even")
    assert code == 0
    assert planners_of(out) == ["even", "exhaustive"], "those without a plan are the last"
    assert "too big" in out
    assert "exhaustive: planner exhaustive takes up to 8 operators" in out


def test_no_plan_at_all_is_a_failure(run, write_chain):
    """Exit code 1 and a paragraph; with --json the rows and the reason are one document."""
    names = "--planner even --planner dapple"
    arguments = ("compare", *write_chain(memory_bytes=10), *names.split())
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


def test_even_says_whether_other_stages_would_fit(run, write_chain):
    """So that its line agrees with the other rows. An operator has 400 bytes of weights, and keeps
    100 per sample: a stage of the three quick ones is too much, one of two is not.
    """
    some = ("--planner", "even", "--planner", "sequential")
    _, out, _ = run("compare", *write_chain(memory_bytes=10), *some)
    assert "nor does it fit with other stages in a row" in out
    code, out, _ = run("compare", *write_chain(1.0, 1.0, 1.0, 3.0, memory_bytes=1350), *some)
    assert code == 0
    assert "planners sequential and graphpipe have stages that fit" in out
    assert "sequential: 2 stages" in out


def test_planner_options_reach_the_planners(run, write_chain):
    """Without replicas there is a stage per device; the others keep their freedom."""
    code, out, err = run(
        "compare", *write_chain(), "--planner", "sequential", "--planner", "pipedream",
        "--planner-option", "sequential.max_replicas=1", "--json",
    )  # fmt: skip
    assert code == 0, err
    sequential, _ = json.loads(out)["plans"]
    assert [len(stage["devices"]) for stage in sequential["stages"]] == [1, 1]


def test_an_interrupt_ends_one_search(run, write_chain, monkeypatch):
    """With the best so far or a row that says so; those behind it have their turn, until a second
    interrupt ends the comparison.
    """
    monkeypatch.setitem(planners.PLANNERS, "dapple", lambda: Interrupted(False))
    monkeypatch.setitem(planners.PLANNERS, "piper", lambda: Interrupted(True))
    names = ("dapple", "even", "piper", "sequential")
    four = [word for name in names for word in ("--planner", name)]
    code, out, err = run("compare", *write_chain(), *four)
    assert code == 0, err
    assert planners_of(out) == ["even", "piper", "dapple"]
    assert "interrupted before sequential" in out
    assert out.splitlines()[5].split()[:3] == ["dapple", "stopped", "-"]
    assert "dapple: interrupted before it had proposed a plan" in out
    assert "piper: 2 stages, micro-batch 8, 1f1b; interrupted: the best of the first 1" in out
    assert "dapple interrupted; Ctrl-C again ends the comparison" in err
    assert "piper interrupted, and the comparison with it" in err
    code, out, err = run("compare", *write_chain(), "--planner", "dapple", "--json")
    assert code == 130
    assert json.loads(out)["plans"][0]["kind"] == SearchStoppedError.__name__


def test_compare_has_every_planner(document, profile):
    """Ours is never behind the strongest chain or data parallelism: it simulates theirs too."""
    found = document("compare", profile, "--cluster", "summit:1x2", "--batch-size", "16")
    assert [plan["planner"] for plan in found["plans"]] == list(planners.PLANNERS)
    steps = {p["planner"]: p["predicted"]["step_s"] for p in found["plans"] if "predicted" in p}
    assert steps["auto"] <= min(steps["sequential"], steps["data-parallel"]) * (1 + 1e-9)


def test_compare_shows_a_row_for_who_cannot(run, profile, tmp_path):
    """One sample cannot be shared out: no data parallelism, and the row and a line say so."""
    file = tmp_path / "compare.json"
    code, out, err = run(
        *("compare", profile, "--cluster", "summit:1x2", "--batch-size", "1", "-o", str(file)),
        *("--planner", "even", "--planner", "data-parallel"),
    )
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "no plan" in lines["data-parallel"]
    assert "at least 2 samples" in lines["data-parallel:"]
    even, parallel = json.loads(file.read_text())["plans"]
    assert even["predicted"]["step_s"] > 0
    assert set(parallel) == {"planner", "error", "kind"}


def test_compare_puts_policies_side_by_side(run, four_files):
    """A row for each, with how old the weights are; policies whose plans run alike share a line."""
    names = ("stash", "2bw", "vertical-sync", "pipeoptim")
    policies = [word for name in names for word in ("--policy", name)]
    code, out, err = run("compare", *four_files, "--mode", "async", *policies)
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1:] for line in out[: out.index("costs:")].splitlines()}
    #                   ms       over    per s    depth between forward backward versions
    assert rows["stash"][:8] == ["12000", "1.00", "0.33", "4", "3", "-3", "-3", "4"]
    assert rows["2bw"][:8] == ["12000", "1.00", "0.33", "4", "1", "-1", "-1", "2"]
    assert rows["pipeoptim"][:7] == ["12000", "1.00", "0.33", "4", "3", "-3", "+3"]
    assert "\nstash, vertical-sync, pipeoptim: 4 stages" in out
    assert "\n2bw: 4 stages, 4 micro-batches of 1" in out


def test_the_page_without_a_flush_begins_with_the_policy_of_auto(run, four_files, tmp_path):
    """All are as fast; it is said which one that is, and the page has a timeline of it."""

    def head(html: str) -> str:
        text = html[html.index("<body") : html.index("Plans side by side")]
        return re.sub("<[^>]*>", " ", text)

    asked = ("compare", *four_files, "--mode", "async", "--optimizer", "sgd-momentum")
    code, out, err = run(*asked, "--report", "page.html", "-o", "c.json")
    assert code == 0, err
    said = "policy auto takes pipeoptim: at depth 4 a prediction"
    (line,) = (line for line in out.splitlines() if line.startswith("policy auto takes"))
    assert line.startswith(said)
    assert json.loads((tmp_path / "c.json").read_text())["auto_policy"] == "pipeoptim"
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert said in html
    assert "pipeoptim" in head(html)
    assert "naive" not in head(html)
    assert "auto, pipeoptim" not in html  # the only planner is no part of a name
    assert said in run(*asked, "--policy", "auto", "--policy", "naive")[1]
    # Of those that were asked for, where that is none of them.
    code, out, err = run(*asked, "--policy", "stash", "--report", "page.html")
    assert code == 0, err
    assert said in out
    assert "stash" in head((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_compare_document(run, four_files):
    """Plans with policy and staleness; planners that are named each have their own."""
    code, out, err = run("compare", *four_files, "--mode", "async", "--planner", "pipedream",
                         "--planner", "sequential", "--policy", "naive", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["mode"] == "async"
    assert [(each["planner"], each["policy"]) for each in found["plans"]] == [
        ("pipedream", "naive"),
        ("sequential", "naive"),
    ]
    assert [each["difference"] for each in found["plans"][0]["staleness"]] == [3, 2, 1, 0]


def test_compare_without_any_plan(run, tmp_path, four_files):
    """A row that says so, a line with the reason, and exit code 1."""
    save_cluster(four(memory_bytes=550).cluster, tmp_path / "box.json")
    code, out, err = run("compare", *four_files, "--mode", "async", "--policy", "stash")
    assert code == 1
    assert "no plan" in out
    assert "policy stash" in err


def test_compare_refuses_per_policy_what_the_optimizer_cannot(run, four_files):
    """A row without a plan, and the others as ever."""
    code, out, err = run("compare", *four_files, "--mode", "async", "--policy", "stash", "--policy",
                         "spectrain", "--optimizer", "adamw", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["optimizer"] == "AdamW"
    assert [each.get("kind") for each in found["plans"]] == [None, "PolicyError"]


def test_a_page_has_the_plans_side_by_side(run, write_chain, tmp_path):
    """Every row of the table, and stages and timelines of the best that differ."""
    names = ("piper", "sequential", "data-parallel")
    three = [word for name in names for word in ("--planner", name)]
    code, out, err = run(
        "compare", *write_chain(1.0, 2.0, 1.0, devices=3), *three, "--report", "page.html"
    )
    assert code == 0, err
    assert "written to page.html" in out
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Plans side by side" in html
    rows = re.findall(r'<tr><td class="left">(.*?)</td><td class="">(.*?)</td>', html)
    assert sorted(name for name, _ in rows) == sorted(names)
    assert rows == sorted(rows, key=lambda row: float(row[1])), "the shortest step first"
    table = {row.split()[0]: row.split()[1] for row in out.splitlines()[3:6]}
    assert dict(rows) == table
    assert len(re.findall("<h2>Stages: ", html)) >= 2
    best, *others = (row.split()[0] for row in out.splitlines()[3:6])
    says = {"data-parallel": "as data parallelism", "sequential": "as the best chain"}
    for name in others:
        assert says.get(name, "A step takes") in html, "what the best gains over it"
    assert says.get(best, "nothing") not in html, "nothing over itself"
    assert "x as fast as the best chain" not in html, "all of these plans are chains"
