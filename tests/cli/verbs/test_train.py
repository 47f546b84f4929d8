"""The verb train without a flush."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch.cli.training.job import Job
from anabranch.cli.verbs.train import _seeded
from anabranch.errors import WorkloadError
from anabranch.record import load_run
from anabranch.solve import rewriting
from tests.cli.examples import TOWERS, by_hand

PIPELINE = ("train", TOWERS, "--devices", "2", "--batch-size", "8", "--max-replicas", "1")


@pytest.mark.dist
def test_a_run_says_how_stale_its_stages_were(run, document, tmp_path):
    """Figures, and a plan in its folder that trains the same way again, summed up for people:
    policy, version differences, copies of the weights.
    """
    found = document(*PIPELINE, "--steps", "12", "--mode", "async", "--policy", "auto")
    folder = tmp_path / found["run"]
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["mode"], plan["policy"]) == ("async", found["policy"])
    assert found["mode"] == "async"
    assert found["policy"] == "pipeoptim"
    assert len(found["losses"]) == 12
    assert found["period_s"] > 0
    stages = len(plan["stages"])
    assert len(found["version_difference"]) == stages
    assert found["version_difference"][-1] == 0
    assert len(found["peak_versions"]) == 2
    assert max(found["peak_versions"]) <= 2
    assert found["metrics"].keys() == {"loss", "error"}
    assert Path(document("report", str(folder))["path"]).exists()
    emulated = ("train", TOWERS, "--plan", str(folder / "plan.json"), "--emulate")
    code, _, err = run(*emulated)
    assert code == 1
    assert "is for mode async" in err
    again = ("train", TOWERS, "--plan", str(folder / "plan.json"), "--steps", "12")
    code, out, err = run(*again, "--out", "again")
    assert code == 0, err
    assert [*load_run(tmp_path / "again").losses] == found["losses"]
    rows = {line[2:24].strip(): line[24:].strip() for line in out.splitlines()}
    assert rows["weight policy"].startswith(f"{found['policy']}, ")
    assert "updates from forward to backward" in rows["version difference"]
    assert "copies, by device" in rows["weight versions"]


@pytest.mark.dist
def test_without_a_plan_file_the_model_is_rewritten_where_that_pays(
    document, monkeypatch, tmp_path
):
    """Here always. The plan in the folder of the run has it, and gradients are compared."""
    monkeypatch.setattr(rewriting, "SETTINGS", replace(rewriting.SETTINGS, least_gain=-1e9))
    found = document(*PIPELINE, "--steps", "2")
    plan = json.loads((tmp_path / found["run"] / "plan.json").read_text())
    assert plan["rewrites"] == ["join-split@head.weight"]
    assert "as the model is written" in plan["notes"][-1]
    assert found["gradients"].startswith("right")


@pytest.mark.parametrize("own", [False, True])
def test_a_seed_is_that_of_model_and_run(own: bool):
    """Of the model unless its function sets one of its own, of the run in any case."""

    def make() -> float:
        if own:
            torch.manual_seed(5)
        return torch.rand(()).item()

    drawn = _seeded(make, 3)
    assert torch.initial_seed() == 3
    assert drawn == torch.rand((), generator=torch.Generator().manual_seed(5 if own else 3)).item()


@pytest.mark.dist
def test_the_order_of_samples_follows_from_the_seed(document):
    """The same losses again, and others with another seed."""
    train = ("train", "tests.cli.models:shuffled", "--devices", "1", "--batch-size", "4")
    losses = [document(*train, "--steps", "3", "--seed", seed)["losses"] for seed in "112"]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.dist
def test_replicas_take_minibatches_in_turn(document, run_file, tmp_path):
    """An update of the first stage, which has two replicas, takes two mini-batches, so it has fewer
    between a forward and its backward than without rounds.
    """
    plan = by_hand([("left right", [0, 1]), ("head", [2])], 8, mode="async", policy="stash")
    (tmp_path / "three.json").write_text(json.dumps(plan))
    options = ("--plan", "three.json", "--steps", "9")
    turns = document("train", *run_file(TOWERS, round_robin=True), *options)
    assert len(turns["losses"]) == 9
    assert turns["version_difference"] == [1, 0]
    assert turns["peak_versions"] == [2, 2, 1]
    assert turns["losses"] != document("train", TOWERS, *options)["losses"]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_data_that_raises_ends_every_rank_and_the_steps_before_are_kept(run, mode, tmp_path):
    """In the middle of the stream, with others in flight; the page opens without a timeline."""
    failing = ("train", "tests.cli.models:with_failing_data", *PIPELINE[2:], "--no-check-gradients")
    code, _, err = run(*failing, "--steps", "9", "--mode", mode, "--out", "kept")
    assert code == 1
    assert err.count("the disk is on fire") == 1
    assert "LoaderError: the data of epoch 0 raised at batch 5, at " in err
    assert "models.py:" in err
    assert "in failing: OSError: the disk is on fire (ANABRANCH_DEBUG=1 shows" in err
    kept = load_run(tmp_path / "kept")
    assert 1 <= len(kept.losses) <= 5
    assert kept.samples == (8,) * len(kept.losses)
    assert kept.mode == mode
    assert "the disk is on fire" in kept.failure
    assert "that were made, and this failure" in err or "that was made, and this failure" in err
    assert f"after step {len(kept.losses)}" in (tmp_path / "kept" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "stash"], "--policy and its options are for --mode async"),
        (["--mode", "async", "--policy", "none"], "is not one of"),
        (["--mode", "async", "--emulate"], "--mode: not with --emulate, nothing is trained"),
        (["--emulate"], "--devices: not with --emulate"),
        (["--keep", "2"], "keep is a key of a run file, no option"),
        (["--resume", "a", "--weights", "b"], "begin with one of them"),
        (["--resume", "a", "--seed", "1"], "the checkpoint has that of the run"),
        (["--replan", "--mode", "async"], "--replan: not with --mode async"),
        (["--survive", "--mode", "async"], "--survive: not with --mode async"),
        (["--survive", "--replan"], "--survive and --replan: take one of them"),
        (["--spare-copies", "5"], "only with --survive"),
    ],
)
def test_options_that_do_not_go_together(run, arguments, message):
    """Wrong usage, in one paragraph."""
    code, _, err = run("train", TOWERS, "--devices", "2", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("mode", "keys", "message"),
    [
        ("async", {"accumulate": 2}, "take a larger --batch-size"),
        ("async", {"policy": "stash", "policy_option": ["clip=3"]}, "it has none"),
        ("async", {"schedule": "gpipe"}, "schedule gpipe is for mode sync"),
        ("sync", {"round_robin": True}, "round-robin is for --mode async"),
        ("sync", {"emulate": True, "round_robin": True}, "round-robin: not with --emulate"),
        ("sync", {"clip_stage_norm": 0.5}, "give the Workload a clip_norm, clip_norm=0.5"),
        ("async", {"clip_stage_norm": 0.0}, "a norm is more than 0"),
        ("async", {"clip_stage_norm": float("nan")}, "a norm is more than 0"),
        ("sync", {"keep": 1}, "keep: only with --save-every"),
        ("sync", {"keep_best": "loss", "save": "run"}, "keep-best: only with --evaluate-every"),
        ("sync", {"keep_best": "loss", "evaluate_every": 2}, "keep-best needs --save"),
    ],
)
def test_keys_of_a_run_file_that_do_not_go_together(run, run_file, mode, keys, message):
    """As options; clipping by stage is for stages that update alone."""
    code, _, err = run("train", *run_file(TOWERS, mode=mode, **keys))
    assert code == 2
    assert message in err


@pytest.fixture
def _nothing_is_captured(monkeypatch):
    """What is refused beforehand is refused before this."""

    def capture(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was captured, and would then have been measured")

    monkeypatch.setattr("anabranch.graph.capture.capture", capture)


@pytest.mark.usefixtures("_nothing_is_captured")
@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("clipped", [], "PolicyError: clip_norm 1 is the norm over all stages"),
        ("clipped", [], 'run.toml --trust, where the file says model = "tests.cli.models:clipped"'),
        ("towers", ["--precision", "fp16"], "PolicyError: fp16 scales the loss"),
        ("towers", ["--policy", "spectrain"], "PolicyError: spectrain predicts with the momentum"),
        ("without_data", [], "DataError: the workload has no data"),
        ("loaded", ["--batch-size", "6"], "DataLoader has batches of 8 samples, and 6 are asked"),
        ("without_a_whole_batch", ["--batch-size", "8"], "DataLoader has no batch of 8 samples"),
        ("on_a_plateau", [], "TrainingError: ReduceLROnPlateau needs a metric at every step"),
        ("with_failing_scheduler", [], "WorkloadError: the scheduler recipe of the Workload"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_planned(
    run, model, arguments, message
):
    """Capturing, measuring and planning take seconds, or minutes."""
    code, _, err = run("train", f"tests.cli.models:{model}", "--mode", "async", *arguments)
    assert code == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save", "."], "TrainingError: . exists"),
        (["--resume", "nothing"], "FileFormatError: nothing is no checkpoint"),
        (["--log", "csv:nowhere/a.csv"], "there is no folder"),
        (["--save-every", "3"], "--save-every needs --save"),
        (["--evaluate-every", "10s"], "it should be a whole number, in steps"),
        (["--timeout", "0"], "it should be greater than or equal to 0.1, in seconds"),
    ],
)
def test_what_is_wrong_with_any_model_is_refused_before_the_model_is_loaded(
    run, monkeypatch, arguments, message
):
    """A large one takes minutes to load."""
    monkeypatch.setattr("anabranch.cli.source.ModelSource.workload", None)
    code, _, err = run("train", TOWERS, *arguments)
    assert code in (1, 2)
    assert message in err


@pytest.mark.dist
def test_what_is_done_before_the_first_step_is_said(run, monkeypatch):
    """Loading, planning, and what ranks do before they train, take seconds each."""
    said: list[str] = []
    for module in ("verbs.train", "training.job", "training.local_run", "verbs.plan"):
        monkeypatch.setattr(f"anabranch.cli.{module}.announce", said.append)
    assert run(*PIPELINE, "--steps", "1", "--precision", "bf16")[0] == 0
    assert said == [
        "loading PyTorch",
        "planning for 2 devices",
        "starting 2 ranks in bf16, and comparing gradients with one process",
    ]
    said.clear()
    where = ("--cluster", "local:2", "--batch-size", "8", "--no-baselines")
    assert run("plan", TOWERS, *where)[0] == 0
    assert said == [
        "planning for 2 devices",
        "trying rewrite join-split",
        "planning with rewrite join-split",
    ]


@pytest.mark.dist
def test_checkpoint_and_weights_of_another_model_are_refused_before_it_is_captured(
    run, tmp_path, request
):
    """By name and shape, of a checkpoint, by name of weights; ranks compare all of it again."""
    assert run("train", TOWERS, "--devices", "1", "--steps", "1", "--save", "kept")[0] == 0
    save_file({"head.weight": torch.zeros(1, 32)}, tmp_path / "head.safetensors")
    request.getfixturevalue("_nothing_is_captured")
    code, _, err = run("train", TOWERS, "-o", "width=8", "--resume", "kept")
    assert code == 1
    assert re.search(r"tensor model/\S+ is float32\[16, .*\], but the model has float32\[8, ", err)
    code, _, err = run("train", "tests.cli.models:normed", "--resume", "kept")
    assert code == 1
    assert "the checkpoint is of another model" in err
    code, _, err = run("train", TOWERS, "--weights", "head.safetensors")
    assert code == 1
    assert "do not have the same tensors: it lacks" in err


def test_sparse_gradients_that_the_optimizer_does_not_take_are_refused_before_measuring(
    run, run_file, monkeypatch
):
    """AdamW, the default, has no state for rows."""
    monkeypatch.setattr(Job, "measure", None)
    code, _, err = run("train", *run_file("dlrm", preset="small", sparse_embeddings=True))
    assert code == 1
    assert "TrainingError: AdamW, as it is set, cannot update this model" in err


@pytest.mark.dist
def test_samples_unlike_the_example_are_refused_before_measuring(run, monkeypatch):
    """Measuring and planning may take minutes. With a plan, ranks read the data at once."""
    monkeypatch.setattr(Job, "measure", None)
    code, _, err = run("train", "tests.cli.models:with_other_labels", "--batch-size", "4")
    assert code == 1
    assert "DataError: batch 0 of epoch 0 differs from the workload's example" in err
    assert "target is [samples] int64, not [samples] float32" in err


@pytest.mark.dist
def test_samples_that_raise_are_a_loader_error_with_its_traceback_on_demand(run, monkeypatch):
    """The error is the one that a rank would raise, which has the traceback as a note."""
    monkeypatch.setattr(Job, "measure", None)
    code, _, err = run("train", "tests.cli.models:with_unreadable_samples", "--batch-size", "4")
    assert code == 1
    assert "LoaderError: the data of epoch 0 raised at batch 0, at " in err
    assert "OSError: a sample is torn (ANABRANCH_DEBUG=1 shows the traceback)" in err


@pytest.mark.dist
def test_gradients_are_clipped_stage_by_stage(document, run_file, tmp_path):
    """The key reaches the pipeline: without momentum and rate decay, losses are others."""
    plan = by_hand([("left right", [0]), ("head", [1])], 8, mode="async", policy="stash")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    slow, options = "tests.cli.models:without_momentum", ("--plan", "plan.json", "--steps", "6")
    free = document("train", slow, *options)["losses"]
    clipped = document("train", *run_file(slow, clip_stage_norm=1e-6), *options)["losses"]
    # Also in place of the norm over all stages, which there cannot be.
    common = document(
        "train", *run_file("tests.cli.models:common_norm", clip_stage_norm=1e-6), *options
    )
    assert common["losses"] == clipped
    assert clipped[0] == free[0]
    assert clipped != free


@pytest.mark.dist
@pytest.mark.parametrize("mode", [[], ["--mode", "async", "--policy", "stash"]])
def test_a_batch_unlike_the_example_is_named(run, mode):
    """On whichever rank, in the middle of a run, and not by an operator inside of a stage."""
    wide = ("train", "tests.cli.models:with_wide_batches", *PIPELINE[2:], *mode)
    code, _, err = run(*wide)
    assert code == 1
    assert "DataError: batch 2 of epoch 0 differs from the workload's example" in err
    assert "left is [samples, 9] float32, not [samples, 8] float32" in err


def test_a_mistake_in_the_users_function_is_one_paragraph(run):
    """Where it is and what it is; the rest of the traceback on request."""
    code, _, err = run("train", "tests.cli.models:raising")
    assert code == 1
    assert "WorkloadError: tests.cli.models:raising raised at" in err
    assert "models.py:" in err
    assert "in raising: TypeError: the module of a Workload is a torch.nn.Module, not Towers" in err
    assert "ANABRANCH_DEBUG=1 shows the traceback" in err
    assert "Traceback" not in err


def test_the_whole_traceback_on_request(run, monkeypatch):
    """With its cause."""
    monkeypatch.setenv("ANABRANCH_DEBUG", "1")
    with pytest.raises(WorkloadError) as caught:
        run("train", "tests.cli.models:raising")
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.fixture
def plan(tmp_path) -> str:
    """A plan of two stages by hand."""
    document = by_hand([("left right", [0]), ("head", [1])], 8)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    return "plan.json"


def test_a_device_that_the_cluster_does_not_have_is_refused_by_all(run, tmp_path):
    """By check and by train, before ranks start: any three numbers could be ranks, but nobody knows
    the links of device 9.
    """
    far = by_hand([("left", [0]), ("right", [1]), ("head", [9])], 8, cluster="local:4")
    (tmp_path / "plan.json").write_text(json.dumps(far))
    code, out, _ = run("check", "plan.json", TOWERS)
    assert code == 1
    assert "has the devices 0-3, not device 9" in out
    for verb in ("train", "verify"):
        code, _, err = run(verb, TOWERS, "--plan", "plan.json")
        assert code == 1
        assert "InvalidPlanError: plan.json has stages on device 9" in err
        assert "has the devices 0-3" in err


def test_a_plan_of_another_model_of_the_same_names_is_warned_of(run, tmp_path):
    """Its stages are those of the model, its figures and memory are not."""
    # Slices of a rewritten layer have their widths in their names.
    options = ("--cluster", "local:2", "--batch-size", "8", "--no-baselines", "--rewrite", "none")
    assert run("plan", TOWERS, *options, "--planner", "even", "-o", "plan.json")[0] == 0
    said = "the plan was made for a model with parameters of"
    # Warnings are errors here, so that the ranks of verify report theirs.
    for verb, ended in {
        ("check", "plan.json", TOWERS): 0,
        ("simulate", "plan.json", TOWERS): 0,
        ("plan", TOWERS, *options, "--from", "plan.json"): 0,
        ("verify", TOWERS, "--plan", "plan.json"): 1,
    }.items():
        assert said not in run(*verb)[2]
        code, _, err = run(*verb, "-o", "width=24")
        assert (code, err.count(said)) == (ended, 1)


@pytest.mark.dist
def test_a_plan_may_leave_devices_out(run, document):
    """Its ranks are the devices that it has: two of a cluster of four, by check and by train."""
    options = ("--batch-size", "8", "--planner", "even", "--no-baselines")
    code, _, err = run("plan", TOWERS, "--cluster", "local:2", *options, "-o", "plan.json")
    assert code == 0, err
    assert document("check", "plan.json", TOWERS, "--cluster", "local:4")["valid"]
    assert document("simulate", "plan.json", TOWERS, "--cluster", "local:4")["step_s"] > 0
    code, out, err = run("train", TOWERS, "--plan", "plan.json", "--steps", "2", "--json")
    assert len(json.loads(out)["losses"]) == 2
    assert "without a calibration" in " ".join(err.split())


@pytest.mark.dist
def test_more_ranks_than_cores_are_told_to_say_nothing_of_time(run, monkeypatch):
    """Where the plan has a device for each of them; a plan for local ranks knows of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    said = "2 ranks take turns on 1 processor core here, but the plan for summit:1x2"
    options = ("--batch-size", "8", "--max-replicas", "1", "--no-baselines", "--planner", "even")
    for cluster, count in {"summit:1x2": 1, "local:2": 0}.items():
        planned = ("--cluster", cluster, "--device", "v100", *options, "-o", "plan.json")
        assert run("plan", TOWERS, *planned)[0] == 0
        code, _, err = run("train", TOWERS, "--plan", "plan.json", "--steps", "1")
        assert (code, " ".join(err.split()).count(said)) == (0, count), err


