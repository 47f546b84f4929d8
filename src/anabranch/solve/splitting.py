"""Choice of split backwards for the stages that a search has found.

A search prices tens of thousands of stage graphs under 1F1B. Its best ones are simulated under the
schedules with split backwards at the end: which stages are best hardly depends on that.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SPLIT_BACKWARDS, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.simulator.run import run
from anabranch.solve.settings import SETTINGS


def split_backwards(judge: Judge, cost: CostModel) -> ScheduledProposal | None:
    """The shortest step of a judge's best proposals with split backwards that fits memory; None
    where none saves enough.
    """
    limit = judge.best_s * (1 - SETTINGS.split_gain)
    near = judge.ranked(SETTINGS.split_near)[: SETTINGS.split_proposals]
    proposals = {_with_shares(proposal, cost): proposal for proposal in near}
    shorter: list[tuple[float, int, ScheduledProposal]] = []
    for number, schedule in enumerate(sorted(SPLIT_BACKWARDS)):
        own = Judge(ShortestStep(cost, (schedule,)))
        own.best_s = limit
        for proposal in proposals:
            passes = 3 * sum(map(proposal.num_microbatches, range(len(proposal))))
            if passes <= SETTINGS.split_passes or not schedule.startswith("zb"):
                own.consider([proposal])
        if own.best is not None and own.best_s < limit:
            shorter.append((own.best_s, number, own.best))
    for *_, best in sorted(shorter, key=lambda entry: entry[:2]):
        # Passes whose weights wait hold more than the formula of memory knows.
        order = compute_order(best.graph, best.schedule)
        timeline = run(best.graph, order, best.costs, messages=False)
        if max(timeline.peak_bytes.values()) <= cost.cluster.memory_bytes:
            return replace(best, proposal=proposals[best.proposal])
    return None


def _with_shares(graph: StageGraph, cost: CostModel) -> StageGraph:
    """The stages with the shares of their backwards that gradients of weights take."""
    costs = ModelCosts(graph, cost)
    shares = [costs.weight_share(s, max(graph.slice_sizes(s))) for s in range(len(graph))]
    stages = zip(graph.stages, shares, strict=True)
    return replace(
        graph, stages=tuple(replace(stage, weight_share=round(share, 3)) for stage, share in stages)
    )
