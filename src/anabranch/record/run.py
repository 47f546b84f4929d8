"""A finished run, and the document of its figures that terminal, JSON and page all show."""

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
"""Steps whose timelines are recorded at a time; the one with the median time is shown."""

WEIGHED_STEP = 2 + RECORDED_STEPS
"""Step whose peak memory is measured: after one that sets up, and the steps with a timeline."""

LAST_LOSSES = 10
"""Losses whose mean is shown as the last loss: the loss of one batch says little."""

_PACKAGES = ("anabranch", "torch", "numpy", "transformers", "safetensors", "pydantic", "typer")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
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
        command: command line, as one would type it.
        date: end of the run, ISO 8601 with the zone.
        host: name of the machine of the first rank.
        versions: versions of Python, the system and packages.
    """

    command: str
    date: str
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> Origin:
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
    """A part of the predicted step; the seconds of all parts add up to the step."""

    name: str
    seconds: float
    remark: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Held-out means after a step.

    Attributes:
        step: steps for which the model had been trained.
        metrics: held-out means, ``loss`` among them; None for one that is not finite.
    """

    step: int
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        losses: loss of each step.
        step_s: wall seconds of the first steps, each of which began when all ranks were ready.
        ideal_step_s: the schedule's step for the measured stage times, links that cost nothing.
        metrics: held-out means if there is held-out data, otherwise metrics of the last step; some
            may not be finite.
        evaluations: evaluations of the held-out data, in the order of their steps.
        chance: metric -> its value for a guess.
        timelines: headings and timelines of one step, predicted before measured.
        period_s: wall seconds per step without a barrier; 0 if the run was too short to tell.
        device_peak_bytes: per device, ascending, most bytes of tensors in a step; may be empty.
        policy: policy of a run without a flush, else empty.
        version_difference: most updates between forward and backward of a mini-batch, per stage.
        peak_versions: per device, ascending, most copies of its stage's weights alive at once;
            ``weight_bytes`` has their bytes; empty with a flush.
        interrupted: the user ended it early, and nothing was evaluated.
        failure: failure that ended it, as text: in the middle, where only losses, times and samples
            of the steps before are known, or in the checkpoint or evaluation behind the last step.
        round_robin: replicas took mini-batches in turn, each of them whole.
        restarts: how often ranks were started again after a failure; figures are of the last time.
        recoveries: steps from which training went on in a part of its processes, each with the
            failure before.
        stragglers: devices and links that took longer than the others, relative to predictions, at
            the last comparison, as text.
        plan_changes: steps and reasons of changes to another plan; ``plan`` is the last one, and
            measurements are of that.
        gradients: result of the comparison of gradients with one process; empty if not known.
        origin: origin of the run; None for one that is not kept.
        parts: parts of the predicted step; may be empty.
        others_share: share of the time of this machine's cores that other processes took meanwhile;
            0 where not known.
        resumed: checkpoint, or folder of several, from which it went on; empty if from none.
        first_step: steps that were done before it.
        samples: samples in the batch of each step; empty where not known, or as in the plan.
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
        """The measured timeline: of the median step or, without a flush, of some mini-batches."""
        return next((t for _, t in self.timelines if t.source == "measured"), None)

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step: of the measured timeline if there is one, else of all steps
        but the first, which sets things up. 0 if there were no steps.
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
        """Prediction of the plan; None if it is for another mode, policy or batch size."""
        is_planned = self.plan.mode == self.mode and self.plan.policy == self.policy
        is_other = self.round_robin != self.plan.round_robin or self.other_samples
        return self.plan.predicted if is_planned and not is_other else None

    @property
    def other_samples(self) -> tuple[int, ...]:
        """Fewest and most samples of a batch; empty if most batches, and the largest, are as in the
        plan. The last batch of an epoch may have fewer.
        """
        planned = self.plan.stage_graph.batch_size
        if not self.samples or statistics.median_high(self.samples) == max(self.samples) == planned:
            return ()
        return min(self.samples), max(self.samples)

    def figures(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints; see ``shown_figures`` for words."""
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
        """Return measured over predicted seconds of forwards and backwards; None if not known."""
        predicted = next((t for _, t in self.timelines if t.source == "predicted"), None)
        if predicted is None or self.measured is None or not sum(predicted.busy_s.values()):
            return None
        return sum(self.measured.busy_s.values()) / sum(predicted.busy_s.values())


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON, with None for values that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
