"""The verb plan: documents, baselines, policies, optimizers, interrupts and mistakes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch import planner as planners
from anabranch.cli.planned_model import faster, gain, gains
from anabranch.cli.source import ModelSource
from anabranch.cli.verbs import plan as plan_verb
from anabranch.files import load_plan
from anabranch.graph import capture as graph_capture
from anabranch.plans.stages import Stage
from tests.cli.examples import TOWERS, Interrupted, a_plan, four


def test_a_builtin_is_captured_once(document, profile, monkeypatch):
    """As written and for its rewrite. The second command finds the same plan without torch, which
    takes seconds to load; so does one for a profile file. --no-cache captures again.
    """
    of_profile = ("plan", profile, "--cluster", "summit:1x2", "--batch-size", "16",
                  "--planner-option", "evaluations=100", "-o", "plan.json")  # fmt: skip
    arguments = ("plan", "candle-uno", "--preset", "small", "-olayers=1", "-obranches=2",
                 "--cluster", "summit:1x2", "--batch-size", "4", "--no-baselines", "--planner",
                 "even", "--json")  # fmt: skip
    captured, capture = [], graph_capture.capture

    def counted(module, *arguments, **options):
        captured.append(type(module).__name__)
        return capture(module, *arguments, **options)

    monkeypatch.setattr(graph_capture, "capture", counted)
    first = document(*arguments[:-1])
    del captured[:]
    code = (
        "import sys; from anabranch import cli\n"
        f"for arguments in ({of_profile!r}, {arguments!r}):\n"
        "    sys.argv = ['anabranch', *arguments]\n"
        "    try:\n        cli.main()\n    except SystemExit as end:\n        assert not end.code\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"
    assert json.loads(Path("plan.json").read_text())["schema"] == "anabranch.plan/1"
    found = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert found["stages"] == first["stages"]
    assert document(*arguments[:-1])["stages"] == first["stages"]
    assert captured == []
    assert document(*arguments[:-1], "--no-cache")["stages"] == first["stages"]
    assert captured == ["CandleUno"] * 2  # as it is written, and with its join split


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "mmt", "--cluster", "local:100000", "--batch-size", "64"),
        ("compare", "mmt", "--cluster", "local:100000", "--batch-size", "64"),
        ("rehearse", "mmt", "--cluster", "local:100000", "--batch-size", "64"),
        ("train", "mmt", "--devices", "100000"),
    ],
)
def test_too_many_devices_are_refused_before_a_capture(run, monkeypatch, command):
    """Which takes longer than the refusal."""

    def capture(*_, **__):
        raise AssertionError("captured")

    monkeypatch.setattr(graph_capture, "capture", capture)
    code, _, err = run(*command)
    assert code == 1
    assert "local:100000 has 100000 devices; plans are searched for 8192 at most" in err


def test_data_that_training_would_refuse_is_said(run):
    """Nobody heard of it before the run that the plan was made for."""
    options = ("--cluster", "summit:1x2", "--batch-size", "4", "--planner", "sequential")
    code, _, err = run("plan", "tests.cli.models:loaded", *options, "--rewrite", "none")
    assert code == 0
    assert "training would refuse its data: the DataLoader has batches of 8 samples" in err


@pytest.mark.parametrize(
    ("cluster", "order"),
    [("local:2", ["profile", "compile"]), ("summit:1x2", ["compile", "profile"])],
)
def test_nothing_is_compiled_beside_operators_that_are_timed(document, monkeypatch, cluster, order):
    """They would seem slower than they are. Beside a capture it costs no time."""
    happened = []

    def profiled(*_, **__):
        happened.append("profile")
        return four().profile, None

    monkeypatch.setattr(ModelSource, "profile_and_optimizer", profiled)
    monkeypatch.setattr(plan_verb, "begin_compiling", lambda _: happened.append("compile"))
    arguments = "--cluster", cluster, "--batch-size", "8", "--planner", "even", "--no-baselines"
    document("plan", TOWERS, *arguments)
    assert happened == order


def test_a_policy_for_another_optimizer_is_refused_before_operators_are_timed(run, monkeypatch):
    """Which takes seconds, or minutes; the model's own optimizer is known by then."""
    monkeypatch.setattr("anabranch.cli.source.measured", None)
    options = "--cluster", "local:2", "--batch-size", "8", "--mode", "async", "--policy", "asyncpp"
    code, _, err = run("plan", TOWERS, *options)
    assert code == 1
    assert "asyncpp is stashing under NAdam, and the optimizer is " in err