def test_a_plan_has_its_own_batch_size_devices_and_schedule(run, plan):
    """What it decides is refused beside it, not ignored."""
    for verb in ("train", "verify"):
        for option in (("--batch-size", "8"), ("--devices", "2")):
            code, _, err = run(verb, TOWERS, "--plan", plan, *option)
            assert code == 2
            assert f"decides what {option[0]} would" in " ".join(err.split())


def test_what_a_run_file_says_beside_a_plan_is_named_with_the_file(run, plan, tmp_path):
    """The user sees no --devices on the command line."""
    (tmp_path / "run.toml").write_text(f'model = "{TOWERS}"\ndevices = 2\n')
    file = str(tmp_path / "run.toml")
    code, _, err = run("train", file, "--trust", "--plan", plan)
    assert code == 2
    said = "".join(err.split())
    assert f"decideswhatdevicesin{file}would;leaveoutone" in said


def test_an_earlier_run_is_never_written_over(run, tmp_path, monkeypatch):
    """By train, rehearse or demo; told before anything is captured."""
    monkeypatch.setattr("anabranch.cli.source.ModelSource.workload", None)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "run.json").write_text("{}")
    for verb in (PIPELINE, ("rehearse", TOWERS), ("demo",)):
        code, _, err = run(*verb, "--out", "kept")
        assert code == 1
        assert "TrainingError: kept has the figures of an earlier run (run.json)" in err
        assert "name a new folder with --out" in err


