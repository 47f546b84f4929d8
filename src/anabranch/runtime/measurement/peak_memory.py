"""The most memory that a rank's tensors take in a step, measured.

A GPU's allocator knows. On a CPU the process's own figures hold code, pages that the allocator
keeps, and memory that ranks share. So one step is run with every operation watched, and the
storages that are alive are added up::

    before     parameters, buffers, optimizer state
    on top     what operations make or are handed, from when it is first seen until nobody, autograd
               included, has it any more

A prediction speaks of the same (``CostModel.device_bytes``). What a kernel takes inside is not
seen, nor are messages on their way. The batch does not count: every rank has it at hand. The step
takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.profile.storages import Storages, TensorWatch


class PeakMemory:
    """Measures one step.

    Args:
        held: tensors that are there before and count.
    """

    def __init__(
        self, place: torch.device, held: Iterable[Tensor], ignored: Iterable[Tensor] = ()
    ) -> None:
        self.peak_bytes = 0
        self._place, self._held, self._ignored = place, list(held), list(ignored)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around the step."""
        if accelerator.has_own_memory(self._place):
            torch.accelerator.reset_peak_memory_stats(self._place)
            yield
            self.peak_bytes = torch.accelerator.max_memory_allocated(self._place)
            return
        storages = Storages(self._held, self._ignored)
        self._held.clear()
        with TensorWatch(storages.see):
            yield
        self.peak_bytes = storages.peak_bytes
