"""Runs and their folders, which ``anabranch report`` turns into a page.

runs/glyphs-20260102-030405/
    plan.json       the plan that ran
    run.json        losses, step times, metrics, predicted and measured timeline of one step
    report.html     the page
    timeline.svg    its picture of the step, also on its own
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.errors import FileFormatError, InvalidScheduleError
from anabranch.files import load_plan, save_plan
from anabranch.files.jsonfile import (
    Index,
    Strict,
    document_fields,
    from_document,
    read_document,
    write_document,
    write_text,
)
from anabranch.plans.plan import NOT_PREDICTED, Plan, time_text
from anabranch.plans.stages import StageGraph
from anabranch.record.figures import beside_tables, shown_figures, tables
from anabranch.record.run import Origin, Run, finite
from anabranch.report.gantt import timeline_svg
from anabranch.report.html import page
from anabranch.report.timeline_layout import ShownTimeline
from anabranch.schedule.schedule import Action
from anabranch.simulator.critical_path import critical_path
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline

RUN = "anabranch.run/1"


def new_folder(name: str, began: float) -> Path:
    """Make a folder for a run in ``runs``, named by the run and its beginning (seconds since the
    epoch); runs of one name that began in the same second get different folders.
    """
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}"
    for number in count(1):
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def save_run(run: Run, folder: Path) -> None:
    """Write plan, figures, page and picture into a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(run.plan, folder / "plan.json")
    document = document_fields(
        run,
        _RunFile,
        schema_=RUN,
        timelines=[_to_dict(title, timeline) for title, timeline in run.timelines],
        metrics=finite(run.metrics),
    )
    write_document(folder / "run.json", document)
    # A run of a single step, or of short batches only, has recorded no timeline.
    if run.timelines:
        is_endless = run.mode == "async"
        picture = timeline_svg(_shown(run), is_endless=is_endless)
        write_text(folder / "timeline.svg", picture)
    write_report(run, folder / "report.html")


def load_run(folder: Path) -> Run:
    """Read the folder of ``save_run``; FileFormatError with file, key and value if it is wrong."""
    path = folder / "run.json"
    if not path.is_file():
        from anabranch.checkpoint.manifest import MANIFEST
        from anabranch.checkpoint.series import newest

        is_saved = (folder / MANIFEST).exists() or newest(folder) is not None
        what = "a checkpoint, which has weights and no figures" if is_saved else "no run"
        raise FileFormatError(
            f"{folder} is {what}: {path} does not exist; name the folder in which train kept "
            "figures and report, that of --out or the one in runs that it said at the end"
        )
    file = read_document(path, RUN, _RunFile)
    try:
        timelines = tuple((t.title, _to_timeline(t)) for t in file.timelines)
    except InvalidScheduleError as error:
        raise FileFormatError(f"{path}: {error}") from None
    return from_document(
        Run,
        file,
        plan=load_plan(folder / "plan.json"),
        timelines=timelines,
        metrics={name: math.nan if m is None else m for name, m in file.metrics.items()},
    )


def _measured_plan(run: Run) -> Plan:
    """Return the plan with the policy of the run, and without reasons for another policy."""
    notes = run.plan.notes
    if run.plan.policy != run.policy:
        notes = tuple(note for note in notes if not note.startswith("policy "))
    return replace(
        run.plan,
        mode=run.mode,
        policy=run.policy,
        round_robin=run.round_robin,
        predicted=run.predicted,
        notes=notes,
    )


def write_report(run: Run, path: Path, *, against: tuple[str, Run] | None = None) -> None:
    """Write the page.

    Args:
        against: name of another run and the run, drawn under the same axes.
    """
    document = run.figures()
    name, other = against or ("", None)
    beside = beside_tables(document, name, other.figures()) if other is not None else []
    text = page(
        _measured_plan(run),
        [*_shown(run), *(_shown(other, f"{name}: ") if other is not None else ())],
        figures=shown_figures(document),
        tables=[*beside, *tables(document)],
        headline=_headline(run),
        losses=run.losses,
        other_losses=other.losses if other is not None else (),
        held_out={e.step: v for e in run.evaluations if (v := e.metrics.get("loss")) is not None},
        steps_before=run.first_step,
        about=_about(run.origin),
        notes=_notes(run),
        version_difference=run.version_difference,
        peak_versions=run.peak_versions,
    )
    write_text(path, text)


def shown_timeline(title: str, timeline: Timeline, graph: StageGraph, mode: str) -> ShownTimeline:
    """Return a timeline for the page, with its critical path if it is of a step with a flush."""
    path = critical_path(timeline, graph) if mode == "sync" else ()
    return ShownTimeline(title, timeline, graph, path)


def _shown(run: Run, before: str = "") -> list[ShownTimeline]:
    graph = run.plan.stage_graph
    return [shown_timeline(before + title, t, graph, run.mode) for title, t in run.timelines]


