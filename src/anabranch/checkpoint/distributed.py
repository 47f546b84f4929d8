"""Conversion from and to PyTorch's distributed checkpoints (DCP), by full names::

    model/layers.0.weight               <->    model.layers.0.weight
    optimizer/exp_avg/layers.0.weight   <->    optimizer.state.layers.0.weight.exp_avg
    options of the parameter's group    <->    optimizer.param_groups.layers.0.weight.lr

That is the form of ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``, which
``set_optimizer_state_dict`` and torchtitan read. State without a place in DCP (position in the
data, kind of the optimizer) is under ``anabranch``. DCP's files are pickles; here they are read
without running code that a pickle names.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import secrets
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from anabranch.checkpoint.export import require_new, written_whole
from anabranch.checkpoint.manifest import Description, Progress
from anabranch.checkpoint.optimizer import option
from anabranch.checkpoint.reading import Checkpoint, load_state_dict
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.writing import RankPart, Target
from anabranch.errors import FileFormatError
from anabranch.files.jsonfile import FilePath, describe_mistake

_STATE = re.compile(r"^(?:app\.)?(?:optimizer|optim)\.state\.(.+)$")
_GROUPS = re.compile(r"^(?:app\.)?(?:optimizer|optim)\.param_groups\.(.+)$")
_OWN = "anabranch."


@dataclass(frozen=True)
class Converted:
    """Result of a conversion: its path, and numbers of tensors of model and optimizer."""

    path: Path
    tensors: int
    optimizer_tensors: int


def is_distributed(folder: FilePath) -> bool:
    return (Path(folder) / ".metadata").is_file()


def to_distributed(checkpoint: FilePath, output: FilePath) -> Converted:
    """Write a checkpoint as a distributed checkpoint of PyTorch, in a new folder.

    Raises:
        FileFormatError: if the checkpoint is incomplete or damaged.
        TrainingError: if the folder exists or cannot be written.
    """
    saved, path = Checkpoint(checkpoint), require_new(output)
    model, manifest = load_state_dict(saved.folder), saved.manifest
    state: dict[str, Any] = {}
    for key in saved.keys("optimizer"):
        entry, _, name = key.partition("/")
        state[f"state.{name}.{entry}"] = saved.tensor(f"optimizer/{key}")
    count = len(state)
    if manifest.optimizer is not None:
        for name, entries in manifest.optimizer.scalars.items():
            state |= {f"state.{name}.{key}": value for key, value in entries.items()}
        for group in manifest.optimizer.groups:
            for name in group.parameters:
                state |= {f"param_groups.{name}.{k}": v for k, v in group.options.items()}
    rest = {
        "progress": saved.progress.model_dump(),
        "kind": manifest.optimizer.kind if manifest.optimizer is not None else None,
        **manifest.model_dump(include={"scheduler", "aliases", "transient", "pretrained"}),
    }
    first = [name for name in manifest.transient if name not in manifest.aliases]
    buffers = {name: saved.tensor(f"model/{name}") for name in first}
    own = {"rest": json.dumps(rest), **{f"buffers.{n}": b for n, b in buffers.items()}}
    document = {"model": model, "optimizer": state, "anabranch": own}
    with written_whole(path, CheckpointException) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(document, checkpoint_id=partial, no_dist=True)
    return Converted(path, len(model), count)


def from_distributed(
    folder: FilePath, output: FilePath, *, optimizer: str | None = None
) -> Converted:
    """Write a distributed checkpoint of PyTorch as a checkpoint from which training resumes.

    Args:
        optimizer: class of the optimizer whose state it has, such as ``AdamW``; needed if it was
            not written by ``to_distributed``. Position and scheduler then begin anew.

    Raises:
        FileFormatError: if it is damaged, or holds entries that no checkpoint takes.
        TrainingError: if the output exists or cannot be written.
    """
    entries = _read(Path(folder))
    rest = json.loads(entries.pop(f"{_OWN}rest", "{}"))
    own = f"{_OWN}buffers."
    buffers = {k.removeprefix(own): v for k, v in entries.items() if k.startswith(own)}
    model = _model(entries) | buffers
    state, scalars, options = _optimizer(entries, model)
    kind, progress = rest.pop("kind", None) or optimizer, rest.pop("progress", {})
    if (state or options) and not kind:
        raise FileFormatError(
            f"{folder} has the state of an optimizer, but not which one: name its class, such as "
            "--optimizer AdamW"
        )
    aliases = rest.get("aliases", _tied(model, state))
    model = {name: tensor for name, tensor in model.items() if name not in aliases}
    tensors = {f"model/{name}": tensor for name, tensor in model.items()}
    tensors |= {f"optimizer/{key}/{name}": t for (name, key), t in state.items()}
    if kind:
        groups = [{"options": o, "parameters": [name]} for name, o in options.items()]
        rest["optimizer"] = {"kind": kind, "scalars": scalars, "groups": groups}
    try:
        target = Target(Path(output), secrets.token_hex(8), 1, Progress.model_validate(progress))
        description = Description.model_validate({**rest, "aliases": aliases})
    except ValidationError as error:
        raise FileFormatError(f"{folder}: {describe_mistake(error)}") from error
    saving = Saving(target, 0, RankPart(tensors, **dict(description)), keep=None, timeout=60.0)
    saving.confirm()
    saving.wait()
    return Converted(target.folder, len(model), len(state))


def _read(folder: Path) -> dict[str, Any]:
    """Read the tensors and other entries of a distributed checkpoint, by full names."""
    try:
        listed = _PlainReader(folder).read_metadata().state_dict_metadata
        entries: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in listed.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(entries, storage_reader=_PlainReader(folder), planner=_LoadPlanner(), no_dist=True)
        return entries
    except (Exception, CheckpointException) as error:
        why = next(iter(error.failures.values()))[0] if hasattr(error, "failures") else error
        raise FileFormatError(
            f"{folder} cannot be read as a distributed checkpoint of PyTorch's: {why}"
        ) from error


def _model(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the model, which may be below ``model`` or beside the optimizer."""
    names = [
        name
        for name, value in entries.items()
        if isinstance(value, Tensor) and not _STATE.match(name) and not name.startswith(_OWN)
    ]
    for start in ("app.model.", "model."):
        if names and all(name.startswith(start) for name in names):
            return {name.removeprefix(start): entries[name] for name in names}
    return {name: entries[name] for name in names}


