"""JSON documents between the ranks of the user's process group.

They travel as tensors of bytes. torch's own collectives for objects pickle them, and a pickle can
run code in the process that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from anabranch.device import accelerator
from anabranch.runtime.ranks.collectives import Pending
from anabranch.runtime.transport import guarded


def gather(document: Any, by: Callable[[bytes], list[bytes]] | None = None) -> list[Any]:
    """Return the documents of all ranks; all ranks call it.

    Args:
        by: gathers bytes of one length, as those of ``Mesh``; by default in the user's group.
    """
    if not dist.is_initialized():
        return [document]
    data, by = json.dumps(document).encode(), by or gather_bytes
    sizes = [int.from_bytes(size, "big") for size in by(len(data).to_bytes(8, "big"))]
    gathered = by(data.ljust(max(sizes)))
    return [json.loads(padded[:size]) for padded, size in zip(gathered, sizes, strict=True)]


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, of one length that is not 0."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_place())
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    Pending(tensor, guarded(lambda: dist.all_gather(gathered, tensor, async_op=True))).wait()
    return [tensor.cpu().numpy().tobytes() for tensor in gathered]


def _place() -> torch.device:
    """Return the device on which the user's group gathers: a GPU for a group of NCCL alone."""
    default = accelerator.default_gpu()
    return default if dist.get_backend() == accelerator.backend(default) else torch.device("cpu")
