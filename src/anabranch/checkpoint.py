"""Training state on disk, keyed by the model's own names, so that any plan loads it::

    run/step-200/
        manifest.json         step, position in the data, scheduler, options of the optimizer, where
        each tensor is rank-0.safetensors    model/text.0.weight  optimizer/exp_avg/text.0.weight
        ... rank-1.safetensors    model/image.0.weight ...

Every rank writes what it owns, in a new folder that takes its final name once everything is on the
disk. Loading reads only the tensors that are asked for. Nothing is pickled, so a checkpoint from a
stranger can be wrong but not dangerous. All ranks have to see the file system.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anabranch.errors import FileFormatError, TrainingError
from anabranch.jsonfile import Strict, read_document, write_document

SCHEMA = "anabranch.checkpoint/1"
MANIFEST = "manifest.json"

_Count = Annotated[int, Field(ge=0, le=2**62)]
Scalar = bool | int | float | str | None


class TensorEntry(Strict):
    """Where a tensor is."""

    file: Annotated[str, Field(pattern=r"^rank-\d{1,6}\.safetensors$")]
    shape: list[_Count]
    dtype: str


class Group(Strict):
    """One parameter group of an optimizer: its options, and the names of its parameters."""

    options: dict[str, Any]
    parameters: list[str]


class OptimizerState(Strict):
    """What an optimizer has besides tensors."""

    kind: str
    groups: list[Group]
    scalars: dict[str, dict[str, Scalar]]


class Manifest(Strict):
    """The JSON document of a checkpoint."""

    schema_: Literal["anabranch.checkpoint/1"] = Field(alias="schema")
    step: _Count
    epoch: _Count
    position: _Count
    seed: _Count
    files: dict[str, _Count]
    tensors: dict[str, TensorEntry]
    optimizer: OptimizerState | None
    scheduler: dict[str, Any] | None
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    loss_streak: _Count = 0


@dataclass(frozen=True)
class RankPart:
    """What one rank saves: tensors, parameter groups with the names that it owns, ``scalars``
    (parameter -> other optimizer state), and ``kind``, class of its optimizer or empty.
    """

    tensors: Mapping[str, Tensor]
    groups: Sequence[Group] = ()
    kind: str = ""
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    scheduler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps done, epoch, batches of the epoch done, seed of random numbers, and under fp16 the
    scale of the loss with its steps without overflow.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    seed: int = 0
    loss_scale: float | None = None
    loss_streak: int = 0


def partial_folder(folder: Path, token: int) -> Path:
    """Where a checkpoint is written before it takes its name; the same on every rank."""
    return folder.with_name(f".{folder.name}.{token:x}.partial")


def begin(folder: Path, token: int) -> None:
    """Make the new folder, on one rank; raises TrainingError if the final name exists."""
    if os.path.lexists(folder):
        raise TrainingError(
            f"{folder} exists, and a checkpoint is never written over another; choose a new folder"
        )
    try:
        partial_folder(folder, token).mkdir(parents=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written: {error.strerror}") from error


def write_part(folder: Path, token: int, rank: int, part: RankPart) -> None:
    """Write what one rank owns; raises TrainingError if it cannot be stored."""
    target = partial_folder(folder, token) / f"rank-{rank}.safetensors"
    tensors = {key: _plain(tensor) for key, tensor in part.tensors.items()}
    description = {
        "tensors": {
            key: {"file": target.name, "shape": list(t.shape), "dtype": _dtype_name(t.dtype)}
            for key, t in tensors.items()
        },
        "kind": part.kind,
        "groups": [group.model_dump() for group in part.groups],
        "scalars": {name: dict(state) for name, state in part.scalars.items()},
        "scheduler": part.scheduler,
    }
    try:
        text = json.dumps(description, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"the state of the optimizer or the scheduler cannot be saved: {error}; a checkpoint "
            "takes tensors, numbers, strings, and lists and mappings of them"
        ) from error
    try:
        save_file(tensors, target)
        _sync(target)
        target.with_suffix(".json").write_text(text)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{target} cannot be written: {error}") from error


def finish(folder: Path, token: int, num_ranks: int, progress: Progress) -> None:
    """Join the parts and give the folder its name; called by one rank when all parts are written.
    Raises TrainingError if a part is missing, or the file system refuses.
    """
    partial = partial_folder(folder, token)
    try:
        parts, files = [], {}
        for rank in range(num_ranks):
            file = partial / f"rank-{rank}.safetensors"
            files[file.name] = file.stat().st_size
            description = file.with_suffix(".json")
            parts.append(json.loads(description.read_text()))
            description.unlink()
        write_document(partial / MANIFEST, _manifest(parts, files, progress))
        _sync(partial)
        if os.path.lexists(folder):
            raise FileExistsError(0, "it came into being meanwhile")
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be written: {error}; with several machines, the folder has to be on "
            "a file system that all of them see"
        ) from error


def abandon(folder: Path, token: int) -> None:
    """Remove what was written so far."""
    shutil.rmtree(partial_folder(folder, token), ignore_errors=True)


def _manifest(
    parts: Sequence[Mapping[str, Any]], files: Mapping[str, int], progress: Progress
) -> dict[str, Any]:
    kinds = [part["kind"] for part in parts if part["kind"]]
    scheduler = next((part["scheduler"] for part in parts if part["scheduler"]), None)
    optimizer = None
    if kinds:
        optimizer = {
            "kind": kinds[0],
            "groups": _merged([group for part in parts for group in part["groups"]]),
            "scalars": {name: state for part in parts for name, state in part["scalars"].items()},
        }
    return {
        "schema": SCHEMA,
        **asdict(progress),
        "files": dict(files),
        "tensors": {key: entry for part in parts for key, entry in part["tensors"].items()},
        "optimizer": optimizer,
        "scheduler": scheduler,
    }


def _merged(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of several ranks that have the same options become one."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        twin = next((m for m in merged if m["options"] == group["options"]), None)
        if twin is None:
            merged.append(group)
        else:
            twin["parameters"] += group["parameters"]
    return merged


class Checkpoint:
    """A checkpoint that is being read.

    Raises:
        FileFormatError: if the folder is none, or a file is missing or cut short.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileFormatError(f"{self.folder} is no checkpoint: there is no such folder")
        self.manifest = read_document(self.where, SCHEMA, Manifest)
        for key, entry in self.manifest.tensors.items():
            if entry.file not in self.manifest.files:
                raise FileFormatError(
                    f"{self.where}: tensors.{key} is in {entry.file}, which files does not list"
                )
        for name, size in self.manifest.files.items():
            self._check_size(name, size)

    @property
    def where(self) -> Path:
        """The manifest, for messages."""
        return self.folder / MANIFEST

    def _check_size(self, name: str, size: int) -> None:
        if Path(name).name != name:
            raise FileFormatError(f"{self.where}: {name!r} in files is no plain file name")
        path = self.folder / name
        if not path.is_file():
            raise FileFormatError(f"{path} is missing; {self.where} lists it")
        actual = path.stat().st_size
        if actual != size:
            raise FileFormatError(
                f"{path} has {actual} bytes, but {size} were written; it was cut short or changed"
            )

    @property
    def progress(self) -> Progress:
        """Where training was."""
        return Progress(**{f.name: getattr(self.manifest, f.name) for f in fields(Progress)})

    def keys(self, prefix: str) -> list[str]:
        """The rest of every key that begins with ``prefix/``."""
        start = f"{prefix}/"
        return [key.removeprefix(start) for key in self.manifest.tensors if key.startswith(start)]

    def require(self, keys: Sequence[str]) -> None:
        """Check that tensors exist; raises FileFormatError, which names those that do not."""
        missing = [key for key in keys if key not in self.manifest.tensors]
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
        entry = self.manifest.tensors[key]
        path = self.folder / entry.file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path}: tensor {key} cannot be read: {error}") from error
        if list(tensor.shape) != entry.shape or _dtype_name(tensor.dtype) != entry.dtype:
            raise FileFormatError(
                f"{path}: tensor {key} is {_shown(tensor)}, but the manifest says "
                f"{entry.dtype}{entry.shape}"
            )
        if like is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype):
            raise FileFormatError(
                f"{path}: tensor {key} is {_shown(tensor)}, but the model has {_shown(like)} there"
            )
        return tensor


