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
        lag: updates of the stage between forward and backward.
        dims: of a matrix; a benchmark that trains several models at once has one more.
    """

    parameters: tuple[Any, ...]
    optimizer: Any
    updates: int
    lag: int
    dims: int = 2


class Correction(Protocol):
    """Change of a stage's updates that makes up for stale gradients.

    A policy names its corrections; ``runtime.asynchronous.corrections`` has them.
    """

    def __call__(
        self, policy: Any, step: Step, *kept: dict[int, Any]
    ) -> AbstractContextManager[None]:
        """Change gradients before the step, the update after it.

        Args:
            policy: its fields are the options.
            kept: tensors from step to step, by the index of a parameter; one for the whole stage is
                there for every parameter.
        """
