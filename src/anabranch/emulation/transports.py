"""Transport between emulated devices: messages really travel, and take as long as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.emulation import Emulation
from anabranch.emulation.shared_links import POSTED, SENT, Channel
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
        self._meet((self._rank, rank, tag), SENT, sum(tensor.nbytes for tensor in tensors))
        self._inner.send(tensors, rank, tag)
        self._clock.resume()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        if self._shared is None:
            return _TimedReceipt(self._inner.receive(specs, device, rank, tag), self._clock)
        self._clock.charge()
        channel = rank, self._rank, tag
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in specs)
        arrival = partial(self._shared.arrival, channel, self._meet(channel, POSTED, nbytes))
        receipt = self._inner.receive(specs, device, rank, tag)
        self._clock.resume()
        return _TimedReceipt(receipt, self._clock, arrival, specs)

    def _meet(self, channel: Channel, end: int, nbytes: int) -> int:
        """Note one end of the next message of a channel; return the number of the message."""
        assert self._shared is not None
        number, route = self._counts[channel], self._emulation.route(*channel[:2])
        self._counts[channel] += 1
        self._shared.meet(channel, number, end, self._clock.now, route, nbytes)
        return number

    def settle(self) -> None:
        """See ``Transport``; what was sent is under way."""

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class _TimedReceipt:
    """A receive; ``arrival`` returns when its message is there, None on links of this machine."""

    inner: Receipt
    clock: DeviceClock
    arrival: Callable[[], float] | None = None
    specs: Sequence[Spec] = ()

    def wait(self) -> list[Tensor]:
        if self.arrival is None:
            tensors = self.inner.wait()
            self.clock.charge()
            self.clock.catch_up()
        else:
            self.clock.charge()
            # The sender notes the time before it sends, so whoever has the bytes can look it up.
            self.inner.wait()
            self.clock.meet(self.arrival())
            tensors = [
                torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.specs
            ]
        self.clock.resume()
        return tensors
