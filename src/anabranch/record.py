"""Runs and their folders, which ``anabranch report`` turns into a page.

runs/glyphs-20260102-030405/
    plan.json       the plan that ran
    run.json        losses, step times, metrics, predicted and measured timeline of one step
    report.html     the page
    timeline.svg    its picture of the step, also on its own
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.errors import FileFormatError, InvalidScheduleError
from anabranch.files import load_plan, save_plan
from anabranch.jsonfile import (
    Strict,
    core_fields,
    document_fields,
    read_document,
    write_document,
)
from anabranch.plans.plan import Plan, Prediction, memory_text
from anabranch.schedule.schedule import Action
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline

RUN = "anabranch.run/1"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        losses: one per step.
        step_s: wall seconds of the first steps, each of which began when all ranks were ready.
        ideal_step_s: the schedule's step for the measured stage times, links that cost nothing.
        metrics: held-out means where there is held-out data, otherwise those of the last step.
        chance: metric -> what guessing would give.
        timelines: headings and timelines of one step, predicted before measured.
        period_s: wall seconds per step without a barrier; 0 where the run was too short to tell.
        device_peak_bytes: per device, ascending, most bytes of tensors in a step; may be empty.
        policy: of a run without a flush, else empty, as is what follows.
        version_difference: per stage, most updates between forward and backward of a mini-batch.
        peak_versions: per device, ascending, most copies of its stage's weights alive at once;
            ``weight_bytes`` has their bytes.
        interrupted: the user ended it early, and nothing was evaluated.
        round_robin: replicas took mini-batches in turn, each of them whole.
        restarts: how often ranks were started again after a failure; figures are of the last time.
    """

    plan: Plan
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    ideal_step_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)
    timelines: tuple[tuple[str, Timeline], ...] = ()
    period_s: float = 0.0
    device_peak_bytes: tuple[int, ...] = ()
    policy: str = ""
    version_difference: tuple[int, ...] = ()
    peak_versions: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    interrupted: bool = False
    round_robin: bool = False
    restarts: int = 0

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step; the first, which sets things up, is left out."""
        return statistics.median(self.step_s[1:] or self.step_s)

    @property
    def mode(self) -> str:
        """``async`` or ``sync``; the plan may have been made for the other one."""
        return "async" if self.policy else "sync"

    @property
    def predicted(self) -> Prediction | None:
        """What the plan predicts; nothing where it is for another mode or policy."""
        is_planned = self.plan.mode == self.mode and self.plan.policy == self.policy
        return self.plan.predicted if is_planned and not self.round_robin else None

    @property
    def metric_prefix(self) -> str:
        """``held-out`` where metrics are so: those of training never include the loss."""
        return "held-out " if "loss" in self.metrics else ""

    def figures(self) -> dict[str, Any]:
        """What the command line prints."""
        predicted = self.predicted
        predicted_s = predicted.step_s if predicted is not None else None
        seconds = self.period_s or self.median_step_s
        common = {
            "losses": list(self.losses),
            "period_s": self.period_s,
            "samples_per_s": self.plan.stage_graph.batch_size / seconds,
            "metrics": dict(self.metrics),
            "chance": dict(self.chance),
        }
        if self.policy:
            return {
                "mode": "async",
                "policy": self.policy,
                "round_robin": self.round_robin,
                "predicted_period_s": predicted_s,
                "version_difference": list(self.version_difference),
                "peak_versions": list(self.peak_versions),
                "weight_bytes": list(self.weight_bytes),
                **common,
            }
        peaks = list(predicted.device_peak_bytes) if predicted is not None else None
        return {
            "step_s": self.median_step_s,
            "predicted_step_s": predicted_s,
            "predicted_period_s": predicted.period_s if predicted is not None else None,
            "ideal_step_s": self.ideal_step_s,
            "device_peak_bytes": list(self.device_peak_bytes),
            "predicted_device_peak_bytes": peaks,
            **common,
        }


def save_run(run: Run, folder: Path) -> None:
    """Write plan, figures, page and picture into a folder, which is made if it does not exist."""
    from anabranch.report.gantt import timeline_svg

    folder.mkdir(parents=True, exist_ok=True)
    save_plan(run.plan, folder / "plan.json")
    timelines = [_to_dict(title, timeline) for title, timeline in run.timelines]
    document = document_fields(run, _RunFile, schema_=RUN, timelines=timelines)
    write_document(folder / "run.json", {"schema": document.pop("schema_"), **document})
    # A run of a single step, or of short batches alone, has recorded none.
    if run.timelines:
        is_endless = run.mode == "async"
        picture = timeline_svg(run.timelines, run.plan.stage_graph, is_endless=is_endless)
        (folder / "timeline.svg").write_text(picture, encoding="utf-8")
    write_report(run, folder / "report.html")


def load_run(folder: Path) -> Run:
    """Read what ``save_run`` wrote; raises FileFormatError, which names file, key and value."""
    path = folder / "run.json"
    file = read_document(path, RUN, _RunFile)
    try:
        timelines = tuple((t.title, _to_timeline(t)) for t in file.timelines)
    except InvalidScheduleError as error:
        raise FileFormatError(f"{path}: {error}") from None
    figures = core_fields(file, leave_out={"schema_", "timelines"})
    return Run(load_plan(folder / "plan.json"), timelines=timelines, **figures)


def _measured_plan(run: Run) -> Plan:
    """The plan with the policy that the run had, and without reasons for another one."""
    notes = run.plan.notes
    if run.plan.policy != run.policy:
        notes = tuple(note for note in notes if not note.startswith("policy "))
    return replace(run.plan, mode=run.mode, policy=run.policy, predicted=run.predicted, notes=notes)


def write_report(run: Run, path: Path) -> None:
    """Write the page."""
    from anabranch.report.html import WeightVersions, page

    metrics: dict[str, float | str] = {}
    for name, value in run.metrics.items():
        chance = f" (chance {run.chance[name]:.3g})" if name in run.chance else ""
        metrics[run.metric_prefix + name] = f"{value:.4g}{chance}"
    if run.device_peak_bytes:
        metrics["measured peak memory"] = memory_text(max(run.device_peak_bytes))
    text = page(
        _measured_plan(run),
        run.timelines,
        losses=run.losses,
        metrics=metrics,
        measured_s=run.period_s if run.policy else None,
        weights=WeightVersions(
            run.version_difference, run.peak_versions, run.weight_bytes, run.round_robin
        ),
    )
    path.write_text(text, encoding="utf-8")


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


_Device = Annotated[int, Field(ge=0, lt=10**6)]
_Count = Annotated[int, Field(ge=0)]
# JSON has no tuples, so fixed-length lists must be read leniently.
_Span = Annotated[tuple[_Device, float, float, str], Field(strict=False)]
_Sum = Annotated[tuple[_Device, float, float, list[_Count], _Count], Field(strict=False)]
_What = Literal["bookkeeping", "agreement", "update", "gather"]
_Overhead = Annotated[tuple[_Device, float, float, _What], Field(strict=False)]
_Point = Annotated[tuple[float, int], Field(strict=False)]
_Memory = Annotated[tuple[_Device, list[_Point]], Field(strict=False)]


class _Timeline(Strict):
    title: str
    source: Literal["predicted", "measured"]
    step_s: Annotated[float, Field(ge=0)]
    devices: list[_Device]
    spans: list[_Span]
    memory: list[_Memory]
    sums: list[_Sum] = Field(default_factory=list)
    overheads: list[_Overhead] = Field(default_factory=list)


class _RunFile(Strict):
    schema_: Literal["anabranch.run/1"] = Field(alias="schema")
    losses: list[float]
    step_s: Annotated[list[float], Field(min_length=1)]
    period_s: Annotated[float, Field(ge=0)] = 0.0
    ideal_step_s: Annotated[float, Field(ge=0)]
    metrics: dict[str, float]
    chance: dict[str, float]
    timelines: list[_Timeline]
    device_peak_bytes: list[_Count] = Field(default_factory=list)
    policy: str = ""
    version_difference: list[_Count] = Field(default_factory=list)
    peak_versions: list[_Count] = Field(default_factory=list)
    weight_bytes: list[_Count] = Field(default_factory=list)
    interrupted: bool = False
    round_robin: bool = False
    restarts: _Count = 0


def _to_timeline(file: _Timeline) -> Timeline:
    return Timeline(
        spans=tuple(Span(d, start, end, Action.parse(text)) for d, start, end, text in file.spans),
        devices=tuple(file.devices),
        source=file.source,
        step_s=file.step_s,
        memory={device: tuple(points) for device, points in file.memory},
        sums=tuple(SumSpan(d, start, end, tuple(s), n) for d, start, end, s, n in file.sums),
        overheads=tuple(OverheadSpan(*span) for span in file.overheads),
    )