def test_figures_that_could_not_be_kept_are_refused_first(run, tmp_path, monkeypatch):
    """A file in the place of the folder, or above it: not after hours of training."""
    monkeypatch.setattr("anabranch.cli.source.ModelSource.workload", None)
    (tmp_path / "taken").write_text("")
    for out in ("taken", "taken/below"):
        code, _, err = run(*PIPELINE, "--out", out)
        assert code == 1
        assert f"cannot be kept in {out}" in " ".join(err.split())
        assert "taken is a file" in " ".join(err.split())
    (tmp_path / "runs").write_text("")
    assert "cannot be kept in runs" in " ".join(run(*PIPELINE)[2].split())


@pytest.mark.dist
def test_the_header_is_that_of_the_run(run, tmp_path):
    """A plan for pipeoptim in fp32 under stash in bf16: not its reason is told, and figures are
    predicted anew.
    """
    options = ("--cluster", "local:2", "--batch-size", "8", "--max-replicas", "1")
    made = ("plan", TOWERS, *options, "--no-baselines", "--mode", "async", "-o", "plan.json")
    code, out, err = run(*made)
    assert code == 0, err
    assert "pipeoptim" in out
    train = ("train", TOWERS, "--plan", "plan.json", "--steps", "4", "--out", "a")
    code, out, err = run(*train, "--policy", "stash", "--precision", "bf16")
    assert code == 0, err
    assert json.loads((tmp_path / "a" / "plan.json").read_text())["precision"] == "bf16"
    assert "without a calibration" not in err  # the prediction is of this moment
    assert "asynchronous 1f1b, stash, batch 8" in out
    assert "pipeoptim" not in out
    assert "a batch every" in out
    assert re.search(r"not measured, predicted [\d.]+ KiB", out)
    assert "not predicted" not in out
    assert "0.0 MiB" not in out
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "policy stash" in page
    assert "pipeoptim" not in page


