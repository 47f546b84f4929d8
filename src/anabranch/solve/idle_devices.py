"""Plans that leave devices of a cluster idle, because fewer devices are as fast or faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.auto import settings as auto
from anabranch.planner.base import Planner
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import Plan
from anabranch.solve.bound import step_bound
from anabranch.solve.settings import SETTINGS
from anabranch.solve.simulation import checked_run, figures_of

SearchOn = Callable[[CostModel], Plan]
"""Search for the best plan by these prices."""


def parts(cluster: Cluster) -> Iterator[Cluster]:
    """Generate the first half of a cluster, the first half of that half, and so on: halves of the
    nodes first, then halves of a node. Devices keep their numbers.
    """
    levels = list(cluster.levels)
    for outer in reversed(range(len(levels))):
        while levels[outer].size > 1:
            levels[outer] = replace(levels[outer], size=levels[outer].size // 2)
            yield replace(cluster, levels=tuple(levels))


def usable_part(problem: Problem) -> Cluster:
    """Return the largest part of a cluster, nodes or a part of one, that can be used as a whole."""
    levels = list(problem.cost.cluster.levels)
    for outer in reversed(range(len(levels))):
        most = problem.usable // prod(level.size for level in levels[:outer])
        levels[outer] = replace(levels[outer], size=min(levels[outer].size, max(most, 1)))
    return replace(problem.cost.cluster, levels=tuple(levels))


def on_whole(plan: Plan, problem: Problem) -> Plan:
    """Turn a plan for the usable part of a cluster into one for all of it, with idle devices."""
    cluster, predicted = problem.cost.cluster, plan.figures
    if plan.machines == cluster:
        return plan
    if predicted.bound_s is not None:
        several = plan.stage_graph.shares_devices
        bound_s = step_bound(problem.cost, problem.batch_size, several=several)
        predicted = replace(predicted, bound_s=bound_s)
    idle = cluster.num_devices - len(plan.stage_graph.devices)
    notes = (*plan.notes, f"{idle} of {cluster.num_devices} devices stay idle: {problem.use}")
    return replace(plan, notes=notes).predicting(predicted, cluster)


def with_fewer_devices(plan: Plan, cost: CostModel, quick: SearchOn, search: SearchOn) -> Plan:
    """Return the best plan for any number of devices, with the fewest that are nearly as fast.

    Smaller and smaller parts of the cluster are tried. A quick search on a part is made only if the
    bound there, for plans with one stage on each device, is low enough. For a single device, where
    plans come near the bound, it has to be below the best step. For several devices it has to be
    below that by the factor ``(bound / step) ** SETTINGS.fewer_bound`` of all devices. A whole
    search follows if the quick one finds a plan nearly as fast as the best so far.

    Args:
        plan: the best plan that uses all devices.
        cost: prices of that plan.
        quick: a quick search; raises an ``InfeasiblePlanError`` where nothing fits, as ``search``.
    """
    best, enough, batch_size = plan, plan, plan.stage_graph.batch_size
    if not plan.figures.step_s:
        return plan
    share = (step_bound(cost, batch_size) / plan.figures.step_s) ** SETTINGS.fewer_bound
    for part in parts(cost.cluster):
        fewer = replace(cost, cluster=part)
        limit_s = best.figures.step_s / SETTINGS.as_fast
        bound_s = step_bound(fewer, batch_size)
        if bound_s > limit_s:
            break
        if bound_s > share * limit_s and part.num_devices > 1:
            continue
        smaller: Plan | None = None
        try:
            with suppress(InfeasiblePlanError):
                smaller = _on(quick(fewer), cost)
            if smaller is None or smaller.figures.step_s > limit_s:
                break
            if not smaller.interrupted:
                smaller = min(
                    smaller, _on(search(fewer), cost), key=lambda plan: plan.figures.step_s
                )
            stopped = smaller.interrupted
        except KeyboardInterrupt:  # the plan for all devices is what counts
            stopped = True
        if smaller is not None:
            enough = smaller
            best = min(best, enough, key=lambda plan: plan.figures.step_s)
        if stopped:
            note = "interrupted while fewer devices were tried"
            best = replace(best, notes=(*best.notes, note), interrupted=True)
            break
    used, total = len(enough.stage_graph.devices), len(plan.stage_graph.devices)
    if len(best.stage_graph.devices) < total:
        idle = total - len(best.stage_graph.devices)
        note = f"{idle} of {total} devices stay idle: with all of them a step takes longer"
        best = replace(best, notes=(*best.notes, note))
    if used == len(best.stage_graph.devices):
        return best
    enough_s = enough.figures.step_s
    figures = replace(best.figures, enough_devices=used, enough_step_s=enough_s)
    return replace(best, predicted=figures)


def with_less_effort(planner: Any) -> Planner:
    """Return the planner with the fewer evaluations that it has for a smaller part of a cluster."""
    evaluations = planner.evaluations
    if evaluations is None:
        evaluations = auto.SETTINGS.evaluations
    fewer: Planner = replace(planner, evaluations=int(evaluations * SETTINGS.fewer_effort))
    return fewer


def on_its_part(devices: tuple[int, ...], cost: CostModel, search: SearchOn) -> Plan | None:
    """Search for a plan on a part of a cluster; None if the devices are no part, or all."""
    for part in parts(cost.cluster):
        if devices == tuple(range(part.num_devices)):
            return _on(search(replace(cost, cluster=part)), cost)
    return None


def _on(plan: Plan, cost: CostModel) -> Plan:
    """Return a plan for part of a cluster with its figures on the whole cluster."""
    cost = replace(cost, shard_optimizer=plan.shard_optimizer)
    timeline = checked_run(plan.stage_graph, plan.schedule, cost, messages=False)
    return plan.predicting(figures_of(timeline, plan.stage_graph, cost), cost.cluster)
