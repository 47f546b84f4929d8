"""The most memory that a rank's tensors take in a step, measured.

On a GPU the allocator tells. On a CPU the figures of the process include code, pages that the
allocator keeps, and memory that ranks share. So one step is run with every operation watched, and
the storages that are alive are added up::

    before     parameters, buffers, optimizer state
    on top     results and arguments of operations, from when they are first seen until nothing,
               autograd included, refers to them any more

A prediction counts the same (``CostModel.device_bytes``). Memory inside a kernel is not seen, nor
are messages on their way. The batch does not count, as every rank has it anyway. The step takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.profile.storages import Storages, TensorWatch


class PeakMemory:
    """Measurement of one step.

    Args:
        held: tensors that are there before and count.
        ignored: tensors that do not count.
    """

    def __init__(
        self, device: torch.device, held: Iterable[Tensor], ignored: Iterable[Tensor] = ()
    ) -> None:
        self.peak_bytes = 0
        self.storages: Storages | None = None
        self._device, self._held, self._ignored = device, list(held), list(ignored)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step inside."""
        if accelerator.has_own_memory(self._device):
            torch.accelerator.reset_peak_memory_stats(self._device)
            yield
            self.peak_bytes = torch.accelerator.max_memory_allocated(self._device)
            return
        self.storages = storages = Storages(self._held, self._ignored)
        self._held.clear()
        with TensorWatch(storages.see):
            yield
        self.peak_bytes, self.storages = storages.peak_bytes, None
