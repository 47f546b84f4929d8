"""Seconds of messages between two ranks: on the link, and of the processors at both ends.

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
    """Seconds of messages: of the link, latency and per byte, and of the processor at each end, per
    byte.
    """

    latency_s: float
    byte_s: float
    end_byte_s: float


def exchange(transport: Transport, peer: int, *, first: bool, tag: int) -> Exchange:
    """Exchange messages with a rank; call it on both, on one of them as the first."""
    seconds = (_back_and_forth(transport, peer, size, first, tag) for size in SIZES)
    links, ends = zip(*seconds, strict=True)
    return Exchange(*_line(*links), _line(*ends)[1])


def _back_and_forth(
    transport: Transport, peer: int, nbytes: int, first: bool, tag: int
) -> tuple[float, float]:
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
    end_s = statistics.median(used)
    return max(0.0, statistics.median(rounds) / 2 - end_s), end_s


def _line(small_s: float, large_s: float) -> tuple[float, float]:
    """Seconds that do not depend on bytes, and seconds per byte, by those of both sizes."""
    small, large = SIZES
    slope = max(0.0, large_s - small_s) / (large - small)
    return max(0.0, small_s - slope * small), slope
