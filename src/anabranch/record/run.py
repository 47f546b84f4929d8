"""A finished run and the document of its figures, from which terminal, JSON and page all tell."""

from __future__ import annotations

import math
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from typing import Any

from anabranch.plans.plan import Plan, Prediction
from anabranch.timeline import Timeline

RECORDED_STEPS = 3
"""Steps of which a timeline is recorded at a time; the one with the median time is shown."""

WEIGHED_STEP = 2 + RECORDED_STEPS
"""The step whose peak memory is measured: after one that sets up, and those with a timeline."""

LAST_LOSSES = 10
"""Losses whose mean is the loss of the last steps: that of one batch says little."""

_PACKAGES = ("anabranch", "torch", "numpy", "transformers", "safetensors", "pydantic", "typer")


def versions() -> dict[str, str]:
    """Python, the system and packages that matter."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class Origin:
    """Origin of a run.

    Attributes:
        command: as one would type it.
        date: when it ended, ISO 8601 with the zone.
        host: name of the machine of the first rank.
        versions: of Python, the system and packages.
    """

    command: str
    date: str
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> Origin:
        """This process, now."""
        name, *arguments = sys.argv or [""]
        name = "anabranch" if name.endswith(("/anabranch", "anabranch/__main__.py")) else name
        return Origin(
            shlex.join([name, *arguments]),
            datetime.now().astimezone().isoformat(timespec="seconds"),
            platform.node(),
            versions(),
        )


@dataclass(frozen=True)
class StepPart:
    """One of the parts that the predicted step is spent on; their seconds add up to it.

    Attributes:
        remark: what else there is to say.
    """

    name: str
    seconds: float
    remark: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Held-out means, and the step that they were computed behind.

    Attributes:
        step: steps that the model had been trained for.
        metrics: ``loss`` among them; None for what is not finite.
    """

    step: int
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        losses: one per step.
        step_s: wall seconds of the first steps, each of which began when all ranks were ready.
        ideal_step_s: the schedule's step for the measured stage times, links that cost nothing.
        metrics: held-out means where there is held-out data, otherwise those of the last step; a
            model may have some that are not finite.
        evaluations: of the held-out data, in the order of their steps.
        chance: metric -> what guessing would give.
        timelines: headings and timelines of one step, predicted before measured.
        period_s: wall seconds per step without a barrier; 0 where the run was too short to tell.
        device_peak_bytes: per device, ascending, most bytes of tensors in a step; may be empty.
        policy: of a run without a flush, else empty, as is what follows.
        version_difference: per stage, most updates between forward and backward of a mini-batch.
        peak_versions: per device, ascending, most copies of its stage's weights alive at once;
            ``weight_bytes`` has their bytes.
        interrupted: the user ended it early, and nothing was evaluated.
        failure: that ended it, as text: in the middle, where only losses, times and samples of the
            steps before are known, or in the checkpoint or evaluation behind the last step.
        round_robin: replicas took mini-batches in turn, each of them whole.
        restarts: how often ranks were started again after a failure; figures are of the last time.
        recoveries: steps that training went on from in a part of its processes, each with the
            failure before.
        stragglers: devices and links that took longer than predicted beside the others, at the last
            look, as text.
        plan_changes: steps and reasons of changes to another plan; ``plan`` is the last one, and
            what was measured is of that.
        gradients: what the comparison of gradients with one process said; empty if not known.
        origin: None for a run that nobody has kept.
        parts: what the predicted step is spent on; may be empty.
        others_share: of the time of all processor cores of this machine, what other processes took
            meanwhile; 0 where that is not known.
        resumed: the checkpoint, or the folder of several, that it went on from; empty if from none.
        first_step: steps that were done before it.
        samples: of the batch of each step; empty where that is not known, or of a plan's batches.
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
    failure: str = ""
    round_robin: bool = False
    restarts: int = 0
    recoveries: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()
    plan_changes: tuple[str, ...] = ()
    gradients: str = ""
    origin: Origin | None = None
    parts: tuple[StepPart, ...] = ()
    others_share: float = 0.0
    resumed: str = ""
    first_step: int = 0
    samples: tuple[int, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def measured(self) -> Timeline | None:
        """The timeline that was recorded: of the median step or, without a flush, of some
        mini-batches.
        """
        return next((t for _, t in self.timelines if t.source == "measured"), None)

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step, which are those of the timeline where one was recorded; the
        first, which sets things up, is left out. 0 where there were no steps.
        """
        if self.measured is not None and not self.policy:
            return self.measured.step_s
        return statistics.median(self.step_s[1:] or self.step_s or (0.0,))

    @property
    def mode(self) -> str:
        """``async`` or ``sync``; the plan may have been made for the other one."""
        return "async" if self.policy else "sync"

    @property
    def predicted(self) -> Prediction | None:
        """Prediction of the plan; None where that is for another mode, policy or batches."""
        is_planned = self.plan.mode == self.mode and self.plan.policy == self.policy
        is_other = self.round_robin != self.plan.round_robin or self.other_samples
        return self.plan.predicted if is_planned and not is_other else None

    @property
    def other_samples(self) -> tuple[int, ...]:
        """Fewest and most samples of a batch, where the plan is for others: of most batches, or of
        a larger one. The last batch of an epoch may have fewer.
        """
        planned = self.plan.stage_graph.batch_size
        if not self.samples or statistics.median_high(self.samples) == max(self.samples) == planned:
            return ()
        return min(self.samples), max(self.samples)

    def figures(self) -> dict[str, Any]:
        """The document that ``--json`` prints; lines and page say nothing else (``told``)."""
        predicted = self.predicted
        predicted_s = predicted.step_s if predicted is not None else None
        peaks = list(predicted.device_peak_bytes) if predicted is not None else None
        last = self.losses[-LAST_LOSSES:]
        per_step = self.samples or (self.plan.stage_graph.batch_size,)
        mean = statistics.fmean if self.period_s else statistics.median
        seconds = self.period_s or self.median_step_s
        common = {
            **self._fields("losses period_s gradients failure restarts recoveries others_share"),
            **self._fields("resumed first_step"),
            "last_loss": sum(last) / len(last) if last else None,
            "samples_per_s": mean(per_step) / seconds if seconds else 0.0,
            "batch_samples": list(self.other_samples),
            "planned_batch_samples": self.plan.stage_graph.batch_size,
            "metrics": finite(self.metrics),
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "chance": dict(self.chance),
        }
        if self.policy:
            return {
                **self._fields("mode policy round_robin version_difference peak_versions"),
                **self._fields("weight_bytes"),
                "predicted_period_s": predicted_s,
                "predicted_device_peak_bytes": peaks,
                **common,
            }
        bubbles = {
            "bubble": self.measured.bubble if self.measured is not None else None,
            "predicted_bubble": predicted.bubble if predicted is not None else None,
        }
        return {
            "step_s": self.median_step_s,
            "predicted_step_s": predicted_s,
            "predicted_period_s": predicted.period_s if predicted is not None else None,
            **self._fields("ideal_step_s device_peak_bytes stragglers plan_changes"),
            "predicted_device_peak_bytes": peaks,
            **bubbles,
            "compute_ratio": self._compute_ratio(),
            "phases": {title: timeline.phases for title, timeline in self.timelines},
            "parts": [asdict(part) for part in self.parts],
            **common,
        }

    def _fields(self, names: str) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names.split()}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def _compute_ratio(self) -> float | None:
        """Seconds of forwards and backwards over those predicted; None where not known."""
        predicted = next((t for _, t in self.timelines if t.source == "predicted"), None)
        if predicted is None or self.measured is None or not sum(predicted.busy_s.values()):
            return None
        return sum(self.measured.busy_s.values()) / sum(predicted.busy_s.values())


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """As JSON has them: None for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
