"""The state of a run from which every rank takes its part, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from anabranch.checkpoint.manifest import Description, Progress, fingerprint, type_text
from anabranch.errors import FileFormatError, some
from anabranch.graph.slices import read_by_name, whole_name


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raises FileFormatError if it is damaged."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise FileFormatError(f"{file} cannot be read, or is damaged: {error}") from error


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file; raises FileFormatError if it is damaged."""
    with opened(file) as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


class SavedState:
    """A checkpoint, or what ranks have sent each other; tensors by the model's own names.

    Attributes:
        where: origin of the state, for messages.
        optimizer: state of the optimizer besides tensors; None if nothing was trained.
        scheduler: the state of the scheduler, if there was one.
        progress: position of training.
        frozen: parameters that it leaves out, which the module has -> their fingerprint.

    Args:
        keys: of all tensors, such as ``model/text.0.weight``.
        read: returns the tensor of a key.
    """

    def __init__(
        self,
        where: object,
        keys: Iterable[str],
        read: Callable[[str], Tensor],
        described: Description,
        progress: Progress,
    ) -> None:
        self.where, self._read, self.progress = where, read, progress
        self.optimizer, self.scheduler = described.optimizer, described.scheduler
        self.frozen = described.frozen
        self._stored: dict[str, list[str]] = {}
        for key in keys:
            self._stored.setdefault(whole_name(key), []).append(key)

    def keys(self, prefix: str) -> list[str]:
        """The rest of every key of a whole tensor that begins with ``prefix/``."""
        start = f"{prefix}/"
        return [key.removeprefix(start) for key in self._stored if key.startswith(start)]

    def require_model(self, names: Collection[str]) -> None:
        """Check that the state is that of a model with these tensors.

        Raises:
            FileFormatError: naming those that are missing, or one that the model lacks.
        """
        self.require([f"model/{name}" for name in names if name not in self.frozen])
        unknown = sorted({*self.keys("model"), *self.frozen} - set(names))
        if unknown:
            raise FileFormatError(
                f"{self.where} holds {len(unknown)} tensors that the model lacks, such as "
                f"{unknown[0]}; the checkpoint is of another model, or of another configuration "
                "of it"
            )

    def require_frozen(self, name: str, parameter: Tensor) -> None:
        """Check that a parameter which the checkpoint leaves out has the values of then.

        Raises:
            FileFormatError: naming it.
        """
        if fingerprint(parameter) != self.frozen[name]:
            raise FileFormatError(
                f"{self.where} leaves frozen parameters out (save_frozen=False), and {name} has "
                "other values in the module than when it was written: build the module with the "
                "same pretrained weights before it resumes"
            )

    def require(self, keys: Sequence[str]) -> None:
        """Check that tensors exist; raises FileFormatError, which names those that do not."""
        missing = [key for key in keys if whole_name(key) not in self._stored]
        if missing:
            raise FileFormatError(
                f"{self.where} lacks {len(missing)} of the tensors that the model has: "
                f"{some(missing, 5)}; the checkpoint is of another model, or of another "
                "configuration of it"
            )

    def tensor(self, key: str, like: Tensor | None = None) -> Tensor:
        """Read one tensor, such as ``model/text.0.weight``, that has the shape and type of
        ``like``.

        Raises:
            FileFormatError: naming file and key, if it is missing, damaged or of another shape.
        """
        self.require([key])
        try:
            tensor = read_by_name(key, self._stored[whole_name(key)], self._read)
        except (ValueError, IndexError, RuntimeError) as error:
            raise FileFormatError(f"{self.where}: tensor {key}: {error}") from error
        if like is not None:
            self.require_type(key, type_text(tensor.dtype, tensor.shape), like)
        return tensor

    def require_type(self, key: str, stored: str, like: Tensor) -> None:
        """Check that a tensor that is ``stored`` as such has the type and shape of ``like``.

        Raises:
            FileFormatError: naming file, key and both.
        """
        if stored != (expected := type_text(like.dtype, like.shape)):
            raise FileFormatError(
                f"{self.where}: tensor {key} is {stored}, but the model has {expected} there"
            )
