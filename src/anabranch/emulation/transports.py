"""Transports between emulated devices: messages really travel, and take as long as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.shared_links import Channel, Price, SharedLinks
from anabranch.runtime.transport import Receipt, Spec, Transport
from anabranch.simulator.costs import StepCosts


class LinkPrices:
    """Prices of messages on the links of a cluster."""

    def __init__(self, costs: StepCosts, devices: Sequence[int]) -> None:
        self._costs, self._devices = costs, devices

    def price(self, source: int, target: int, nbytes: int) -> Price:
        """Price of so many bytes from one rank to another."""
        route = self._costs.route(self._devices[source], self._devices[target])
        return Price(nbytes * route.per_byte_s, route.latency_s, route.ports)


class ModelledTransport:
    """Messages go through another transport, and are there when the modelled links have them there.

    A message that has arrived is dropped, and tensors without content take its place.
    """

    def __init__(
        self,
        inner: Transport,
        rank: int,
        shared: SharedLinks,
        prices: LinkPrices,
        clock: DeviceClock,
    ) -> None:
        self._inner, self._rank = inner, rank
        self._shared, self._prices, self._clock = shared, prices, clock
        self._counts: Counter[Channel] = Counter()

    def begin(self) -> None:
        """Start a step, on a board that has been cleared."""
        self._counts.clear()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._clock.charge()
        channel = self._rank, rank, tag
        price = self._prices.price(self._rank, rank, sum(tensor.nbytes for tensor in tensors))
        self._shared.sent(channel, self._next(channel), self._clock.now, price)
        self._inner.send(tensors, rank, tag)
        self._clock.resume()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        self._clock.charge()
        channel = rank, self._rank, tag
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in specs)
        number = self._next(channel)
        price = self._prices.price(rank, self._rank, nbytes)
        self._shared.posted(channel, number, self._clock.now, price)
        receipt = self._inner.receive(specs, device, rank, tag)
        self._clock.resume()
        return _Modelled(self, receipt, specs, channel, number)

    def _next(self, channel: Channel) -> int:
        self._counts[channel] += 1
        return self._counts[channel] - 1

    def flush(self) -> None:
        self._clock.charge()
        self._inner.flush()
        self._clock.resume()

    def close(self) -> None:
        self._inner.close()


class _Modelled:
    """A receive on a modelled link."""

    def __init__(
        self,
        transport: ModelledTransport,
        inner: Receipt,
        specs: Sequence[Spec],
        channel: Channel,
        number: int,
    ) -> None:
        self._transport, self._inner, self._specs = transport, inner, specs
        self._channel, self._number = channel, number

    def wait(self) -> list[Tensor]:
        clock, shared = self._transport._clock, self._transport._shared
        clock.charge()
        # The sender notes the time before it sends, so whoever has the bytes can look it up.
        self._inner.wait()
        clock.meet(shared.arrival(self._channel, self._number))
        clock.resume()
        return [torch.empty((*shape[:1], 0), dtype=dtype) for shape, dtype in self._specs]


class HostLinks:
    """Messages take as long as they do on this machine: the wall clock is the devices' time."""

    def __init__(self, inner: Transport, clock: DeviceClock) -> None:
        self._inner, self._clock = inner, clock

    def begin(self) -> None:
        """Start a step."""

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._inner.send(tensors, rank, tag)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        return _EmulatedReceive(self._inner.receive(specs, device, rank, tag), self._clock)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


class _EmulatedReceive:
    """A receive on a link of this machine."""

    def __init__(self, inner: Receipt, clock: DeviceClock) -> None:
        self._inner, self._clock = inner, clock

    def wait(self) -> list[Tensor]:
        tensors = self._inner.wait()
        self._clock.charge()
        self._clock.catch_up()
        self._clock.resume()
        return tensors
