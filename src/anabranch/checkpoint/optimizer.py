"""State of optimizers and schedulers by names of parameters, and back into their own types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from anabranch.checkpoint.manifest import OptimizerState, Option, Scalar
from anabranch.checkpoint.reading import SavedState
from anabranch.errors import FileFormatError, TrainingError
from anabranch.files.jsonfile import describe_mistake, shown
from anabranch.graph.slices import whole_name


def optimizer_part(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], owned: set[str]
) -> tuple[dict[str, Tensor], OptimizerState]:
    """Return tensors of this rank's optimizer and the rest of its state, by names of parameters.

    Args:
        names: ``id`` of a parameter -> its name.
        owned: names of the parameters whose state this rank saves.

    Raises:
        TrainingError: for a state that is neither tensor nor scalar.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    groups = []
    for group in optimizer.param_groups:
        owned_here = {names[id(p)]: p for p in group["params"] if names[id(p)] in owned}
        options = {k: option(k, v) for k, v in group.items() if k not in _NO_OPTIONS}
        parameters = list(dict.fromkeys(map(whole_name, owned_here)))
        groups.append({"options": options, "parameters": parameters})
        for name, parameter in owned_here.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{key}/{name}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    scalars.setdefault(whole_name(name), {})[key] = value
                else:
                    raise TrainingError(
                        f"the optimizer keeps a {type(value).__name__} as {key!r} of {name}; a "
                        "checkpoint takes tensors and numbers"
                    )
    document = {"kind": type(optimizer).__name__, "groups": groups, "scalars": scalars}
    try:
        return tensors, OptimizerState.model_validate(document)
    except ValidationError as error:
        raise TrainingError(f"the optimizer cannot be saved: {describe_mistake(error)}") from error


_NO_OPTIONS = ("params", "param_names")


