"""Bytes of the storages that are alive at once, added up while operations run.

A storage counts from when it is first seen until nothing refers to it any more, autograd included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every tensor that an operation reads or makes."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(args)
        result = func(*args, **(kwargs or {}))
        self._look(result)
        return result

    def _look(self, nested: Any) -> None:
        for leaf in tree_iter(nested):
            if isinstance(leaf, Tensor):
                self._see(leaf)


class Storages:
    """Adds up the storages that are alive.

    Attributes:
        now: bytes of all storages that were seen and are alive, without the ``ignored``.
        peak_bytes: largest ``now`` since the beginning, or since ``restart``.
    """

    def __init__(self, held: Iterable[Tensor], ignored: Iterable[Tensor]) -> None:
        self.now = self.peak_bytes = 0
        # Keeps the storages alive, so that no other one can get their ``id``.
        self._ignored = {id(s): s for tensor in ignored for s in storages_of(tensor)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self.see(tensor)

    def restart(self) -> int:
        """Forget the peak; returns the bytes that are alive."""
        self.peak_bytes = self.now
        return self.now

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storages, if they are new, until they are gone."""
        for storage in storages_of(tensor):
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._alive or key in self._ignored:
            return
        nbytes = storage.nbytes()

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now)


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor; a sparse one has several."""
    parts: tuple[Tensor, ...] = (tensor,) if tensor.layout is torch.strided else ()
    if tensor.layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
    return [part.untyped_storage() for part in parts]
