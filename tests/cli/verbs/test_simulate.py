"""The verbs check and simulate: a plan file as it is, and in another mode or policy."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.cli.source import ModelSource
from anabranch.files import save_cluster
from anabranch.runtime.measurement import workload as whole
from tests.cli.examples import TOWERS, four


def test_check_and_simulate_a_plan_file(run, document, profile, tmp_path):
    """The plan that was just written is valid and takes as long as it says; a broken one is not.
    Gains of a file whose step is not that of today's costs are left out: a page said 1.33x as fast
    as data parallelism of a plan that gained 1.15x.
    """
    plan, page, trace = (str(tmp_path / name) for name in ("plan.json", "p.html", "t.json"))
    made = document("plan", profile, "--cluster", "summit:1x2", "--batch-size", "16", "-o", plan)
    assert document("check", plan, profile) == {"valid": True, "problems": []}
    found = document("simulate", plan, profile, "--trace", trace)
    assert found["step_s"] == pytest.approx(made["predicted"]["step_s"])
    assert len(found["device_peak_bytes"]) == 2
    assert "actions" not in found
    actions = document("simulate", plan, profile, "--actions")["actions"]
    assert {"device", "start_s", "end_s", "kind", "stage", "microbatch", "action"} == set(
        actions[0]
    )
    assert max(action["end_s"] for action in actions) <= found["step_s"]
    assert run("simulate", plan, profile, "--actions")[0] == 2
    assert "explanation" not in found
    why = document("simulate", plan, profile, "--why", "--report", page)["explanation"]
    assert why == made["explanation"]
    assert "why this plan" in run("simulate", plan, profile, "--why")[1]
    code, _, err = run("simulate", plan, profile, "--why", "--mode", "async")
    assert code == 2
    assert "without a flush" in err
    html = Path(page).read_text(encoding="utf-8")
    assert "<svg" in html
    assert "as data parallelism" in html
    # To the step at the head of the page, not to the parts that are worth a line.
    assert f'together</td><td class="">{found["step_s"] * 1e3:.2f}</td>' in html
    assert json.loads(Path(trace).read_text())["traceEvents"]
    for option in ("--report", "--trace"):
        code, _, err = run("simulate", plan, profile, option, str(tmp_path / "no" / "such"))
        assert code == 1, "a folder that is not there is one paragraph"
        assert "cannot be written: there is no folder" in err
    assert "itself says" not in run("simulate", plan, profile)[2]
    broken = json.loads(Path(plan).read_text())
    broken["predicted"]["step_s"] *= 2
    broken["predicted"]["samples_per_s"] /= 2
    Path(plan).write_text(json.dumps(broken))
    code, _, err = run("simulate", plan, profile, "--report", page)
    assert "plan.json itself says" in err, "figures of another plan"
    assert "as data parallelism" not in Path(page).read_text(encoding="utf-8")
    broken["stages"][0]["operators"].pop()
    if not broken["stages"][0]["operators"]:
        broken["stages"][0]["operators"] = ["nothing"]
    Path(plan).write_text(json.dumps(broken))
    code, out, _ = run("check", plan, profile, "--json")
    assert code == 1
    assert not json.loads(out)["valid"]


def test_operators_that_are_timed_anew_are_no_change_of_the_file(run, tmp_path):
    """It said that the file had been edited, of one that nobody had touched."""
    options = ("--cluster", "local:2", "--batch-size", "8", "--no-baselines", "--planner", "even")
    assert run("plan", TOWERS, *options, "-o", "plan.json")[0] == 0
    plan = json.loads(Path("plan.json").read_text())
    plan["predicted"]["step_s"] *= 2
    plan["predicted"]["samples_per_s"] /= 2
    Path("plan.json").write_text(json.dumps(plan))
    said = run("simulate", "plan.json", TOWERS)[2]
    assert "plan.json itself says" in said
    assert "operators were timed anew just now, or it was changed" in said


def test_check_times_nothing(run, monkeypatch, tmp_path):
    """It asks for bytes alone. Operators were timed for a minute, those of a large model with too
    few samples for its plan, which then was no plan.
    """
    options = ("--cluster", "local:2", "--batch-size", "16", "--planner", "even")
    assert run("plan", TOWERS, *options, "--no-baselines", "-o", "plan.json")[0] == 0
    monkeypatch.delattr(whole, "measure_workload")
    code, _, err = run("check", "plan.json", TOWERS)
    assert code == 0, err
    small = json.loads(Path("plan.json").read_text())
    small["machines"]["memory_bytes"] = 1000
    Path("plan.json").write_text(json.dumps(small))
    code, out, _ = run("check", "plan.json", TOWERS)
    assert code == 1
    assert "KiB on each device" in out


def test_check_has_no_memory_for_parameters(run, monkeypatch, tmp_path):
    """It asks how large they are: those of mmt took 14 s and 1.7 GB."""
    options = ("--cluster", "local:2", "--batch-size", "4", "--planner", "even", "--device", "v100")
    assert run("plan", TOWERS, *options, "-o", "plan.json")[0] == 0
    local = Path("plan.json").read_text().replace('"v100"', '"cpu"')
    Path("plan.json").write_text(local)
    built, meta = ModelSource.workload, []
    monkeypatch.setattr(
        ModelSource, "workload", lambda self, **how: meta.append(how["meta"]) or built(self, **how)
    )
    assert run("check", "plan.json", TOWERS, "--no-cache")[0] == 0
    assert meta == [True]


def test_a_plan_file_is_checked_and_simulated(run, four_files, tmp_path):
    """Written, valid with and without the model, simulated with trace and report."""
    assert (
        run("plan", *four_files, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")[0] == 0
    )
    code, out, err = run("check", "p.json")
    assert (code, err) == (0, "")
    assert " ".join(out.split()) == (
        "p.json is valid: its structure and schedule; whether its stages hold all operators of the "
        "model and fit into memory, anabranch check p.json chain.json says"
    )
    text = Path("p.json").read_text("utf-8")
    Path("far.json").write_text(text.replace('"devices": [3]', '"devices": [7]'), "utf-8")
    code, out, _ = run("check", "far.json")
    assert code == 1
    assert "has stages on device 7, but its cluster" in out
    code, out, err = run("check", "p.json", "chain.json", "--json")
    assert (code, json.loads(out)) == (0, {"valid": True, "problems": []}), err
    code, out, err = run(
        "simulate", "p.json", "chain.json", "--json", "--trace", "t.json", "--report", "r.html"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["step_s"] == pytest.approx(12.0)
    assert found["bubble"] == pytest.approx(0.0, abs=1e-9)
    assert found["device_peak_bytes"] == [600, 600, 600, 500]
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


def test_a_plan_is_simulated_in_another_mode_and_policy(run, four_files):
    """With a flush each mini-batch takes 4 * 12 s; under stash 4 versions are held."""
    run("plan", *four_files, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")
    _, out, _ = run("simulate", "p.json", "chain.json", "--mode", "sync", "--json")
    assert json.loads(out)["step_s"] == pytest.approx(48.0)
    assert "policy" not in json.loads(out)
    assert "weights under policy pipeoptim" in run("simulate", "p.json", "chain.json")[1]
    code, out, _ = run("simulate", "p.json", "chain.json", "--policy", "stash")
    assert code == 0
    assert "a batch every 12000.00 ms" in out
    assert "weights under policy stash" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "3", "-3", "-3", "4"] in rows


def test_a_synchronous_plan_is_simulated_without_its_flush(run, four_files):
    """The stages of the plan, each mini-batch in one piece."""
    run("plan", *four_files, "--microbatch-size", "1", "-o", "p.json")
    code, out, err = run("simulate", "p.json", "chain.json", "--mode", "async", "--json")
    assert code == 0, err
    assert json.loads(out)["step_s"] == pytest.approx(12.0)


def test_a_policy_for_another_optimizer_is_refused_before_operators_are_timed(run, monkeypatch):
    """Which takes seconds, or minutes; also where the optimizer is named."""
    options = "--cluster", "local:2", "--batch-size", "8", "--mode", "async", "--policy", "stash"
    assert run("plan", TOWERS, *options, "--no-baselines", "-o", "plan.json")[0] == 0
    monkeypatch.setattr("anabranch.cli.source.measured", None)
    for named in ((), ("--optimizer", "sgd-momentum")):
        code, _, err = run("simulate", "plan.json", TOWERS, "--policy", "asyncpp", *named)
        assert code == 1
        assert "asyncpp is stashing under NAdam, and the optimizer is " in err


def test_too_few_micro_batches(run, four_files):
    """Two micro-batches in a chain of four under 2bw: no plan of four stages, and it is said."""
    run("plan", *four_files, "--mode", "async", "--policy", "pipeoptim", "-o", "p.json")
    code, _, err = run("simulate", "p.json", "chain.json", "--policy", "2bw")
    assert code == 1
    assert "1 < 4" in err
    assert "more micro-batches" in err


def test_a_command_that_names_the_function_has_all_options(run, document, profile):
    """So that whoever copies it loses none."""
    quick = ("--planner", "even", "--no-baselines", "-o", "plan.json")
    document("plan", profile, "--cluster", "summit:1x2", "--batch-size", "16", *quick)
    plan = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps(plan | {"model": "my:workload"}))
    code, _, err = run("simulate", "plan.json", "--why", "--report", "page.html")
    said = " ".join(err.replace("\u2502", " ").split())
    assert code == 2
    assert "anabranch simulate plan.json my:workload --why --report page.html" in said


def test_parts_without_a_flush_are_those_of_a_mini_batch(run, document, profile):
    """As the line above them, which is not as long as the timeline of some mini-batches."""
    options = ("--cluster", "summit:1x2", "--batch-size", "16", "--mode", "async")
    made = document("plan", profile, *options, "--policy", "stash", "-o", "plan.json")
    first, second = run("simulate", "plan.json", profile)[1].splitlines()[:2]
    period = f"{made['predicted']['step_s'] * 1e3:.2f} ms"
    assert first.startswith(f"a batch every {period}")
    assert second.startswith(f"of {period} a device has on average: compute ")


def test_compute_without_a_flush_is_what_the_bubble_leaves(run, document, four_files, tmp_path):
    """Four devices share two cores: fill and drain, which the timeline has, share them less."""
    save_cluster(replace(four().cluster, cores=2), tmp_path / "box.json")
    options = ("--mode", "async", "--policy", "stash")
    made = document("plan", *four_files, *options, "-o", "plan.json")["predicted"]
    said = run("simulate", "plan.json", "chain.json")[1]
    (compute,) = re.findall(r"compute ([0-9.]+) ms", said)
    assert float(compute) == pytest.approx((1 - made["bubble"]) * made["step_s"] * 1e3, abs=0.01)