def option(key: str, value: Any) -> Option:
    """Convert an option of an optimizer for a checkpoint; TrainingError if that is impossible."""
    plain = value.tolist() if isinstance(value, Tensor) else value
    plain = list(plain) if isinstance(plain, tuple) else plain
    numbers = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(number, bool | int | float | str | None) for number in numbers):
        raise TrainingError(
            f"the optimizer has a {type(value).__name__} as option {key!r}; a checkpoint takes "
            "numbers, texts, and tuples of numbers"
        )
    return cast(Option, plain)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], checkpoint: SavedState
) -> None:
    """Give an optimizer the saved state of its parameters; FileFormatError for another kind."""
    saved = checkpoint.optimizer
    where = checkpoint.where
    kind = type(optimizer).__name__
    if saved is None or saved.kind != kind:
        saved_kind = "none" if saved is None else f"that of {saved.kind}"
        raise FileFormatError(
            f"{where}: the training resumes with {kind}, but the optimizer state is {saved_kind}; "
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
            whole = whole_name(name)
            if whole not in options:
                raise FileFormatError(f"{where}: optimizer.groups lacks the parameter {whole}")
            tensors = {
                key: laid_out(checkpoint.tensor(f"optimizer/{key}/{name}"), parameter)
                for key in keys[whole]
            }
            if entries := {**saved.scalars.get(whole, {}), **tensors}:
                state[index] = entries
        if group["params"]:
            saved_options = options[whole_name(names[id(group["params"][0])])]
            described.update(_options(optimizer, group, saved_options, str(where)))
    optimizer.load_state_dict({"state": state, "param_groups": document["param_groups"]})


_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Options that schedulers of torch add to those of an optimizer."""


def _options(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the saved options of a parameter group in the types of the optimizer that resumes.

    Raises:
        FileFormatError: for a value of another kind, or an option that the optimizer lacks, if it
            is one of torch (others may add options when they step).
    """
    unknown = sorted(saved.keys() - group.keys() - _OF_SCHEDULERS)
    if unknown and type(optimizer).__module__.startswith("torch."):
        raise FileFormatError(
            f"{where}: {type(optimizer).__name__} has no option {unknown[0]} here; resume with the "
            "workload, and the version of torch, that wrote it"
        )
    return {
        key: _in_type(value, group.get(key), f"{where}: optimizer option {key}")
        for key, value in saved.items()
    }


def laid_out(values: Tensor, parameter: Tensor) -> Tensor:
    """Return values in the memory format of their parameter, such as channels last, if they have
    its shape: a fused optimizer expects state and gradient in that format.
    """
    if values.shape != parameter.shape or values.stride() == parameter.stride():
        return values
    like = torch.empty_like(parameter, dtype=values.dtype, device=values.device)
    return like.detach().copy_(values)


def restore_scheduler(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    optimizer: torch.optim.Optimizer,
    checkpoint: SavedState,
) -> None:
    """Give a scheduler its state, after ``restore_optimizer``; FileFormatError if there is none."""
    saved = checkpoint.scheduler
    if saved is None:
        raise FileFormatError(
            f"{checkpoint.where}: the training resumes with a scheduler, but scheduler is null; "
            "resume with the workload that wrote it"
        )
    # Lists with an entry per parameter group; the rank that saved them may have had other groups.
    per_group = {
        "base_lrs": [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups],
        "_last_lr": [float(g["lr"]) for g in optimizer.param_groups],
    }
    where, now = f"{checkpoint.where}: scheduler", scheduler.state_dict()
    scheduler.load_state_dict(_in_type(_with_own_groups(saved, now, per_group), now, where))


_OF_CYCLES = ("base_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Lists of ``CyclicLR`` with an entry per parameter group, which training does not change."""


def _with_own_groups(
    state: Mapping[str, Any], now: Mapping[str, Any], per_group: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return a scheduler's state with this rank's lists, also in schedulers inside it.

    Args:
        now: state of the new scheduler.
        per_group: lists with an entry per group, from the restored optimizer.
    """
    own = {**per_group, **{k: now[k] for k in _OF_CYCLES if k in now and "max_lrs" in now}}
    result = {**state, **{k: list(v) for k, v in own.items() if k in state}}
    functions = now.get("lr_lambdas")
    if functions is not None and len(functions) != len(state.get("lr_lambdas", functions)):
        result["lr_lambdas"] = functions
    if isinstance(parts := state.get("_schedulers"), list):
        made: list[Any] = now.get("_schedulers", [])[: len(parts)]
        pairs = zip_longest(parts, made, fillvalue=dict[str, Any]())
        result["_schedulers"] = [_with_own_groups(*pair, per_group) for pair in pairs]
    return result


def _in_type(saved: Any, now: Any, where: str, *, may_lack: bool = False) -> Any:
    """Convert a saved value to the present type: JSON has no tuples, tensors or keys but strings.

    Args:
        may_lack: None may stand in place of a number.

    Raises:
        FileFormatError: if the value is of another kind.
    """
    if isinstance(now, Mapping) and isinstance(saved, dict):
        return _mapping_in_type(saved, now, where)
    if isinstance(now, tuple) and isinstance(saved, list) and len(saved) == len(now):
        return tuple(_in_type(s, n, where, may_lack=True) for s, n in zip(saved, now, strict=True))
    if isinstance(now, list) and isinstance(saved, list):
        # Lists with an entry per parameter group may have another length on this rank.
        like = now if len(now) == len(saved) else [now[0] if now else None] * len(saved)
        return [_in_type(s, n, where, may_lack=True) for s, n in zip(saved, like, strict=True)]
    if isinstance(now, Tensor) and isinstance(saved, bool | int | float):
        return torch.as_tensor(saved, dtype=now.dtype, device=now.device)
    is_number = type(now) in (int, float)
    if now is None or _kind(saved) is _kind(now) or (saved is None and (may_lack or not is_number)):
        return saved
    raise FileFormatError(
        f"{where} is {shown(saved)}, where this training has {now!r}; resume with the workload "
        "that wrote it"
    )


def _mapping_in_type(saved: dict[str, Any], now: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    if all(isinstance(key, int) for key in now):
        # Such as the milestones of MultiStepLR, which are counted.
        try:
            return {int(key): value for key, value in saved.items()}
        except ValueError:
            raise FileFormatError(f"{where} has keys that are no numbers") from None
    if saved.keys() != now.keys():
        odd = min(saved.keys() ^ now.keys())
        raise FileFormatError(
            f"{where}.{odd} is {'unknown here' if odd in saved else 'missing'}; resume with the "
            "workload, and the version of torch, that wrote it"
        )
    return {key: _in_type(value, now[key], f"{where}.{key}") for key, value in saved.items()}


def _kind(value: Any) -> type:
    """Return the kind of a value: integers and floats are one kind, booleans another."""
    return float if type(value) is int else type(value)
