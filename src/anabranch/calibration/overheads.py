"""What a rank does besides computing, sending and updating: the bookkeeping of its worker.

A pipeline of one rank trains a model whose operators take next to nothing, with few micro-batches
and with many. What they differ by, without the operators as the profiler times them, is the
bookkeeping of passes; the rest is that of steps, as the optimizer does nothing::

    step(M) = step_s + M * (2 * microbatch_s + operators)
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.calibration.restarts import measure_restarts
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.profile.measure import measure
from anabranch.profile.profile import Profile
from anabranch.runtime.pipeline import Pipeline
from anabranch.solve import plan
from anabranch.workload import NamedParameters, Workload, adamw

_SAMPLES = 4
"""Of a micro-batch."""

_FEW, _MANY = 2, 14
_STEPS = 24
_UPDATE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a forward or backward and of a step besides their work, bytes/s of updates, and
    what waits cost (``Calibration.restarts``).
    """

    microbatch_s: float
    step_s: float
    memory_bandwidth: float
    restarts: tuple[tuple[float, float], ...] = ()


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(values).relu())
        return result.square().mean()


class _Idle(torch.optim.Optimizer):
    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change nothing."""


def measure_overheads() -> Overheads:
    """Measure them on this processor core; no process group may have been made."""
    torch.manual_seed(0)
    workload = Workload(_Tiny(), (torch.randn(_SAMPLES, 8),), optimizer=_Idle)
    captured = capture(workload.module, workload.example)
    profile = measure(captured, (_SAMPLES, 2 * _SAMPLES), repeats=24)
    operators_s = sum(cost.forward_s[0] + cost.backward_s[0] for cost in profile.costs)
    few, many = (_step_s(workload, captured, profile, m) for m in (_FEW, _MANY))
    microbatch_s = (many - few) / (_MANY - _FEW)
    return Overheads(
        max(0.0, microbatch_s - operators_s) / 2,
        max(0.0, few - _FEW * microbatch_s),
        _memory_bandwidth(),
        measure_restarts(),
    )


def _step_s(
    workload: Workload, captured: Captured, profile: Profile, num_microbatches: int
) -> float:
    """Processor seconds of a step on one rank."""
    size = num_microbatches * _SAMPLES
    one = Cluster("one rank", "cpu", 2**34, Cluster.preset("local:1").levels)
    chosen = plan(profile, one, size, planner="even", microbatch_size=_SAMPLES)
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    batch, taken = (torch.randn(size, 8),), []
    for _ in range(_STEPS):
        used = time.process_time()
        pipe.step(batch)
        taken.append(time.process_time() - used)
    return statistics.median(taken)


def _memory_bandwidth() -> float:
    """Bytes/s of an update that reads weight, gradient and two moments and writes all but the
    gradient.
    """
    weights = nn.Parameter(torch.zeros(_UPDATE_BYTES // 4))
    optimizer = adamw([("weights", weights)])
    weights.grad = torch.full_like(weights, 1e-3)
    taken = []
    for repeat in range(8):
        begun = time.perf_counter()
        optimizer.step()
        if repeat >= 2:
            taken.append(time.perf_counter() - begun)
    return 7 * _UPDATE_BYTES / statistics.median(taken)
