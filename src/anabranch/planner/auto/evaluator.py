"""Evaluator: seconds of a draft, for a search that asks thousands of times a second.

It is the simulator once more, compiled: the same devices, messages, ports, all-reduces and updates,
with the prices of the same cost model, from operators to seconds without an object between. Where a
draft cannot run, that is infinitely long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from anabranch.cost import CostModel
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.tables import tables_of, with_seconds
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
        # Compiling takes seconds, and importing the compiler a quarter of one.
        from anabranch.planner.auto.compiled.step import step_seconds

        self._step_seconds: Any = step_seconds
        self._cost = replace(cost, shard_optimizer=False)
        self._tables = tables_of(self._cost, batch_size, max_replicas)

    def step_s(self, draft: Draft, limit: float = math.inf) -> float:
        """Seconds of a step; infinity for a draft that cannot run: a circle of stages, a stage
        without operators or devices, too little memory, slices that the profile does not cover, too
        many replicas, a replica over several nodes.

        Args:
            limit: infinity for all that takes longer. A search that draws its chance before it asks
                knows which seconds it would take, and most answers come early then.
        """
        while True:
            seconds, degree, samples = self._step_seconds(*draft, self._tables, limit)
            if not math.isnan(seconds):
                return float(seconds)
            self._tables = with_seconds(self._tables, self._cost, degree, samples)

    def period_s(self, draft: Draft, policy: WeightPolicy, *, last_update: bool = False) -> float:
        """Seconds from one mini-batch to the next without a flush; infinity likewise.

        Args:
            last_update: see ``weights.versions_held``.
        """
        raise NotImplementedError