def _headline(run: Run) -> str:
    """Return the first sentence: the measured step, and the plan's prediction of it."""
    is_async = run.mode == "async"
    what, seconds = ("A mini-batch", run.period_s) if is_async else ("A step", run.median_step_s)
    if run.predicted is not None:
        return run.predicted.headline(run.plan.stage_graph, run.mode, seconds or None)
    return f"{what} took {time_text(seconds)}; {NOT_PREDICTED} for this run." if seconds else ""


def _notes(run: Run) -> list[str]:
    """Return the reason why a prediction has no timeline beside the measured one."""
    is_drawn = any(timeline.source == "predicted" for _, timeline in run.timelines)
    if run.predicted is None or run.measured is None or is_drawn:
        return []
    return [
        "the timeline is the measured one alone: a plan has the predicted figures, but not the "
        "seconds of each operator, which this run had no need to measure; anabranch simulate "
        "plan.json MODEL --report page.html measures them and draws the predicted timeline"
    ]


def _about(origin: Origin | None) -> dict[str, str]:
    if origin is None:
        return {}
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    about = {"command": origin.command, "date": origin.date, "host": origin.host}
    return {**about, "versions": versions}


def _to_dict(title: str, timeline: Timeline) -> dict[str, Any]:
    return {
        "title": title,
        "source": timeline.source,
        "step_s": timeline.step_s,
        "devices": list(timeline.devices),
        "spans": [[s.device, s.start, s.end, str(s.action)] for s in timeline.spans],
        "memory": [[d, [[t, b] for t, b in points]] for d, points in timeline.memory.items()],
        "sums": [[s.device, s.start, s.end, list(s.stages), s.nbytes] for s in timeline.sums],
        "overheads": [[s.device, s.start, s.end, s.what] for s in timeline.overheads],
    }


_Count = Annotated[int, Field(ge=0)]
# JSON has no tuples, so fixed-length lists must be read leniently.
_Span = Annotated[tuple[Index, float, float, str], Field(strict=False)]
_Sum = Annotated[tuple[Index, float, float, list[_Count], _Count], Field(strict=False)]
_What = Literal["bookkeeping", "agreement", "update", "gather"]
_Overhead = Annotated[tuple[Index, float, float, _What], Field(strict=False)]
_Point = Annotated[tuple[float, int], Field(strict=False)]
_Memory = Annotated[tuple[Index, list[_Point]], Field(strict=False)]


class _TimelineEntry(Strict):
    title: str
    source: Literal["predicted", "measured"]
    step_s: Annotated[float, Field(ge=0)]
    devices: list[Index]
    spans: list[_Span]
    memory: list[_Memory]
    sums: list[_Sum] = Field(default_factory=list)
    overheads: list[_Overhead] = Field(default_factory=list)


class _OriginEntry(Strict):
    command: str
    date: str
    host: str
    versions: dict[str, str]


class _PartEntry(Strict):
    name: str
    seconds: float
    remark: str = ""


class _EvaluationEntry(Strict):
    step: _Count
    metrics: dict[str, float | None]


class _RunFile(Strict):
    schema_: Literal["anabranch.run/1"] = Field(alias="schema")
    losses: list[float]
    step_s: list[float]
    period_s: Annotated[float, Field(ge=0)] = 0.0
    ideal_step_s: Annotated[float, Field(ge=0)]
    metrics: dict[str, float | None]
    chance: dict[str, float]
    timelines: list[_TimelineEntry]
    device_peak_bytes: list[_Count] = Field(default_factory=list)
    policy: str = ""
    version_difference: list[_Count] = Field(default_factory=list)
    peak_versions: list[_Count] = Field(default_factory=list)
    weight_bytes: list[_Count] = Field(default_factory=list)
    interrupted: bool = False
    failure: str = ""
    round_robin: bool = False
    restarts: _Count = 0
    recoveries: list[str] = Field(default_factory=list)
    stragglers: list[str] = Field(default_factory=list)
    plan_changes: list[str] = Field(default_factory=list)
    gradients: str = ""
    origin: _OriginEntry | None = None
    parts: list[_PartEntry] = Field(default_factory=list)
    others_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    resumed: str = ""
    first_step: _Count = 0
    samples: list[_Count] = Field(default_factory=list)
    evaluations: list[_EvaluationEntry] = Field(default_factory=list)


def _to_timeline(file: _TimelineEntry) -> Timeline:
    return Timeline(
        spans=tuple(Span(d, start, end, Action.parse(text)) for d, start, end, text in file.spans),
        devices=tuple(file.devices),
        source=file.source,
        step_s=file.step_s,
        memory={device: tuple(points) for device, points in file.memory},
        sums=tuple(SumSpan(d, start, end, tuple(s), n) for d, start, end, s, n in file.sums),
        overheads=tuple(OverheadSpan(*span) for span in file.overheads),
    )
