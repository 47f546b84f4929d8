"""How much longer computing takes while other ranks of the host compute as well.

Memory, caches and, behind some "cores", the arithmetic itself are shared. The work is what a stage
does with a small micro-batch: it goes through layers whose weights and gradients are more than a
core's own cache holds, so that its numbers come from what cores share. (On an AMD EPYC with 1 MiB
for each of two cores, the slower of two ranks took 1.08 to 1.18 times the processor time of one
alone, the slowest of four 1.07 to 1.26.)

What counts is processor time per piece of work, so that other users of the machine do not look
like a slow processor; that ranks beyond the cores have to take turns comes on top. And ranks wait
for each other, so it is that of the slowest, for as long as a step may take: the mean of two ranks
is 3 to 5 % less::

    slowdown(k) = processor seconds of the slowest of k / of 1 alone  *  max(1, k / cores)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

_ROUNDS = 20
_WINDOW_S = 0.03
"""Long enough for ranks to be preempted, no longer than what they do between waits."""

_LAYERS = 4, 1
"""Of the work, with 2 MiB of weights and gradients each: of ranks with a core each, and of more.
With four layers those would hold as much as the caches that cores share, and slow each other twice
as much as they do in steps.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one rank did in one window: processor and wall seconds per piece of work."""

    processor_s: float
    wall_s: float


Paces = dict[int, list[Pace]]
"""Those of one rank with one kind of work, by number of ranks that compute."""


def work(layers: int = _LAYERS[0]) -> Callable[[], object]:
    """One piece of work, of half a millisecond per layer: a forward and a backward."""
    torch.manual_seed(0)
    stage = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
            for _ in range(layers)
        )
    )
    values = torch.randn(16, 256)

    def piece() -> None:
        torch.autograd.backward(stage(values).sum())

    piece()
    return piece


def pace(piece: Callable[[], object], window_s: float = _WINDOW_S) -> Pace:
    """Do pieces of work for a while."""
    done, begun, used = 0, time.perf_counter(), time.thread_time()
    while True:
        piece()
        done += 1
        wall = time.perf_counter() - begun
        if wall >= window_s:
            return Pace((time.thread_time() - used) / done, wall / done)


def counts(cores: int, most: int) -> tuple[int, ...]:
    """Numbers of ranks to measure: powers of two up to the cores, the cores, one more, twice them;
    at most ``most``.
    """
    powers = {1 << i for i in range(cores.bit_length())}
    return tuple(sorted(k for k in powers | {cores, cores + 1, 2 * cores} if k <= most))


def measure_paces(
    local_rank: int,
    ks: Sequence[int],
    cores: int,
    meet: Callable[[], None],
    told: Callable[[int], None],
) -> tuple[Paces, ...]:
    """This rank's paces: of up to as many ranks as there are cores, then those of more, if there
    are; both beside the first one's alone. Call it on all ranks of a host.

    Args:
        ks: numbers of ranks.
        meet: waits for all ranks.
        told: called with the number of windows done.
    """
    found: tuple[Paces, ...] = tuple({k: [] for k in ks} for ks in _split(ks, cores))
    pieces = [work(layers) for layers in _LAYERS[: len(found)]]
    done = 0
    for _ in range(_ROUNDS):
        for piece, paces in zip(pieces, found, strict=True):
            for k, mine in paces.items():
                meet()
                if local_rank < k:
                    mine.append(pace(piece))
                done += 1
                told(done)
    meet()
    return found


def _split(ks: Sequence[int], cores: int) -> list[list[int]]:
    """Numbers of ranks that have a core each; those of more, behind a single one."""
    more = [k for k in ks if k > cores]
    return [[k for k in ks if k <= cores], *([[1, *more]] if more else [])]


def num_windows(ks: Sequence[int], cores: int) -> int:
    """Windows that ``measure_paces`` has."""
    return _ROUNDS * sum(map(len, _split(ks, cores)))


def slowdown(paces: Sequence[Sequence[Paces]], cores: int) -> tuple[float, ...]:
    """The table of a host from the paces of its ranks: an entry for 1, 2, ... ranks.

    Between numbers that were measured it is interpolated; it never falls.
    """
    ratio = {1: 1.0}
    for alike in zip(*paces, strict=True):
        alone = alike[0][1]
        for k in alike[0]:
            # Turn by turn, so that a slow moment of the machine hits both.
            ratio[k] = statistics.median(
                max(mine[k][turn].processor_s for mine in alike if mine[k])
                / alone[turn].processor_s
                for turn in range(len(alone))
            )
    table = [1.0]
    for low, high in pairwise(sorted(ratio)):
        for k in range(low + 1, high + 1):
            share = (k - low) / (high - low)
            shared = ratio[low] * (1 - share) + ratio[high] * share
            table.append(max(table[-1], max(1.0, shared) * max(1.0, k / cores)))
    return tuple(table)


def lost_share(paces: Sequence[Sequence[Paces]]) -> float:
    """Share of the time of ranks alone that went to other processes."""
    alone = [pace for alike in paces[0] for pace in alike[1]]
    return max(0.0, 1 - sum(p.processor_s for p in alone) / sum(p.wall_s for p in alone))
