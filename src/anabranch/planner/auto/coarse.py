"""Coarse problems: a large model or cluster reduced to a size that is searched quickly.

Operators in a row are joined until each has a fair share of the work, and a part of the cluster
trains a part of the batch. In the whole, a stage of the coarse plan has ``factor`` times the
replicas, on ``factor`` times the nodes::

    coarse    stage 0 on node 0      stage 1 on node 1         8 devices, batch 64
    whole     stage 0 on nodes 0 1   stage 1 on nodes 2 3      16 devices, batch 128

All-reduces over more replicas are slower; the search of the whole problem adapts the plan to that.
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
    """A smaller problem, and how to turn its plans into plans of the whole one.

    Attributes:
        cost: prices of fewer operators on fewer devices.
        contracted: the operators that were joined.
        factor: devices and samples of the whole problem per device and sample of this one.
    """

    cost: CostModel
    contracted: Contracted
    factor: int

    def expand(self, graph: StageGraph) -> StageGraph:
        """Turn stages of the coarse problem into stages of the whole one."""
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
    """Reduce a problem to about ``SETTINGS.most`` operators and devices; None if it has no more."""
    fewer = in_runs(cost.profile, SETTINGS.most)
    factor = _factor(cost.cluster, math.gcd(batch_size, microbatch_size or batch_size))
    if factor == 1 and fewer.profile is cost.profile:
        return None
    *inner, outermost = cost.cluster.levels
    levels = (*inner, replace(outermost, size=outermost.size // factor))
    cluster = replace(cost.cluster, levels=levels)
    return Coarse(replace(cost, profile=fewer.profile, cluster=cluster), fewer, factor)


def _factor(cluster: Cluster, samples: int) -> int:
    """Return the factor by which the cluster shrinks, to a whole number of outermost groups."""
    groups = cluster.levels[-1].size
    return max(
        f
        for f in range(1, max(2, cluster.num_devices // SETTINGS.most + 1))
        if groups % f == 0 and samples % f == 0
    )
