"""One training step of a stage graph, on a clock instead of machines.

Every device goes through its list of actions:

- compute takes the seconds of its slice of the micro-batch;
- a send hands a message over and goes on; a receive waits for its message;
- a message starts when it has been sent, its receive is posted and every port on its way is free,
  first come first served per port; it occupies them for bytes / bandwidth of the slowest link and
  arrives one latency later. Ports are a device's own link in each direction and the network cards
  it shares with the devices of its node;
- gradients are summed up in buckets while the last backward of a stage goes on: each bucket when
  all of its replicas have passed the operators that add to it, those of the same devices one after
  the other, as the runtime does it (``runtime.data_parallel.reducer``). They take the same ports as
  messages, large ones in pieces, so that messages get between;
- a device updates its stages when all devices are through their lists, their gradients are summed,
  and they have agreed on the loss;
- on a calibrated cluster devices of one host compute the slower the more of them do at a time
  (``cost.overheads`` and ``simulator.engine``), sends and receives take time of the devices at both
  ends, and so does the bookkeeping of passes and steps;
- the step ends with the last compute, all-reduce or update.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter

from anabranch.cost import CostModel
from anabranch.errors import DeadlockError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import check_deadlock, check_order
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import ModelCosts, StepCosts
from anabranch.simulator.program import Program, compile_schedule, in_a_row
from anabranch.simulator.step import StepRun
from anabranch.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Tuned numbers of long runs whose seconds are told from shorter ones.

    Attributes:
        steps_in_a_row: steps that are simulated to see how long one takes behind others.
        most_in_a_row: actions of them at most; more take too long to be worth it.
        tolerance: how much increases may differ between devices, as a share of the longer
            run: rounding.
        batches: mini-batches that one of three streams has more than the one before.
        most_streams: times that streams are simulated, each twice as long as the one before.
        shown: mini-batches that a timeline shows beyond those that fill the pipeline.
    """

    steps_in_a_row: int = 3
    most_in_a_row: int = 400_000
    tolerance: float = 1e-11
    batches: int = 6
    most_streams: int = 5
    shown: int = 4


REPETITIONS = Repetitions()


def run(
    graph: StageGraph,
    schedule: Schedule,
    costs: CostModel | StepCosts,
    *,
    period: bool = False,
    messages: bool = True,
) -> Timeline:
    """Simulate one step and record it.

    Args:
        schedule: actions per device, with messages or without.
        costs: a cost model for the model of this graph, or seconds per stage.
        period: also say how long the step takes among others in a row (``Timeline.period_s``).
        messages: show them; figures are the same without.

    Returns:
        The predicted timeline. Messages are spans at both ends, from the start of the transfer to
        the arrival.

    Raises:
        InvalidScheduleError: if actions are missing or out of order, or too many in flight.
        DeadlockError: if the schedule cannot be executed; the message shows what each device waits
            for.
    """
    with collector_paused():
        prices = _prices(graph, costs)
        check_order(schedule.computes, graph, prices.message_edges)
        step = simulate(graph, schedule, prices)
        timeline = timeline_of(step, schedule, graph, prices, messages=messages)
        return replace(timeline, period_s=_period_s(step.program, prices)) if period else timeline


def timeline_of(
    step: StepRun, schedule: Schedule, graph: StageGraph, costs: StepCosts, *, messages: bool = True
) -> Timeline:
    """Convert a finished step to a timeline; ``messages`` as for ``run``."""
    schedule = schedule.computes
    if messages:
        schedule = lower(schedule, graph, costs.message_edges)
    return Timeline(
        spans=tuple(sorted(step.spans(schedule), key=attrgetter("device", "start", "end"))),
        devices=tuple(sorted(step.program.devices)),
        source="predicted",
        step_s=step.end,
        memory=memory_of(step, graph, costs),
        sums=tuple(sorted(step.sum_spans(), key=attrgetter("device", "start", "end"))),
        overheads=tuple(sorted(step.overhead_spans(), key=attrgetter("device", "start", "end"))),
    )


def memory_of(
    step: StepRun, graph: StageGraph, costs: StepCosts
) -> dict[int, tuple[tuple[float, int], ...]]:
    """Device -> ascending (time, bytes in use from then on)."""
    base: dict[int, float] = defaultdict(float)
    sums: dict[int, float] = defaultdict(float)
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            resident, summed = costs.held_bytes(s, device)
            base[device] += resident
            sums[device] = max(sums[device], summed)
    curves = {}
    for d, device in enumerate(step.program.devices):
        changes = step.memory(d)
        if sums[device]:
            # What is summed earlier, beside the last backwards, is taken when they have ended.
            changes.append((max((time for time, _ in changes), default=0.0), sums[device]))
        curves[device] = memory_curve(base[device], changes)
    return curves


def step_seconds(graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts) -> float:
    """Seconds of the step that ``run`` would record, in a fraction of the time, of actions that are
    known to be in order.
    """
    with collector_paused():
        return simulate(graph, schedule, costs).end


def _period_s(program: Program, costs: StepCosts) -> float | None:
    """Seconds of a step among others in a row, where a device begins the next as soon as it has
    ended one, as in ``Pipeline.steps``; None where the step is too large to simulate several.
    """
    if REPETITIONS.steps_in_a_row * len(program.entries) > REPETITIONS.most_in_a_row:
        return None
    step = StepRun(in_a_row(program, REPETITIONS.steps_in_a_row, costs.overheads.read_s), costs)
    # Steps alone were executed before; in a row they wait for nothing more.
    assert step.is_done
    return step.end - step.begun


def simulate(
    graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts, *, per_update: int = 0
) -> StepRun:
    """Run one step and keep when everything happened, as numbers.

    Args:
        per_update: see ``compile_schedule``.

    Raises:
        DeadlockError: if it does not come to its end.
    """
    prices = _prices(graph, costs)
    program = compile_schedule(schedule, graph, prices, per_update=per_update)
    step = StepRun(program, prices)
    if not step.is_done:
        check_deadlock(lower(schedule.computes, graph, prices.message_edges), graph)
        raise DeadlockError("devices wait for each other's sums of gradients")
    return step


def _prices(graph: StageGraph, costs: CostModel | StepCosts) -> StepCosts:
    return ModelCosts(graph, costs) if isinstance(costs, CostModel) else costs


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection: all that a step makes lives to its end; looking costs a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def memory_curve(base: float, changes: list[tuple[float, float]]) -> tuple[tuple[float, int], ...]:
    """Bytes in use from each time on; changes at one time are one, releases first."""
    curve = [(0.0, base)]
    for time, change in changes:
        before = curve[-1][1]
        if curve[-1][0] == time:
            curve.pop()
        curve.append((time, before + change))
    return tuple((time, round(nbytes)) for time, nbytes in curve)
