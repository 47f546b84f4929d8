"""Evaluator: seconds of a draft, for a search that asks thousands of times a second.

It is about what the simulator says; where a draft cannot run, that is infinitely long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, InvalidScheduleError, ProfileError
from anabranch.planner.auto.draft import Draft, stage_graph_of
from anabranch.plans.check import check, stage_bytes
from anabranch.plans.stages import StageGraph
from anabranch.schedule import compute_order, rule_named
from anabranch.weights import WeightPolicy


class Evaluator:
    """Prices drafts of one model on one cluster.

    Args:
        cost: ``shard_optimizer`` is the draft's matter.
        batch_size: samples of one step.
        max_replicas: of a stage at most; None: no limit.
    """

    def __init__(
        self, cost: CostModel, batch_size: int, *, max_replicas: int | None = None
    ) -> None:
        self._cost, self._batch_size, self._max_replicas = cost, batch_size, max_replicas

    def step_s(self, draft: Draft, limit: float = math.inf) -> float:
        """Seconds of a step; infinity for a draft that cannot run: a circle of stages, a stage
        without operators or devices, too little memory, slices that the profile does not cover, too
        many replicas, a replica over several nodes.

        Args:
            limit: infinity for all that takes longer. A search that draws its chance before it asks
                knows which seconds it would take, and most answers come early then.
        """
        cost = replace(self._cost, shard_optimizer=draft.sharded)
        name = "1f1b-deep" if draft.deep else "1f1b"
        try:
            proposed = stage_graph_of(draft, cost, self._batch_size)
            graph = rule_named(name).warm_up(proposed, partial(_room, cost, proposed))
            # Until it is compiled: the simulator itself.
            run: Any = import_module("anabranch.simulator.run")
            order = compute_order(graph, name, slots=cost.receive_slots)
            if check(graph, cost) or not self._suits(graph):
                return math.inf
            seconds = float(run.step_seconds(graph, order, cost))
            return seconds if seconds <= limit else math.inf
        except (InvalidPlanError, InvalidScheduleError, ProfileError, ValueError):
            return math.inf

    def period_s(self, draft: Draft, policy: WeightPolicy, *, last_update: bool = False) -> float:
        """Seconds from one mini-batch to the next without a flush; infinity likewise.

        Args:
            last_update: see ``weights.versions_held``.
        """
        raise NotImplementedError

    def _suits(self, graph: StageGraph) -> bool:
        node = self._cost.cluster.group_sizes[0]
        return all(
            stage.replicas <= (self._max_replicas or stage.replicas)
            and all(
                first // node == last // node
                for first, last in zip(
                    stage.devices[:: stage.tensor],
                    stage.devices[stage.tensor - 1 :: stage.tensor],
                    strict=True,
                )
            )
            for stage in graph.stages
        )


def _room(cost: CostModel, graph: StageGraph, s: int) -> int:
    none, one = (stage_bytes(graph, cost, s, in_flight=n) for n in (0, 1))
    free = cost.cluster.memory_bytes - none
    return int(free // (one - none)) if one > none else graph.num_microbatches(s)