BASELINES = {"data-parallel", "sequential", "straight sequential", "chain", "one device"}
_SHOWN: list[str] = []


@pytest.fixture
def shown(run, profile) -> tuple[str, dict]:
    """What plan says to people and to programs, once for all tests."""
    if not _SHOWN:
        arguments = ("plan", profile, "--cluster", "summit:1x4", "--batch-size", "16")
        _SHOWN.extend(run(*arguments, *more)[1] for more in ((), ("--json",)))
    return _SHOWN[0], json.loads(_SHOWN[1])


def test_plan_has_the_fields_of_the_contract(shown):
    """Other programs rely on them. With a flush nothing is stale. For people, below the plan: what
    it loses, in parts that add up, and what would help.
    """
    text, found = shown
    assert {"planner", "stages", "edges", "depth", "search_s", "predicted"} <= found.keys()
    assert "staleness" not in found
    assert {"operators", "devices", "microbatch_size", "k", "in_flight"} <= found["stages"][
        0
    ].keys()
    assert set(found["baselines"]) == BASELINES
    assert found["gain"]["sequential"] >= 1 - 1e-9
    assert sorted(d for stage in found["stages"] for d in stage["devices"]) == [0, 1, 2, 3]
    why = found["explanation"]
    assert {"device", "floors", "losses", "changes", "verdict"} <= why.keys()
    assert {"cause", "stages", "seconds"} <= why["losses"][0].keys()
    lost = sum(loss["seconds"] for loss in why["losses"])
    assert lost == pytest.approx(found["predicted"]["step_s"])
    lines = text.splitlines()
    first = lines.index("why this plan: no step can be shorter than")
    assert all(len(line) <= 80 for line in lines[first:])
    assert any(line.startswith("  together") for line in lines[first:])


def test_a_chain_is_planned_where_it_is_asked_for(document, run, profile):
    """By planner auto alone."""
    where = "--cluster summit:1x4 --batch-size 16"
    arguments = ("plan", profile, *where.split(), "--shape", "chain")
    assert document(*arguments)["shape"] == "chain"
    code, _, err = run(*arguments, "--planner", "even")
    assert code == 2
    assert "no option shape" in err


def test_planner_options_reach_the_planner(document, run, profile):
    """With a name and a value; a wrong one is wrong usage and lists what there is."""
    arguments = ("plan", profile, "--cluster", "summit:1x4", "--batch-size", "16")
    found = document(*arguments, "--planner", "sequential", "--planner-option", "max_replicas=1")
    assert all(len(stage["devices"]) == 1 for stage in found["stages"])
    code, _, err = run(*arguments, "--planner", "even", "--planner-option", "recompute=false")
    assert code == 2
    assert "max_replicas" in err
    code, _, err = run(*arguments, "--planner-option", "recompute")
    assert code == 2
    before_capture = ("plan", "tests.cli.models:branching", *arguments[2:])
    code, _, err = run(*before_capture, "--planner-option", "nonsense=1")
    assert code == 2
    assert "planner auto has no option nonsense" in err


def test_a_baseline_that_is_as_fast_is_not_called_faster():
    """A tenth of a percent less is told as the same step by the line before."""
    stage = Stage(("a",), (0,), 8)
    for step_s, is_faster in ((0.999, False), (0.9, True)):
        other = a_plan(stage, step_s=step_s)
        assert bool(faster({"sequential": other}, a_plan(stage))) is is_faster


def test_one_device_that_is_faster_is_told_with_the_cluster_to_plan_for():
    """A plan for local ranks uses all of them; other clusters may have no preset of one device."""
    others = {"one device": a_plan(Stage(("a",), (0,), 8), step_s=0.5)}
    for name, way_on in (("local:3", "--cluster local:1 plans it"), ("mine", "a cluster of one")):
        ours = replace(a_plan(Stage(("a",), (0, 1), 8)), cluster=name)
        line = faster(others, ours)
        assert line.startswith("one device is faster than this plan: ")
        assert line.endswith(way_on)


