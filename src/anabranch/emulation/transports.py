"""Transport between emulated devices: messages really travel, and take as long as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.emulation import Emulation
from anabranch.emulation.shared_links import Channel, SharedLinks
from anabranch.runtime.transport import Receipt, Spec, Transport


class EmulatedTransport:
    """Messages go through another transport. On modelled links they are there when those have them
    there: a message that has arrived is dropped, and tensors without content take its place. On the
    links of this machine they take as long as they do, and the wall clock is the devices' time.
    """

    def __init__(
        self, inner: Transport, rank: int, emulation: Emulation, clock: DeviceClock
    ) -> None:
        self._inner, self._rank, self._emulation, self._clock = inner, rank, emulation, clock
        self._shared = emulation.shared_links if emulation.links == "modelled" else None
        self._counts: Counter[Channel] = Counter()

    def begin(self) -> None:
        """Start a step, on links that have been cleared."""
        self._counts.clear()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        if self._shared is None:
            self._inner.send(tensors, rank, tag)
            return
        self._clock.charge()
        channel, nbytes = (self._rank, rank, tag), sum(tensor.nbytes for tensor in tensors)
        route, now = self._emulation.route(self._rank, rank), self._clock.now
        self._shared.sent(channel, self._next(channel), now, route, nbytes)
        self._inner.send(tensors, rank, tag)
        self._clock.resume()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        if self._shared is None:
            return _HostReceipt(self._inner.receive(specs, device, rank, tag), self._clock)
        self._clock.charge()
        channel = rank, self._rank, tag
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in specs)
        number = self._next(channel)
        route = self._emulation.route(rank, self._rank)
        self._shared.posted(channel, number, self._clock.now, route, nbytes)
        receipt = self._inner.receive(specs, device, rank, tag)
        self._clock.resume()
        return _ModelledReceipt(receipt, self._clock, self._shared, specs, channel, number)

    def _next(self, channel: Channel) -> int:
        self._counts[channel] += 1
        return self._counts[channel] - 1

    def settle(self) -> None:
        """See ``Transport``; what was sent is under way."""

    def flush(self) -> None:
        if self._shared is None:
            self._inner.flush()
            return
        self._clock.charge()
        self._inner.flush()
        self._clock.resume()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class _ModelledReceipt:
    inner: Receipt
    clock: DeviceClock
    shared: SharedLinks
    specs: Sequence[Spec]
    channel: Channel
    number: int

    def wait(self) -> list[Tensor]:
        self.clock.charge()
        # The sender notes the time before it sends, so whoever has the bytes can look it up.
        self.inner.wait()
        self.clock.meet(self.shared.arrival(self.channel, self.number))
        self.clock.resume()
        return [torch.empty((*shape[:1], 0), dtype=dtype) for shape, dtype in self.specs]


@dataclass(frozen=True)
class _HostReceipt:
    inner: Receipt
    clock: DeviceClock

    def wait(self) -> list[Tensor]:
        tensors = self.inner.wait()
        self.clock.charge()
        self.clock.catch_up()
        self.clock.resume()
        return tensors
