"""Corrections for stale gradients, made around the optimizer's step of one stage."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a stage's optimizer that is about to be made.

    Attributes:
        parameters: the trainable ones, each with its gradient or without.
        optimizer: of torch.
        updates: made before.
    """

    parameters: tuple[Any, ...]
    optimizer: Any
    updates: int


class Correction(Protocol):
    """What a stage changes about its updates because its gradients are stale.

    A policy names its corrections; ``runtime.asynchronous.corrections`` makes them.

    Attributes:
        kept: its tensors by the first part of their names in a checkpoint, then by parameter; one
            for the whole stage is there for every parameter.
    """

    kept: dict[str, dict[int, Any]]

    def rate(self, updates: int) -> float:
        """Return the factor on the learning rate after so many updates, also of predictions."""

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Change gradients before the step, the update after it."""
