"""Events of a training run, given to callbacks.

A callback is anything that can be called with an event. It is called on the first rank only, in
the process that trains; loss, metrics and held-out means are those of the whole batch, as on every
rank. Events come in the order of their steps; training waits meanwhile. An exception of a callback
ends the run on all ranks. A run that fails has no ``EndEvent``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from anabranch.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step was made, or without a flush a mini-batch was learned by all stages.

    Attributes:
        step: steps for which the model has been trained, those before ``resume`` included.
        done: steps done in this run, from 1.
        total: steps to do in this run; None if not known.
        epoch: passes through the data that were complete before the batch.
        loss: mean over the batch.
        seconds: wall time since the previous loss, without evaluations in between; without a flush
            0 while the pipeline fills or drains.
        samples: samples of the batch.
        learning_rate: learning rate of the first parameter group of the first rank when the batch
            was read; None if that rank trains nothing.
    """

    name: ClassVar[str] = "step"
    step: int
    done: int
    total: int | None
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    seconds: float
    samples: int
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """Held-out data was evaluated.

    Attributes:
        metrics: means over samples, ``loss`` among them.
        seconds: seconds of the evaluation.
        is_best: whether the checkpoint of this step becomes ``best`` (``SaveEvery.best``).
    """

    name: ClassVar[str] = "evaluation"
    step: int
    metrics: Mapping[str, float]
    seconds: float
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A checkpoint is complete.

    Attributes:
        step: step of the checkpoint; training may be further.
    """

    name: ClassVar[str] = "checkpoint"
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class LookEvent:
    """Times of devices and links were compared with the prediction.

    Attributes:
        slow: devices and links that take longer than predicted, as text, the worst first.
    """

    name: ClassVar[str] = "look"
    step: int
    slow: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """Training goes on under another plan.

    Attributes:
        why: reason, as text.
        predicted_s: predicted seconds of its step; None if not known.
        plan: the new plan.
    """

    name: ClassVar[str] = "plan"
    step: int
    why: str
    predicted_s: float | None
    plan: Plan


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The run has ended without a failure.

    Attributes:
        metrics: held-out means if there is held-out data, otherwise metrics of the last step.
        interrupted: whether the user ended it early.
    """

    name: ClassVar[str] = "end"
    step: int
    metrics: Mapping[str, float]
    interrupted: bool


Event = StepEvent | EvaluationEvent | CheckpointEvent | LookEvent | PlanEvent | EndEvent
Callback = Callable[[Event], None]
