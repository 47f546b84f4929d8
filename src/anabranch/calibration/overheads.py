"""What a rank does besides computing and updating: messages, and the bookkeeping of its worker.

A pipeline of two ranks trains a model of small matrices, and every action is timed by the processor
time that its rank spends until it has ended, from the end of the one before. Between messages ranks
compute, so caches are as a step has them: a message costs several times what it does where nothing
else is done. What a step takes in front of its first action and behind its last one is timed as
well. An operator's share is known from its profile, whose turns come between
the steps, and what an update costs besides the optimizer, which does nothing, from a measurement
of that::

    step of a rank = step_s + leaf_s * (L - 1) + agreement + update
                     + M * (send_s + receive_s + 2 * (microbatch_s + value_s) + operators)

M is the number of micro-batches, L that of tensors of a batch. Where several values go from rank to
rank in a message of the same bytes, what sending and receiving take longer is of the values; it
counts with the passes in front of a send and behind a receive, and ``send_s`` and ``receive_s`` are
of a message without values. ``leaf_s`` is timed directly, on batches of one and of several tensors.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan
from anabranch.profile.measure import Measurement, measure
from anabranch.profile.profile import Profile
from anabranch.runtime.guards.same_batch import batch_digest
from anabranch.runtime.measurement.update import measure_update
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule.schedule import Kind
from anabranch.solve import plan
from anabranch.workload import NamedParameters, Workload, adamw

_RANKS, _LAYERS, _WIDTH = 2, 4, 256

_SAMPLES, _MICROBATCHES = 16, 6
"""Of a micro-batch, and of a step: most messages have come before they are waited for."""

_VALUES = 8
"""In a message of several, and tensors of its batch: many more than one, and each still has a few
hundred bytes.
"""

_LOOKS = 30
"""At a batch, and rounds of so many of them."""

_COUNTS = _SAMPLES, 2 * _SAMPLES
"""Samples at which operators are measured."""

_TURNS, _STEPS, _SETTLING = 8, 8, 4
"""Turns of the profile, steps behind each, and how many of them do not count: they meet the caches
of the profile.
"""

_UPDATE_BYTES = 2**24

MESSAGE_BYTES = 4 * _SAMPLES * _WIDTH
"""Of each message."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Processor seconds of a rank.

    Attributes:
        send_s: of a message of ``MESSAGE_BYTES`` at its sender, ``receive_s`` at its receiver,
            besides the values in it.
        microbatch_s: of a forward or backward besides its operators, and ``value_s`` for each value
            that enters or leaves its stage, or gradient of one.
        step_s: of a step besides its actions, and the update; ``leaf_s`` for each tensor of its
            batch besides the first.
        memory_bandwidth: bytes/s of an update.
    """

    send_s: float
    receive_s: float
    microbatch_s: float
    step_s: float
    memory_bandwidth: float
    value_s: float = 0.0
    leaf_s: float = 0.0


class _Layer(nn.Module):
    """A layer that takes and gives several values, each in a piece of memory as those of most
    models are: others are copied slowly when they are sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH))

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given: Tensor = self.work(torch.cat(values, 1))
        return tuple(value.contiguous() for value in given.chunk(len(values), 1))


class _Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer() for _ in range(layers)))

    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(self.layers(values), 1).square().mean()


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
    """What one rank has seen: seconds of a step before its first action and behind its last one,
    those of its actions by kind, and what the first one found on its own.
    """

    besides_s: float
    actions: dict[str, float]
    alone: _Alone | None


