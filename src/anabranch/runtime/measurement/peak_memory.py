"""The most memory that a rank's tensors take in a step, measured.

A GPU's allocator knows. On a CPU the process's own figures hold code, pages that the allocator
keeps, and memory that ranks share. So one step is run with every operation watched, and the
storages that are alive are added up::

    before     parameters, buffers, optimizer state
    on top     what operations make or are handed, from when it is first seen until nobody, autograd
               included, has it any more

A prediction speaks of the same (``CostModel.device_bytes``), less temporaries of activations
between two operations. What a kernel takes inside is not seen, nor are messages on their way. The
batch does not count: every rank has it at hand. The step takes several times as long.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory:
    """Measures one step.

    Args:
        held: tensors that are there before and count.
    """

    def __init__(
        self, place: torch.device, held: Iterable[Tensor], ignored: Iterable[Tensor] = ()
    ) -> None:
        self.peak_bytes = 0
        self.storages: Storages | None = None
        self._place, self._held, self._ignored = place, list(held), list(ignored)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around the step."""
        if self._place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._place)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self._place)
            return
        self.storages = storages = Storages(self._held, self._ignored)
        self._held.clear()
        with _Watch(storages.see):
            yield
        self.peak_bytes, self.storages = storages.peak_bytes, None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
    """Adds up the storages that are alive."""

    def __init__(self, held: Iterable[Tensor], ignored: Iterable[Tensor]) -> None:
        self.now = self.peak_bytes = 0
        # Keeps them, so that no other storage can come to be at their place.
        self._ignored = {id(s): s for s in (t.untyped_storage() for t in ignored)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new, until it is gone."""
        if tensor.layout is not torch.strided:
            for part in _parts(tensor):
                self.see(part)
            return
        storage = tensor.untyped_storage()
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


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