def test_data_parallelism_is_a_baseline_of_every_plan(run, document, profile):
    """On links that are fast it beats a pipeline that may not have replicas, and plan says so."""
    arguments = ("plan", profile, "--cluster", "summit:1x4", "--batch-size", "64")
    free = document(*arguments)
    _, out, _ = run(*arguments, "--max-replicas", "1", "-o", "straight.json")
    straight = json.loads(Path("straight.json").read_text())
    baseline = straight["predicted"]["data_parallel_s"]
    assert baseline == free["baselines"]["data-parallel"]["predicted"]["step_s"]
    assert baseline < straight["predicted"]["step_s"]
    assert free["gain"]["data-parallel"] >= 1 - 1e-9
    assert straight["predicted"]["chain_s"] <= baseline  # which may have replicas as well
    assert "faster than this plan: --planner " in out
    assert " without --max-replicas plans it\n" in out
    better = document(*arguments, "--from", "straight.json")
    before = better["baselines"]["from"]["predicted"]
    assert before["step_s"] == straight["predicted"]["step_s"]
    assert better["gain"]["from"] >= 1
    assert "as fast as the plan of --from (" in run(*arguments, "--from", "straight.json")[1]
    assert "as fast as" not in run(*arguments, "--from", "straight.json", "--no-baselines")[1]


def test_a_plan_that_is_a_chain_and_the_fastest_is_the_best_chain():
    """On fewer devices than chains to compare with are searched for, or with more evaluations."""
    chain = a_plan(Stage(("a",), (0,), 8), step_s=0.9)
    others = {"sequential": a_plan(Stage(("a",), (0, 1), 8))}
    assert [*gains(others, chain)] == ["the best chain is this plan"]
    slower = replace(chain, predicted=replace(chain.figures, step_s=1.1))
    (line,) = gains(others, slower)
    assert line.endswith("the best chain of stages")


def test_a_plan_remembers_how_its_model_was_built(document, tmp_path):
    """So that ``simulate PLAN MODEL`` can build it again, options included; presets are those of
    built-in models.
    """
    plan = str(tmp_path / "plan.json")
    made = document(
        "plan", TOWERS, "--cluster", "summit:1x2", "--batch-size", "8", "-o", "width=32",
        "--granularity", "operator", "--planner", "even", "--no-baselines", "-o", plan,
    )  # fmt: skip
    assert made["options"] == {"width": "32"}
    assert made["granularity"] == "operator"
    again = document("simulate", plan, TOWERS)
    assert again["step_s"] == pytest.approx(made["predicted"]["step_s"])


def test_the_limit_on_replicas_is_given_once(run, write_chain):
    """Neither of the two wins silently, in plan or in compare."""
    for verb in ("plan", "compare"):
        code, _, err = run(
            verb, *write_chain(), "--planner", "sequential", "--max-replicas", "2",
            "--planner-option", "max_replicas=1",
        )  # fmt: skip
        assert code == 2
        assert "given twice, 2 for every planner and 1 as an option of planner sequential" in err


def test_an_interrupted_plan_is_compared_all_the_same(run, write_chain, monkeypatch):
    """And where a baseline is better, the user learns how to get that one."""
    monkeypatch.setitem(planners.PLANNERS, "auto", lambda: Interrupted(True))
    code, out, err = run("plan", *write_chain(), "-o", "plan.json")
    assert code == 0, err
    assert "interrupted: the best of the first 1 proposals" in out
    assert "data parallelism is faster than this plan: --planner data-parallel plans it" in out
    assert "Ctrl-C again leaves them out" in err
    assert Path("plan.json").exists()


def test_a_plan_interrupted_at_once_is_an_error(run, write_chain, monkeypatch):
    """One paragraph, not a bare stop."""
    monkeypatch.setitem(planners.PLANNERS, "auto", lambda: Interrupted(False))
    code, _, err = run("plan", *write_chain())
    assert code == 130
    assert "SearchStoppedError: interrupted before planner auto had proposed a plan" in err


def test_nothing_is_trained_by_an_interrupted_plan(run, monkeypatch):
    """Ctrl-C ends the command, and no long run begins by the first plan that came to hand."""
    monkeypatch.setitem(planners.PLANNERS, "auto", lambda **_: Interrupted(True))
    code, out, err = run("train", TOWERS, "--devices", "2", "--batch-size", "4", "--steps", "2")
    assert (code, out) == (130, "")
    assert f"interrupted while {TOWERS} was planned, so nothing runs" in err


def test_operators_that_take_no_time(run, write_chain):
    """No figure is divided by a step of zero seconds, in plan, compare or simulate."""
    arguments = write_chain(0.0, 0.0, devices=1)
    code, out, err = run("plan", *arguments, "-o", "plan.json")
    assert code == 0, err
    assert "the sequential pipeline is this plan" in out
    code, out, err = run("plan", *arguments, "--json")
    assert json.loads(out)["gain"]["sequential"] is None
    code, out, err = run("simulate", "plan.json", "chain.json")
    assert (code, out.split(",")[:2]) == (0, ["step 0.00 ms", " 0 samples/s"])
    code, out, err = run("compare", *arguments, "--planner", "data-parallel")
    assert code == 0, err
    assert out.splitlines()[3].split()[:5] == ["data-parallel", "0.00", "-", "-", "0.00"]


