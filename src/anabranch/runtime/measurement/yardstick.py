"""A fixed piece of work that all ranks do at the same time, which shows how fast each device is."""

from __future__ import annotations

import time

import torch

_SIZE = {"cpu": 256, "cuda": 2048}
"""Rows of square matrices whose product takes a millisecond or so."""

_REPEATS = 15


def yardstick_s(place: torch.device) -> float:
    """Seconds of the work here, as its quick half takes: what interrupts a process is none of its
    device's slowness, but what shares the processor with it is.
    """
    size = _SIZE.get(place.type, 256)
    matrix = torch.ones(size, size, device=place)
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        taken.append(time.perf_counter() - began)
    quick = sorted(taken[1:])[: _REPEATS // 2]
    return sum(quick) / len(quick)
