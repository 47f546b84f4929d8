"""What a plan's step would be if one thing that holds it up were gone, by simulating that.

Stages, devices, micro-batches and schedule stay what they are, so these are what a change of the
machines, the model or the balance could gain this very plan; a new plan may gain more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from anabranch.cluster import Level
from anabranch.cost import CostModel
from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.schedule import compute_order
from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import step_seconds
from anabranch.simulator.step import Step

MOST_ACTIONS = 400_000
"""Actions of all changed steps together at most, some two seconds; further changes are left out."""

FREE_BANDWIDTH = 1e30
"""Bytes/s of a link that is as good as infinitely fast."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One thing that would be different, and the step then.

    Attributes:
        change: key of it.
        what: in words.
    """

    change: str
    what: str
    step_s: float


class _WithoutSums(ModelCosts):
    """Prices of stages whose gradients are summed in no time."""

    def all_reduces(self) -> Sequence[AllReduce]:
        """None."""
        return ()


class _WithoutUpdates(ModelCosts):
    """Prices of stages whose parameters are updated in no time."""

    def update_s(self, stage: int) -> float:
        """Nothing."""
        return 0.0


def relaxations(
    graph: StageGraph,
    schedule: str,
    cost: CostModel,
    step: Step,
    device_seconds: dict[int, float],
) -> list[Relaxation]:
    """The changes that make sense for a plan, the shortest step first; of a step with so many
    actions that it takes long to simulate, fewer or none.

    Args:
        graph: stages with their in-flight counts.
        schedule: key of ``schedule.SCHEDULES``.
        step: as it is.
        device_seconds: what each device computes in a step.
    """
    found = []
    affordable = MOST_ACTIONS // max(len(step.program.entries), 1)
    # A change that is not asked for is not priced either.
    for change, what, costs in islice(_changes(graph, cost, device_seconds), affordable):
        stages = costs.graph
        try:
            order = compute_order(stages, schedule, slots=cost.receive_slots)
            seconds = step_seconds(stages, order, costs)
        except (InvalidScheduleError, DeadlockError):
            continue  # some counts in flight cannot be scheduled where a device has several stages
        if stages != graph or change == "even_stages":  # neither memory nor balance need be used
            seconds = min(seconds, step.end)
        found.append(Relaxation(change, what, seconds))
    return sorted(found, key=lambda relaxation: relaxation.step_s)


def _changes(
    graph: StageGraph, cost: CostModel, device_seconds: dict[int, float]
) -> Iterator[tuple[str, str, ModelCosts]]:
    """Key, words and the prices of the stages after every change, one at a time."""
    levels = cost.cluster.levels
    if len(graph.devices) > 1:
        fast = [replace(level, bandwidth=FREE_BANDWIDTH) for level in levels]
        yield "fast_links", "links infinitely fast", _linked(graph, cost, fast)
        if any(level.latency_s for level in levels):
            prompt = [replace(level, latency_s=0.0) for level in levels]
            yield "no_latency", "links without latency", _linked(graph, cost, prompt)
        if len(levels) > 1 and cost.cluster.link(graph.devices[0], graph.devices[-1]).level:
            faster = [replace(level, bandwidth=2 * level.bandwidth) for level in levels[1:]]
            what = "a network between nodes twice as fast"
            yield "fast_network", what, _linked(graph, cost, [levels[0], *faster])
        if ModelCosts(graph, cost).all_reduces():
            yield "free_all_reduce", "all-reduces for nothing", _WithoutSums(graph, cost)
        if len(graph) > 1:
            evened = ModelCosts(graph, _evened(graph, cost, device_seconds))
            yield "even_stages", "all stages computing equally long", evened
    if any(map(ModelCosts(graph, cost).update_s, range(len(graph)))):
        yield "free_update", "updates for nothing", _WithoutUpdates(graph, cost)
    if any(stage.recompute for stage in graph.stages):
        stages = tuple(replace(stage, recompute=False) for stage in graph.stages)
        lighter = ModelCosts(replace(graph, stages=stages), cost)
        yield "no_recompute", "memory for everything, nothing recomputed", lighter
    # Twice as many beyond those that a stage at the end of the model has, as of "1f1b-deep".
    stages = tuple(
        replace(stage, in_flight=max(stage.in_flight, min(2 * stage.in_flight - stage.k, count)))
        for stage, count in zip(
            graph.stages, map(graph.num_microbatches, range(len(graph))), strict=True
        )
    )
    if stages != graph.stages:
        deeper = ModelCosts(replace(graph, stages=stages), cost)
        yield "more_in_flight", "memory for a warm-up twice as deep", deeper


def _linked(graph: StageGraph, cost: CostModel, levels: Sequence[Level]) -> ModelCosts:
    """Prices with other links."""
    cluster = replace(cost.cluster, levels=tuple(levels))
    return ModelCosts(graph, replace(cost, cluster=cluster))


def _evened(graph: StageGraph, cost: CostModel, device_seconds: dict[int, float]) -> CostModel:
    """Prices of operators that are quicker in stages whose devices compute more than the mean, and
    slower in the others: the work stays what it is.
    """
    mean = sum(device_seconds.values()) / len(device_seconds)
    share = {}
    for stage in graph.stages:
        slowest = max(device_seconds[device] for device in stage.devices)
        for name in stage.operators:
            share[name] = mean / slowest if slowest else 1.0
    scales = [share[op.name] for op in cost.graph.ops]
    profile = cost.profile
    evened: Profile = replace(profile, costs=_scaled(profile.costs, scales))
    return replace(cost, profile=evened)


def _scaled(costs: Sequence[OpCost], scales: Sequence[float]) -> tuple[OpCost, ...]:
    return tuple(
        replace(
            cost,
            forward_s=tuple(seconds * scale for seconds in cost.forward_s),
            backward_s=tuple(seconds * scale for seconds in cost.backward_s),
        )
        for cost, scale in zip(costs, scales, strict=True)
    )
