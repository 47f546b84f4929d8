"""Writing of a checkpoint by all ranks, into a folder that gets its name in the end.

::

    rank 0    begin: .step-8.9f31....partial    write_part    finish: manifest, rename to step-8
    others                                      write_part

A process that is killed leaves a ``.partial`` folder behind, which the next checkpoint in the same
place removes. In a run that still writes, the first rank holds a lock on its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from anabranch.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    Description,
    Group,
    Manifest,
    OptimizerState,
    Progress,
    dtype_name,
    file_checksum,
    sealed,
)
from anabranch.errors import TrainingError, some
from anabranch.files.jsonfile import write_document, write_whole

_PARTIAL = re.compile(r"^\..+\.([0-9a-f]{1,16}|old)\.partial$")


class RankPart:
    """Part of a checkpoint that one rank saves.

    Attributes:
        tensors: key as in the manifest -> tensor.
        description: ``Description`` as JSON, as of the time when the part was made.

    Args:
        rest: fields of ``Description``: ``optimizer`` for the parameters that the rank owns;
            ``aliases``, ``transient`` and ``pretrained`` from the first rank only.

    Raises:
        TrainingError: if the state has values that neither JSON nor a safetensors file can hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor], **rest: Any) -> None:
        self.tensors = tensors
        if wide := [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]:
            raise TrainingError(
                f"{some(wide)} cannot be saved: safetensors files have no complex128; make them "
                "complex64, or keep real and imaginary parts (torch.view_as_real)"
            )
        try:
            described = Description(**rest).model_dump()
            text = json.dumps(described, allow_nan=False, default=_in_json)
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"the state of the optimizer or the scheduler cannot be saved: {error}; a "
                "checkpoint takes tensors, numbers, strings, and lists and mappings of them"
            ) from error
        self.description: dict[str, Any] = json.loads(text)

    @property
    def listed(self) -> dict[str, list[Any]]:
        """Key -> [shape, name of the type] of each tensor."""
        return {key: [list(t.shape), dtype_name(t.dtype)] for key, t in self.tensors.items()}


@dataclass(frozen=True)
class Target:
    """Place of a checkpoint that is being written.

    Attributes:
        folder: its final path.
        id: id of the checkpoint, in every file; the same on all ranks.
    """

    folder: Path
    id: str
    num_ranks: int
    progress: Progress

    @property
    def partial(self) -> Path:
        """Folder in which it is written before it takes its name."""
        return self.folder.with_name(f".{self.folder.name}.{self.id}.partial")

    def file(self, rank: int) -> Path:
        return self.partial / f"rank-{rank}.safetensors"

    def description(self, rank: int) -> Path:
        """Return the file that describes one rank's part, written when its tensors are on disk."""
        return self.partial / f"rank-{rank}.json"


