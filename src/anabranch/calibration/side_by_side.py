"""Slowdown of a rank while other ranks of its host compute as well.

Memory, caches and, for some "cores", the arithmetic units are shared. Ranks wait for each other, so
the slowest one counts::

    slowdown(k) = processor seconds of the slowest of k / of 1 alone
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from anabranch import launch

_ROUNDS, _STEPS = 20, 12
"""Rounds of each number of ranks, and steps in a round, of about two milliseconds each."""

_LAYERS = 4
"""Layers of the work: 8 MiB of weights and gradients, more than a core's own cache holds."""

Paces = dict[int, list[float]]
"""Number of ranks that compute -> processor seconds of one rank in each round."""


def measure_slowdown(cores: int) -> tuple[float, ...]:
    """Measure the slowdown of 1, 2, ... ``cores`` ranks; interpolated between powers of two."""
    counts = sorted({1 << i for i in range(cores.bit_length())} | {cores})
    return slowdown(launch.run(_paces, cores, counts))


def _paces(counts: Sequence[int]) -> Paces:
    layers = (
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
        for _ in range(_LAYERS)
    )
    stage, values = nn.Sequential(*layers), torch.randn(16, 256)
    paces: Paces = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count, seconds in paces.items():
            dist.barrier()
            if dist.get_rank() < count:
                used = time.thread_time()
                for _ in range(_STEPS):
                    torch.autograd.backward(stage(values).sum())
                seconds.append(time.thread_time() - used)
    return paces


def slowdown(ranks: Sequence[Paces]) -> tuple[float, ...]:
    """Return the slowdown from the paces of all ranks; it never falls with more ranks."""
    counts, ratios = [*ranks[0]], list[float]()
    for count in counts:
        rounds = zip(*(paces[count] for paces in ranks if paces[count]), strict=True)
        # Round by round, so that a slow moment of the machine affects both sides of the ratio.
        slower = (max(s) / alone for s, alone in zip(rounds, ranks[0][1], strict=True))
        ratios.append(statistics.median(slower))
    rising = np.maximum.accumulate([1.0, *ratios[1:]])
    return tuple(np.interp(range(1, counts[-1] + 1), counts, rising).tolist())
