"""Two ranks with NCCL: the cases of two ranks on one GPU with a GPU each, or, from NCCL 2.30 on,
still on one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.distributed as dist

from anabranch.runtime.ranks import mesh
from benchmarks.gpu import shared_gpu
from benchmarks.gpu.case import Case, Row, first_gpu

SEVERAL_PER_GPU = (2, 30)
"""The version from which several ranks may share a GPU."""


def cases(device: str) -> list[Case]:
    """Those of two ranks, where NCCL can run them."""
    if torch.cuda.device_count() >= 2:
        return shared_gpu.two_ranks({})
    version = _version()
    if version < SEVERAL_PER_GPU:
        here = ".".join(map(str, version)) or "none"
        return [Case("all", left_out=f"needs two GPUs, or NCCL 2.30 on one; NCCL here: {here}")]
    # Few blocks per kernel: one that waits must leave room for the one that it waits for.
    several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    return shared_gpu.two_ranks(first_gpu() | several)


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """The transport tells whether it was NCCL."""
    if torch.cuda.device_count() < 2:
        mesh.choose_backend = lambda seen: "nccl"  # as if each rank had a GPU of its own
    return shared_gpu.measure(case, device)


def _version() -> tuple[int, ...]:
    """Of the library that is loaded, which may be newer than the one that PyTorch was built with;
    empty if there is none.
    """
    if not dist.is_nccl_available():
        return ()
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        return number.value // 10000, number.value // 100 % 100
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version()[:2])
