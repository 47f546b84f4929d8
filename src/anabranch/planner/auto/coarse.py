"""Coarse problems: a large model or cluster brought down to a size that is searched quickly.

Operators that follow one another are joined until each has a fair share of the work, and the
cluster is taken for a part of it, that trains a part of the batch. A stage of the coarse plan then
has so many times the replicas, on the nodes of its own and as many others::

    coarse    stage 0 on node 0      stage 1 on node 1         8 devices, batch 64
    whole     stage 0 on nodes 0 1   stage 1 on nodes 2 3      16 devices, batch 128

What is slower in the whole, all-reduces over more replicas, the search of the whole mends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner.auto.settings import SETTINGS
from anabranch.plans.contraction import Contracted, in_runs
from anabranch.plans.stages import Stage, StageGraph


@dataclass(frozen=True)
class Coarse:
    """A smaller problem, and the way back from its plans.

    Attributes:
        cost: of fewer operators on fewer devices.
        factor: how many times more devices and samples the whole problem has.
    """

    cost: CostModel
    contracted: Contracted
    factor: int

    def expand(self, graph: StageGraph) -> StageGraph:
        """Stages of the coarse problem as stages of the whole one."""
        stages = tuple(self._stage(stage) for stage in self.contracted.expand(graph).stages)
        return replace(graph, stages=stages, batch_size=graph.batch_size * self.factor)

    def _stage(self, stage: Stage) -> Stage:
        node = self.cost.cluster.group_sizes[0] if len(self.cost.cluster.levels) > 1 else 1
        devices = (
            (device // node * self.factor + i) * node + device % node
            for i in range(self.factor)
            for device in stage.devices
        )
        size = stage.microbatch_size * self.factor
        return replace(stage, devices=tuple(sorted(devices)), microbatch_size=size)


def coarsen(cost: CostModel, batch_size: int, microbatch_size: int | None) -> Coarse | None:
    """The problem with about ``SETTINGS.most`` operators and devices, where that is fewer."""
    fewer = in_runs(cost.profile, SETTINGS.most)
    factor = _factor(cost.cluster, math.gcd(batch_size, microbatch_size or batch_size))
    if factor == 1 and fewer.profile is cost.profile:
        return None
    *inner, outermost = cost.cluster.levels
    levels = (*inner, replace(outermost, size=outermost.size // factor))
    cluster = replace(cost.cluster, levels=levels)
    return Coarse(replace(cost, profile=fewer.profile, cluster=cluster), fewer, factor)


def _factor(cluster: Cluster, samples: int) -> int:
    """Factor by which the cluster shrinks: a whole number of its outermost groups is left."""
    groups = cluster.levels[-1].size
    return max(
        f
        for f in range(1, max(2, cluster.num_devices // SETTINGS.most + 1))
        if groups % f == 0 and samples % f == 0
    )