@dataclass(frozen=True, slots=True)
class _Alone:
    """Seconds of operators and of an update on one rank; for the others see ``Overheads``."""

    operators_s: float
    update_s: float
    memory_bandwidth: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Mean processor seconds of the ranks.

    Attributes:
        passes_s: of a forward and a backward together besides their operators.
        step_s: of a step besides its actions, the agreement and the update.
        batch_s: of that for the check and the digest of the batch.
    """

    send_s: float
    receive_s: float
    passes_s: float
    step_s: float
    batch_s: float
    alone: _Alone


def measure_overheads() -> Overheads:
    """Measure them on local ranks, alone on the machine."""
    one, several = _found(1), _found(_VALUES)
    more_s = several.send_s + several.receive_s - one.send_s - one.receive_s
    value_s = max(0.0, more_s) / (2 * (_VALUES - 1))
    leaf_s = max(0.0, several.batch_s - one.batch_s) / (_VALUES - 1)
    return Overheads(
        max(0.0, one.send_s - value_s),
        max(0.0, one.receive_s - value_s),
        max(0.0, one.passes_s / 2),
        one.step_s,
        one.alone.memory_bandwidth,
        value_s,
        leaf_s,
    )


def _found(values: int) -> _Found:
    """Of a chain that takes so many values, as many of which go from rank to rank."""
    torch.manual_seed(0)
    workload, whole = _workload(values), _workload(values)
    captured = capture(workload.module, workload.example)
    chosen = plan(
        measure(captured, _COUNTS, repeats=1),
        Cluster.preset(f"local:{_RANKS}"),
        _MICROBATCHES * _SAMPLES,
        planner="even",
        schedule="1f1b",
        microbatch_size=_SAMPLES,
        max_replicas=1,
    )
    # Ranks forget the parameters of other stages; to be timed, the model has to be whole.
    spare = capture(whole.module, whole.example)
    ranks = launch.run(_rank, _RANKS, workload, chosen, captured, whole, spare)
    return _means(ranks, _batch_s(captured, _batch(values, _MICROBATCHES * _SAMPLES)))


def _batch_s(captured: Captured, batch: tuple[Tensor, ...]) -> float:
    """Seconds of telling whether a batch is built as the example, and of its digest."""
    seconds = []
    for _ in range(_LOOKS):
        started = time.process_time()
        for _ in range(_LOOKS):
            batch_digest(captured.flatten_batch(batch))
        seconds.append((time.process_time() - started) / _LOOKS)
    return statistics.median(seconds)


def _means(ranks: Sequence[_Seen], batch_s: float) -> _Found:
    alone = ranks[0].alone
    assert alone is not None

    def mean_s(chosen: Callable[[Kind], bool]) -> float:
        names = [kind.name for kind in Kind if chosen(kind)]
        found = (rank.actions[name] for rank in ranks for name in names if name in rank.actions)
        return statistics.fmean(found)

    passes_s = mean_s(lambda kind: kind is Kind.FORWARD) + mean_s(lambda k: k is Kind.BACKWARD)
    send_s, receive_s = mean_s(lambda kind: kind.is_send), mean_s(lambda kind: kind.is_receive)
    agreement_s = (_RANKS - 1) * (send_s + receive_s)
    besides_s = statistics.fmean(rank.besides_s for rank in ranks)
    return _Found(
        send_s,
        receive_s,
        passes_s - alone.operators_s,
        max(0.0, besides_s - agreement_s - alone.update_s),
        batch_s,
        alone,
    )


def _workload(values: int) -> Workload:
    return Workload(_Chain(_LAYERS), _batch(values, _SAMPLES), optimizer=_Idle)


def _batch(values: int, samples: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(samples, _WIDTH // values) for _ in range(values))


def _rank(
    workload: Workload,
    chosen: Plan,
    captured: Captured,
    whole: Workload,
    spare: Captured,
) -> _Seen:
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    pipe._workers.clock = _ProcessorClock()
    measurement = Measurement(spare, _COUNTS) if pipe.rank == 0 else None
    batch = _batch(len(workload.example), _MICROBATCHES * _SAMPLES)
    steps: list[_Step] = []
    for _ in range(_TURNS):
        if measurement is not None:
            measurement.turn()
        for step in range(_STEPS):
            used = time.thread_time()
            pipe.step(batch)
            used = time.thread_time() - used
            if step < _SETTLING:
                continue
            worker, _, outcome = pipe._ran
            begun, *ends = outcome.times[0][0], *(end for _, end in outcome.times)
            actions: defaultdict[str, list[float]] = defaultdict(list)
            for action, begin, end in zip(worker.actions, [begun, *ends], ends, strict=False):
                actions[action.kind.name].append(end - begin)
            steps.append(_Step(used, used - (ends[-1] - begun), _means_of(actions)))
    alone = None if measurement is None else _alone(whole, measurement.profile())
    dist.barrier()
    # Means of steps that nothing has disturbed: medians of parts do not add up to whole steps.
    steps.sort(key=lambda step: step.whole_s)
    middle = steps[len(steps) // 4 : len(steps) - len(steps) // 4]
    by_kind = {kind: [step.actions[kind] for step in middle] for kind in middle[0].actions}
    besides_s = statistics.fmean(step.besides_s for step in middle)
    return _Seen(besides_s, _means_of(by_kind), alone)


@dataclass(frozen=True, slots=True)
class _Step:
    """Seconds of a step: all of it, what is no action, and its actions by kind, as means."""

    whole_s: float
    besides_s: float
    actions: dict[str, float]


def _means_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {kind: statistics.fmean(each) for kind, each in seconds.items()}


def _alone(workload: Workload, profile: Profile) -> _Alone:
    parameters = list(workload.module.parameters())
    nbytes = sum(parameter.nbytes for parameter in parameters)
    return _Alone(
        sum(cost.forward_s[0] + cost.backward_s[0] for cost in profile.costs) / _RANKS,
        measure_update(workload).seconds(len(parameters) / _RANKS, nbytes / _RANKS),
        _memory_bandwidth(),
    )


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
