"""Processor time of summing gradients, and of sharing what was updated by one rank for others.

A sum takes hooks, copies to the bucket, terms sent, taken and added. Two ranks run backwards over
parameters that both hold, with the runtime's reducer and without. The difference, for small and for
large parameters, is what a parameter and a byte of it cost. Then each of them gives the other one
half of the parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.calibration.messages import Line, line
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.measurement.update import CACHE_BYTES
from anabranch.runtime.mesh import Mesh

RANKS = (0, 1)
"""Who sums."""

_COUNT, _SMALL, _LARGE = 48, 256, 1 << 16
"""Parameters, and bytes of each."""

_STEPS = 16


@dataclass(frozen=True, slots=True)
class Sums:
    """Processor seconds per parameter and per byte of it, on each of two ranks: of its sum, and of
    sharing it behind an update. Per parameter a part of the message in which all travel is in them.
    """

    sum: Line
    share: Line


def per_tensor_s(lines: Sequence[Line], message_s: float) -> float:
    """The mean seconds per parameter besides a message, sent and taken, of so many seconds."""
    mean_s = statistics.fmean(line.fixed_s for line in lines) if lines else 0.0
    return max(0.0, mean_s - message_s / _COUNT)


def per_byte_s(lines: Sequence[Line]) -> float:
    """The mean seconds per byte."""
    return statistics.fmean(line.byte_s for line in lines) if lines else 0.0


def measure_sums(mesh: Mesh) -> Sums:
    """Measure them; call it on both ranks."""
    small, large = (_Parameters(mesh, nbytes) for nbytes in (_SMALL, _LARGE))
    return Sums(
        _line(small.sum_s(), large.sum_s()),
        _line(small.share_s(), large.share_s()),
    )


def _line(small_s: float, large_s: float) -> Line:
    return line((_SMALL, _LARGE), (small_s / _COUNT, large_s / _COUNT))


class _Parameters:
    """Parameters of one size that both ranks hold."""

    def __init__(self, mesh: Mesh, nbytes: int) -> None:
        self._mesh = mesh
        self._named = {str(i): nn.Parameter(torch.ones(nbytes // 4)) for i in range(_COUNT)}
        self._holders = Holders(
            dict.fromkeys(self._named, RANKS), {}, dict.fromkeys(self._named, (0,))
        )

    def sum_s(self) -> float:
        """Of the sums of one step."""
        return _sum_s(self._named, Reducer(self._named, self._holders, self._mesh))

    def share_s(self) -> float:
        """Of giving and taking what was updated in one step."""
        holders = self._holders.sharded(self._named, cut=False)
        reducer = Reducer(self._named, holders, self._mesh)
        taken: list[float] = []
        other = torch.zeros(CACHE_BYTES // 4)  # in a step parameters and buckets are in no cache
        for _ in range(2 * _STEPS):
            other.add_(1)
            self._mesh.all_reduce(torch.zeros(1), RANKS)
            used = time.process_time()
            reducer.start_share()
            reducer.finish_share()
            taken.append(time.process_time() - used)
        return statistics.median(taken)


def _sum_s(parameters: dict[str, nn.Parameter], reducer: Reducer) -> float:
    summed: list[float] = []
    alone: list[float] = []
    other = torch.zeros(CACHE_BYTES // 4)
    for step in range(2 * _STEPS):
        sums = step % 2 == 0
        loss = torch.stack([p.square().sum() for p in parameters.values()]).sum()
        for parameter in parameters.values():
            parameter.grad = None
        if not sums:
            reducer.begin((), is_last=False)  # takes the hooks away
        other.add_(1)
        used = time.process_time()
        if sums:
            reducer.begin((0,))
            reducer.arm(0)
        torch.autograd.backward(loss)
        if sums:
            reducer.complete(0)
            reducer.take_all()
        (summed if sums else alone).append(time.process_time() - used)
    return max(0.0, statistics.median(summed) - statistics.median(alone))
