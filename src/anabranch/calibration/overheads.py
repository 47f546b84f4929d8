"""What a rank does besides computing and updating: messages, and the bookkeeping of its worker.

A pipeline of two ranks trains a model of small matrices, and every action is timed by the processor
time that its rank spends on it. Between messages ranks compute, so caches are as a step has them: a
message costs several times what it does where nothing else is done. An operator's share is known
from its profile, before and after, and the optimizer does nothing::

    step of a rank = step_s + sends + receives + M * (2 * microbatch_s + operators) + agreement
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.calibration.restarts import measure_restarts
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan
from anabranch.profile.measure import measure
from anabranch.profile.profile import Profile
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule.schedule import Kind
from anabranch.solve import plan
from anabranch.workload import NamedParameters, Workload, adamw

_RANKS, _LAYERS, _WIDTH = 2, 6, 256
_SAMPLES, _MICROBATCHES = 16, 6
"""Of a micro-batch, and of a step: most messages have come before they are waited for."""

_STEPS = 16
_UPDATE_BYTES = 2**24

MESSAGE_BYTES = 4 * _SAMPLES * _WIDTH
"""Of each message."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Processor seconds of a rank.

    Attributes:
        send_s: of a message of ``MESSAGE_BYTES`` at its sender, ``receive_s`` at its receiver.
        microbatch_s: of a forward or backward besides its operators.
        step_s: of a step besides its actions, and the update.
        memory_bandwidth: bytes/s of an update.
        restarts: see ``Calibration``.
    """

    send_s: float
    receive_s: float
    microbatch_s: float
    step_s: float
    memory_bandwidth: float
    restarts: tuple[tuple[float, float], ...] = ()


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.layers(values)
        return result.square().mean()


class _Idle(torch.optim.Optimizer):
    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


class _ProcessorClock:
    """A worker's clock that shows the processor time of its rank."""

    def begin(self) -> None:
        """See ``Clock``."""

    def end(self) -> None:
        """See ``Clock``."""

    def mark(self) -> float:
        return time.thread_time()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank has seen: seconds of a whole step, and those of its actions by kind, of all
    ranks.
    """

    step_s: float
    actions: dict[str, float]
    memory_bandwidth: float
    restarts: tuple[tuple[float, float], ...]


def measure_overheads() -> Overheads:
    """Measure them on local ranks, alone on the machine."""
    torch.manual_seed(0)
    workload = Workload(_Chain(), (torch.randn(_SAMPLES, _WIDTH),), optimizer=_Idle)
    captured = capture(workload.module, workload.example)
    before = _profile(captured)
    cluster = Cluster.preset(f"local:{_RANKS}")
    size = _MICROBATCHES * _SAMPLES
    chosen = plan(
        before,
        cluster,
        size,
        planner="even",
        schedule="1f1b",
        microbatch_size=_SAMPLES,
        max_replicas=1,
    )
    seen = launch.run(_rank, _RANKS, workload, chosen, captured)
    operators_s = statistics.fmean(map(_operators_s, (before, _profile(captured)))) / _RANKS
    found = seen[0].actions
    forward_s, backward_s = (found[kind.name] for kind in (Kind.FORWARD, Kind.BACKWARD))
    send_s = statistics.fmean(found[k.name] for k in Kind if k.is_send)
    receive_s = statistics.fmean(found[k.name] for k in Kind if k.is_receive)
    actions_s = _MICROBATCHES * (forward_s + backward_s + send_s + receive_s)
    agreement_s = (_RANKS - 1) * (send_s + receive_s)
    whole_s = statistics.fmean(rank.step_s for rank in seen)
    return Overheads(
        send_s,
        receive_s,
        max(0.0, forward_s + backward_s - operators_s) / 2,
        max(0.0, whole_s - actions_s - agreement_s),
        seen[0].memory_bandwidth,
        seen[0].restarts,
    )


def _profile(captured: Captured) -> Profile:
    return measure(captured, (_SAMPLES, 2 * _SAMPLES), repeats=24)


def _operators_s(profile: Profile) -> float:
    return sum(cost.forward_s[0] + cost.backward_s[0] for cost in profile.costs)


def _rank(workload: Workload, chosen: Plan, captured: Captured) -> _Seen:
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    pipe._workers.clock = _ProcessorClock()
    batch = (torch.randn(_MICROBATCHES * _SAMPLES, _WIDTH),)
    steps: list[float] = []
    actions: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(_STEPS):
        used = time.thread_time()
        pipe.step(batch)
        steps.append(time.thread_time() - used)
        pipe.step(batch, record=True)
        assert pipe.timeline is not None
        for span in pipe.timeline.spans:
            actions[span.action.kind.name].append(span.end - span.start)
    medians = {kind: statistics.median(seconds) for kind, seconds in actions.items()}
    alone = pipe.rank == 0
    bandwidth = _memory_bandwidth() if alone else 0.0
    return _Seen(statistics.median(steps), medians, bandwidth, measure_restarts() if alone else ())


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
