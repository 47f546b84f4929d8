"""Choice of a schedule: for a plan, and of split backwards for the stages that a search proposes.

A search judges hundreds of stage graphs under 1F1B. The most promising ones are simulated with
split backwards as well. List schedules take longest to make, so they are tried only if the other
ones are not far behind, and for one of several graphs whose steps under these are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

import anabranch.planner as planners
from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, ProfileError
from anabranch.planner.auto import settings as auto
from anabranch.plans.check import require, require_few
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.schedule import LISTS, SPLIT_BACKWARDS, rule_named
from anabranch.simulator.costs import ModelCosts, with_lengths
from anabranch.simulator.judge import Judge
from anabranch.simulator.messages import port_seconds
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.solve.settings import SETTINGS

AUTO = ("1f1b", "1f1b-deep")
"""Schedules of ``schedule="auto"``, least memory first. GPipe holds all micro-batches."""

LOOP_SCHEDULES = (AUTO, ("1f1b-split",), ("zb-h1",), ("zb-h2",))
"""Schedules of stages that share devices, in the order in which they are tried: whole backwards,
then split ones. Lists take longest and come last, only for stages whose bounds and steps without
lists are shortest. A deep warm-up with split backwards was never the shortest.
"""


def scheduled(plan_: Plan, cost: CostModel, schedule: str | None = None) -> tuple[StageGraph, str]:
    """Return a synchronous plan's stages with in-flight counts, and the key of the schedule.

    Args:
        schedule: see ``simulate``, also for the errors.
    """
    graph, name = plan_.stage_graph, schedule or plan_.schedule
    require_few(graph)
    if name == "published" and plan_.planner not in planners.PLANNERS:
        raise ValueError(f"planner {plan_.planner!r} is unknown here, and so is its schedule")
    if name in ("auto", "published"):
        chosen = AUTO if name == "auto" else planners.PLANNERS[plan_.planner]().schedules
        judge = Judge(ShortestStep(cost, chosen))
        judge.consider([graph])
        best = judge.winner(plan_.planner)
        if name == "auto":
            _, best = split_backwards(judge, cost) or (0.0, best)
        graph, name = best.graph, best.schedule
    elif schedule is not None and schedule != plan_.schedule:
        if name in LISTS:
            graph = with_lengths(ModelCosts(graph, cost))
        graph = rule_named(name).warm_up(graph)
    require(graph, cost, shared=True, idle=True)
    return graph, name


def split_backwards(
    judge: Judge,
    cost: CostModel,
    graphs: Iterable[StageGraph] | None = None,
    limit: float | None = None,
    schedules: Sequence[str] = tuple(sorted(SPLIT_BACKWARDS)),
) -> tuple[float, ScheduledProposal] | None:
    """Return the shortest step of some proposals with split backwards, and how it runs; None if it
    is not below a limit. It has to save enough of the proposal's step with whole backwards.

    Args:
        judge: judge of the proposals under schedules with whole backwards.
        graphs: proposals; by default the judge's best.
        limit: seconds; by default the judge's best.
    """
    near = judge.ranked(SETTINGS.split_near) if graphs is None else graphs
    best_s = judge.best_s if limit is None else limit
    best: ScheduledProposal | None = None
    alike: set[tuple[float, ...]] = set()
    for proposal in [*near][: SETTINGS.split_proposals]:
        known_s = list[float]()
        for schedule in schedules:
            least_s, longest_s = min(known_s, default=0.0), max(known_s, default=0.0)
            if least_s > SETTINGS.schedules_near * best_s:
                continue
            if schedule in LISTS and (
                _passes(proposal) > SETTINGS.split_passes
                or longest_s > SETTINGS.list_spread * least_s
                or tuple(known_s) in alike
            ):
                continue
            own = Judge(ShortestStep(cost, (schedule,)))
            own.best_s = best_s
            own.consider([proposal])
            own_s = own.seconds().values()
            if schedule not in LISTS:
                known_s += [float(f"{seconds:.5g}") for seconds in own_s]
            elif min(own_s, default=0.0) > SETTINGS.schedules_near * best_s:
                break  # a list with more memory is not that much shorter
            if own.best is None or own.best_s >= best_s:
                continue
            whole = Judge(ShortestStep(cost, AUTO))
            whole.consider([proposal])
            if own.best_s <= (1 - auto.SETTINGS.split_gain) * whole.best_s:
                best_s, best = own.best_s, own.best
        if known_s:
            alike.add(tuple(known_s))
    return None if best is None else (best_s, best)


def best_loop(
    cost: CostModel,
    graphs: Iterable[StageGraph],
    limit: float,
    ways: Sequence[tuple[str, ...]],
    passes: int = SETTINGS.loop_passes,
) -> tuple[tuple[float, ScheduledProposal] | None, dict[StageGraph, float]]:
    """Return the seconds of the shortest step of some stage graphs whose devices have several
    stages, and how it runs; None if it is not below a limit. Also return the least seconds of each
    that was judged, infinity if it does not fit.

    Args:
        ways: schedules to try one after the other, as ``LOOP_SCHEDULES``; split backwards have to
            save enough of the shortest step with whole ones.
        passes: most passes of list schedules that are made, for all these graphs together.
    """
    known = least_bounds(cost, graphs, limit, ways[-1])
    best, quick = None, dict[StageGraph, float]()
    for names in ways:
        split, left = not SPLIT_BACKWARDS.isdisjoint(names), passes
        for graph in sorted(known, key=lambda graph: known[graph] + quick.get(graph, 0.0)):
            if SETTINGS.split_near * limit < quick.get(graph, 0.0) < math.inf:
                continue
            if names[0] in LISTS:
                if _passes(graph) > left:
                    continue
                left -= _passes(graph)
            judge = Judge(ShortestStep(cost, names))
            judge.best_s = limit
            judge.consider([graph])
            quick[graph] = min([*judge.seconds().values(), quick.get(graph, math.inf)])
            if judge.best is not None and judge.best_s < limit:
                limit = judge.best_s
                best = limit, judge.best
        if best is not None and not split and len(ways) > 1:
            limit *= 1 - auto.SETTINGS.split_gain
    return best, quick


def least_bounds(
    cost: CostModel, graphs: Iterable[StageGraph], limit: float, schedules: tuple[str, ...]
) -> dict[StageGraph, float]:
    """Return the ``most_loops`` stage graphs that fit under 1F1B and have the least bounds below a
    limit, ascending. A bound is that of the step under some schedules, or the seconds of the
    busiest port if these are more: rows that pass the devices several times send much.
    """
    lower, known = ShortestStep(cost, schedules), dict[StageGraph, float]()
    plain, memory_bytes = ShortestStep(cost, AUTO[:1]), cost.cluster.memory_bytes

    def fits(graph: StageGraph) -> bool:
        costs = lower.prices(graph)
        return plain.peak_bytes(costs, *next(plain.runs(costs))) <= memory_bytes

    for graph in graphs:
        with suppress(InvalidPlanError, ProfileError):
            costs = lower.prices(graph)
            if (least_s := lower.least_s(costs, limit)) < limit:
                known[graph] = max([least_s, *port_seconds(costs, costs.graph).values()])
    near = sorted((graph for graph in known if known[graph] < limit), key=known.__getitem__)
    return {graph: known[graph] for graph in islice(filter(fits, near), SETTINGS.most_loops)}


def _passes(graph: StageGraph) -> int:
    return 3 * sum(map(graph.num_microbatches, range(len(graph))))
