"""Reading the state of a run; a checkpoint that is not whole and undamaged is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from anabranch.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    Description,
    Manifest,
    Progress,
    checksum_of,
    dtype_name,
    file_checksum,
    fingerprint,
    type_text,
)
from anabranch.checkpoint.series import newest
from anabranch.errors import FileFormatError, some
from anabranch.files.jsonfile import FilePath, read_document
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
    """A checkpoint, or a state that ranks have sent each other; tensors by the model's own names.

    Attributes:
        where: origin of the state, for messages.
        optimizer: state of the optimizer besides tensors; None if nothing was trained.
        scheduler: state of the scheduler, if there was one.
        progress: position of training.
        frozen: parameters of the module that it leaves out -> their fingerprint.

    Args:
        keys: keys of all tensors, such as ``model/text.0.weight``.
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
        """Return the keys of whole tensors that begin with ``prefix/``, without it."""
        start = f"{prefix}/"
        return [key.removeprefix(start) for key in self._stored if key.startswith(start)]

    def require_model(self, names: Collection[str]) -> None:
        """Check that the state has exactly these tensors of a model.

        Raises:
            FileFormatError: naming tensors that are missing, or one that the model lacks.
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
        """Check that a parameter which the checkpoint leaves out still has the same values.

        Raises:
            FileFormatError: naming the parameter.
        """
        if fingerprint(parameter) != self.frozen[name]:
            raise FileFormatError(
                f"{self.where} leaves frozen parameters out (save_frozen=False), and {name} has "
                "other values in the module than when it was written: build the module with the "
                "same pretrained weights before it resumes"
            )

    def require(self, keys: Sequence[str]) -> None:
        """Check that tensors exist; raises FileFormatError, which names missing ones."""
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
        """Check that ``stored``, the ``type_text`` of a tensor, is that of ``like``.

        Raises:
            FileFormatError: naming file, key and both types.
        """
        if stored != (expected := type_text(like.dtype, like.shape)):
            raise FileFormatError(
                f"{self.where}: tensor {key} is {stored}, but the model has {expected} there"
            )


class Checkpoint(SavedState):
    """A checkpoint on disk.

    Args:
        folder: a checkpoint, or the folder of a run with several, for the newest.

    Raises:
        FileFormatError: if the folder is no checkpoint, the manifest is damaged, or a file is
            missing, cut short or of another checkpoint.
    """

    def __init__(self, folder: FilePath) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            why = "it is a file" if self.folder.exists() else "there is no such folder"
            raise FileFormatError(f"{self.folder} is no checkpoint, which is a folder: {why}")
        if not (self.folder / MANIFEST).is_file():
            self.folder = newest(self.folder) or self.folder
        where = self.folder / MANIFEST
        if not where.is_file():
            raise FileFormatError(
                f"{self.folder} is no checkpoint: {where} does not exist, nor does a folder "
                f"step-N with one{self._way_on()}"
            )
        self.manifest = manifest = read_document(where, SCHEMA, Manifest)
        progress = Progress(**{name: getattr(manifest, name) for name in Progress.model_fields})
        super().__init__(where, manifest.tensors, self._read_stored, manifest, progress)
        # Keys that were added later are not in earlier checkpoints, nor in their checksums.
        written = self.manifest.model_dump(by_alias=True, exclude_unset=True)
        if checksum_of(written) != self.manifest.checksum:
            raise FileFormatError(
                f"{self.where} was changed or damaged after it was written: its checksum is that "
                "of another content; take an earlier checkpoint"
            )
        for name, size in self.manifest.files.items():
            self._check_file(name, size)

    def require_module(self, module: nn.Module) -> None:
        """Check by the manifest that it is of this model, or raise FileFormatError."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.require_model(tensors)
        for name, tensor in tensors.items():
            # A tensor stored in parts is compared when it is read.
            if entry := self.manifest.tensors.get(f"model/{name}"):
                self.require_type(f"model/{name}", f"{entry.dtype}{entry.shape}", tensor)

    def _way_on(self) -> str:
        """Suggest another folder than one without a manifest: inside it, or that of ``--save``."""
        inside = [p for p in sorted(self.folder.iterdir()) if (p / MANIFEST).exists() or newest(p)]
        if inside:
            return f"; {inside[0]} is one"
        if (self.folder / "run.json").exists():
            return (
                "; it has the figures and the report of a run, whose weights are in the folder of "
                "--save, if that was given"
            )
        return ""

    def _check_file(self, name: str, size: int) -> None:
        path = self.folder / name
        if not path.is_file():
            raise FileFormatError(f"{path} is missing; {self.where} lists it")
        actual = path.stat().st_size
        if actual != size:
            raise FileFormatError(
                f"{path} has {actual} bytes, but {size} were written; it was cut short or changed"
            )
        with opened(path) as file:
            metadata = file.metadata() or {}
        if metadata.get("checkpoint") != self.manifest.id:
            raise FileFormatError(
                f"{path} is of another checkpoint than {self.where}: of step "
                f"{metadata.get('step', '?')}, not {self.manifest.step}, or of another run; copy "
                "whole folders, or take another checkpoint"
            )

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare files with their checksums; ``shares`` ranks can each take a part.

        Raises:
            FileFormatError: naming the first file that has changed since it was written.
        """
        for name in sorted(self.manifest.files)[share::shares]:
            path = self.folder / name
            try:
                actual = file_checksum(path)
            except OSError as error:
                raise FileFormatError(f"{path} cannot be read: {error}") from error
            if actual != self.manifest.checksums[name]:
                raise FileFormatError(
                    f"{path} was changed or damaged after it was written: its checksum is another "
                    f"than in {self.where}; take an earlier checkpoint"
                )

    def names(self) -> dict[str, list[str]]:
        """Return first name -> all names of each tensor in the model's ``state_dict``."""
        names = {first: [first] for first in self.keys("model")}
        for alias, first in self.manifest.aliases.items():
            names.get(first, []).append(alias)
        transient = set(self.manifest.transient)
        listed = {first: [n for n in every if n not in transient] for first, every in names.items()}
        return {first: every for first, every in listed.items() if every}

    def _read_stored(self, key: str) -> Tensor:
        entry = self.manifest.tensors[key]
        path = self.folder / entry.file
        tensor = read_tensor(path, key)
        if list(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
            raise FileFormatError(
                f"{path}: tensor {key} is {type_text(tensor.dtype, tensor.shape)}, but the "
                f"manifest says {entry.dtype}{entry.shape}"
            )
        return tensor


def load_state_dict(folder: FilePath, *, optimizer_state: str = "") -> dict[str, Tensor]:
    """Load the whole model of a checkpoint, for ``torch.nn.Module.load_state_dict``.

    Args:
        folder: a checkpoint, or the folder of a run with several, for the newest.
        optimizer_state: name of a state that the optimizer keeps per parameter, such as a moving
            average, to be returned in place of these parameters.

    Returns:
        Tensors on the CPU, by the names of the model's own ``state_dict``; a tied tensor is under
        each of its names. A checkpoint that leaves frozen parameters out (``Workload.save_frozen``)
        has none of them: load it with ``strict=False``.

    Raises:
        FileFormatError: if the checkpoint is incomplete or damaged.
        ValueError: if the optimizer has no state of that name.
    """
    saved = Checkpoint(folder)
    saved.verify()
    kept = set(saved.keys(f"optimizer/{optimizer_state}")) if optimizer_state else set[str]()
    if optimizer_state and not kept:
        states = sorted({key.partition("/")[0] for key in saved.keys("optimizer")})
        raise ValueError(
            f"the optimizer of {saved.folder} has no state {optimizer_state!r}; it has "
            f"{', '.join(states) or 'none'}"
        )
    tensors: dict[str, Tensor] = {}
    for first, names in saved.names().items():
        kind = f"optimizer/{optimizer_state}" if first in kept else "model"
        tensors |= dict.fromkeys(names, saved.tensor(f"{kind}/{first}"))
    return tensors
