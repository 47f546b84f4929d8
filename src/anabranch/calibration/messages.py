"""Seconds of messages between two ranks on the link, without those of the receiving processor.

A message goes back and forth. Half of a round is the time from the moment a rank begins to send
until the other rank has the message, so the link's seconds include those of the sender::

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
"""Bytes of a small message, for the latency, and of a large activation."""

_ROUNDS = 32
_CPU = torch.device("cpu")


class LinkTimes(NamedTuple):
    """Seconds of messages on a link: latency, and per byte."""

    latency_s: float
    byte_s: float


def exchange(transport: Transport, peer: int, *, first: bool, tag: int) -> LinkTimes:
    """Measure messages to another rank and back; call it on both ranks, on one as ``first``."""
    return _line(*(_back_and_forth(transport, peer, size, first, tag) for size in SIZES))


def _back_and_forth(transport: Transport, peer: int, nbytes: int, first: bool, tag: int) -> float:
    ones = torch.ones(nbytes // 4)
    specs = [(ones.shape, ones.dtype)]
    rounds, used = [], []
    for _ in range(_ROUNDS):
        # As in a step: the sent tensor has just been made, and a receive is posted before the wait.
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


def _line(small_s: float, large_s: float) -> LinkTimes:
    """Return latency and seconds per byte, from the seconds of both sizes."""
    small, large = SIZES
    slope = max(0.0, large_s - small_s) / (large - small)
    return LinkTimes(max(0.0, small_s - slope * small), slope)
