"""Choice of split backwards for the stages that a search has found.

A search judges hundreds of stage graphs under 1F1B. The most promising ones are simulated under the
schedules with split backwards as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, ProfileError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SPLIT_BACKWARDS, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.simulator.run import run
from anabranch.solve.settings import SETTINGS

AUTO = ("1f1b", "1f1b-deep")
"""Schedules of ``schedule="auto"``, least memory first. GPipe holds all micro-batches."""


LOOP_SCHEDULES = (AUTO, ("1f1b-split",), ("1f1b-deep-split",), ("zb-h1",), ("zb-h2",))
"""Likewise, of stages that share devices: whole backwards, then split ones. Lists take longest and
come last, of stages whose bounds and steps without are shortest.
"""


def split_backwards(
    judge: Judge,
    cost: CostModel,
    graphs: Iterable[StageGraph] | None = None,
    limit: float | None = None,
    schedules: Sequence[str] = tuple(sorted(SPLIT_BACKWARDS)),
) -> tuple[float, ScheduledProposal] | None:
    """The shortest step of some proposals with split backwards that fits memory, and its seconds;
    None where it is not below a limit. Each has to save enough of the proposal's own step.

    Args:
        judge: knows these proposals, as far as they were simulated.
        graphs: by default the judge's best.
        limit: by default the judge's best seconds.
    """
    near = judge.ranked(SETTINGS.split_near) if graphs is None else graphs
    best_s = judge.best_s if limit is None else limit
    best: ScheduledProposal | None = None
    for proposal in [*near][: SETTINGS.split_proposals]:
        with_passes = with_lengths(proposal, cost)
        for schedule in schedules:
            if _passes(proposal) > SETTINGS.split_passes and schedule.startswith("zb"):
                continue
            own = Judge(ShortestStep(cost, (schedule,)))
            own.best_s = best_s
            own.consider([with_passes])
            if own.best is None or own.best_s >= best_s or not _fits(own.best, cost):
                continue
            whole = Judge(ShortestStep(cost, AUTO))
            whole.consider([proposal])
            if own.best_s <= (1 - SETTINGS.split_gain) * whole.best_s:
                best_s, best = own.best_s, replace(own.best, proposal=proposal)
    return None if best is None else (best_s, best)


def best_loop(
    cost: CostModel,
    graphs: Iterable[StageGraph],
    limit: float,
    ways: Sequence[tuple[str, ...]],
    passes: int = SETTINGS.loop_passes,
) -> tuple[float, ScheduledProposal] | None:
    """The shortest step of some stage graphs whose devices have several stages, and its seconds;
    None where it is not below a limit.

    Args:
        ways: schedules, one after the other, as ``LOOP_SCHEDULES``; split backwards have to save
            enough of a step with whole ones before them.
        passes: that are scheduled in lists at most, of all these graphs together.
    """
    lower, known = ShortestStep(cost, ways[-1]), dict[StageGraph, float]()
    for graph in graphs:
        with suppress(InvalidPlanError, ProfileError):
            known[graph] = lower.least_s(lower.prices(graph), limit)
    near = sorted((graph for graph in known if known[graph] < limit), key=known.__getitem__)
    near, best, quick = near[: SETTINGS.most_loops], None, dict[StageGraph, float]()
    for names in ways:
        split, left = not SPLIT_BACKWARDS.isdisjoint(names), passes
        for graph in sorted(near, key=lambda graph: known[graph] + quick.get(graph, 0.0)):
            if names[0].startswith("zb"):
                if _passes(graph) > left:
                    continue
                left -= _passes(graph)
            judge = Judge(ShortestStep(cost, names))
            judge.best_s = limit
            judge.consider([with_lengths(graph, cost) if split else graph])
            quick[graph] = min([*judge.seconds().values(), quick.get(graph, math.inf)])
            if judge.best is not None and judge.best_s < limit and _fits(judge.best, cost):
                limit = judge.best_s
                best = limit, replace(judge.best, proposal=graph)
        if best is not None and not split and len(ways) > 1:
            limit *= 1 - SETTINGS.split_gain
    return best


def _passes(graph: StageGraph) -> int:
    """Passes of a list schedule."""
    return 3 * sum(map(graph.num_microbatches, range(len(graph))))


def _fits(best: ScheduledProposal, cost: CostModel) -> bool:
    """Whether the simulated step fits memory: passes whose weights wait hold more than the formula
    of memory knows.
    """
    timeline = run(best.graph, compute_order(best.graph, best.schedule), best.costs, messages=False)
    return max(timeline.peak_bytes.values()) <= cost.cluster.memory_bytes


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
