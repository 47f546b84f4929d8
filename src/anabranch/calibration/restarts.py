"""How much longer work takes behind a wait: meanwhile others had the core, or it was asleep.

Caches have other contents then, and the clock has slowed down. A piece of work of some milliseconds
is done behind waits of several lengths and behind none; what it takes longer is lost once per wait,
however long the work is. Another rank computes meanwhile, as the one does that is waited for: where
all cores sleep, the machine falls asleep more deeply (behind 5 ms work took 1.4 ms longer, beside
another rank 1.1).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import nn

WAITS_S = (0.0005, 0.002, 0.005, 0.02)
"""From a message of another rank to a whole backward of it."""

_ROUNDS = 32


def work() -> Callable[[], float]:
    """A piece of work, which returns its processor seconds."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    values = torch.randn(16, 256)

    def piece_s() -> float:
        used = time.thread_time()
        for _ in range(3):
            torch.autograd.backward(block(values).sum())
        return time.thread_time() - used

    return piece_s


def measure_restarts() -> tuple[tuple[float, float], ...]:
    """Pairs of seconds waited and seconds that work then takes longer; call it while another rank
    works.
    """
    piece_s = work()
    longer: dict[float, list[float]] = {wait: [] for wait in WAITS_S}
    for _ in range(_ROUNDS):
        piece_s()
        plain = piece_s()
        for wait, seconds in longer.items():
            time.sleep(wait)
            seconds.append(piece_s() - plain)
    return ascending({wait: statistics.median(seconds) for wait, seconds in longer.items()})


def ascending(longer: dict[float, float]) -> tuple[tuple[float, float], ...]:
    """The pairs as a table that never falls, from 0."""
    never_falling = accumulate((max(0.0, seconds) for seconds in longer.values()), max)
    return tuple(zip(longer, never_falling, strict=True))
