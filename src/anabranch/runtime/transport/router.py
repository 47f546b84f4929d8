"""One transport made of several: each rank is reached by the best there is for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anabranch.runtime.transport.base import Receipt, Spec, Transport


class Router:
    """Hands messages to the transport of the rank at the other end; both ends have to choose the
    same.

    ``transports`` are all of them, each once, flushed and closed in this order.
    """

    def __init__(self, routes: Mapping[int, Transport], transports: Sequence[Transport]) -> None:
        self._routes = dict(routes)
        self._transports = tuple(transports)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._routes[rank].send(tensors, rank, tag)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        return self._routes[rank].receive(specs, device, rank, tag)

    def settle(self) -> None:
        for transport in self._transports:
            transport.settle()

    def flush(self) -> None:
        for transport in self._transports:
            transport.flush()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
