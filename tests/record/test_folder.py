"""Run folders: what training leaves comes back, also where no step was recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.errors import FileFormatError
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.record import Evaluation, Origin, Run, StepPart, load_run, new_folder, save_run
from anabranch.record.folder import write_report
from anabranch.schedule.schedule import Action
from anabranch.timeline import Span, Timeline

PLAN = Plan(
    StageGraph((Stage(("a",), (0,), 2, in_flight=1),), (), 4),
    schedule="1f1b",
    planner="even",
    model="m",
    cluster="local:1",
    profile="measured",
    search_s=0.0,
    simulate_s=0.0,
    predicted=Prediction(0.5, 0.1, 0.0, (7,)),
)
SPANS = tuple(
    Span(0, start, start + 1.0, Action.parse(text))
    for start, text in enumerate(["0F0", "0B0", "0F1", "0B1"])
)
RUN = Run(
    plan=PLAN,
    losses=(2.0, 1.0, 0.5),
    step_s=(9.0, 4.0, 5.0),
    ideal_step_s=4.0,
    metrics={"loss": 0.4, "accuracy": 0.75},
    chance={"accuracy": 0.5},
    device_peak_bytes=(7, 9),
    origin=Origin("anabranch train m", "2026-11-22T12:00:00+00:00", "host", {"torch": "2.11"}),
    evaluations=(Evaluation(2, {"loss": 0.6, "accuracy": None}),),
    parts=(StepPart("work", 0.3, "evenly"), StepPart("warm-up", 0.2)),
    timelines=(("measured", Timeline(SPANS, (0,), "measured", 4.5, {0: ((0.0, 3), (1.0, 7))})),),
)


def test_a_run_comes_back(tmp_path: Path) -> None:
    """Figures, plan and timelines; page and picture lie beside them."""
    save_run(RUN, tmp_path / "run")
    assert load_run(tmp_path / "run") == RUN
    assert (tmp_path / "run" / "timeline.svg").exists()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "held-out accuracy" in page
    assert "Green: the loss of held-out data." in page
    assert "peak memory" in page


def test_a_page_without_a_predicted_timeline_says_why(tmp_path: Path) -> None:
    """As of a plan from a file, which has no seconds of operators; not where there is one."""
    predicted = ("predicted", Timeline(SPANS, (0,), "predicted", 4.5, {}))
    for run, says in ((RUN, True), (replace(RUN, timelines=(predicted, *RUN.timelines)), False)):
        write_report(run, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert ("the timeline is the measured one alone" in page) == says


def test_the_losses_of_a_resumed_run_begin_behind_the_steps_before(tmp_path: Path) -> None:
    """On the page the steps have the numbers that they had in training."""
    save_run(replace(RUN, resumed="checkpoint", first_step=60), tmp_path)
    assert ">61</text>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_plan_predicts_nothing_of_the_other_mode(tmp_path: Path) -> None:
    """Neither as figures nor on the page, whose timeline is then of mini-batches, not of a step."""
    run = replace(RUN, policy="stash", period_s=0.25, weight_bytes=(7,))
    assert (run.mode, run.predicted) == ("async", None)
    save_run(run, tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "250.00 ms" in page
    assert "Some mini-batches" in page
    assert "Predicted against measured" not in page
    run = replace(RUN, plan=replace(PLAN, mode="async", policy="stash"))
    assert (run.mode, run.predicted) == ("sync", None)
    assert run.figures()["predicted_step_s"] is None
    assert run.figures()["predicted_device_peak_bytes"] is None


def test_a_run_without_a_flush_comes_back(tmp_path: Path) -> None:
    """Its policy decides which figures it has; there is no timeline."""
    run = replace(
        RUN,
        timelines=(),
        policy="stash",
        version_difference=(1, 0),
        peak_versions=(2, 1),
        weight_bytes=(20, 12),
        device_peak_bytes=(),
        period_s=0.5,
    )
    save_run(run, tmp_path / "run")
    assert load_run(tmp_path / "run") == run
    figures = run.figures()
    assert (figures["policy"], figures["period_s"], figures["samples_per_s"]) == ("stash", 0.5, 8.0)
    assert figures["weight_bytes"] == [20, 12]
    assert "ideal_step_s" not in figures
    assert "policy" not in RUN.figures()


def test_a_plan_predicts_nothing_of_other_batches(tmp_path: Path) -> None:
    """Of 16 samples, where it is for 4: said, and samples per second are of theirs."""
    run = replace(RUN, samples=(16, 16, 4))
    save_run(run, tmp_path / "run")
    assert load_run(tmp_path / "run") == run
    document = run.figures()
    assert document["predicted_step_s"] is document["predicted_device_peak_bytes"] is None
    assert document["samples_per_s"] == 4 * RUN.figures()["samples_per_s"]
    assert document["batch_samples"] == [4, 16]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "samples in a batch" in page
    assert "samples in a batch" not in text_of_page(RUN, tmp_path)


def text_of_page(run: Run, folder: Path) -> str:
    write_report(run, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_run_of_one_step_has_no_picture(tmp_path: Path) -> None:
    """Nothing was recorded, which is no reason to lose the run."""
    short = replace(RUN, losses=(2.0,), step_s=(9.0,), ideal_step_s=0.0, timelines=())
    save_run(short, tmp_path / "run")
    assert load_run(tmp_path / "run") == short
    assert not (tmp_path / "run" / "timeline.svg").exists()


def test_a_broken_action_is_named(tmp_path: Path) -> None:
    """File and value, as for every file."""
    save_run(RUN, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    document = json.loads(path.read_text())
    document["timelines"][0]["spans"][0][3] = "0Q0"
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"run\.json: '0Q0' is no action"):
        load_run(tmp_path / "run")


def test_a_folder_that_is_no_run_says_what_it_is(tmp_path: Path) -> None:
    """The folder of --save, or of --save-every, is easily taken for that of the figures."""
    for manifest, what in (
        ("saved/manifest.json", "a checkpoint, which has weights and no figures"),
        ("series/step-3/manifest.json", "a checkpoint, which has weights and no figures"),
        ("other/file", "no run"),
    ):
        file = tmp_path / manifest
        file.parent.mkdir(parents=True)
        file.touch()
        folder = tmp_path / Path(manifest).parts[0]
        with pytest.raises(FileFormatError, match=rf"is {what}: .*run\.json does not exist; name"):
            load_run(folder)


def test_a_plan_predicts_nothing_of_another_policy_or_of_replicas_in_turn(tmp_path: Path) -> None:
    """Both change what is held, and the page says which it was."""
    planned = replace(PLAN, mode="async", policy="stash", notes=("policy stash: by hand",))
    run = replace(RUN, plan=planned, policy="stash", period_s=0.25, weight_bytes=(7,))
    assert run.predicted == PLAN.predicted
    assert replace(run, policy="2bw").predicted is None
    turns = replace(run, round_robin=True)
    assert turns.predicted is None
    assert replace(turns, plan=replace(planned, round_robin=True)).predicted == PLAN.predicted
    assert turns.figures()["round_robin"]
    save_run(turns, tmp_path / "turns")
    assert load_run(tmp_path / "turns") == turns
    page = (tmp_path / "turns" / "report.html").read_text(encoding="utf-8")
    assert "policy stash, replicas taking mini-batches in turn (round-robin)" in page
    save_run(replace(run, policy="2bw"), tmp_path / "other")
    page = (tmp_path / "other" / "report.html").read_text(encoding="utf-8")
    assert "policy 2bw" in page
    assert "stash" not in page


def test_a_run_of_an_earlier_version_has_no_turns(tmp_path: Path) -> None:
    """Its file does not speak of them."""
    save_run(RUN, tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    del document["round_robin"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert load_run(tmp_path) == RUN


def test_runs_that_begin_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    """The second wrote over the figures of the first."""
    monkeypatch.chdir(tmp_path)
    first, second, other = new_folder("demo", 0.0), new_folder("demo", 0.9), new_folder("demo", 1)
    assert first.is_dir()
    assert second.name == f"{first.name}-2"
    assert other.name not in (first.name, second.name)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    """``runs`` points to a disk that is gone: names were tried for ever, behind the training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(FileExistsError):
        new_folder("demo", 0.0)
