"""A checkpoint that is being read: complete, of one piece and undamaged, or refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from anabranch.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    Manifest,
    OptimizerState,
    Progress,
    checksum_of,
    dtype_name,
    file_checksum,
    type_text,
)
from anabranch.checkpoint.series import newest
from anabranch.errors import FileFormatError
from anabranch.files.jsonfile import read_document
from anabranch.graph.slices import read_by_name, whole_name


class Checkpoint:
    """A checkpoint that is being read.

    Args:
        folder: a checkpoint, or the folder of a run with several, of which it is the newest.

    Raises:
        FileFormatError: if the folder is none, the manifest is damaged, or a file is missing, cut
            short or of another checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileFormatError(f"{self.folder} is no checkpoint: there is no such folder")
        if not self.where.exists():
            self.folder = newest(self.folder) or self.folder
        if not self.where.exists():
            raise FileFormatError(
                f"{self.folder} is no checkpoint: {self.where} does not exist, nor does a folder "
                f"step-N with one{self._way_on()}"
            )
        self.manifest = read_document(self.where, SCHEMA, Manifest)
        # Keys that came into being later are in no checkpoint from before.
        written = self.manifest.model_dump(by_alias=True, exclude_unset=True)
        if checksum_of(written) != self.manifest.checksum:
            raise FileFormatError(
                f"{self.where} was changed or damaged after it was written: its checksum is that "
                "of another content; take an earlier checkpoint"
            )
        if self.manifest.files.keys() != self.manifest.checksums.keys():
            raise FileFormatError(f"{self.where}: files and checksums list different files")
        for key, entry in self.manifest.tensors.items():
            if entry.file not in self.manifest.files:
                raise FileFormatError(
                    f"{self.where}: tensors.{key} is in {entry.file}, which files does not list"
                )
        for name, size in self.manifest.files.items():
            self._check_file(name, size)
        self._stored: dict[str, list[str]] = {}
        for key in self.manifest.tensors:
            self._stored.setdefault(whole_name(key), []).append(key)

    @property
    def where(self) -> Path:
        """The manifest, for messages."""
        return self.folder / MANIFEST

    def _way_on(self) -> str:
        """Suggest another folder, one further in or that of ``--save``, where no manifest is."""
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
        try:
            with safe_open(path, framework="pt") as file:
                told, keys = file.metadata() or {}, set(file.keys())
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path} is damaged: {error}; take an earlier one") from error
        if told.get("checkpoint") != self.manifest.id:
            raise FileFormatError(
                f"{path} is of another checkpoint than {self.where}: of step "
                f"{told.get('step', '?')}, not {self.manifest.step}, or of another run; copy whole "
                "folders, or take another checkpoint"
            )
        listed = {key for key, entry in self.manifest.tensors.items() if entry.file == name}
        if keys != listed:
            example = min(keys ^ listed)
            raise FileFormatError(
                f"{path} and {self.where} do not list the same tensors: only one of them has "
                f"{example}; take an earlier checkpoint"
            )

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare files with their checksums; ``shares`` ranks can do it together, each its part.

        Raises:
            FileFormatError: naming the first file that is not as it was written.
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

    @property
    def progress(self) -> Progress:
        """Position of training."""
        return Progress(**{f.name: getattr(self.manifest, f.name) for f in fields(Progress)})

    @property
    def optimizer(self) -> OptimizerState | None:
        """State of the optimizer besides tensors; None if nothing was trained."""
        return self.manifest.optimizer

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """The state of the scheduler, if there was one."""
        return self.manifest.scheduler

    def keys(self, prefix: str) -> list[str]:
        """The rest of every key of a whole tensor that begins with ``prefix/``."""
        start = f"{prefix}/"
        return [key.removeprefix(start) for key in self._stored if key.startswith(start)]

    def require_model(self, names: Sequence[str]) -> None:
        """Check that the checkpoint is of a model with these tensors.

        Raises:
            FileFormatError: naming those that are missing, or one that the model lacks.
        """
        self.require([f"model/{name}" for name in names])
        unknown = sorted(set(self.keys("model")) - set(names))
        if unknown:
            raise FileFormatError(
                f"{self.where} holds {len(unknown)} tensors that the model lacks, such as "
                f"{unknown[0]}; the checkpoint is of another model, or of another configuration "
                "of it"
            )

    def require(self, keys: Sequence[str]) -> None:
        """Check that tensors exist; raises FileFormatError, which names those that do not."""
        missing = [key for key in keys if whole_name(key) not in self._stored]
        if missing:
            shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise FileFormatError(
                f"{self.where} lacks {len(missing)} of the tensors that the model has: {shown}; "
                "the checkpoint is of another model, or of another configuration of it"
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
        if like is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype):
            raise FileFormatError(
                f"{self.where}: tensor {key} is {type_text(tensor.dtype, tensor.shape)}, but the "
                f"model has {type_text(like.dtype, like.shape)} there"
            )
        return tensor

    def _read(self, key: str) -> Tensor:
        """Read a tensor as it is stored."""
        entry = self.manifest.tensors[key]
        path = self.folder / entry.file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path}: tensor {key} cannot be read: {error}") from error
        if list(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
            raise FileFormatError(
                f"{path}: tensor {key} is {type_text(tensor.dtype, tensor.shape)}, but the "
                f"manifest says {entry.dtype}{entry.shape}"
            )
        return tensor


def load_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The whole model of a checkpoint, as ``torch.nn.Module.load_state_dict`` takes it.

    Args:
        folder: a checkpoint, or the folder of a run with several, of which it is the newest.

    Returns:
        Tensors on the CPU, by the names of the model's own ``state_dict``; the same tensor under
        each name of one that the model shares.

    Raises:
        FileFormatError: if the checkpoint is incomplete or damaged.
    """
    saved = Checkpoint(folder)
    saved.verify()
    tensors = {name: saved.tensor(f"model/{name}") for name in saved.keys("model")}
    tensors |= {a: tensors[n] for a, n in saved.manifest.aliases.items() if n in tensors}
    return {name: t for name, t in tensors.items() if name not in saved.manifest.transient}
