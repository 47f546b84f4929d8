"""Tensors of a message side by side in one piece of memory, aligned as torch would have them.

The receiver makes separate tensors, not views of one: autograd takes a change in place for a change
of all views.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from anabranch.runtime.transport.base import Spec, listed

ALIGNMENT = 64
"""Alignment of tensors in bytes, which is torch's own: some kernels give other bits elsewhere."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of the tensors of a message: offsets, sizes and ``nbytes`` (with gaps) in bytes;
    ``signature`` is a number for the specs, the same in all processes.
    """

    specs: tuple[Spec, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    signature: int


def aligned(nbytes: int) -> int:
    """Return the next offset, from a number of bytes on, at which a tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=4096)
def packing_of(specs: tuple[Spec, ...]) -> Packing:
    """Lay out tensors of these shapes and element types."""
    sizes = tuple(shape.numel() * dtype.itemsize for shape, dtype in specs)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(aligned(end))
        end = aligned(end) + size
    return Packing(specs, tuple(offsets), sizes, end, zlib.crc32(listed(specs).encode()))


def specs_of(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def pack(tensors: Sequence[Tensor], packing: Packing, memory: memoryview, address: int) -> None:
    """Copy tensors, on any device and in any order, to memory that begins at an address."""
    for tensor, offset, size in zip(tensors, packing.offsets, packing.sizes, strict=True):
        if not size:
            continue
        if is_plain(tensor):
            # A tenth of the time of the copy below, for small tensors.
            ctypes.memmove(address + offset, tensor.data_ptr(), size)
        else:
            there = torch.frombuffer(
                memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
            )
            there.view(tensor.shape).copy_(tensor.detach())


def unpack(packing: Packing, data: memoryview) -> list[Tensor]:
    """Return tensors on top of the memory, which they keep alive and may write to."""
    return [
        torch.frombuffer(data, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        if size
        else torch.empty(shape, dtype=dtype)
        for (shape, dtype), offset, size in zip(
            packing.specs, packing.offsets, packing.sizes, strict=True
        )
    ]


def is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor's bytes lie in CPU memory in the order in which they are sent."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
