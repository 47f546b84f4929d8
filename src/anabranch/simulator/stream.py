"""Asynchronous 1F1B: mini-batch after mini-batch without a flush, on the simulator's clock.

The order of N mini-batches of B samples is that of one synchronous 1F1B step of N * B samples on
the same stages, so orders and messages are nothing new. New is the update: behind the last backward
of every mini-batch a stage has summed its gradients over its replicas and updates its own weights.
Sums begin in that backward, as gradients become final, and the replicas wait for the last sum,
because the next pass may read the new weights::

    stage 0, replicas 0 and 1    F0 F1 F2 B0 | sum | F3 B1 | sum | F4 B2 | sum | ...
    stage 1                         F0 F1 B0   F2 B1   F3 B2   F4 ...
    stage 2                            F0 B0 F1 B1 F2 B2 F3 ...
                                                 `-- period --'

Messages and sums share ports, first come first served. An update takes its own seconds on each
device, and the seconds of a step's bookkeeping.

The period is the time that one more mini-batch takes. Where devices do not go at one pace yet, the
pace of the slowest is taken, which the others follow in the end.

Where replicas take whole mini-batches in turn (``schedule.asynchronous``), rounds take the place of
mini-batches: a stage with R replicas has one sum and one update for R mini-batches, and a batch is
the fewest mini-batches that are whole rounds of all stages.

Where the papers are silent: all stages have one micro-batch size, which divides the mini-batch;
they alternate single micro-batches (k = 1); and what a device holds in flight is counted in
micro-batches, which are whole mini-batches unless several make up one update (PipeDream-2BW).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anabranch.plans.check import tied_stages_error
from anabranch.plans.stages import StageGraph
from anabranch.schedule.asynchronous import AsynchronousOrder, units_in_flight
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.run import REPETITIONS, collector_paused, memory_of, simulate, timeline_of
from anabranch.simulator.step import StepRun
from anabranch.simulator.sums import least_sum_s
from anabranch.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Steady:
    """Training once the pipeline is full.

    Attributes:
        period_s: seconds from one mini-batch to the next.
        periodic: whether all devices go at that pace; otherwise only the slowest does.
        bubble: share of device time that is not compute; compute is longer on shared cores.
        device_peak_bytes: peak of each device of the plan, ascending, the fill included.
        simulated: mini-batches times devices that were simulated, a measure of the work done.
    """

    period_s: float
    periodic: bool
    bubble: float
    device_peak_bytes: tuple[int, ...]
    simulated: int


def units_held(graph: StageGraph, stage: int) -> int:
    """Return the most mini-batches of a stage in flight; begun ones count as whole."""
    return units_in_flight(graph.stages[stage].in_flight, graph.num_microbatches(stage))


def steady(order: AsynchronousOrder, costs: StepCosts) -> Steady:
    """Measure training with a full pipeline, for stages with the in-flight counts of ``warm_up``.

    Args:
        costs: prices of the order's own stages, whose batch may be several mini-batches.

    Raises:
        InvalidPlanError: if a parameter is tied across stages.
        DeadlockError: if the in-flight counts cannot be executed.
    """
    graph = order.graph
    batches = 2 * max(units_held(graph, s) for s in range(len(graph))) + 4
    require_untied(costs)
    simulated = 0
    with collector_paused():
        for times in range(REPETITIONS.most_streams):
            counts = [(batches << times) + more * REPETITIONS.batches for more in range(3)]
            steps = [_run(order, costs, count) for count in counts]
            simulated += sum(counts) * len(graph.devices)
            increases = np.diff([step.last_ends for step in steps], axis=0)
            increases = increases[increases > 0]  # a replica without samples is done at once
            slowest_s, tolerance = float(increases.max(initial=0.0)), REPETITIONS.tolerance
            is_common = bool((slowest_s - increases <= tolerance * steps[-1].end).all())
            if is_common:
                break
    period_s = slowest_s / REPETITIONS.batches / order.minibatches
    computed_s = steps[-1].compute_s - steps[-2].compute_s
    available_s = slowest_s * len(graph.devices)
    curves = memory_of(steps[-1], graph, costs)
    return Steady(
        period_s,
        is_common,
        max(0.0, 1 - computed_s / available_s) if available_s else 0.0,
        tuple(max(nbytes for _, nbytes in curves[device]) for device in sorted(curves)),
        simulated,
    )


def _run(order: AsynchronousOrder, costs: StepCosts, batches: int) -> StepRun:
    whole, schedule = order.computes(batches)
    return simulate(whole, schedule, costs, per_update=order.per_update)


def busy_s(graph: StageGraph, costs: StepCosts) -> dict[int, float]:
    """Return device -> compute seconds per batch of ``graph``, ascending."""
    busy = dict.fromkeys(graph.devices, 0.0)
    for s, stage in enumerate(graph.stages):
        for at, device in enumerate(stage.devices):
            for i in range(graph.num_microbatches(s)):
                start, stop = graph.slice(s, i, at)
                busy[device] += sum(costs.compute_s(s, stop - start))
    return busy


def least_period_s(graph: StageGraph, costs: StepCosts) -> float:
    """Return a lower bound of the seconds per batch of ``graph``: compute of the busiest device,
    and the part of its sums that its last backward cannot hide.
    """
    require_untied(costs)
    busy = busy_s(graph, costs)
    for work in costs.all_reduces():
        (stage,) = work.stages
        final = graph.num_microbatches(stage) - 1
        replicas = range(graph.stages[stage].replicas)
        sizes = {stop - start for start, stop in (graph.slice(stage, final, r) for r in replicas)}
        left = least_sum_s(costs, work, stage, sizes)
        for device in work.devices:
            busy[device] += left
    return max(busy.values())


def require_untied(costs: StepCosts) -> None:
    """Raise an ``InvalidPlanError`` if stages read the same trainable parameters."""
    for stages in sorted(costs.tied_stages()):
        raise tied_stages_error(stages)


def record(order: AsynchronousOrder, costs: StepCosts, *, batches: int | None = None) -> Timeline:
    """Simulate batches, by default ``shown``, from an empty pipeline to an empty one; see
    ``steady`` for the other arguments.

    Returns:
        The predicted timeline of all batches. Actions number micro-batches through all of them;
        ``asynchronous.repeated(order.graph, batches)`` has their samples.
    """
    count = shown(order.graph) if batches is None else batches
    with collector_paused():
        whole, schedule = order.computes(count)
        return timeline_of(_run(order, costs, count), schedule, whole, costs)


def shown(graph: StageGraph) -> int:
    """Return the number of batches that a timeline shows by default."""
    return 2 * max(units_held(graph, s) for s in range(len(graph))) + REPETITIONS.shown