@pytest.mark.dist
@pytest.mark.filterwarnings("always:Normed fails with 1 sample")
def test_batch_normalisation_is_planned_trained_and_verified(run, document, tmp_path):
    """One sample has no statistics, so nothing is measured or planned with one."""
    model = "tests.cli.models:normed"
    where = ("--cluster", "local:2", "--batch-size", "8", "--max-replicas", "1")
    # A join that is split adds up in another order.
    as_written = ("--rewrite", "none", "--planner", "even")
    code, _, err = run("plan", model, *where, *as_written, "--no-baselines", "-o", "plan.json")
    assert code == 0, err
    assert "warning: Normed fails with 1 sample" in err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["profile"] == "measured, cpu, at 2, 4, 8 samples"
    assert len(document("train", model, "--plan", "plan.json", "--steps", "3")["losses"]) == 3
    assert document("verify", model, "--plan", "plan.json")["bitwise"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch_size": 4}, "InvalidPlanError: stage 1 has micro-batches of 8 samples, stage"),
        ({"k": 2}, "InvalidPlanError: stage 0 alternates groups of 2"),
        ({"devices": [1]}, "InvalidPlanError: device 1 has stages 0 and 1"),
        ({"edges": [[0, 2]]}, "InvalidPlanError: stage 1 makes what stage 2 reads"),
        ({"schedule": "gpipe"}, "InvalidPlanError: schedule gpipe is for mode sync"),
        ({"policy": "2bw"}, "PolicyError: 2bw runs through"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_it_is_shown(run, tmp_path, change, message):
    """Made by hand: no header, and in the words of check where it says so."""
    plan = by_hand([("left", [0]), ("right", [1]), ("head", [2])], 8, mode="async", policy="stash")
    stages = plan["stages"]
    changed = plan if change.keys() <= plan.keys() else stages[0]
    changed.update(change)
    (tmp_path / "hand.json").write_text(json.dumps(plan))
    code, out, err = run("train", TOWERS, "--plan", "hand.json", "--steps", "3")
    assert code == 1
    assert message in err
    assert out == ""


@pytest.mark.dist
def test_train_save_resume_and_report(document, tmp_path):
    """The run folder holds page and picture; a checkpoint goes on under another plan."""
    out, saved = str(tmp_path / "out"), str(tmp_path / "saved")
    found = document(
        "train", TOWERS, "--devices", "2", "--steps", "12", "--batch-size", "8", "--out", out,
        "--save", saved, "--max-replicas", "1",
    )  # fmt: skip
    assert len(found["losses"]) == 12
    assert {"step_s", "predicted_step_s", "ideal_step_s", "metrics"} <= found.keys()
    assert found["metrics"].keys() == {"loss", "error"}
    assert Path(document("report", out)["path"]).exists()
    assert (tmp_path / "out" / "timeline.svg").exists()
    one_device = ("train", TOWERS, "--devices", "1", "--batch-size", "8")
    resumed = document(*one_device, "--steps", "2", "--resume", saved)
    assert f"from checkpoint {saved}" in Path(resumed["report"]).read_text(encoding="utf-8")
    whole = document(*one_device, "--steps", "14")["losses"]
    assert [*found["losses"], *resumed["losses"]] == pytest.approx(whole, rel=1e-4)
    assert (found["resumed"], resumed["resumed"], resumed["first_step"]) == ("", saved, 12)


@pytest.mark.dist
def test_an_evaluation_that_fails_loses_nothing_and_is_made_by_itself(run, document, tmp_path):
    """Of training, checkpoint and figures are there; a run without a step evaluates the checkpoint,
    and has a page without a step.
    """
    (tmp_path / "two.json").write_text(json.dumps(by_hand([("left right head", [0])], 8)))
    of_plan = ("--plan", "two.json", "--no-check-gradients", "--steps")
    failing = ("train", "tests.cli.models:with_failing_evaluation", *of_plan, "2")
    code, _, err = run(*failing, "--save", "saved", "--out", "kept")
    assert code == 1
    assert "kept has the figures of the 2 steps that were made, and this failure; saved has" in err
    assert "train with --resume saved --steps 0 evaluates it" in err
    kept = load_run(tmp_path / "kept")
    assert len(kept.losses) == 2
    assert "the disk is on fire" in kept.failure
    assert "the disk is on fire" in (tmp_path / "kept" / "report.html").read_text()
    whole = document("train", TOWERS, *of_plan, "2")
    assert list(kept.losses) == whole["losses"]
    alone = document("train", TOWERS, *of_plan, "0", "--resume", "saved")
    assert (alone["metrics"], alone["losses"]) == (whole["metrics"], [])
    assert "held-out error" in Path(alone["report"]).read_text()


def test_batches_of_another_size_than_before_the_checkpoint_are_warned_of(run, tmp_path):
    """Their position in the epoch is a number of batches; warnings are errors here."""
    short = "train", TOWERS, "--devices", "1", "--steps", "2"
    assert run(*short, "--batch-size", "8", "--save", "saved", "--out", "a")[0] == 0
    assert run(*short, "--batch-size", "8", "--resume", "saved", "--out", "b")[0] == 0
    code, _, err = run(*short, "--batch-size", "4", "--resume", "saved", "--out", "c")
    assert code == 1
    assert "the checkpoint was trained with batches of 8 samples, this run has 4; 2 batches" in err
    assert "--batch-size 8, or a plan for it, goes on as before" in err


def test_a_checkpoint_with_all_epochs_is_refused_first(run, monkeypatch):
    """Before the model is loaded for nothing."""
    once = "train", TOWERS, "--devices", "1", "--epochs", "1", "--batch-size", "8"
    assert run(*once, "--save", "saved", "--out", "a")[0] == 0
    monkeypatch.setattr("anabranch.cli.source.ModelSource.workload", None)
    code, _, err = run(*once, "--resume", "saved", "--out", "b")
    assert code == 1
    assert "nothing is left to do: saved has 1 epochs already; ask for more than 1" in err


def test_a_folder_that_is_nearly_a_checkpoint_says_where_one_is(run, tmp_path):
    """The folder of figures is easily taken for that of weights, and a folder for the one in it."""
    short = "train", TOWERS, "--devices", "1", "--steps", "1", "--batch-size", "8"
    code, *_ = run(*short, "--out", str(tmp_path / "out"), "--save", str(tmp_path / "in" / "saved"))
    assert code == 0
    code, _, err = run(*short, "--resume", "out")
    assert code == 1
    assert "out is no checkpoint: out/manifest.json does not exist" in err
    assert "the figures and the report of a run, whose weights are in the folder of --save" in err
    code, _, err = run(*short, "--resume", "in")
    assert (code, "in/saved is one" in err) == (1, True)
    code, out, _ = run(*short, "--resume", "in/saved")
    assert code == 0
    assert "goes on from in/saved, after step 1" in out
