"""Corrections for stale gradients, made around the optimizer's step of one stage.

A correction is a value, without torch and without state. ``runtime.asynchronous.corrections`` has
the arithmetic of each name, with the tensors that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Correction(Protocol):
    """What a stage changes about its updates because its gradients are stale.

    Attributes:
        name: key in ``runtime.asynchronous.corrections.CORRECTIONS``.
        copies: copies of the stage's weights that its tensors take at most.
    """

    @property
    def name(self) -> str: ...

    @property
    def copies(self) -> int: ...

    def rate(self, lag: int, updates: int) -> float:
        """Return the factor on the learning rate after so many updates of a stage with a lag."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """A learning rate that rises from ``lr / lag`` to ``lr`` (PipeMare, technique 1).

    Attributes:
        length: N, updates until it is reached: ``lr / lag ** (1 - min(t / N, 1))`` at update t.
    """

    length: int

    name: ClassVar[str] = "ramp"
    copies: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"ramp is a number of updates, at least 0, not {self.length}")

    def rate(self, lag: int, updates: int) -> float:
        if updates >= self.length or lag <= 1:
            return 1.0
        return math.pow(lag, updates / self.length - 1)


@dataclass(frozen=True, slots=True)
class NormClip:
    """A bound on the gradient norm of a stage, relative to its own running mean.

    Attributes:
        multiple: of the running mean.
    """

    multiple: float

    name: ClassVar[str] = "norm-clip"
    copies: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 1 < self.multiple < math.inf:
            raise ValueError(
                f"clip is a multiple of the usual gradient norm, over 1, or 0; not {self.multiple}"
            )

    def rate(self, lag: int, updates: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Updates that make up for the one before, which came from an older gradient.

    Attributes:
        share: of ``u_t - u_(t-1)`` that is added to update ``u_t``.
    """

    share: float

    name: ClassVar[str] = "error-feedback"
    copies: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.share < math.inf:
            raise ValueError(f"share is a factor on an update, more than 0, not {self.share}")

    def rate(self, lag: int, updates: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class BasisRotation:
    """Steps in the eigenbasis of the gradients' second moments, matrix by matrix.

    Attributes:
        every: updates from one basis to the next.
        memory: weight of the past in the second moments.
    """

    every: int
    memory: float

    name: ClassVar[str] = "basis-rotation"
    copies: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is a number of updates, at least 1, not {self.every}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory is at least 0 and less than 1, not {self.memory}")

    def rate(self, lag: int, updates: int) -> float:
        return 1.0


def rate_of(corrections: Sequence[Correction], lag: int, updates: int) -> float:
    """Return the factor of all corrections on the learning rate."""
    return math.prod(correction.rate(lag, updates) for correction in corrections)
