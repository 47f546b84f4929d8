"""Activations on the host between forward and backward::

    main stream   F0 ------ F1 ------ F2 ------        B0 ------ ...
    side stream       copies of 0 ->    of 1 ->  ...   <- copies of 0, a few ahead of their use

A tensor that autograd saves is copied into pinned memory; its device memory is free once the copy
is done and nobody else holds it. Backward takes tensors in about the opposite order, so with each
the ones saved just before it are fetched as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.device import accelerator


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Tuned numbers of the offload.

    Attributes:
        ahead: tensors that are fetched before backward asks for them.
        smallest_bytes: a copy of less costs more than it frees.
    """

    ahead: int = 3
    smallest_bytes: int = 4096


SETTINGS = OffloadSettings()


class Offload:
    """Keeps what autograd saves of a stage on a GPU on the host, but for parameters."""

    def __init__(self, parameters: Iterable[Tensor], place: torch.device) -> None:
        self._parameters = list(parameters)
        self._place = place
        self._stream: torch.Stream | None = None

    def __call__(self) -> AbstractContextManager[Any]:
        """Around the forward of one micro-batch."""
        if not accelerator.has_streams(self._place):
            return nullcontext()
        if self._stream is None:
            # The pool of streams is small, and NCCL takes from it as well.
            self._stream = accelerator.new_stream(self._place)
        saved = Saved(self._parameters, self._stream)
        return torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)


class Saved:
    """Saved tensors of one micro-batch; without a stream copies are made in line."""

    def __init__(self, parameters: Iterable[Tensor], stream: torch.Stream | None) -> None:
        self._kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._stream = stream
        self._entries: list[_Entry] = []

    def pack(self, tensor: Tensor) -> _Entry | Tensor:
        """Start the copy to the host."""
        small = tensor.nbytes < SETTINGS.smallest_bytes
        strided = tensor.layout is torch.strided
        if small or not strided or tensor.untyped_storage()._cdata in self._kept:
            return tensor
        entry = _Entry(len(self._entries), tensor, self._stream)
        self._entries.append(entry)
        return entry

    def unpack(self, entry: _Entry | Tensor) -> Tensor:
        """The tensor on its device again."""
        if isinstance(entry, Tensor):
            return entry
        entry.fetch()
        for nearby in self._entries[max(entry.index - SETTINGS.ahead, 0) : entry.index]:
            if not nearby.is_taken:
                nearby.fetch()
        return entry.take()


class _Entry:
    """One saved tensor."""

    def __init__(self, index: int, tensor: Tensor, stream: torch.Stream | None) -> None:
        self.index, self._stream, self._device = index, stream, tensor.device
        self._back: Tensor | None = None
        self._ready: torch.Event | None = None
        self.is_taken = False
        if stream is None:
            self._host = tensor.clone()
            return
        # empty_like keeps the strides of a dense tensor, so views and kernels find what they knew.
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(accelerator.current_stream(self._device))
        with stream:
            self._host.copy_(tensor, non_blocking=True)
        # The allocator may hand the memory out again only after the copy.
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Start the copy back, unless it is under way."""
        if self._back is not None:
            return
        if self._stream is None:
            self._back = self._host.clone()
            return
        with self._stream:
            self._back = self._host.to(self._device, non_blocking=True)
            self._ready = self._stream.record_event()

    def take(self) -> Tensor:
        """Wait for the copy that was fetched; a second backward fetches it again."""
        assert self._back is not None
        back, self._back = self._back, None
        self.is_taken = True
        if self._ready is not None:
            current = accelerator.current_stream(self._device)
            current.wait_event(self._ready)
            back.record_stream(current)
        return back
