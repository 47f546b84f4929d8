"""Choice of split backwards for the stages that a search has found.

A search judges hundreds of stage graphs under 1F1B. The most promising ones are simulated under the
schedules with split backwards as well: under list schedules, which take longest to make, where
the others are not far behind, and one of those that take equally long under them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, ProfileError
from anabranch.plans.stages import StageGraph
from anabranch.schedule import LISTS, SPLIT_BACKWARDS, compute_order
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.simulator.run import run
from anabranch.solve.settings import SETTINGS

AUTO = ("1f1b", "1f1b-deep")
"""Schedules of ``schedule="auto"``, least memory first. GPipe holds all micro-batches."""


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
    alike: set[tuple[float, ...]] = set()
    for proposal in [*near][: SETTINGS.split_proposals]:
        known_s = list[float]()
        for schedule in schedules:
            if schedule in LISTS and (
                _passes(proposal) > SETTINGS.split_passes
                or min(known_s, default=0.0) > SETTINGS.list_near * best_s
                or tuple(known_s) in alike
            ):
                continue
            own = Judge(ShortestStep(cost, (schedule,)))
            own.best_s = best_s
            own.consider([proposal])
            if schedule not in LISTS:
                known_s += [float(f"{seconds:.5g}") for seconds in own.seconds().values()]
            if own.best is None or own.best_s >= best_s or not _fits(own.best, cost):
                continue
            whole = Judge(ShortestStep(cost, AUTO))
            whole.consider([proposal])
            if own.best_s <= (1 - SETTINGS.split_gain) * whole.best_s:
                best_s, best = own.best_s, own.best
        if known_s:
            alike.add(tuple(known_s))
    return None if best is None else (best_s, best)


def best_loop(
    cost: CostModel,
    graphs: Iterable[StageGraph],
    limit: float,
    schedules: tuple[str, ...],
    *,
    split: bool,
) -> tuple[float, ScheduledProposal] | None:
    """The shortest step of some stage graphs whose devices have several stages, and its seconds;
    None where it is not below a limit.

    Args:
        schedules: of whole backwards; with ``split`` those of split ones, too, which have to save
            enough.
    """
    halves = [(name,) for name in ("zb-h1", "zb-h2", "1f1b-split", "1f1b-deep-split") if split]
    lower, least = ShortestStep(cost, halves[0] if split else schedules), dict[StageGraph, float]()
    for graph in graphs:
        with suppress(InvalidPlanError, ProfileError):
            least[graph] = lower.least_s(lower.prices(graph), limit)
    near = sorted((graph for graph in least if least[graph] < limit), key=least.__getitem__)
    near, listed = near[: SETTINGS.most_loops], list[StageGraph]()
    for graph in near:
        if sum(map(_passes, [*listed, graph])) <= SETTINGS.loop_passes:
            listed.append(graph)
    best: tuple[float, ScheduledProposal] | None = None
    for names in (schedules, *halves):
        for graph in listed if names[0].startswith("zb") else near:
            judge = Judge(ShortestStep(cost, names))
            judge.best_s = limit
            judge.consider([graph])
            if judge.best is not None and judge.best_s < limit and _fits(judge.best, cost):
                limit = judge.best_s
                best = limit, judge.best
        if names == schedules and best is not None:
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
