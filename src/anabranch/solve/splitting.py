"""Choice of split backwards for the stages that a search has found.

A search prices tens of thousands of stage graphs under 1F1B. Its best ones are simulated under the
schedules with split backwards at the end: which stages are best hardly depends on that.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.cost import CostModel
from anabranch.plans.stages import Stage, StageGraph
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
    proposals = {with_lengths(proposal, cost): proposal for proposal in near}
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


def with_lengths(graph: StageGraph, cost: CostModel) -> StageGraph:
    """The stages with the lengths of their passes and messages, by which lists are scheduled."""
    costs, stages = ModelCosts(graph, cost), list[Stage]()
    slices = [max(graph.slice_sizes(s)) for s in range(len(graph))]
    seconds = [costs.compute_s(s, samples) for s, samples in enumerate(slices)]
    sizes = [stage.microbatch_size for stage in graph.stages]
    slowest_s = max(sum(pair) / size for pair, size in zip(seconds, sizes, strict=True)) or 1.0
    for s, stage in enumerate(graph.stages):
        forward_s, backward_s = seconds[s]
        message_s = max((_message_s(graph, costs, s, t) for t in graph.successors[s]), default=0.0)
        factor = backward_s / forward_s if forward_s else 2.0
        changed = replace(
            stage,
            load=round((forward_s + backward_s) / sizes[s] / slowest_s, 3),
            backward_factor=round(factor, 3),
            weight_share=round(costs.weight_share(s, slices[s]), 3),
            message=round(message_s / sizes[s] / slowest_s, 3),
        )
        stages.append(changed)
    return replace(graph, stages=tuple(stages))


def _message_s(graph: StageGraph, costs: ModelCosts, s: int, t: int) -> float:
    """Seconds of the first message of a stage edge, if nothing else is on its way."""
    if not costs.message_edges.goes_forward((s, t)):
        return 0.0
    samples = min(max(graph.slice_sizes(x)) for x in (s, t))
    route = costs.route(graph.stages[s].devices[0], graph.stages[t].devices[0])
    nbytes = costs.message_bytes(s, t, samples)[0]
    return route.latency_s + nbytes * route.per_byte_s + 2 * costs.message_s(nbytes)