def begin(target: Target) -> int:
    """Make the new folder, on one rank; return its lock for ``finish`` or ``abandon``.

    Raises:
        TrainingError: if the final name exists, or the folder cannot be made.
    """
    folder, partial = target.folder, target.partial
    if os.path.lexists(folder):
        raise TrainingError(
            f"{folder} exists, and a checkpoint is never written over another; choose a new folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tidy(folder.parent)
        while True:
            partial.mkdir()
            # Another run may remove the folder before it is locked.
            if (lock := _lock(partial)) is not None:
                return lock
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written: {error.strerror}") from error


def tidy(parent: Path) -> None:
    """Remove half-written checkpoints of killed runs from a folder."""
    for partial in parent.iterdir():
        if not is_partial(partial):
            continue
        lock = _lock(partial)
        if lock is not None and lock >= 0:
            shutil.rmtree(partial, ignore_errors=True)
            _unlock(lock)


def is_partial(path: Path) -> bool:
    """Return True for the folder of a checkpoint that was begun, or is being removed."""
    return _PARTIAL.match(path.name) is not None and path.is_dir()


def remove(folder: Path) -> None:
    """Remove a checkpoint under a name that is tidied up later if this process is killed."""
    gone = folder.with_name(f".{folder.name}.old.partial")
    try:
        folder.rename(gone)
    except OSError:
        return  # another process was faster, or the folder may not be changed
    shutil.rmtree(gone, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """Lock a folder as long as the descriptor is open; None if it is locked or gone, -1 on a file
    system without locks, where nothing is ever tidied up.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        return -1
    if folder.exists():
        return descriptor
    os.close(descriptor)
    return None


def _unlock(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def write_part(target: Target, rank: int, part: RankPart) -> None:
    """Write one rank's part; raises TrainingError if it cannot be stored."""
    file = target.file(rank)
    tensors = {key: _plain(tensor) for key, tensor in part.tensors.items()}
    where = {
        key: {"file": file.name, "shape": list(t.shape), "dtype": dtype_name(t.dtype)}
        for key, t in tensors.items()
    }
    try:
        write_tensors(tensors, file, {"checkpoint": target.id, "step": str(target.progress.step)})
        sync(file)
        written = {
            **part.description,
            "tensors": where,
            "bytes": file.stat().st_size,
            "checksum": file_checksum(file),
        }
        write_whole(target.description(rank), json.dumps(written).encode())
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{file} cannot be written: {error}") from error


def write_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the usual permissions; the library's allow only its owner."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata)
    if file.stat().st_mode != mode:  # file systems without permissions refuse to change them
        file.chmod(mode)


def finish(target: Target, lock: int) -> None:
    """Join the parts and give the folder its name; called by one rank when all parts are written.

    Raises:
        TrainingError: if a part is missing, or the file system refuses.
    """
    folder, partial = target.folder, target.partial
    try:
        parts = {}
        for rank in range(target.num_ranks):
            description = target.description(rank)
            parts[target.file(rank).name] = json.loads(description.read_text())
            description.unlink()
        write_document(partial / MANIFEST, _manifest(target, parts))
        sync(partial)
        if os.path.lexists(folder):
            raise FileExistsError(0, "it came into being meanwhile")
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be written: {error}; several machines need a file system that all see"
        ) from error
    _unlock(lock)


def abandon(target: Target, lock: int) -> None:
    """Remove an unfinished checkpoint; a rank that still writes finds the folder gone."""
    remove(target.partial)
    _unlock(lock)


def joined(parts: Collection[Mapping[str, Any]]) -> Description:
    """Join the descriptions of the parts of all ranks, as ``RankPart`` has them."""
    states = [part["optimizer"] for part in parts if part["optimizer"] is not None]
    optimizer = None
    if states:
        optimizer = OptimizerState(
            kind=states[0]["kind"],
            groups=_merged([Group(**group) for state in states for group in state["groups"]]),
            scalars={name: values for s in states for name, values in s["scalars"].items()},
        )
    return Description(
        aliases={alias: name for part in parts for alias, name in part["aliases"].items()},
        transient=[name for part in parts for name in part["transient"]],
        pretrained=[entry for part in parts for entry in part["pretrained"]],
        frozen={name: number for part in parts for name, number in part["frozen"].items()},
        optimizer=optimizer,
        scheduler=next((part["scheduler"] for part in parts if part["scheduler"]), None),
    )


def _manifest(target: Target, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    descriptions = parts.values()
    document = {
        "schema": SCHEMA,
        "id": target.id,
        **target.progress.model_dump(),
        "files": {name: part["bytes"] for name, part in parts.items()},
        "checksums": {name: part["checksum"] for name, part in parts.items()},
        "tensors": {key: entry for part in descriptions for key, entry in part["tensors"].items()},
        **joined(descriptions).model_dump(),
    }
    checked = Manifest.model_validate({**document, "checksum": "0" * 64})
    return sealed(checked.model_dump(by_alias=True))


def _merged(groups: Sequence[Group]) -> list[Group]:
    """Merge groups of several ranks that have the same options."""
    merged: list[Group] = []
    for group in groups:
        twin = next((m for m in merged if m.options == group.options), None)
        if twin is None:
            merged.append(group)
        else:
            twin.parameters[:] = dict.fromkeys(twin.parameters + group.parameters)
    return merged


def _in_json(value: Any) -> Any:
    """Return the numbers of a tensor, such as a learning rate, for JSON."""
    if isinstance(value, Tensor):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor contiguous, on the host, with a storage of its own."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def sync(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
