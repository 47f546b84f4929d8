"""One training step of a stage graph, on a clock instead of machines.

Every device goes through its list of actions:

- compute takes the seconds of its slice of the micro-batch;
- a send hands a message over and goes on; a receive waits for its message;
- a message starts when it has been sent, its receive is posted and every port on its way is free,
  first come first served per port; it occupies them for bytes / bandwidth of the slowest link and
  arrives one latency later. Ports are a device's own link in each direction and the network cards
  it shares with the devices of its node;
- gradients are summed up in buckets while the last backward of a stage goes on, as in the runtime
  (``runtime.data_parallel.reducer``): a bucket begins when all replicas have passed the operators
  that add to it, and buckets of the same devices go one after the other. They occupy the same ports
  as messages; large ones are cut into pieces, between which messages may go;
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
    """Tuned numbers for predicting long runs from short ones.

    Attributes:
        steps_in_a_row: steps that are simulated to see how long one takes behind others.
        most_in_a_row: most entries of these steps; more take too long to be worth it.
        tolerance: difference between devices in the seconds of one more batch that counts as
            rounding, as a share of the longest run.
        batches: batches that each of three streams has more than the one before.
        most_streams: number of attempts with three streams, each twice as long as the last.
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
        messages: record them as spans; all figures are the same without.

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
    """Return device -> ascending (time, bytes in use from then on)."""
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
            # Buffers of sums beside the last backwards are counted from the end of these.
            changes.append((max((time for time, _ in changes), default=0.0), sums[device]))
        curves[device] = memory_curve(base[device], changes)
    return curves


def step_seconds(graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts) -> float:
    """Return the seconds of the step that ``run`` would record, in a fraction of the time; the
    order of actions is not checked.
    """
    with collector_paused():
        return simulate(graph, schedule, costs).end


def _period_s(program: Program, costs: StepCosts) -> float | None:
    """Return the seconds of a step in a row of steps, where a device begins the next step as soon
    as it has ended one, as in ``Pipeline.steps``; None if the step is too large to repeat.
    """
    if REPETITIONS.steps_in_a_row * len(program.entries) > REPETITIONS.most_in_a_row:
        return None
    step = StepRun(in_a_row(program, REPETITIONS.steps_in_a_row, costs.overheads.read_s), costs)
    # The step alone has been executed; in a row it waits for nothing more.
    assert step.is_done
    return step.end - step.begun


def simulate(
    graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts, *, per_update: int = 0
) -> StepRun:
    """Run one step and keep the times of all events as numbers.

    Args:
        per_update: see ``compile_schedule``.

    Raises:
        DeadlockError: if the step never ends.
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
    """Pause garbage collection: a step's objects live to its end, and scans take a third longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def memory_curve(base: float, changes: list[tuple[float, float]]) -> tuple[tuple[float, int], ...]:
    """Return (time, bytes in use from then on); changes at one time are one, releases first."""
    curve = [(0.0, base)]
    for time, change in changes:
        before = curve[-1][1]
        if curve[-1][0] == time:
            curve.pop()
        curve.append((time, before + change))
    return tuple((time, round(nbytes)) for time, nbytes in curve)
