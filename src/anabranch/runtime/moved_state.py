"""State of a run that goes from rank to rank in memory, when training goes on under another plan.

What a rank has, and what it needs, is what it would write into a checkpoint and read from it::

    plan A   rank 0  embed, blocks.0        rank 1  blocks.1, head
                |          \\                  |         |
    plan B   rank 0  embed   `-------> rank 1  blocks.0  |  blocks.1
                                       rank 2                head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import Progress, RankPart
from anabranch.checkpoint.manifest import dtype_name
from anabranch.checkpoint.saved_state import SavedState, saved_in_parts
from anabranch.runtime import texts
from anabranch.runtime.mesh import Mesh

_BUNDLE_BYTES = 1 << 28
"""Bytes that are on their way at once, at most (or one tensor); more would take less waiting and
more memory.
"""
_CPU = torch.device("cpu")


def move(
    part: RankPart, readers: Mapping[str, Sequence[int]], progress: Progress, mesh: Mesh
) -> SavedState:
    """Send what this rank has to the ranks that need it, and take what it needs; all ranks call it.

    Args:
        part: what this rank would write into a checkpoint; together the ranks have everything once.
        readers: ranks that need each tensor of the part.
        progress: where training is, the same on every rank.
    """
    described = {**part.described(), "tensors": _listed(part, readers)}
    documents = texts.gather(described, mesh.all_gather_bytes)
    everything = sorted(
        (key, owner, *entry)
        for owner, document in enumerate(documents)
        for key, entry in document["tensors"].items()
    )
    tensors: dict[str, Tensor] = {}
    transport = mesh.transport(_CPU)
    flying = 0
    for key, owner, size, dtype, ranks in everything:
        if owner == mesh.rank:
            tensor = part.tensors[key].detach()
            if mesh.rank in ranks:
                tensors[key] = tensor
            if others := [rank for rank in ranks if rank != owner]:
                plain = tensor.cpu().contiguous()
                for rank in others:
                    assert transport is not None
                    transport.send([plain], rank, tag=0)
        elif mesh.rank in ranks:
            assert transport is not None
            spec = torch.Size(size), getattr(torch, dtype)
            # A copy: what has arrived lies in the sender's memory, which is about to end.
            tensors[key] = transport.receive([spec], _CPU, owner, tag=0).wait()[0].clone()
        flying += torch.Size(size).numel() * getattr(torch, dtype).itemsize * len(ranks)
        if flying > _BUNDLE_BYTES:
            mesh.barrier()  # what was sent has been taken
            flying = 0
    mesh.barrier()
    if transport is not None:
        transport.close()
    where = "the state that the ranks have sent each other"
    return saved_in_parts(where, documents, tensors, tensors.__getitem__, progress)


def _listed(part: RankPart, readers: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    """Size, type and readers of each tensor."""
    return {
        key: [list(tensor.shape), dtype_name(tensor.dtype), list(readers[key])]
        for key, tensor in part.tensors.items()
    }
