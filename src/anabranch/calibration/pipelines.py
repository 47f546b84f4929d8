"""Processor seconds of the runtime, from steps of small pipelines.

A step takes longer the more micro-batches it has. The intercept and the slope of that line are the
costs of a step and of a micro-batch besides operators, on one rank or on each of two::

    one rank     step_s                       +  2 * pass_s * micro-batches
    two ranks    ... + 2 * message_s (totals) + (2 * pass_s + 2 * message_s) * micro-batches
    replicas     ... + 2 * message_s (totals) +  2 * pass_s * micro-batches + all-reduce

Operators are timed between these steps, since the speed of a machine changes. The optimizer does
nothing.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan
from anabranch.profile.estimate import estimate
from anabranch.profile.measure import Measurement
from anabranch.runtime.pipeline import Pipeline
from anabranch.solve import plan
from anabranch.workload import Batch, NamedParameters, Workload

_LAYERS, _WIDTH, _SAMPLES = 2, 256, 16
"""Layers of a rank, their width, and samples of a micro-batch: half a millisecond of operators, so
messages find caches as in a real step.
"""

_FEW, _MANY = 2, 12
"""Micro-batches of a step."""

_TURNS, _STEPS, _SETTLING = 6, 4, 2
"""Turns of timing operators, steps behind each turn, and steps before these that do not count,
since they find other contents in the caches.
"""


def measure_overheads() -> tuple[float, float, float, float]:
    """Measure processor seconds on local ranks: of a message, a pass and a step, and per byte of an
    all-reduce, as ``Calibration`` has them.
    """
    workload = _workload(_LAYERS)
    nbytes = sum(parameter.nbytes for parameter in workload.module.parameters())
    one, two = _steps(workload, 1), _steps(_workload(2 * _LAYERS), 2)
    replicas = _steps(workload, 2, replicas=2)
    message_s = max(0.0, (two.microbatch_s - one.microbatch_s) / 2)
    # The all-reduce has one message each way, and so has the exchange of totals.
    all_reduce_s = replicas.few_s - one.few_s - 4 * message_s
    pass_s, step_s = one.microbatch_s / 2, one.few_s - _FEW * one.microbatch_s
    return message_s, max(0.0, pass_s), max(0.0, step_s), max(0.0, all_reduce_s / nbytes)


class _Steps(NamedTuple):
    """Mean processor seconds of ranks besides operators: in a step of ``_FEW`` micro-batches, and
    for each further one.
    """

    few_s: float
    microbatch_s: float


class _Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = _WIDTH, _WIDTH
        blocks = ((nn.Linear(*sizes), nn.GELU(), nn.LayerNorm(_WIDTH)) for _ in range(layers))
        self.layers = nn.Sequential(*(nn.Sequential(*block) for block in blocks))

    def forward(self, values: Tensor) -> Tensor:
        loss: Tensor = self.layers(values).square().mean()
        return loss


class _Idle(torch.optim.Optimizer):
    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


def _workload(layers: int) -> Workload:
    return Workload(_Chain(layers), _batch(1), optimizer=_Idle)


def _batch(microbatches: int) -> Batch:
    return (torch.randn(microbatches * _SAMPLES, _WIDTH),)


def _steps(workload: Workload, ranks: int, replicas: int = 1) -> _Steps:
    """Measure steps of a pipeline with a stage per rank, or of replicas."""
    captured = capture(workload.module, workload.example)
    chosen = plan(
        estimate(captured),
        Cluster.preset(f"local:{ranks}"),
        _MANY * replicas * _SAMPLES,
        planner="data-parallel" if replicas > 1 else "even",
        schedule="1f1b",
        microbatch_size=replicas * _SAMPLES,
        max_replicas=replicas,
    )
    batches = [_batch(count * replicas) for count in (_FEW, _MANY)]
    # Ranks forget the parameters of other stages; to be timed, the model has to be whole.
    whole = capture(copy.deepcopy(workload.module), workload.example)
    seen = launch.run(_rank, ranks, workload, chosen, captured, whole, batches)
    few_s, many_s = (statistics.fmean(rank[i] for rank in seen) for i in range(2))
    operators_s = seen[0][2] * replicas / ranks
    return _Steps(few_s - _FEW * operators_s, (many_s - few_s) / (_MANY - _FEW) - operators_s)


def _rank(
    workload: Workload, chosen: Plan, captured: Captured, whole: Captured, batches: list[Batch]
) -> tuple[float, float, float]:
    """Return the processor seconds of this rank in a step of few and of many micro-batches, and on
    the first rank the seconds of all operators for a micro-batch.
    """
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    measurement = Measurement(whole, [_SAMPLES]) if pipe.rank == 0 else None
    seconds: list[list[float]] = [[] for _ in batches]
    for _ in range(_TURNS):
        if measurement is not None:
            measurement.turn()
        for step in range(-_SETTLING, _STEPS):
            for batch, taken in zip(batches, seconds, strict=True):
                used = time.process_time()
                pipe.step(batch)
                if step >= 0:
                    taken.append(time.process_time() - used)
    costs = () if measurement is None else measurement.profile().costs
    # The lower quartile: disturbances only make steps longer.
    few_s, many_s = (statistics.quantiles(taken, n=4)[0] for taken in seconds)
    return few_s, many_s, sum(cost.forward_s[0] + cost.backward_s[0] for cost in costs)
