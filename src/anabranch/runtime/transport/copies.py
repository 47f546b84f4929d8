"""Copies between a GPU and pinned memory of the host, on streams of their own.

Copies and computation wait for each other on the GPU, the host for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class CopyDown(Protocol):
    """A copy to the host that has been started."""

    @property
    def tensors(self) -> list[Tensor]:
        """The copies; to be read when it is done."""
        ...

    def is_done(self) -> bool:
        """Return True if ``wait`` would return at once."""
        ...

    def wait(self) -> None:
        """Wait for it."""
        ...


class Copies(Protocol):
    """Copies between a device and the host."""

    def down(self, tensors: Sequence[Tensor]) -> CopyDown:
        """Start to copy tensors to the host; those that are there already stay as they are."""
        ...

    def up(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors of the host on a device, for whatever is computed there from now on."""
        ...


class GpuCopies:
    """Copies from and to one GPU."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._down = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]

    def down(self, tensors: Sequence[Tensor]) -> CopyDown:
        self._down.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(self._down):
            copies = [self._copied(tensor.detach()) for tensor in tensors]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._down)
        return _GpuCopyDown(copies, done)

    def _copied(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._down)
        return host

    def up(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        compute = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._up):
            # Copies from other memory of the host would make the host wait for them.
            result = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        compute.wait_stream(self._up)
        for tensor in result:
            tensor.record_stream(compute)
        return result


class _GpuCopyDown:
    def __init__(self, tensors: list[Tensor], done: torch.cuda.Event) -> None:
        self.tensors, self._done = tensors, done

    def is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._done.synchronize()
