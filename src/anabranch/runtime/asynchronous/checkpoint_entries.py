"""Entries of a checkpoint that only asynchronous training has.

Predictions need the last update, the parameters that it moved, and the usual norm of gradients;
policies and rounds need the number of updates. All of it is saved per parameter, so that any plan
finds what its stages need, under keys that the synchronous pipeline passes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.checkpoint import Checkpoint

_LAST, _MOVED, _NORM = "asynchronous-last", "asynchronous-moved", "asynchronous-norm"
_VERSION = "asynchronous-version"


def entries(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint."""
    found: dict[str, Tensor] = {}
    for name in names:
        found[f"{_VERSION}/{name}"] = torch.tensor(state["version"])
        if state["last_update"] is not None:
            found[f"{_LAST}/{name}"] = state["last_update"][name]
        if state["moved"] is not None:
            found[f"{_MOVED}/{name}"] = torch.tensor(name in state["moved"])
        if state["norm"] is not None:
            found[f"{_NORM}/{name}"] = state["norm"]
    return found


def state_of(
    saved: Checkpoint, parameters: Mapping[str, nn.Parameter], place: torch.device
) -> dict[str, Any]:
    """For ``StageWeights.load_state_dict``; a synchronous run leaves nothing but its steps."""
    names = list(parameters)
    last, moved, norms, versions = (
        {name: f"{what}/{name}" for name in names if name in set(saved.keys(what))}
        for what in (_LAST, _MOVED, _NORM, _VERSION)
    )
    state: dict[str, Any] = {"last_update": None, "moved": None, "norm": None}
    if len(last) == len(names):
        state["last_update"] = {
            name: saved.tensor(key, like=parameters[name]).to(place) for name, key in last.items()
        }
    if len(moved) == len(names):
        state["moved"] = [name for name, key in moved.items() if bool(saved.tensor(key))]
    if norms:
        state["norm"] = saved.tensor(next(iter(norms.values()))).to(place)
    # Stages of another plan may have been at other versions, if they learned from rounds.
    updates = [int(saved.tensor(key)) for key in versions.values()]
    state["version"] = max(updates, default=saved.progress.step)
    return state
