"""Plans from every partition of a small model, where no proposal of a planner can run.

Planners look for short steps. They may miss the few stage graphs that fit where memory holds many
versions of the weights, or where a mini-batch has fewer micro-batches than a pipeline is deep. So
what is small enough is cut in every way, and a larger model first brought down to so many
operators, neighbours joined, the quickest first::

    a --> b --> c --> d --> ...      a --> bc --> d --> ...       (b and c are quick)

For every partition, micro-batch size and stage: the replicas that fit memory with the versions of
the policy, with recomputation only where it does not fit without; then the numbers of replicas that
use all devices and make the slowest stage as quick as can be. A model that is not brought down
therefore has a proposal if anything fits at all, unless there are more than ``MOST_TRIED`` ways to
look at. What is proposed are the ``MOST`` with the quickest slowest
stages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.graph.opgraph import OpGraph, bits
from anabranch.plans.check import stage_bytes
from anabranch.plans.contraction import Contracted, contract, in_order
from anabranch.plans.partitions import partitions
from anabranch.plans.slices import profile_covers
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import asynchronous
from anabranch.simulator.staleness import versions_of
from anabranch.weights import WeightPolicy

MOST_OPERATORS = 8
"""A model of so many has at most 4,140 partitions."""

MOST_DEVICES = 64

MOST_TRIED = 150_000
"""Pairs of a partition and a micro-batch size that are looked at; some twenty seconds."""

MOST = 24
"""Stage graphs that are proposed."""

_Mode = tuple[float, bool]
"""Seconds that a stage computes per mini-batch, and whether it recomputes."""


def brought_down(profile: Profile) -> Contracted:
    """The model with at most ``MOST_OPERATORS``, by joining neighbours, the quickest pair first."""
    graph = profile.graph
    seconds = [cost.forward_s[-1] + cost.backward_s[-1] for cost in profile.costs]
    parts = [1 << i for i in range(len(graph))]
    while len(parts) > MOST_OPERATORS:
        work = [sum(seconds[i] for i in bits(part)) for part in parts]
        x, y = min(_neighbours(graph, parts), key=lambda pair: work[pair[0]] + work[pair[1]])
        others = (part for i, part in enumerate(parts) if i not in (x, y))
        parts = in_order(graph, [*others, parts[x] | parts[y]])
    return contract(profile, parts)


def _neighbours(graph: OpGraph, parts: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of parts, in topological order, that may be joined; any two where nothing flows."""
    home = {op: i for i, part in enumerate(parts) for op in bits(part)}
    after = [0] * len(parts)
    for a, b in graph.edges:
        if home[a] != home[b]:
            after[home[a]] |= 1 << home[b]
    # What comes later: from the next on, and from the one after that on.
    later, much_later = [0] * len(parts), [0] * len(parts)
    for x in reversed(range(len(parts))):
        for y in bits(after[x]):
            much_later[x] |= later[y]
        later[x] = after[x] | much_later[x]
    # A second, longer way from one to the other would become a circle.
    joined = [(x, y) for x in range(len(parts)) for y in bits(after[x] & ~much_later[x])]
    return joined or [(x, y) for x in range(len(parts)) for y in range(x + 1, len(parts))]


