"""Seconds of messages between two ranks on the link, without the processor's at the receiving end.

A message goes back and forth. Half of a round is what a link takes from the moment a rank begins to
send until the other has the message in hand, so the link's seconds hold those of the sender::

    sender    |== end ==|
              |---- link: latency + bytes / bandwidth ----|
    receiver                                              |== end ==|
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from anabranch.runtime.transport import Transport

SIZES = 256, 2 << 20
"""Bytes of a small message, whose latency counts, and of a large activation."""

_ROUNDS = 32
_CPU = torch.device("cpu")


class Exchange(NamedTuple):
    """Seconds of messages on a link: latency, and per byte."""

    latency_s: float
    byte_s: float


def exchange(transport: Transport, peer: int, *, first: bool, tag: int) -> Exchange:
    """Exchange messages with a rank; call it on both, on one of them as the first."""
    return _line(*(_back_and_forth(transport, peer, size, first, tag) for size in SIZES))


def _back_and_forth(transport: Transport, peer: int, nbytes: int, first: bool, tag: int) -> float:
    ones = torch.ones(nbytes // 4)
    specs = [(ones.shape, ones.dtype)]
    rounds, used = [], []
    for _ in range(_ROUNDS):
        # As in a step: what is sent has just been made, and a receive is posted before the wait.
        made = ones + 1
        receipt = transport.receive(specs, _CPU, peer, tag)
        begun, before = time.perf_counter(), time.process_time()
        if not first:
            receipt.wait()
        transport.send([made], peer, tag)
        if first:
            receipt.wait()
        rounds.append(time.perf_counter() - begun)
        used.append((time.process_time() - before) / 2)
    return max(0.0, statistics.median(rounds) / 2 - statistics.median(used))


def _line(small_s: float, large_s: float) -> Exchange:
    """Seconds that do not depend on bytes, and seconds per byte, by those of both sizes."""
    small, large = SIZES
    slope = max(0.0, large_s - small_s) / (large - small)
    return Exchange(max(0.0, small_s - slope * small), slope)
