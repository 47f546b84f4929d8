"""Demands on a planner for training without a flush, where versions of the weights take memory.

A planner is asked for a synchronous plan of a very long batch, ``STREAM`` mini-batches in a row
with an all-reduce for each. Asynchronous 1F1B runs the same: filling the pipeline hardly counts,
and the slowest stage decides.

Planners know one version of the weights. If proposals do not fit with the versions that the policy
holds, the planner is asked again with prices that include them (``Demand``), and then for plans
that leave more memory free, at most as often as ``SHARES`` has entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.auto.planner import Auto
from anabranch.planner.base import Planner
from anabranch.plans.stages import MOST_MICROBATCHES, Stage, StageGraph
from anabranch.schedule import asynchronous
from anabranch.simulator.staleness import versions_of
from anabranch.solve.phases import Stop, collect
from anabranch.weights import WeightPolicy

STREAM = 256
"""Mini-batches in the batch that planners are asked for; fewer if a stage would have more than
``MOST_MICROBATCHES`` micro-batches.
"""

SHARES = (1.0, 0.8, 0.6, 0.4)
"""Shares of a device's memory that planners may take, tried one after the other."""


class Demand(NamedTuple):
    """Weight versions as a planner can price them, and the memory it may take.

    A stage with n mini-batches in flight is taken to hold ``1 + constant + flight * n`` versions;
    for most policies that is at most one too many. A replica is taken to stash only its share of
    the weights. The judge counts exactly. ``share`` is that of a device's memory.
    """

    share: float
    constant: int = 0
    flight: int = 0
    recompute: bool = True


_Answer = tuple[list[StageGraph], Stop | None] | InfeasiblePlanError

_DEPTH = 4


def versions_of_flight(policy: WeightPolicy, *, last_update: bool = False) -> tuple[int, int]:
    """Return the versions that a stage holds per mini-batch in flight, and the versions besides
    these and the current one.
    """
    graph = asynchronous.warm_up(
        StageGraph(
            tuple(Stage((f"{s}",), (s,), 1) for s in range(_DEPTH)),
            tuple((s, s + 1) for s in range(_DEPTH - 1)),
            _DEPTH if policy.microbatches else 1,
        )
    )
    order = asynchronous.split_batches(graph)
    first, second, *_ = versions_of(order, policy, last_update=last_update)
    flight = first - second
    return flight, first - 1 - flight * _DEPTH


def demands(policy: WeightPolicy, *, last_update: bool = False) -> list[Demand]:
    """Return the demands to make one after the other, until all proposals fit."""
    flight, constant = versions_of_flight(policy, last_update=last_update)
    first_of_all = [Demand(1.0)]
    if flight:
        first_of_all.append(Demand(1.0, constant, flight, recompute=False))
    return [*first_of_all, *(Demand(share, constant, flight) for share in SHARES)]


class Proposals:
    """Proposals of a planner for a stream of mini-batches.

    Args:
        known: answers from other searches.

    Attributes:
        stop: reason for the early end of a search, if one was ended early.
    """

    def __init__(
        self, planner: Planner, cost: CostModel, batch_size: int, known: dict[Any, Any]
    ) -> None:
        self.stop: Stop | None = None
        self.planner = planner
        self._cost, self._batch_size = cost, batch_size
        self._known: dict[tuple[int, Demand], _Answer] = known
        self._proposed: set[StageGraph] = set()

    @property
    def count(self) -> int:
        return len(self._proposed)

    def get(self, microbatch_size: int, demand: Demand) -> list[StageGraph]:
        """Return the stage graphs for a micro-batch size that meet a demand.

        Raises:
            InfeasiblePlanError: if the planner has none.
        """
        key = microbatch_size, demand
        if key not in self._known:
            answer = self._ask(*key)
            if isinstance(answer, tuple) and isinstance(answer[1], KeyboardInterrupt):
                self._known = {**self._known}  # other searches ask again
            self._known[key] = answer
        answer = self._known[key]
        if isinstance(answer, InfeasiblePlanError):
            raise answer
        graphs, stop = answer
        self.stop = self.stop or stop
        self._proposed.update(graphs)
        return graphs

    def _ask(self, microbatch_size: int, demand: Demand) -> _Answer:
        count = min(STREAM, max(MOST_MICROBATCHES * microbatch_size // self._batch_size, 1))
        cost = replace(self._asked(microbatch_size, demand), updates=count)
        try:
            return collect(
                self._planner(demand)(
                    cost, batch_size=count * self._batch_size, microbatch_size=microbatch_size
                )
            )
        except InfeasiblePlanError as error:
            return InfeasiblePlanError(f"for {count} mini-batches in a row: {error}")

    def _planner(self, demand: Demand) -> Planner:
        planner: Any = self.planner
        if isinstance(planner, Auto):
            # It searches later, when its starts have been judged.
            planner = replace(planner, evaluations=0)
        if getattr(planner, "recompute", None) is True and not demand.recompute:
            planner = replace(planner, recompute=False)
        return cast(Planner, planner)

    def _asked(self, microbatch_size: int, demand: Demand) -> CostModel:
        cost, profile = self._cost, self._cost.profile
        tight = replace(cost.cluster, memory_bytes=int(cost.cluster.memory_bytes * demand.share))
        if demand.flight:
            # A version per mini-batch in flight counts as activations: bytes per sample.
            stashed = (
                int(cost.stage_parameter_bytes([i]).trainable) * demand.flight
                for i in range(len(profile.graph))
            )
            costs = tuple(
                replace(op, kept_bytes=op.kept_bytes - -nbytes // microbatch_size)
                for op, nbytes in zip(profile.costs, stashed, strict=True)
            )
            profile = replace(profile, costs=costs)
        factor = max(cost.update.state + demand.constant, 0.0)
        return replace(cost, profile=profile, cluster=tight, optimizer_factor=factor)