def _optimizer(
    entries: Mapping[str, Any], model: Mapping[str, Tensor]
) -> tuple[dict[tuple[str, str], Tensor], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return tensors by (parameter, entry), and other entries and options by parameter."""
    state: dict[tuple[str, str], Tensor] = {}
    scalars: dict[str, dict[str, Any]] = defaultdict(dict)
    options, groups = dict[str, dict[str, Any]](), defaultdict[str, dict[str, Any]](dict)
    for full, value in entries.items():
        if match := _STATE.match(full):
            name, _, key = match[1].rpartition(".")
            if isinstance(value, Tensor):
                state[name, key] = value
            else:
                scalars[name][key] = value
        elif match := _GROUPS.match(full):
            name, _, key = match[1].rpartition(".")
            groups[name][key] = value
    for name, values in groups.items():
        # A group has its parameters in a list, unless the state was flattened.
        known = {key: option(key, value) for key, value in values.items() if key != "params"}
        options |= dict.fromkeys(values.get("params", [name]), known)
    if unknown := sorted({name for name, _ in state} - model.keys()):
        raise FileFormatError(f"the optimizer has a state of {unknown[0]}, which the model lacks")
    return state, dict(scalars), options


def _tied(model: Mapping[str, Tensor], state: Mapping[tuple[str, str], Tensor]) -> dict[str, str]:
    """Return name -> trained name, for untrained tensors that equal a trained one bit by bit."""
    trained = {name for name, _ in state}
    return {
        name: first
        for name, tensor in model.items()
        if trained and name not in trained
        for first in trained
        if tensor.dtype == model[first].dtype and torch.equal(tensor, model[first])
    }


class _LoadPlanner(DefaultLoadPlanner):
    """Loads entries that are no tensors as plain data only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = loaded


class _PlainReader(FileSystemReader):
    """Reads the list of tensors without running code that a pickle names."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class _Unpickler(pickle.Unpickler):
    """Accepts only the classes of which DCP's list of tensors is made."""

    def find_class(self, module: str, name: str) -> Any:
        part = getattr(dcp_metadata, name, None) if module == _PARTS else None
        is_part = isinstance(part, type) and part.__module__ == module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_part or is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


_PARTS = "torch.distributed.checkpoint.metadata"
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}
