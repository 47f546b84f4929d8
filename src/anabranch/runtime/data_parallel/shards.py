"""Shards of parameters: rows that one rank of a replica group updates for all of them.

::

    parameter   | rows 0 to 499 of rank 0 | rows 500 to 999 of rank 1 |   whole on both
    gradient    | summed on rank 0        | summed on rank 1          |   in one bucket
    state       | on rank 0               | on rank 1                 |

The optimizer of a rank holds its shard, a view of the parameter, in place of the parameter.
In checkpoints the state of a shard is that of a slice (``graph.slices``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.errors import TrainingError
from anabranch.graph.slices import Slice, view_named, whole_name
from anabranch.workload import BY_ELEMENT


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of a parameter that one rank updates; all rows if ``stop`` is None."""

    rank: int
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the parameter's shape; a view unless it is sparse."""
        if self.stop is None:
            return tensor
        if tensor.is_sparse:
            return tensor.narrow_copy(0, self.start, self.stop - self.start)
        return tensor[self.start : self.stop]

    def name(self, parameter: str) -> str:
        """Return the name of these rows, which are not all, as a slice of the parameter."""
        assert self.stop is not None
        return Slice(parameter, 0, self.start, self.stop).name


Shards = tuple[Shard, ...]
"""Shards of one parameter in order of its rows; empty if every rank of its group updates it."""


_VECTOR = 32
"""Most elements that a processor computes at once."""


def shards_of(parameter: Tensor, dealt: Sequence[tuple[int, int]]) -> Shards:
    """Cut a parameter into whole rows, for ranks that are to update so many bytes each
    (``cost.memory.deal``); one shard has all if rows are not consecutive in memory (strides are 0
    where a rank has no values yet).

    A shard begins where a vector of the processor does in the whole parameter, since elements
    behind the last full vector are rounded in another way (fused Adam on a CPU).
    """
    rows, nbytes = len(parameter) if parameter.dim() else 1, parameter.nbytes
    if parameter.dim() and parameter.stride(0) not in (0, parameter.numel() // max(rows, 1)):
        rows = 1
    step = _VECTOR // math.gcd(_VECTOR, parameter.numel() // max(rows, 1))
    shards: list[Shard] = []
    before = start = 0
    for rank, share in dealt:
        before += share
        stop = min(rows, step * round(rows * before / nbytes / step)) if before < nbytes else rows
        if stop > start:
            shards.append(Shard(rank, start, stop))
        start = stop
    return tuple(shards) if len(shards) > 1 else (Shard(shards[0].rank if shards else dealt[0][0]),)


def replace_parameters(
    optimizer: torch.optim.Optimizer, parts: Mapping[nn.Parameter, Mapping[str, nn.Parameter]]
) -> None:
    """Have an optimizer update parts of parameters in their place.

    Args:
        parts: parameter -> its parts by their names as slices.

    Raises:
        TrainingError: if it may look at whole parameters, unlike the recipe's optimizer of all
            parameters that this rank holds.
    """
    if parts and type(optimizer) not in BY_ELEMENT:
        raise TrainingError(
            f"the optimizer recipe makes {type(optimizer).__name__} for the parameters that this "
            "rank updates, which needs whole ones, but for all that the rank holds an optimizer "
            f"that takes rows, as {whole_name(min(map(min, parts.values())))} is shared; have it "
            "make one kind, or train with --no-shard-optimizer (shard_optimizer=False)"
        )
    for group in optimizer.param_groups:
        kept = [[*parts[p].values()] if p in parts else [p] for p in group["params"]]
        if "param_names" in group:
            named = zip(group["param_names"], kept, strict=True)
            group["param_names"] = [name for name, of_name in named for _ in of_name]
        group["params"] = [part for of_whole in kept for part in of_whole]
    for whole, several in parts.items():
        state = optimizer.state.pop(whole, {})
        for name, part in several.items():
            if state:  # as Adagrad's, from the start
                optimizer.state[part] = {key: _cut(name, value) for key, value in state.items()}


def _cut(name: str, value: Any) -> Any:
    """Copy a slice of an optimizer's state; a number, such as of steps, stays whole."""
    if not isinstance(value, Tensor):
        return value
    return (view_named(name, value) if value.dim() else value).clone()
