"""The weight policies, one small frozen class each; ``WeightPolicy`` describes the methods.

For unit n at a stage with lag d, K the unit of the last fill, W the units in flight at the deepest
source, v = n - d the current version at the forward; ``+ s`` extrapolates by s updates::

                    forward                 backward               from
    naive           v                       n
    stash           v                       v                      PipeDream, weight stashing
    vertical-sync   max(K, n - (W-1))       the same               PipeDream, vertical sync
    2bw             max(K, n - 1)           the same               PipeDream-2BW
    spectrain       v  + (d + h)            n  + h                 SpecTrain
    pipeoptim       v  + d                  n                      PipeOptim
    predict-stash   v  + d                  the same               ours

PipeOptim's paper has a fixed ``s = D - rank - 1``. After every drain in mid-run that would
overshoot, because the first units after a fill are less stale; so the actual lag counts. With the
minimal warm-up W is the depth D of the papers. A unit is in flight W - w updates longer at the
deepest source than at a stage with w in flight, half of them before that stage's forward and half
after its backward. So with SpecTrain's ``h = (W - w) // 2``, the paper's ``floor(k / 2)`` at stage
k of a chain, all stages aim at versions of about the moment when the unit is back at the source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anabranch.weights.base import Reading, Unit, WeightPolicy


@dataclass(frozen=True, slots=True)
class Naive(WeightPolicy):
    """Current weights in forward and backward: a gradient belongs to neither version."""

    name: ClassVar[str] = "naive"

    def forward(self, unit: Unit) -> Reading:
        return Reading(unit.seen)

    def backward(self, unit: Unit) -> Reading:
        return Reading(unit.number)


@dataclass(frozen=True, slots=True)
class Stash(WeightPolicy):
    """The backward reads the weights of its forward (PipeDream, weight stashing)."""

    name: ClassVar[str] = "stash"

    def forward(self, unit: Unit) -> Reading:
        return Reading(unit.seen)


@dataclass(frozen=True, slots=True)
class VerticalSync(WeightPolicy):
    """Every stage reads the version that was current at the deepest source (PipeDream)."""

    name: ClassVar[str] = "vertical-sync"

    def forward(self, unit: Unit) -> Reading:
        return Reading(max(unit.filled, unit.number - (unit.deepest - 1)))


@dataclass(frozen=True, slots=True)
class TwoBuffers(WeightPolicy):
    """All micro-batches of a mini-batch read the version before the last (PipeDream-2BW)."""

    name: ClassVar[str] = "2bw"
    microbatches: ClassVar[bool] = True

    def forward(self, unit: Unit) -> Reading:
        return Reading(max(unit.filled, unit.number - 1))


@dataclass(frozen=True, slots=True)
class SpecTrain(WeightPolicy):
    """Forward and backward predict the same later version, each from its current weights."""

    name: ClassVar[str] = "spectrain"

    def forward(self, unit: Unit) -> Reading:
        return Reading(unit.seen, unit.lag + _halfway(unit))

    def backward(self, unit: Unit) -> Reading:
        return Reading(unit.number, _halfway(unit))


def _halfway(unit: Unit) -> int:
    return (unit.deepest - unit.in_flight) // 2


@dataclass(frozen=True, slots=True)
class PipeOptim(WeightPolicy):
    """The forward predicts the version of its own backward, which reads the current weights."""

    name: ClassVar[str] = "pipeoptim"

    def forward(self, unit: Unit) -> Reading:
        return Reading(unit.seen, unit.lag)

    def backward(self, unit: Unit) -> Reading:
        return Reading(unit.number)


@dataclass(frozen=True, slots=True)
class PredictStash(WeightPolicy):
    """The forward predicts as in PipeOptim; the backward reads the same prediction, kept.

    Attributes:
        ramp: N, updates over which a stage's learning rate rises from ``lr / lag`` to ``lr``, as
            ``lr / lag ** (1 - min(t / N, 1))`` at update t (PipeMare, technique 1); 0 for none.
        clip: largest gradient norm of a stage, as a multiple of its own running mean; 0 for none.

    Raises:
        ValueError: if an option is negative, or ``clip`` is over 0 and at most 1, which would
            shrink every gradient.
    """

    ramp: int = 0
    clip: float = 0.0

    name: ClassVar[str] = "predict-stash"
    corrections: ClassVar[Mapping[str, int]] = {"ramp": 0, "norm-clip": 0}

    def __post_init__(self) -> None:
        if self.ramp < 0:
            raise ValueError(f"ramp is a number of updates, at least 0, not {self.ramp}")
        if self.clip != 0 and not 1 < self.clip < math.inf:
            raise ValueError(
                f"clip is a multiple of the usual gradient norm, over 1, or 0; not {self.clip}"
            )

    def forward(self, unit: Unit) -> Reading:
        return Reading(unit.seen, unit.lag)

    def rate(self, lag: int, updates: int) -> float:
        """Return the factor on the learning rate of a stage with a lag, after some updates."""
        if updates >= self.ramp or lag <= 1:
            return 1.0
        return math.pow(lag, updates / self.ramp - 1)


@dataclass(frozen=True, slots=True)
class AsyncPP(Stash):
    """Stashing under NAdam with a momentum of .99 (AsyncPP, arXiv 2505.01099).

    NAdam's step is the paper's look-ahead along a long momentum, so the method is nothing but the
    optimizer: ``requirements`` refuses other ones, and warns of a shorter momentum.
    """

    name: ClassVar[str] = "asyncpp"


@dataclass(frozen=True, slots=True)
class Rotation(Stash):
    """Stashing, and steps of Adam in an eigenbasis (basis rotation, arXiv 2602.03515).

    The abstract fixes that the optimizer's coordinates are rotated to the eigenbasis of the
    Hessian, in which scaling by coordinate keeps old directions useful. Assumed: second moments of
    the gradients on a matrix's shorter side stand for its Hessian; one step of the power method and
    QR make a new basis; first moments are rotated with it, second moments stay; parameters that are
    no matrices are not rotated.

    Attributes:
        every: updates from one basis to the next.
        memory: weight of the past in the second moments.
    """

    every: int = 10
    memory: float = 0.95

    name: ClassVar[str] = "basis-rotation"
    corrections: ClassVar[Mapping[str, int]] = {"basis-rotation": 2}

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is a number of updates, at least 1, not {self.every}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory is at least 0 and less than 1, not {self.memory}")


@dataclass(frozen=True, slots=True)
class TwoBuffersFeedback(TwoBuffers):
    """PipeDream-2BW with error feedback (arXiv 2606.30634, whose optimizer is Muon).

    The abstract fixes a correction for any optimizer, modelled on error feedback. Assumed: the
    error of an update is its difference to the update by the newer gradient. Update t - 1 should
    have been ``u_t``, which comes one step late, but was ``u_(t-1)``; so update t makes up for the
    difference, ``W -= u_t + share * (u_t - u_(t-1))``, also when the pipeline has been drained.

    Attributes:
        share: share of the difference that is made up for.
    """

    share: float = 1.0

    name: ClassVar[str] = "2bw-ef"
    corrections: ClassVar[Mapping[str, int]] = {"error-feedback": 1}

    def __post_init__(self) -> None:
        if not 0 < self.share < math.inf:
            raise ValueError(f"share is a factor on an update, more than 0, not {self.share}")


POLICIES: Mapping[str, type[WeightPolicy]] = {
    policy.name: policy
    for policy in (
        *(Naive, Stash, VerticalSync, TwoBuffers, SpecTrain, PipeOptim, PredictStash),
        *(AsyncPP, Rotation, TwoBuffersFeedback),
    )
}
"""Name -> policy."""
