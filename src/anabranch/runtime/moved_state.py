"""State of a run that goes from rank to rank in memory, when training goes on under another plan.

What a rank has, and what it needs, is what it would write into a checkpoint and read from it::

    plan A   rank 0  embed, blocks.0        rank 1  blocks.1, head
                |          \\                  |         |
    plan B   rank 0  embed   `-------> rank 1  blocks.0  |  blocks.1
                                       rank 2                head

So nothing is lost or changed that a checkpoint keeps: parameters, buffers, the optimizer's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import RankPart
from anabranch.checkpoint.manifest import OptimizerState
from anabranch.checkpoint.writing import joined
from anabranch.runtime import texts
from anabranch.runtime.mesh import Mesh

_BUNDLE_BYTES = 1 << 28
"""Bytes that are on their way at once, at most (or one tensor); more would take less waiting and
more memory.
"""
_TAG = 0
_CPU = torch.device("cpu")

Takers = Callable[[str], Sequence[int]]
"""Key, such as ``model/text.0.weight`` -> ranks that need the tensor."""


class MovedState:
    """What one rank needs of a run; a ``SavedState``."""

    where = "the state that the ranks have sent each other"

    def __init__(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        self._tensors, self._document = tensors, document

    @property
    def optimizer(self) -> OptimizerState | None:
        """See ``SavedState``."""
        found = self._document["optimizer"]
        return None if found is None else OptimizerState.model_validate(found)

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """See ``SavedState``."""
        found: Mapping[str, Any] | None = self._document["scheduler"]
        return found

    def keys(self, prefix: str) -> list[str]:
        """See ``SavedState``; of the tensors that this rank has."""
        start = f"{prefix}/"
        return [key.removeprefix(start) for key in self._tensors if key.startswith(start)]

    def require_model(self, names: Sequence[str]) -> None:
        """See ``SavedState``; it is the same module."""

    def tensor(self, key: str, like: Tensor | None = None) -> Tensor:
        """See ``SavedState``."""
        return self._tensors[key]


def move(part: RankPart, takers: Takers, mesh: Mesh) -> MovedState:
    """Send what this rank has to those who need it, and take what it needs; all ranks together.

    Args:
        part: what this rank would write into a checkpoint; together the ranks have everything once.
    """
    told = [json.loads(text) for text in texts.gather(json.dumps(_described(part)))]
    everything = sorted(
        (key, rank, size, dtype)
        for rank, theirs in enumerate(told)
        for key, (size, dtype) in theirs["tensors"].items()
    )
    taken: dict[str, Tensor] = {}
    transport = mesh.transport(_CPU)
    flying = 0
    for key, owner, size, dtype in everything:
        ranks = takers(key)
        if owner == mesh.rank:
            tensor = part.tensors[key].detach()
            if mesh.rank in ranks:
                taken[key] = tensor
            others = [rank for rank in ranks if rank != owner]
            if others:
                plain = tensor.cpu().contiguous()
                for rank in others:
                    assert transport is not None
                    transport.send([plain], rank, _TAG)
        elif mesh.rank in ranks:
            assert transport is not None
            spec = torch.Size(size), getattr(torch, dtype)
            # A copy: what has arrived lies in the sender's memory, which is about to end.
            taken[key] = transport.receive([spec], _CPU, owner, _TAG).wait()[0].clone()
        flying += torch.Size(size).numel() * getattr(torch, dtype).itemsize * len(ranks)
        if flying > _BUNDLE_BYTES:
            mesh.barrier()  # what was sent has been taken
            flying = 0
    mesh.barrier()
    if transport is not None:
        transport.close()
    return MovedState(taken, joined(told))


def _described(part: RankPart) -> dict[str, Any]:
    """As a checkpoint describes it, with size and type of each tensor."""
    tensors = {
        key: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for key, tensor in part.tensors.items()
    }
    return {**part.described(), "tensors": tensors}
