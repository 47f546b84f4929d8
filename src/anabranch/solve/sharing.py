"""Proposals of a search again, with replicas that share the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.cost import CostModel
from anabranch.planner.base import Improving
from anabranch.plans.stages import StageGraph
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.simulator.stage_costs import stage_costs
from anabranch.solve.settings import SETTINGS


def judge_of_sharing(judge: Judge, shared: CostModel, schedules: tuple[str, ...]) -> Judge:
    """A judge for which only steps count that are worth sharing beside the best of another."""
    sharing = Judge(ShortestStep(shared, schedules))
    sharing.best_s = judge.best_s * (1 - SETTINGS.worth_sharing)
    return sharing


def share(
    judge: Judge,
    sharing: Judge,
    improving: Improving | None,
    cost: CostModel,
    shared: CostModel,
    budget: int,
) -> None:
    """Judge proposals again, those that may gain where replicas share the optimizer's state.

    Args:
        budget: what simulations may take, see ``SearchBudget``.
    """
    near: Iterable[StageGraph]
    if improving is not None:
        known = filter(_is_replicated, (*judge.seconds(), *judge.unfit))
        near = improving.sharing(known, sharing.best_s)
    else:
        gaining = _may_gain(judge, sharing.best_s, shared, cost)
        near = filter(_is_replicated, (*gaining, *judge.unfit))
    sharing.consider(near, budget, in_order=True)


def _may_gain(judge: Judge, limit: float, cost: CostModel, unshared: CostModel) -> list[StageGraph]:
    """Proposals of a judge, of a search without, that may take less than a limit where replicas
    share the optimizer's state: an update took long, or there is memory for a faster way to run.
    """

    def least_s(proposal: StageGraph, seconds: float) -> float:
        """Its seconds, less what its longest update is shortened by, if that may be enough."""
        size = proposal.batch_size
        updates = (stage_costs(unshared, s, size).update_s for s in proposal.stages)
        if seconds - max(updates) > limit:  # which is known, unlike what is left of them
            return seconds
        return seconds - max(
            stage_costs(unshared, stage, size).update_s - stage_costs(cost, stage, size).update_s
            for stage in proposal.stages
        )

    known = {p: least_s(p, seconds) for p, seconds in judge.seconds().items()}
    return sorted((p for p in known if known[p] <= limit), key=known.__getitem__)


def _is_replicated(graph: StageGraph) -> bool:
    return any(stage.replicas > 1 for stage in graph.stages)
