"""Comparison of plans: by all planners, by all weight policies, with baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anabranch.planner as planners
from anabranch.cluster import Cluster
from anabranch.errors import AnabranchError, PolicyError, SearchStoppedError
from anabranch.planner.exhaustive import MOST_DEVICES, MOST_OPERATORS
from anabranch.plans.baselines import BASELINES
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.solve.planner_options import check_arguments, planner_with
from anabranch.solve.policy_choice import check_mode
from anabranch.solve.search import plan
from anabranch.solve.simulation import foreseen
from anabranch.weights import POLICIES, OptimizerFacts


def comparable(profile: Profile, cluster: Cluster) -> list[str]:
    """List the planners worth comparing: all, but ``exhaustive`` only for small models."""
    small = len(profile.graph) <= MOST_OPERATORS and cluster.num_devices <= MOST_DEVICES
    return [name for name in planners.PLANNERS if small or name != "exhaustive"]


def compare(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    names: Iterable[str] | None = None,
    *,
    planner_options: Mapping[str, Mapping[str, object]] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Plan | AnabranchError]]:
    """Generate the plan of every planner on the same profile, judged by the same simulator.

    An interrupt (Ctrl-C) ends the search of the planner under way, not the comparison: its plan is
    the best that it has proposed, or a ``SearchStoppedError`` where there is none.

    Args:
        names: keys of ``planner.PLANNERS``; by default those that ``comparable`` lists.
        planner_options: {planner: {field: value}}.
        options: other options of ``plan``.

    Yields:
        Name of a planner, and its plan or the error that says why it has none: nothing fits, its
        search would take more than its budget, or it was interrupted.

    Raises:
        ValueError: for an unknown name or option; before anything is searched.
    """
    chosen = comparable(profile, cluster) if names is None else list(names)
    own_options = planner_options or {}
    _check(chosen, batch_size, own_options, options)
    others = ", ".join(name for name in own_options if name not in chosen)
    if others:
        raise ValueError(f"options for {others}, but {', '.join(chosen)} are compared")

    def search(name: str) -> Plan:
        own = own_options.get(name, {})
        return plan(profile, cluster, batch_size, planner=name, planner_options=own, **options)

    return ((name, _plan_or_why(partial(search, name))) for name in chosen)


def compare_policies(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    names: Sequence[str],
    policies: Sequence[str] = tuple(POLICIES),
    *,
    planner_options: Mapping[str, Mapping[str, object]] | None = None,
    **options: Any,
) -> Iterator[tuple[str, str, Plan | AnabranchError]]:
    """Generate the plan of every planner under every weight policy, judged by the same simulator.

    A planner is asked once for all policies. An interrupt (Ctrl-C) ends the search under way.

    Args:
        names: keys of ``planner.PLANNERS``.
        policies: keys of ``weights.POLICIES``.
        planner_options: {planner: {field: value}}.
        options: other options of ``plan``. A policy that does not go with a ``microbatch_size`` has
            an error.

    Yields:
        Planner, policy, and their plan or the error that says why there is none.

    Raises:
        ValueError: for an unknown name or option, before anything is searched.
    """
    own_options = planner_options or {}
    _check(names, batch_size, own_options, options)
    for policy in policies:
        check_mode("async", policy)

    def search(name: str, policy: str) -> Plan:
        asked = {"planner": name, "planner_options": own_options.get(name, {}), **options}
        try:
            return plan(profile, cluster, batch_size, mode="async", policy=policy, **asked)
        except ValueError as error:  # a micro-batch size that suits other policies
            raise PolicyError(str(error)) from None

    return (
        (name, policy, _plan_or_why(partial(search, name, policy)))
        for name in names
        for policy in policies
    )


def _check(
    names: Iterable[str],
    batch_size: int,
    own_options: Mapping[str, Mapping[str, object]],
    options: Mapping[str, Any],
) -> None:
    """Refuse unknown planners, and options that planners do not take."""
    size, most = options.get("microbatch_size"), options.get("max_replicas")
    for name in names:
        check_arguments(batch_size, name, size, options.get("schedule", "auto"), most)
        planner_with(name, most, own_options.get(name, {}))


def _plan_or_why(search: Callable[[], Plan]) -> Plan | AnabranchError:
    try:
        return search()
    except AnabranchError as error:
        return error
    except KeyboardInterrupt:
        return SearchStoppedError("interrupted before it had proposed a plan")


def baselines(
    best: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    names: Iterable[str] | None = None,
    optimizer: OptimizerFacts | None = None,
    start: Plan | None = None,
    **options: Any,
) -> Iterator[tuple[str, Plan | AnabranchError]]:
    """Generate baselines: data parallelism and sequential plans, not improved by simulation, an
    improved chain and, with a flush, the model on one device of several. An interrupt (Ctrl-C)
    leaves out the rest, and reaches the caller.

    Args:
        best: plan to compare with the baselines.
        names: keys of ``BASELINES``; by default all.
        start: the plan that the search began with, a baseline if it has the same batches and fits
            as it stands.
        optimizer: see ``plan``, as for all other options.

    Yields:
        Name, and the plan or the error that says why there is none.
    """
    same = {"model": best.model, "mode": best.mode, "policy": best.policy, "optimizer": optimizer}
    one = replace(cluster, levels=tuple(replace(level, size=1) for level in cluster.levels))
    for name in BASELINES if names is None else names:
        if (search := BASELINES[name].search) is None:
            if start is not None and start.stage_graph.batch_size == best.stage_graph.batch_size:
                with suppress(AnabranchError):
                    yield name, foreseen(start, profile, cluster)[0]
            continue
        is_one = name == "one device"
        if is_one and (best.mode == "async" or cluster.num_devices == 1):
            continue
        # All but the straight pipeline may have replicas even where the plan may not: with one
        # stage the best chain is data parallelism.
        asked = {**options, **same, "max_replicas": None, **search, "improve": name == "chain"}
        try:
            other = plan(profile, one if is_one else cluster, best.stage_graph.batch_size, **asked)
        except AnabranchError as error:
            yield name, error
            continue
        if other.interrupted:
            raise KeyboardInterrupt
        yield name, other
