"""Memory that received messages lie in, made once and used again.

A tensor of a message lies in a buffer of its channel for as long as anybody holds it, such as the
autograd graph of its micro-batch. A channel has as many buffers as messages that were held at once,
with those posted: micro-batches in flight, and one more. The allocator of the device never gets
them back, so it need not know of the streams that fill them.

The host is ahead of its device: a buffer that nobody holds any more may still be read by what the
device has been given. So it is filled again behind a fence, the place that the compute stream had
reached by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import TrainingError
from anabranch.runtime.transport.base import Spec


@dataclass(slots=True, eq=False)
class _Buffer:
    """Bytes on the device, and the place of the compute stream behind their last readers."""

    storage: torch.UntypedStorage
    fence: Any
    is_lent: bool = True


class Buffers:
    """Buffers of all channels of a rank.

    Attributes:
        nbytes: of all of them.

    Args:
        fence: marks the place behind all that the compute stream has been given.
    """

    def __init__(self, place: torch.device, fence: Callable[[], Any]) -> None:
        self._place, self._fence = place, fence
        self._pools: defaultdict[Hashable, list[_Buffer]] = defaultdict(list)
        self.nbytes = 0

    def take(self, key: Hashable, spec: Spec) -> tuple[Tensor, Any]:
        """Return a tensor on a buffer of a pool, and the fence behind which it may be filled.

        Raises:
            TrainingError: if the device has no memory for another buffer.
        """
        shape, dtype = spec
        nbytes = shape.numel() * dtype.itemsize
        for buffer in self._pools[key]:
            if not buffer.is_lent and buffer.storage.nbytes() >= nbytes:
                break
        else:
            buffer = self._make(nbytes)
            self._pools[key].append(buffer)
        buffer.is_lent = True
        tensor = torch.empty(0, dtype=dtype, device=self._place)
        # A tensor of its own, not a view: a change in place is no change of its neighbours.
        tensor.set_(buffer.storage, 0, shape)  # type: ignore[call-overload]
        return tensor, buffer.fence

    def _make(self, nbytes: int) -> _Buffer:
        count = sum(map(len, self._pools.values()))
        try:
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._place)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{self._place} has no memory for {nbytes} bytes of a message, after {count} "
                f"buffers of {self.nbytes} bytes; plan with a smaller micro-batch, with "
                "recomputation or for more devices"
            ) from error
        self.nbytes += nbytes
        # Memory that was another tensor's may still be read by what the device has been given.
        return _Buffer(made.untyped_storage(), self._fence())

    def sweep(self) -> None:
        """Find buffers that nobody holds any more."""
        fence = None
        for pool in self._pools.values():
            for buffer in pool:
                if buffer.is_lent and _uses(buffer.storage) == 1:  # the pool's own
                    fence = fence or self._fence()
                    buffer.is_lent, buffer.fence = False, fence


def _uses(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, of tensors and of autograd as well."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
