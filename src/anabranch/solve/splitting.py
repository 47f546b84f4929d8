"""Choice of split backwards for the stages that a search has found.

A search prices tens of thousands of stage graphs under 1F1B. Its best ones are simulated under the
schedules with split backwards at the end: which stages are best hardly depends on that.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SPLIT_BACKWARDS
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.solve.simulation import checked_run

LEAST_GAIN = 0.02
"""Share of the step that split backwards have to save. Each call with weights costs the host some
20 us more, which is not predicted.
"""

NEAR = 1.6
"""Proposals whose steps are within this factor of the shortest are tried, ``MOST`` of them. With
1.2 and 8 two of 20 plans for mmt were 3 and 13 % longer; on 256 devices it takes 4 s more.
"""

MOST = 24

LISTED = 30_000
"""Passes up to which lists are scheduled: it takes 40 us for each."""


def split_backwards(judge: Judge, cost: CostModel) -> ScheduledProposal | None:
    """The shortest step of a judge's best proposals with split backwards that fits memory; None
    where none saves enough.
    """
    limit = judge.best_s * (1 - LEAST_GAIN)
    proposals = {_with_shares(proposal, cost): proposal for proposal in judge.ranked(NEAR)[:MOST]}
    shorter: list[tuple[float, int, ScheduledProposal]] = []
    for number, schedule in enumerate(sorted(SPLIT_BACKWARDS)):
        own = Judge(ShortestStep(cost, (schedule,)))
        own.best_s = limit
        for proposal in proposals:
            passes = 3 * sum(map(proposal.num_microbatches, range(len(proposal))))
            if passes <= LISTED or not schedule.startswith("zb"):
                own.consider([proposal])
        if own.best is not None and own.best_s < limit:
            shorter.append((own.best_s, number, own.best))
    for *_, best in sorted(shorter, key=lambda entry: entry[:2]):
        # Passes whose weights wait hold more than the formula of memory knows.
        timeline = checked_run(best.graph, best.schedule, cost, messages=False)
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
