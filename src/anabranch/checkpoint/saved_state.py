"""The state of a run from which every rank takes its part, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from anabranch.checkpoint.manifest import OptimizerState, Progress


class SavedState(Protocol):
    """A checkpoint, or what ranks have sent each other; tensors by the model's own names."""

    @property
    def where(self) -> object:
        """Origin of the state, for messages."""

    @property
    def optimizer(self) -> OptimizerState | None:
        """State of the optimizer besides tensors; None if nothing is trained."""

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """The state of the scheduler, if there is one."""

    @property
    def progress(self) -> Progress:
        """Position of training."""

    def keys(self, prefix: str) -> list[str]:
        """The rest of every key that begins with ``prefix/``."""

    def require_model(self, names: Sequence[str]) -> None:
        """Check that it is of a model with these tensors; raises FileFormatError."""

    def tensor(self, key: str, like: Tensor | None = None) -> Tensor:
        """One tensor, such as ``model/text.0.weight``, that has the shape and type of ``like``."""
