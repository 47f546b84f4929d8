"""Messages between GPUs without NCCL: through pinned memory of the host and a transport there.

Copies run on streams of their own, beside the computation. A send is handed over to the host's
transport once its copy is done, which is looked up whenever the host is here. It waits for copies
only before it waits for another rank, which may need them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.runtime.transport.base import Receipt, Spec, Transport

_CPU = torch.device("cpu")


class StagedTransport:
    """Tensors of a GPU through a transport of the CPU, which is closed with this one."""

    def __init__(self, inner: Transport, place: torch.device) -> None:
        self._inner = inner
        self._down = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._place = place
        self._copies: deque[tuple[torch.cuda.Event, list[Tensor], int, int]] = deque()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(self._down):
            copies = [self._copied_down(tensor.detach()) for tensor in tensors]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._down)
        self._copies.append((done, copies, rank, tag))
        self._hand_over(wait=False)

    def _copied_down(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._down)
        return host

    def _hand_over(self, *, wait: bool) -> None:
        """Send what has been copied, in order."""
        while self._copies:
            done, copies, rank, tag = self._copies[0]
            if wait:
                done.synchronize()
            elif not done.query():  # type: ignore[no-untyped-call]
                return
            self._copies.popleft()
            self._inner.send(copies, rank, tag)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        self._hand_over(wait=False)
        return _Staged(self, self._inner.receive(specs, _CPU, rank, tag), device)

    def take(self, receipt: Receipt, device: torch.device) -> list[Tensor]:
        """Wait for a message and copy it to the GPU; the compute stream waits for the copies."""
        self._hand_over(wait=True)
        tensors = receipt.wait()
        if device.type != "cuda":
            return tensors
        compute = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._up):
            # Copies from other memory of the host would make the host wait for them.
            result = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        compute.wait_stream(self._up)
        for tensor in result:
            tensor.record_stream(compute)
        return result

    def flush(self) -> None:
        self._hand_over(wait=True)
        self._inner.flush()

    def close(self) -> None:
        self._copies.clear()
        self._inner.close()


class _Staged:
    __slots__ = ("_device", "_receipt", "_transport")

    def __init__(self, transport: StagedTransport, receipt: Receipt, device: torch.device) -> None:
        self._transport, self._receipt, self._device = transport, receipt, device

    def wait(self) -> list[Tensor]:
        return self._transport.take(self._receipt, self._device)