def optimizer_part(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], owned: set[str]
) -> tuple[dict[str, Tensor], list[Group], dict[str, dict[str, Scalar]]]:
    """Tensors, groups and other entries of this rank's optimizer, by names of parameters.

    ``names`` has the name by ``id``, ``owned`` what this rank saves. Raises TrainingError for a
    state that is neither tensor nor scalar.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    groups = []
    for group in optimizer.param_groups:
        mine = {names[id(p)]: p for p in group["params"] if names[id(p)] in owned}
        options = {k: _option(v) for k, v in group.items() if k not in _NO_OPTIONS}
        groups.append(Group(options=options, parameters=list(mine)))
        for name, parameter in mine.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{key}/{name}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    scalars.setdefault(name, {})[key] = value
                else:
                    raise TrainingError(
                        f"the optimizer keeps a {type(value).__name__} as {key!r} of {name}; a "
                        "checkpoint takes tensors and numbers"
                    )
    return tensors, groups, scalars


_NO_OPTIONS = ("params", "param_names")


def _option(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], checkpoint: Checkpoint
) -> None:
    """Give an optimizer the state that its parameters had; raises FileFormatError if the checkpoint
    has none for them, or that of another kind of optimizer.
    """
    saved = checkpoint.manifest.optimizer
    where = checkpoint.where
    kind = type(optimizer).__name__
    if saved is None or saved.kind != kind:
        found = "none" if saved is None else f"that of {saved.kind}"
        raise FileFormatError(
            f"{where}: the training resumes with {kind}, but the optimizer state is {found}; "
            "resume with the optimizer that wrote it"
        )
    options = {name: group.options for group in saved.groups for name in group.parameters}
    keys: dict[str, list[str]] = defaultdict(list)
    for rest in checkpoint.keys("optimizer"):
        key, _, name = rest.partition("/")
        keys[name].append(key)
    document = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, described in zip(optimizer.param_groups, document["param_groups"], strict=True):
        for index, parameter in zip(described["params"], group["params"], strict=True):
            name = names[id(parameter)]
            if name not in options:
                raise FileFormatError(f"{where}: optimizer.groups lacks the parameter {name}")
            tensors = {key: checkpoint.tensor(f"optimizer/{key}/{name}") for key in keys[name]}
            if entries := {**saved.scalars.get(name, {}), **tensors}:
                state[index] = entries
        if group["params"]:
            described.update(_like(options[names[id(group["params"][0])]], described))
    optimizer.load_state_dict({"state": state, "param_groups": document["param_groups"]})


def restore_scheduler(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
) -> None:
    """Give a scheduler its state, after ``restore_optimizer``; FileFormatError if there is none."""
    saved = checkpoint.manifest.scheduler
    if saved is None:
        raise FileFormatError(
            f"{checkpoint.where}: the training resumes with a scheduler, but scheduler is null; "
            "resume with the workload that wrote it"
        )
    # Lists with an entry per parameter group: this rank may have other groups than the one that
    # saved.
    per_group = {
        "base_lrs": [g.get("initial_lr", g["lr"]) for g in optimizer.param_groups],
        "_last_lr": [g["lr"] for g in optimizer.param_groups],
    }
    scheduler.load_state_dict(_with_own_groups(saved, per_group))


def _with_own_groups(
    state: Mapping[str, Any], per_group: Mapping[str, list[float]]
) -> dict[str, Any]:
    """A scheduler's state with this rank's lists, also in the schedulers that it is made of."""
    result = {**state, **{k: list(v) for k, v in per_group.items() if k in state}}
    if isinstance(parts := state.get("_schedulers"), list):
        result["_schedulers"] = [_with_own_groups(part, per_group) for part in parts]
    return result


def _like(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Saved options in the types that the optimizer uses: JSON has no tuples and no tensors."""
    result = {}
    for key, value in saved.items():
        before = now.get(key)
        if isinstance(before, tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(before, Tensor):
            value = torch.as_tensor(value, dtype=before.dtype, device=before.device)
        result[key] = value
    return result


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, on the host, with a storage of its own."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(tensor: Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
