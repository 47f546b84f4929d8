"""Activations on the host between forward and backward::

    main stream   F0 ------ F1 ------ F2 ------        B0 ------ ...
    side stream       copies of 0 ->    of 1 ->  ...   <- copies of 0, a few ahead of their use

A tensor that autograd saves is copied into pinned memory, once however often it is saved. Tensors
that are there anyway (parameters, received values, the batch) stay. Forwards wait for copies that
lag, so at most the tensors of ``behind`` micro-batches are on the device as well; a backward that
comes sooner finds its tensors there. All memory belongs to the main stream, which waits for each
copy before the memory is used again: no allocation depends on how far ahead the host is.

A backward takes tensors in about the opposite order, so together with each tensor the ones saved
just before it are fetched.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch.device import accelerator


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Tuned numbers of the offload.

    Attributes:
        ahead: tensors that are fetched before the backward asks for them.
        behind: micro-batches whose tensors may be on the device while they are copied.
        smallest_bytes: least bytes of a tensor that is copied; a smaller copy is not worth it.
    """

    ahead: int = 3
    behind: int = 2
    smallest_bytes: int = 4096


SETTINGS = OffloadSettings()


class Offload:
    """Keeps tensors that autograd saves on a GPU on the host, except those that are held anyway."""

    def __init__(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._stream: torch.Stream | None = None
        self._copying: deque[weakref.ref[Saved]] = deque()

    @contextmanager
    def __call__(self, held: Iterable[Tensor] = ()) -> Iterator[None]:
        """Offload what the forward of one micro-batch inside saves.

        Args:
            held: tensors that stay on the device until its backward.
        """
        if not accelerator.has_streams(self._device):
            yield
            return
        if self._stream is None:
            # The pool of streams is small, and NCCL takes from it as well.
            self._stream = accelerator.new_stream(self._device)
        while len(self._copying) >= SETTINGS.behind:
            if (earlier := self._copying.popleft()()) is not None:
                earlier.release()
        saved = Saved([*self._parameters, *held], self._stream)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield
        saved.end()
        self._copying.append(weakref.ref(saved))


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor: its entry, and its layout in it if the entry is a whole storage."""

    entry: _Entry
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # -1 for a part


class Saved:
    """Saved tensors of one micro-batch, copied on a stream."""

    def __init__(self, kept: Iterable[Tensor], stream: torch.Stream) -> None:
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}
        self._stream = stream
        self._entries: list[_Entry] = []
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, _Entry]] = {}
        self._copied: torch.Event | None = None

    def pack(self, tensor: Tensor) -> _View | Tensor:
        """Start the copy to the host, unless it was started before."""
        small = tensor.nbytes < SETTINGS.smallest_bytes
        if small or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept:
            return tensor
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        is_plain = not (tensor.is_complex() or tensor.is_neg())
        is_whole = is_plain and tensor.nbytes == storage.nbytes()
        # The reference below keeps the storage's number from being reused.
        key = (
            storage._cdata,
            tensor._version,
            tensor.dtype,
            None if is_whole else (size, stride, offset),
        )
        if key not in self._known:
            flat = tensor.as_strided((tensor.numel(),), (1,), 0) if is_whole else tensor
            entry = _Entry(len(self._entries), flat.detach(), self._stream)
            self._entries.append(entry)
            self._known[key] = StorageWeakRef(storage), entry  # type: ignore[no-untyped-call]
        entry = self._known[key][1]
        entry.users += 1
        return _View(entry, size, stride, offset if is_whole else -1)

    def unpack(self, saved: _View | Tensor) -> Tensor:
        """Return the tensor, on its device again."""
        if isinstance(saved, Tensor):
            return saved
        entry = saved.entry
        entry.fetch()
        for nearby in self._entries[max(entry.index - SETTINGS.ahead, 0) : entry.index]:
            if not nearby.is_taken:
                nearby.fetch()
        tensor = entry.take()
        if saved.offset < 0:
            return tensor
        return tensor.as_strided(saved.size, saved.stride, saved.offset)

    def end(self) -> None:
        """End the forward; all copies have been started."""
        self._known.clear()
        self._copied = self._stream.record_event()

    def release(self) -> None:
        """Let the device wait for the copies, and free the memory of the tensors."""
        left = [entry for entry in self._entries if entry.tensor is not None]
        if left and self._copied is not None:
            accelerator.current_stream(left[0].device).wait_event(self._copied)
        for entry in left:
            entry.tensor = None


class _Entry:
    """One saved storage, or a part of it.

    Attributes:
        users: number of saved tensors for which it stands.
        tensor: the tensor itself, while it is still on the device.
    """

    def __init__(self, index: int, tensor: Tensor, stream: torch.Stream) -> None:
        self.index, self._stream, self.device = index, stream, tensor.device
        self.users = self._taken = 0
        self._back: Tensor | None = None
        self._ready: torch.Event | None = None
        self.tensor: Tensor | None = tensor
        # It keeps the strides of a dense tensor, so views and kernels find the same layout.
        self._host = accelerator.host_like(tensor)
        stream.wait_stream(accelerator.current_stream(self.device))
        with stream:
            self._host.copy_(tensor, non_blocking=True)

    @property
    def is_taken(self) -> bool:
        """True if all tensors for which it stands have been taken."""
        return self._taken >= max(self.users, 1)

    def fetch(self) -> None:
        """Start the copy back, unless it is under way or the tensor is still there."""
        if self._back is not None or self.tensor is not None:
            return
        self._back = torch.empty_like(self._host, device=self.device)
        # The memory may have been in use for something else until now.
        self._stream.wait_stream(accelerator.current_stream(self.device))
        with self._stream:
            self._back.copy_(self._host, non_blocking=True)
        self._ready = self._stream.record_event()

    def take(self) -> Tensor:
        """Wait for the copy that was fetched; one more backward fetches it again."""
        tensor = self.tensor if self.tensor is not None else self._back
        assert tensor is not None
        self._taken += 1
        if self._ready is not None:
            accelerator.current_stream(self.device).wait_event(self._ready)
            self._ready = None
        if self.is_taken:
            self._back = None  # ``self.tensor``, whose copy may be under way, goes in ``release``
        return tensor
