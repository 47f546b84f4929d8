"""Messages between GPUs without NCCL: through pinned memory of the host and a transport there.

A send is handed on once its copy is done. The host waits for copies only before it waits for
another rank (``push``), because that rank may need them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.runtime.transport.base import Receipt, Spec, Transport
from anabranch.runtime.transport.copies import Copies, CopyDown

_CPU = torch.device("cpu")


class StagedTransport:
    """Tensors of a GPU through a transport of the CPU, which is closed with this one."""

    def __init__(self, inner: Transport, copies: Copies) -> None:
        self._inner, self._copies = inner, copies
        self._unsent: deque[tuple[CopyDown, int, int]] = deque()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._unsent.append((self._copies.down(tensors), rank, tag))
        self._hand_over(wait=False)

    def _hand_over(self, *, wait: bool) -> None:
        """Send what has been copied, in order."""
        while self._unsent:
            copy, rank, tag = self._unsent[0]
            if wait:
                copy.wait()
            elif not copy.is_done():
                return
            self._unsent.popleft()
            self._inner.send(copy.tensors, rank, tag)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        self._hand_over(wait=False)
        return _Staged(self, self._inner.receive(specs, _CPU, rank, tag), device)

    def take(self, receipt: Receipt, device: torch.device) -> list[Tensor]:
        """Wait for a message and start to copy it to the GPU."""
        self._hand_over(wait=True)
        tensors = receipt.wait()
        return tensors if device.type == "cpu" else self._copies.up(tensors, device)

    def push(self) -> None:
        self._hand_over(wait=True)

    def flush(self) -> None:
        self.push()
        self._inner.flush()

    def close(self) -> None:
        self._unsent.clear()
        self._inner.close()


class _Staged:
    __slots__ = ("_device", "_receipt", "_transport")

    def __init__(self, transport: StagedTransport, receipt: Receipt, device: torch.device) -> None:
        self._transport, self._receipt, self._device = transport, receipt, device

    def wait(self) -> list[Tensor]:
        return self._transport.take(self._receipt, self._device)
