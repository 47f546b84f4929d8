"""Simulated what-ifs: the step of a plan without one bottleneck.

Stages, devices, micro-batches and schedule stay the same. So each tells what a change of machines,
model or balance would gain for this very plan; a new plan may gain more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from anabranch.cluster import Level
from anabranch.cost import CostModel
from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.schedule import compute_order
from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import step_seconds
from anabranch.solve.bound import least_s_per_sample
from anabranch.solve.settings import SETTINGS
from anabranch.timeline import Timeline

FREE_BANDWIDTH = 1e30
"""Bytes/s of a link that is as good as infinitely fast."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and the step with it.

    Attributes:
        change: key of the change.
        what: the change in words.
    """

    change: str
    what: str
    step_s: float


class _WithoutSums(ModelCosts):
    """Prices of stages whose gradients are summed in no time."""

    def all_reduces(self) -> Sequence[AllReduce]:
        return ()


class _WithoutUpdates(ModelCosts):
    """Prices of stages whose parameters are updated in no time."""

    def update_s(self, stage: int) -> float:
        return 0.0


def what_ifs(graph: StageGraph, schedule: str, cost: CostModel, timeline: Timeline) -> list[WhatIf]:
    """Simulate the changes that make sense for a plan; the shortest step first.

    A step with so many actions that it takes long to simulate gets fewer changes, or none.

    Args:
        graph: stages with their in-flight counts.
        schedule: key of ``schedule.SCHEDULES``.
        timeline: the step as it is.
    """
    results = []
    affordable = SETTINGS.most_computes // max(len(timeline.spans), 1)
    # A change that is not asked for is not priced either.
    for change, what, costs in islice(_changes(graph, cost, timeline), affordable):
        stages = costs.graph
        try:
            order = compute_order(stages, schedule)
            seconds = step_seconds(stages, order, costs)
        except (InvalidScheduleError, DeadlockError):
            continue  # some counts in flight cannot be scheduled where a device has several stages
        if stages != graph or change == "even_stages":  # neither memory nor balance need be used
            seconds = min(seconds, timeline.step_s)
        results.append(WhatIf(change, what, seconds))
    return sorted(results, key=lambda what_if: what_if.step_s)


def _changes(
    graph: StageGraph, cost: CostModel, timeline: Timeline
) -> Iterator[tuple[str, str, ModelCosts]]:
    """Generate (key, words, prices of the stages) for every change, one at a time."""
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
            yield "free_all_reduce", "all-reduces that take no time", _WithoutSums(graph, cost)
        if len(graph) > 1:
            evened = _evened(graph, cost, timeline.busy_s)
            yield "even_stages", "all stages computing equally long", evened
    if any(map(ModelCosts(graph, cost).update_s, range(len(graph)))):
        yield "free_update", "updates that take no time", _WithoutUpdates(graph, cost)
    if not cost.profile.proportional:
        what = "micro-batches as efficient as larger ones"
        yield "best_slices", what, _in_best_slices(graph, cost)
    if any(stage.recompute for stage in graph.stages):
        lighter = ModelCosts(graph.without_recompute(), cost)
        yield "no_recompute", "memory for everything, nothing recomputed", lighter
    # Twice as many beyond the k that a stage at the end of the model has, as for "1f1b-deep".
    counts = map(graph.num_microbatches, range(len(graph)))
    stages = tuple(
        replace(stage, in_flight=max(stage.in_flight, min(2 * stage.in_flight - stage.k, count)))
        for stage, count in zip(graph.stages, counts, strict=True)
    )
    if stages != graph.stages:
        deeper = ModelCosts(replace(graph, stages=stages), cost)
        yield "more_in_flight", "memory for a warm-up twice as deep", deeper


def _linked(graph: StageGraph, cost: CostModel, levels: Sequence[Level]) -> ModelCosts:
    """Return prices with other links."""
    cluster = replace(cost.cluster, levels=tuple(levels))
    return ModelCosts(graph, replace(cost, cluster=cluster))


def _evened(graph: StageGraph, cost: CostModel, busy_s: Mapping[int, float]) -> ModelCosts:
    """Return prices with quicker operators in stages whose devices compute more than the mean, and
    slower ones in other stages: the total work stays the same.
    """
    mean = sum(busy_s.values()) / len(busy_s)
    slowest = [max(busy_s[device] for device in stage.devices) for stage in graph.stages]
    shares = np.ones((len(cost.graph), 1))
    for stage, seconds in zip(graph.stages, slowest, strict=True):
        if seconds:
            shares[[cost.graph.index[name] for name in stage.operators]] = mean / seconds
    return ModelCosts(graph, replace(cost, profile=cost.profile.scaled(shares)))


def _in_best_slices(graph: StageGraph, cost: CostModel) -> ModelCosts:
    """Return prices at which every sample takes an operator as long as in its best slice."""
    profile, least_s = cost.profile, least_s_per_sample(cost, graph.batch_size)
    wanted = np.outer(least_s, profile.samples)
    shares = wanted / np.maximum(profile.seconds.sum(axis=0), 1e-300)
    return ModelCosts(graph, replace(cost, profile=profile.scaled(shares)))
