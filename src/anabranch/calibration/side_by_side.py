"""How much longer computing takes while other ranks of the host compute as well.

Memory, caches and, behind some "cores", the arithmetic itself are shared. The work is what a stage
does with a small micro-batch. Its layers have more weights and gradients than a core's own cache
holds, so that its numbers come from what cores share. Ranks wait for each other, so what counts is
the slowest of them::

    slowdown(k) = processor seconds of the slowest of k / of 1 alone
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from anabranch import launch

_ROUNDS, _WINDOW_S = 20, 0.03
"""Looks at each number of ranks, and seconds of one: about what ranks compute between waits."""

_LAYERS = 4
"""Of the work, with 2 MiB of weights and gradients each."""


def work() -> Callable[[], object]:
    """A forward and a backward that take about two milliseconds."""
    layers = (
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
        for _ in range(_LAYERS)
    )
    stage, values = nn.Sequential(*layers), torch.randn(16, 256)
    return lambda: torch.autograd.backward(stage(values).sum())


def pace_s(piece: Callable[[], object]) -> float:
    """Processor seconds of one piece of work, done again and again for a while."""
    count, begun, used = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun < _WINDOW_S:
        piece()
        count += 1
    return (time.thread_time() - used) / count


def measure_slowdown(cores: int) -> tuple[float, ...]:
    """The slowdown of 1, 2, ... up to so many ranks; interpolated between powers of two."""
    counts = sorted({1 << i for i in range(cores.bit_length())} | {cores})
    return slowdown(launch.run(_paces, cores, counts))


def _paces(counts: Sequence[int]) -> dict[int, list[float]]:
    """This rank's paces, round after round, by the number of ranks that compute."""
    piece, rank = work(), dist.get_rank()
    piece()
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count, seconds in found.items():
            dist.barrier()
            if rank < count:
                seconds.append(pace_s(piece))
    return found


def slowdown(paces: Sequence[dict[int, list[float]]]) -> tuple[float, ...]:
    """The slowdown from the paces of all ranks; it never falls."""
    counts, ratios = [*paces[0]], list[float]()
    for count in paces[0]:
        rounds = zip(*(rank[count] for rank in paces if rank[count]), strict=True)
        # Round by round, so that a slow moment of the machine hits both.
        slower = (max(s) / alone for s, alone in zip(rounds, paces[0][1], strict=True))
        ratios.append(statistics.median(slower))
    rising = np.maximum.accumulate([1.0, *ratios[1:]])
    return tuple(np.interp(range(1, counts[-1] + 1), counts, rising).tolist())
