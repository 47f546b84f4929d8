"""How much longer work takes behind a wait: meanwhile others had the core, or it was asleep.

Caches have other contents then, and the clock has slowed down. Work of some ten milliseconds is
done behind waits of several lengths and behind none; what it takes longer is lost once per wait,
most of it in the first work: of 1.6 ms behind 20 ms, .9 in the first and 1.4 in the first three.
Another rank computes meanwhile, as the one does that is waited for: where
all cores sleep, the machine falls asleep more deeply (behind 5 ms work took 1.4 ms longer, beside
another rank 1.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import nn

WAITS_S = (0.0005, 0.002, 0.005, 0.02)
"""From a message of another rank to a whole backward of it."""

_ROUNDS = 32

_PIECES = 12
"""Of work, of about a millisecond each."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """What waits cost.

    Attributes:
        longer: pairs of seconds waited and seconds that long work then takes longer.
        work_s: the work in which all but 1/e of it is lost.
    """

    longer: tuple[tuple[float, float], ...] = ()
    work_s: float = 0.0


NO_RESTARTS = Restarts()


def work() -> Callable[[], list[float]]:
    """Some pieces of work, which return the processor seconds up to the end of each."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    values = torch.randn(16, 256)

    def pieces_s() -> list[float]:
        begun, ends = time.thread_time(), []
        for _ in range(_PIECES):
            torch.autograd.backward(block(values).sum())
            ends.append(time.thread_time() - begun)
        return ends

    return pieces_s


def measure_restarts() -> Restarts:
    """Measure them; call it while another rank works."""
    pieces_s = work()
    plain: list[list[float]] = []
    longer: dict[float, list[list[float]]] = {wait: [] for wait in WAITS_S}
    for _ in range(_ROUNDS):
        pieces_s()
        plain.append(pieces_s())
        for wait, rounds in longer.items():
            time.sleep(wait)
            rounds.append(np.subtract(pieces_s(), plain[-1]).tolist())
    medians = {wait: np.median(rounds, axis=0).tolist() for wait, rounds in longer.items()}
    return Restarts(
        ascending({wait: lost[-1] for wait, lost in medians.items()}),
        most_lost_s(np.median(plain, axis=0).tolist(), medians[WAITS_S[-1]]),
    )


def ascending(longer: dict[float, float]) -> tuple[tuple[float, float], ...]:
    """The pairs as a table that never falls, from 0."""
    never_falling = accumulate((max(0.0, seconds) for seconds in longer.values()), max)
    return tuple(zip(longer, never_falling, strict=True))


def most_lost_s(worked: Sequence[float], lost: Sequence[float]) -> float:
    """The work in which all but 1/e of what is lost in the end is lost."""
    rising = [0.0, *accumulate((max(0.0, seconds) for seconds in lost), max)]
    if not rising[-1]:
        return 0.0
    return float(np.interp((1 - 1 / np.e) * rising[-1], rising, [0.0, *worked]))