def test_a_plan_for_a_cluster_file_knows_its_cluster(run, write_chain):
    """``check`` and ``simulate`` need neither --cluster nor the file; an older plan says so."""
    arguments = write_chain()
    code, made, err = run("plan", *arguments, "-o", "plan.json", "--planner", "sequential")
    assert code == 0, err
    Path("box.json").unlink()
    assert run("check", "plan.json", "chain.json")[:2] == (0, "plan.json is valid\n")
    code, out, err = run("simulate", "plan.json")
    assert code == 0, err
    assert out.splitlines()[0] == made.splitlines()[0], "the same units, too"
    older = json.loads(Path("plan.json").read_text())
    del older["machines"]
    Path("older.json").write_text(json.dumps(older))
    for verb in (("check", "older.json", "chain.json"), ("simulate", "older.json")):
        code, _, err = run(*verb)
        assert code == 1
        assert "older.json was made for a cluster called 'my box', which is no preset" in err
        assert "--cluster FILE" in err
        assert run(*verb, "--cluster", "summit:1x2")[0] == 0


def test_plan_has_mode_and_policy(run, four_files):
    """12 s per mini-batch of 4 samples, 4 in flight at the first stage, baselines alike."""
    code, out, err = run("plan", *four_files, "--mode", "async", "--policy", "stash", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["mode"], found["policy"], found["schedule"]) == ("async", "stash", "1f1b")
    assert found["predicted"]["step_s"] == pytest.approx(12.0)
    assert found["predicted"]["samples_per_s"] == pytest.approx(1 / 3)
    assert found["predicted"]["device_peak_bytes"] == [800, 700, 600, 500]
    assert [stage["in_flight"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert set(found["baselines"]) == BASELINES - {"one device"}
    assert all(each["mode"] == "async" for each in found["baselines"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--policy", "stash"], "policy stash is for mode async"),
        (["compare", "--policy", "stash"], "--policy is for --mode async"),
        (["plan", "--mode", "async", "--schedule", "gpipe"], "schedule gpipe is for mode sync"),
        (["compare", "--mode", "async", "--schedule", "gpipe"], "schedule gpipe is for mode sync"),
        (["plan", "--mode", "async", "--policy", "hoard"], "'hoard' is not one of"),
        (["plan", "--optimizer", "sgd"], "--optimizer is for --mode async"),
        (["compare", "--optimizer", "sgd"], "--optimizer is for --mode async"),
        (
            ["plan", "--mode", "async", "--policy", "2bw", "--microbatch-size", "3"],
            "do not divide mini-batches of 4",
        ),
    ],
)
def test_wrong_usage(run, four_files, arguments, message):
    """Exit code 2 and what there is instead."""
    verb, *rest = arguments
    code, _, err = run(verb, *four_files, *rest)
    assert code == 2
    assert message in err


def test_plan_says_how_old_weights_are(run, four_files):
    """Per stage and with a policy whose age is not the version difference, as text and JSON."""
    arguments = ("plan", *four_files, "--mode", "async", "--policy", "vertical-sync")
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


def test_an_optimizer_by_name(run, four_files):
    """For a profile file, which has none: for what auto chooses, memory, and what is refused."""
    arguments = ("plan", *four_files, "--mode", "async")
    found = json.loads(run(*arguments, "--optimizer", "sgd", "--json")[1])
    assert (found["policy"], found["optimizer"]) == ("stash", "SGD")
    other = ("--policy", "pipeoptim", "--optimizer", "other")
    found = json.loads(run(*arguments, *other, "--json")[1])
    assert [each["versions"] for each in found["staleness"]] == [3, 3, 3, 1]
    assert found["predicted"]["device_peak_bytes"] == [700, 700, 700, 500]
    code, _, err = run(*arguments, "--policy", "spectrain", "--optimizer", "adamw")
    assert code == 1
    assert "the optimizer is AdamW" in err
    run(*arguments, "--policy", "pipeoptim", "-o", "p.json")
    found = json.loads(run("simulate", "p.json", "chain.json", "--optimizer", "other", "--json")[1])
    assert [each["versions"] for each in found["staleness"]] == [3, 3, 3, 1]
    assert run("check", "p.json", "chain.json", "--optimizer", "other")[0] == 0


def test_the_optimizer_of_the_model(run):
    """The recipe of a workload that is named; AdamW is the default."""
    where = ("--cluster", "summit:1x2", "--batch-size", "4", "--no-baselines", "--planner", "even")
    found = json.loads(run("plan", TOWERS, *where, "--mode", "async", "--json")[1])
    assert found["optimizer"] == "AdamW"


def test_of_a_model_that_is_clipped_over_all_stages_it_is_said_how_to_train_it(run):
    """Before it is planned without a flush, and where a plan is checked for it."""
    where = ("--cluster", "summit:1x2", "--batch-size", "4", "--no-baselines", "--planner", "even")
    clipped = "tests.cli.models:clipped"
    code, _, err = run("plan", clipped, *where, "--mode", "async")
    assert code == 0
    assert "clip_norm 1 is the norm over all stages" in err
    assert 'mode = "async" and clip-stage-norm = 1' in err
    assert run("plan", TOWERS, *where, "--mode", "async", "-o", "async.json")[0] == 0
    code, _, err = run("check", "async.json", clipped)
    assert code == 0
    assert "clip_norm 1 is" in err


@pytest.mark.parametrize("policy", ["2bw-ef", "pipeoptim", "vertical-sync"])
def test_a_policy_is_planned_checked_and_simulated(run, four_files, policy):
    """The plan is valid, with and without the model, and its period is its own. Plans of every
    policy are in ``tests/solve/asynchronous/test_search.py``.
    """
    plan = ("plan", *four_files, "--mode", "async", "--policy", policy, "-o", "p.json", "--json")
    code, out, err = run(*plan)
    assert code == 0, err
    assert run("check", "p.json")[0] == run("check", "p.json", "chain.json")[0] == 0
    code, again, err = run("simulate", "p.json", "chain.json", "--json")
    assert code == 0, err
    assert json.loads(again)["step_s"] == json.loads(out)["predicted"]["step_s"]
    assert json.loads(again)["staleness"] == json.loads(out)["staleness"]


def test_all_chains_are_one_line(run, shown, profile):
    """The best of them; words that not everybody has are explained below the stages."""
    text, document = shown
    named = [
        line for line in text.splitlines() if "sequential pipeline" in line or "best chain" in line
    ]
    assert len(named) == 1
    plans = document["baselines"]
    chains = [p["predicted"]["step_s"] for n, p in plans.items() if n != "data-parallel"]
    assert f"({min(chains) * 1e3:.2f} ms" in named[0] or "is this plan" in named[0]
    arguments = ("plan", profile, "--cluster", "summit:1x4", "--batch-size", "16")
    several = run(*arguments, "--max-replicas", "1", "--no-baselines")[1]
    assert "in flight: micro-batches between forward" in several


def test_an_asynchronous_plan_is_compared_with_and_without_a_flush(run, four_files):
    """Its baselines have no flush, which the words say; what a flush would take stands below."""
    arguments = ("plan", *four_files, "--mode", "async", "--policy", "stash", "-o", "p.json")
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "as fast as data parallelism without a flush (12000.00 ms, depth 1" in out
    assert (
        "\nwith a flush, data parallelism takes 12000.00 ms and the sequential pipeline takes "
        "12000.00 ms per batch: the same command without --mode async plans steps with a flush\n"
    ) in out


def test_a_gain_that_rounds_to_equal_figures_has_another_digit(run, four_files):
    """1.01x between 0.66 ms and 0.66 ms is no comparison; what is equal is as fast."""
    assert run("plan", *four_files, "-o", "p.json", "--no-baselines")[0] == 0
    ours = load_plan(Path("p.json"))
    graph = replace(ours.stage_graph, batch_size=8)

    def said(step_s: float) -> str:
        figures = replace(ours.figures, step_s=step_s)
        other = replace(ours, stage_graph=graph, predicted=figures)
        return gain("sequential", other, replace(ours, predicted=replace(figures, step_s=0.657e-3)))

    assert said(0.664e-3).startswith(
        "1.01x as fast as the sequential pipeline (0.664 ms against 0.657 ms, depth "
    )
    assert said(0.658e-3).startswith("as fast as the sequential pipeline (0.66 ms, depth ")
    assert said(0.8e-3).startswith("1.22x as fast as the sequential pipeline (0.80 ms, depth ")
