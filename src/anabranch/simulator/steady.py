"""Seconds of a step of very many micro-batches: a short step is simulated, its period repeated.

Once the pipeline is full, what happens in one period happens again in the next, until the
micro-batches run out. Units are the least samples after which every stage has run whole groups::

    short   | warm-up |  u  |  u  |  u  | drain |
    long    | warm-up |  u  |  u  |  u  |  u  |  u  |  u  |  u  | drain |
                      `- period -'     the same, and then the same again

Until the first device comes to the end of its forwards, the short step and the long one are the
same. If by then every compute and message arrival has repeated one period later, for as long as
anything stays in flight, the state has come back, and the long step is the short one plus periods.
A period may span several units, where messages alternate on a port that they share.

Under a schedule that runs all forwards first no state comes back. There three short steps tell
whether the step already grows by the same amount with every unit; that is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.run import collector_paused, simulate
from anabranch.simulator.step import Step
from anabranch.weights import units_in_flight

TOLERANCE = 1e-11
"""How far times may be off the period, as a share of the short step: rounding."""

MOST_UNITS = 48
"""Units of the longest period that is looked for."""

MOST_STEPS = 4
"""Short steps that are simulated, each up to twice as long as the one before."""

DIFFERENCE = 12
"""Units between short steps that are compared: a multiple of most periods."""

ONE_PACE = 1.02
"""How much devices may differ in their mean seconds per unit, none of them running ahead."""

OrderFor = Callable[[StageGraph], Schedule]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and whether they rest on a period rather than on a trend."""

    seconds: float
    periodic: bool


def estimate_step_s(
    graph: StageGraph,
    order_for: OrderFor,
    costs: CostModel | StepCosts,
    *,
    roughly: bool = False,
) -> Estimate | None:
    """Seconds of a step, from shorter ones of the same stages.

    Args:
        order_for: the order of compute for a graph with another batch size.
        roughly: where no period is found but all devices go on at one pace, take the pace of the
            longest short step. Then the result may be a few hundredths off.

    Returns:
        None where no period is found in steps of up to half the batch: simulate the whole.
    """
    unit = math.lcm(*(stage.k * stage.microbatch_size for stage in graph.stages))
    total, left = divmod(graph.batch_size, unit)
    held = [min(s.in_flight * s.microbatch_size, graph.batch_size) for s in graph.stages]
    if min(held) >= graph.batch_size:
        return _by_differences(graph, order_for, costs, unit)
    units = 3 * -(-max(held) // unit) + 4
    rough = None
    with collector_paused():
        for _ in range(MOST_STEPS):
            if 2 * units > total:
                break
            short = replace(graph, batch_size=units * unit + left)
            order = order_for(short)
            step = simulate(short, order, costs)
            logs = logs_of(step, short, order, unit)
            period = find_period(logs, TOLERANCE * step.end)
            missing = (total - units) % period.units if period else units
            if period and not missing:
                seconds = step.end + (total - units) // period.units * period.seconds
                return Estimate(seconds, periodic=True)
            pace = _mean_s(logs)
            rough = step.end + (total - units) * pace if pace is not None else None
            units += missing
    return Estimate(rough, periodic=False) if roughly and rough is not None else None


def _by_differences(
    graph: StageGraph, order_for: OrderFor, costs: CostModel | StepCosts, unit: int
) -> Estimate | None:
    """For all forwards first: three steps, each ``DIFFERENCE`` units longer than the one before."""
    total, left = divmod(graph.batch_size, unit)
    first = 2 * graph.depth + 4
    for _ in range(MOST_STEPS):
        # What is missing from the last of the three are whole differences.
        first += (total - first) % DIFFERENCE
        sizes = [first + i * DIFFERENCE for i in range(3)]
        if 2 * sizes[-1] > total:
            return None
        shorts = [replace(graph, batch_size=n * unit + left) for n in sizes]
        with collector_paused():
            ends = [simulate(short, order_for(short), costs).end for short in shorts]
        increase = ends[2] - ends[1]
        if abs(increase - (ends[1] - ends[0])) <= TOLERANCE * ends[2]:
            seconds = ends[2] + (total - sizes[-1]) // DIFFERENCE * increase
            return Estimate(seconds, periodic=False)
        first *= 2
    return None


@dataclass(frozen=True, slots=True)
class Log:
    """What one device does.

    Attributes:
        times: when what it receives arrived and what it computes ended, in the order of its list.
        undisturbed: how many computes a longer batch would not change.
        held: computes of what is in flight at most.
    """

    times: NDArray[np.float64]
    computes: NDArray[np.intp]
    undisturbed: int
    per_unit: int
    held: int


@dataclass(frozen=True, slots=True)
class Period:
    """After so many units everything happens again, so many seconds later."""

    units: int
    seconds: float


def logs_of(
    step: Step, graph: StageGraph, order: Schedule, unit: int, updating: Collection[int] = ()
) -> list[Log]:
    """What the devices with samples did in a step."""
    whole = graph.batch_size // unit
    logs, last_forwards = [], []
    recorded = dict(zip(step.program.devices, step.logs(), strict=True))
    for s, stage in enumerate(graph.stages):
        microbatches = unit // stage.microbatch_size
        actions = [a for a in order.actions[stage.devices[0]] if a.peer < 0]
        # Two for each micro-batch, or three where backwards are split.
        computes_each = len(actions) // graph.num_microbatches(s)
        last = actions.index(Action(s, Kind.FORWARD, whole * microbatches - 1))
        backwards = last + 1 - whole * microbatches
        units_held = units_in_flight(stage.in_flight, microbatches)
        for at, device in enumerate(stage.devices):
            start, stop = graph.slice(s, 0, at)
            if start == stop:
                continue  # more replicas than samples: it has nothing to do and is done at once
            updates = int(device in updating)
            times, is_compute = recorded[device]
            computes = np.flatnonzero(is_compute)
            last_forwards.append(times[computes[last + updates * (backwards // microbatches)]])
            held = computes_each * stage.in_flight + updates * units_held
            logs.append(Log(times, computes, 0, computes_each * microbatches + updates, held))
    until = min(last_forwards)
    return [replace(log, undisturbed=int((log.times[log.computes] <= until).sum())) for log in logs]


def find_period(logs: Sequence[Log], tolerance: float) -> Period | None:
    """The shortest period that all devices repeat at the end of what is undisturbed."""
    for units in range(1, MOST_UNITS + 1):
        seconds: float | None = None
        for log in logs:
            shift, last = units * log.per_unit, log.undisturbed - 1
            first = last - max(shift, log.held)
            if first < shift:
                return None
            begin, end = log.computes[first] + 1, log.computes[last] + 1
            back = log.computes[last] - log.computes[last - shift]
            if begin < back:
                return None
            later = log.times[begin:end] - log.times[begin - back : end - back]
            seconds = float(later[-1]) if seconds is None else seconds
            if np.abs(later - seconds).max() > tolerance:
                break
        else:
            assert seconds is not None
            return Period(units, seconds)
    return None


def _mean_s(logs: Sequence[Log]) -> float | None:
    """Seconds per unit in the middle of the logs; None if devices differ in it, each at a pace of
    its own.
    """
    paces = []
    for log in logs:
        first, last = len(log.computes) // 3, 2 * len(log.computes) // 3
        seconds = log.times[log.computes[last]] - log.times[log.computes[first]]
        paces.append(float(seconds) / ((last - first) / log.per_unit))
    return sum(paces) / len(paces) if max(paces) <= ONE_PACE * min(paces) else None
