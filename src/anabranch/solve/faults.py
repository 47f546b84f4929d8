"""Faults of a plan that keep it from being simulated or run."""

from __future__ import annotations

from anabranch.cluster import Cluster
from anabranch.errors import InvalidPlanError, InvalidScheduleError, PolicyError
from anabranch.plans.check import check as check_stages
from anabranch.plans.check import too_many_microbatches, unfit_sizes
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.profile.profile import Profile
from anabranch.schedule import asynchronous, schedule_of
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.solve.asynchronous.simulation import ages_of, order_of, require_asynchronous
from anabranch.weights import OptimizerFacts, policy_named


def check_plan(
    plan_: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    optimizer: OptimizerFacts | None = None,
) -> list[str]:
    """List faults of a plan, a line each: its schedule and, with profile and cluster, C1-C4 and
    memory.

    Raises:
        ValueError: if only one of profile and cluster is given.
    """
    if (profile is None) != (cluster is None):
        raise ValueError("conditions C1-C4 and memory need both a profile and a cluster")
    graph, is_async = plan_.stage_graph, plan_.mode == "async"
    if problems := too_many_microbatches(graph):
        return problems
    edges, problems = EVERY_EDGE, unfit_sizes(graph) if profile is None else []
    versions: tuple[int, ...] = ()
    run_graph = graph
    if is_async:
        try:
            require_asynchronous(plan_)
            order = order_of(plan_, graph, policy_named(plan_.policy))
            ages = ages_of(order, plan_.policy, optimizer)
            versions, run_graph = tuple(age.versions for age in ages), order.graph
        except (InvalidPlanError, PolicyError, ValueError) as error:
            return [str(error)]
    if profile is not None and cluster is not None:
        cost = prices_of(plan_, profile, cluster)
        problems = check_stages(run_graph, cost, versions, shared=not is_async, idle=True)
        if not problems:
            edges = message_edges(graph, profile.graph)
        if is_async and not problems:
            try:
                stream.require_untied(ModelCosts(graph, cost))
            except InvalidPlanError as error:
                problems.append(str(error))
    whole = asynchronous.repeated(graph, stream.shown(graph)) if is_async else graph
    try:
        schedule_of(whole, asynchronous.ORDER if is_async else plan_.schedule, edges)
    except (InvalidScheduleError, ValueError) as error:
        problems.append(str(error))
    return problems
