"""Plans from every partition of a small model, where no proposal of a planner can run.

Planners look for short steps. They may miss the few stage graphs that fit where memory holds many
versions of the weights, or where a mini-batch has fewer micro-batches than a pipeline is deep. So a
small model is cut in every way; a larger one is first reduced to ``MOST_OPERATORS`` runs of its
operators, with about equal work.

For every partition and micro-batch size, each stage gets the numbers of replicas that fit in memory
with the weight versions of the policy. Of these the ones are chosen that use all devices and make
the slowest stage as quick as possible (``planner.toolkit``). So a small model has a proposal if
anything fits at all, unless there are more ways than ``SETTINGS.most_tried``. Proposed are the
``SETTINGS.most_proposed`` stage graphs whose slowest stage is quickest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.even import even_runs
from anabranch.planner.exhaustive import MOST_DEVICES, MOST_OPERATORS
from anabranch.planner.toolkit.assemble import on_exactly, stage_graph
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.contraction import Contracted, contract
from anabranch.plans.partitions import partitions
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.remembered import remembered
from anabranch.schedule import asynchronous
from anabranch.simulator.staleness import versions_of
from anabranch.solve.settings import SETTINGS
from anabranch.weights import WeightPolicy


def brought_down(profile: Profile) -> Contracted:
    """Contract a model to at most ``MOST_OPERATORS`` runs of about equal work, branch by branch."""
    order = [*operators(decompose(profile.graph))]
    seconds = [profile.costs[op].forward_s[-1] + profile.costs[op].backward_s[-1] for op in order]
    runs = even_runs(seconds, min(MOST_OPERATORS, len(order)))
    return contract(profile, [sum(1 << op for op in order[i:j]) for i, j in runs])


@dataclass(frozen=True)
class EveryPartition:
    """Proposals from all partitions of a model; ``recompute`` says whether stages may recompute."""

    cost: CostModel
    policy: WeightPolicy
    batch_size: int
    max_replicas: int
    recompute: bool
    last_update: bool = False

    def propose(self, sizes: Sequence[int]) -> list[StageGraph]:
        """Return the stage graphs that fit and whose slowest stages are quickest, in micro-batches
        of any of these sizes; empty if none fits.
        """
        devices = self.cost.cluster.num_devices
        if len(self.cost.graph) > MOST_OPERATORS or devices > MOST_DEVICES:
            return []
        proposals = (
            (slowest_s, graph.depth, n, graph)
            for n, (slowest_s, graph) in enumerate(self._all(sizes))
        )
        return [graph for *_, graph in heapq.nsmallest(SETTINGS.most_proposed, proposals)]

    def _all(self, sizes: Sequence[int]) -> Iterator[tuple[float, StageGraph]]:
        tried = 0
        for masks, pairs in partitions(self.cost):
            if not len(masks) <= self.cost.cluster.num_devices <= len(masks) * self.max_replicas:
                continue
            tried += len(sizes)
            if tried > SETTINGS.most_tried:
                return
            for size in sizes:
                chosen = self._quickest(size, masks, pairs)
                if chosen is not None:
                    yield chosen

    def _quickest(
        self, size: int, masks: Sequence[int], pairs: set[tuple[int, int]]
    ) -> tuple[float, StageGraph] | None:
        """Return the seconds of the slowest stage in a mini-batch, and the stages with the replicas
        that make it quickest on all devices; None if not all devices can be used.
        """
        prices, parts = self._prices(size), [Part(mask, 1) for mask in masks]
        graph = stage_graph(prices, parts, [(s,) for s in range(len(parts))], pairs)
        try:
            graph = asynchronous.warm_up(graph)
            order = asynchronous.split_batches(graph)
            versions = versions_of(order, self.policy, last_update=self.last_update)
        except (InvalidPlanError, PolicyError):
            return None
        ways = [
            self._fitting(size, mask, stage.in_flight, held)
            for mask, stage, held in zip(masks, graph.stages, versions, strict=True)
        ]
        parts = on_exactly(self.cost.cluster.num_devices, prices, ways)
        if not parts:
            return None
        ends = pairwise(accumulate((part.replicas for part in parts), initial=0))
        stages = tuple(
            replace(stage, devices=tuple(range(*devices)), recompute=part.recompute)
            for stage, part, devices in zip(graph.stages, parts, ends, strict=True)
        )
        slowest_s = max(map(prices.part_period_s, parts)) * prices.num_microbatches
        return slowest_s, replace(graph, stages=stages)

    @remembered
    def _prices(self, size: int) -> MicrobatchPrices:
        limit = self.max_replicas
        return Problem(
            self.cost, self.batch_size, max_replicas=limit, recompute=self.recompute
        ).prices(size)

    @remembered
    def _fitting(self, size: int, mask: int, in_flight: int, versions: int) -> list[Part]:
        """Return the ways to run a stage that fit in memory."""
        most = min(self.max_replicas, self.cost.cluster.num_devices)
        return [
            part
            for part in self._prices(size).parts(mask, most)
            if self.cost.device_bytes(
                bits(mask),
                microbatch_size=size,
                replicas=part.replicas,
                in_flight=in_flight,
                recompute=part.recompute,
                versions=versions,
            )
            <= self.cost.cluster.memory_bytes
        ]