@dataclass
class EveryPartition:
    """Proposals from all partitions of a model; ``recompute`` says whether stages may recompute."""

    cost: CostModel
    policy: WeightPolicy
    batch_size: int
    max_replicas: int
    recompute: bool
    last_update: bool = False
    _modes: dict[tuple[object, ...], dict[int, _Mode]] = field(default_factory=dict, init=False)

    def propose(self, sizes: Sequence[int]) -> list[StageGraph]:
        """The stage graphs with the quickest slowest stages that fit, in micro-batches of any of
        these sizes; empty if none does.
        """
        devices = self.cost.cluster.num_devices
        if len(self.cost.graph) > MOST_OPERATORS or devices > MOST_DEVICES:
            return []
        ranked = (
            (slowest_s, graph.depth, n, graph)
            for n, (slowest_s, graph) in enumerate(self._all(sizes))
        )
        return [graph for *_, graph in heapq.nsmallest(MOST, ranked)]

    def _all(self, sizes: Sequence[int]) -> Iterator[tuple[float, StageGraph]]:
        tried = 0
        for masks, pairs in partitions(self.cost):
            if not len(masks) <= self.cost.cluster.num_devices <= len(masks) * self.max_replicas:
                continue
            tried += len(sizes)
            if tried > MOST_TRIED:
                return
            for size in sizes:
                stages = tuple(
                    Stage(self.cost.graph.names(mask), (s,), size) for s, mask in enumerate(masks)
                )
                graph = StageGraph(stages, tuple(sorted(pairs)), self.batch_size)
                try:
                    graph = asynchronous.warm_up(graph)
                    versions = versions_of(graph, self.policy, last_update=self.last_update)
                except (InvalidPlanError, PolicyError):
                    continue
                chosen = self._quickest(graph, versions)
                if chosen is not None:
                    yield chosen

    def _quickest(
        self, graph: StageGraph, versions: Sequence[int]
    ) -> tuple[float, StageGraph] | None:
        """The replicas with the least slowest stage that use all devices, if they can be used."""
        # Per number of devices that the stages so far use: the slowest of them, and their replicas.
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        total = self.cost.cluster.num_devices
        modes = [self._modes_of(graph, s, versions[s]) for s in range(len(graph))]
        for of_stage in modes:
            following: dict[int, tuple[float, tuple[int, ...]]] = {}
            for used, (slowest_s, replicas) in best.items():
                for d, (seconds, _) in of_stage.items():
                    choice = max(slowest_s, seconds), (*replicas, d)
                    if used + d <= total and choice < following.get(used + d, (math.inf, ())):
                        following[used + d] = choice
            best = following
        if total not in best:
            return None
        slowest_s, replicas = best[total]
        starts = (0, *accumulate(replicas))
        stages = tuple(
            replace(
                stage,
                devices=tuple(range(starts[s], starts[s + 1])),
                recompute=modes[s][replicas[s]][1],
            )
            for s, stage in enumerate(graph.stages)
        )
        return slowest_s, replace(graph, stages=stages)

    def _modes_of(self, graph: StageGraph, s: int, versions: int) -> dict[int, _Mode]:
        """Replicas with which a stage fits memory, and how it then runs."""
        stage = graph.stages[s]
        key = stage.operators, stage.in_flight, versions, stage.microbatch_size
        if key not in self._modes:
            most = min(self.max_replicas, stage.microbatch_size, self.cost.cluster.num_devices)
            modes = ((d, self._mode(graph, s, versions, d)) for d in range(1, most + 1))
            self._modes[key] = {d: mode for d, mode in modes if mode is not None}
        return self._modes[key]

    def _mode(self, graph: StageGraph, s: int, versions: int, replicas: int) -> _Mode | None:
        stage, cost = graph.stages[s], self.cost
        if not profile_covers(cost, graph.batch_size, stage.microbatch_size, replicas):
            return None
        mask = cost.graph.mask(stage.operators)
        for recompute in (False, True)[: 1 + self.recompute]:
            as_run = replace(stage, devices=tuple(range(replicas)), recompute=recompute)
            stages = (*graph.stages[:s], as_run, *graph.stages[s + 1 :])
            nbytes = stage_bytes(
                replace(graph, stages=stages),
                cost,
                s,
                in_flight=stage.in_flight,
                versions=versions,
            )
            if nbytes <= cost.cluster.memory_bytes:
                samples = -(-stage.microbatch_size // replicas)
                seconds = sum(cost.stage_s(mask, samples, recompute=recompute))
                return seconds * graph.num_microbatches(s), recompute
        return None
