"""A ready training loop: what ``anabranch train`` does on every rank.

It is a user's own loop with progress, evaluation and checkpoints around it; whoever needs another loop writes it
with ``Pipeline`` in five lines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.errors import AnabranchError, DataError
from anabranch.graph.capture import Captured
from anabranch.planner.stages import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.timeline import Timeline
from anabranch.workload import Batch, Workload


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did, for whoever watches.

    Attributes:
        step: steps done, from 1.
        total: steps to do.
        loss: of this step.
        metrics: of this step.
        seconds: wall time of this step.
        samples: in this step.
    """

    step: int
    total: int
    loss: float
    metrics: Mapping[str, float]
    seconds: float
    samples: int


@dataclass(frozen=True)
class TrainResult:
    """What a rank brings home; losses, times and metrics are the same on every rank.

    Attributes:
        losses: one per step.
        step_s: wall seconds, one per step.
        metrics: held-out means; the training metrics of the last step where nothing is held out.
        samples: trained on.
        timeline: this rank's spans of one step.
    """

    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    timeline: Timeline | None = None

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step; the first one, which sets things up, left out."""
        return statistics.median(self.step_s[1:] or self.step_s)
