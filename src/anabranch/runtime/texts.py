"""Texts, such as JSON documents, between the ranks of the user's process group.

They travel as tensors of bytes. torch's own collectives for objects pickle them, and a pickle runs
what it names on whoever reads it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from anabranch.runtime.transport import guarded


def gather(mine: str) -> list[str]:
    """Everybody's text, by rank; all ranks call it."""
    if not dist.is_initialized():
        return [mine]
    data = mine.encode()
    sizes = [int.from_bytes(told, "big") for told in gather_bytes(len(data).to_bytes(8, "big"))]
    found = gather_bytes(data.ljust(max(1, *sizes)))
    return [told[:size].decode() for told, size in zip(found, sizes, strict=True)]


def from_first(mine: str) -> str:
    """The text of the first rank, on every rank; what others have does not count."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    length = torch.tensor([len(mine.encode())], device=_place())
    guarded(lambda: dist.broadcast(length, 0))
    data = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        data.copy_(torch.tensor(list(mine.encode()), dtype=torch.uint8))
    data = data.to(_place())
    guarded(lambda: dist.broadcast(data, 0))
    return data.cpu().numpy().tobytes().decode()


def gather_bytes(mine: bytes) -> list[bytes]:
    """Everybody's bytes, of one length that is not 0."""
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_place())
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    guarded(lambda: dist.all_gather(gathered, tensor))
    return [theirs.cpu().numpy().tobytes() for theirs in gathered]


def _place() -> torch.device:
    """Where the user's group can gather: one for NCCL alone has no way for tensors on the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
