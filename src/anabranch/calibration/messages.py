"""What messages cost between two ranks: the link, and processor time at both ends.

A message goes back and forth. Half of a round is what a link takes from the moment a rank begins to
send until the other has the message in hand; the sender goes on earlier, when it has handed the
message over::

    sender    |== send_s ==|
              |---- link: latency + bytes / bandwidth ----|
    receiver                                              |= receive_s =|

So the link's figures have the sender's time in them, and the receiver's comes after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.runtime.transport import Transport

SIZES = (256, 16 << 10, 256 << 10, 2 << 20)
"""Bytes of a message: small ones, whose latency counts, up to a large activation."""

_ROUNDS = 24
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a message of some size: on its way, and of the processors at both ends."""

    nbytes: int
    one_way_s: float
    send_s: float
    receive_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a message: ``fixed_s`` and ``byte_s`` per byte."""

    fixed_s: float
    byte_s: float


def exchange(transport: Transport, peer: int, *, first: bool, tag: int) -> list[Exchange]:
    """Messages of all sizes to a rank and back; call it on both."""
    return [_back_and_forth(transport, peer, size, first, tag) for size in SIZES]


def _back_and_forth(
    transport: Transport, peer: int, nbytes: int, first: bool, tag: int
) -> Exchange:
    ones = torch.ones(nbytes // 4)
    specs = [(ones.shape, ones.dtype)]
    rounds, sends, receives = [], [], []
    for _ in range(_ROUNDS):
        # As in a step: what is sent has just been made, and a receive is posted before the wait.
        made = ones + 1
        receipt = transport.receive(specs, _CPU, peer, tag)
        begun = time.perf_counter()
        if first:
            sends.append(_send(transport, made, peer, tag))
        used = time.process_time()
        receipt.wait()
        receives.append(time.process_time() - used)
        if not first:
            sends.append(_send(transport, made, peer, tag))
        rounds.append(time.perf_counter() - begun)
    return Exchange(
        nbytes,
        max(0.0, statistics.median(rounds) / 2 - statistics.median(receives)),
        statistics.median(sends),
        statistics.median(receives),
    )


def _send(transport: Transport, tensor: torch.Tensor, peer: int, tag: int) -> float:
    # Of all threads: Gloo sends in its own.
    used = time.process_time()
    transport.send([tensor], peer, tag)
    transport.push()
    return time.process_time() - used


def line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line through seconds by size: the smallest size's, and the slope to the largest."""
    slope = max(0.0, (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]))
    return Line(max(0.0, seconds[0] - slope * sizes[0]), slope)


def pairs(hosts: Sequence[str], most: int = 12) -> list[tuple[int, int]]:
    """Pairs of ranks to measure, all or a sample of each kind: on one host, between two hosts."""
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for a in range(len(hosts)):
        for b in range(a + 1, len(hosts)):
            (near if hosts[a] == hosts[b] else far).append((a, b))
    return [pair for kind in (near, far) for pair in kind[:: max(1, -(-len(kind) // most))]]
