"""Processor time of summing gradients: hooks, copies to the bucket, terms sent, taken and added.

Two ranks run backwards over parameters that both hold, with the runtime's reducer and without. The
difference, for small and for large parameters, is what a parameter and a byte of it cost.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from anabranch.calibration.messages import Line
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.mesh import Mesh

RANKS = (0, 1)
"""Who sums."""

_COUNT, _SMALL, _LARGE = 48, 256, 1 << 16
"""Parameters, and bytes of each."""

_STEPS = 16


def measure_sums(mesh: Mesh) -> Line:
    """Seconds per parameter and per byte on each of two ranks; call it on both."""
    small, large = (_seconds(mesh, nbytes) / _COUNT for nbytes in (_SMALL, _LARGE))
    byte_s = max(0.0, (large - small) / (_LARGE - _SMALL))
    return Line(max(0.0, small - byte_s * _SMALL), byte_s)


def _seconds(mesh: Mesh, nbytes: int) -> float:
    """Processor seconds of the sums of one step."""
    parameters = {str(i): nn.Parameter(torch.ones(nbytes // 4)) for i in range(_COUNT)}
    holders = Holders(dict.fromkeys(parameters, RANKS), {}, dict.fromkeys(parameters, (0,)))
    reducer = Reducer(parameters, holders, mesh)
    summed: list[float] = []
    alone: list[float] = []
    for step in range(2 * _STEPS):
        sums = step % 2 == 0
        loss = torch.stack([p.square().sum() for p in parameters.values()]).sum()
        for parameter in parameters.values():
            parameter.grad = None
        if not sums:
            reducer.begin((), is_last=False)  # takes the hooks away
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
