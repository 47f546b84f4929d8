"""Options of planners, and checks of the arguments of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import anabranch.planner as planners
from anabranch.planner.base import Planner
from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.schedule import rule_named


def options_of(name: str) -> dict[str, str]:
    """Return the options of a planner: {field: the types it takes, such as ``int | None``}."""
    search = planners.PLANNERS[name]()
    if not is_dataclass(search):
        return {}
    # The names of types: annotations are text.
    return {f.name: getattr(f.type, "__name__", str(f.type)) for f in fields(search)}


def planner_with(
    name: str, max_replicas: int | None, options: Mapping[str, object]
) -> tuple[Planner, bool]:
    """Return the planner with its options, and whether the limit on replicas had to be ignored.

    Raises:
        ValueError: for an option that the planner does not have, or a value that it does not take.
    """
    search = planners.PLANNERS[name]()
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"planner {name} has no option {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    for option, value in options.items():
        kinds = known[option].split(" | ")
        kind = "None" if value is None else type(value).__name__
        if kind not in kinds and not (kind == "int" and "float" in kinds):
            raise ValueError(
                f"option {option} of planner {name} is {value!r}; it takes {known[option]}"
            )
    if max_replicas is not None and "max_replicas" in options:
        raise ValueError(
            f"the limit on replicas is given twice, {max_replicas} for every planner and "
            f"{options['max_replicas']} as an option of planner {name}; leave out one of them"
        )
    ignored = max_replicas is not None and "max_replicas" not in known
    chosen = dict(options)
    if max_replicas is not None and not ignored:
        chosen["max_replicas"] = max_replicas
    return (replace(cast(Any, search), **chosen) if chosen else search), ignored


def check_arguments(
    batch_size: int,
    planner: str,
    microbatch_size: int | None,
    schedule: str,
    max_replicas: int | None,
) -> None:
    """Refuse unknown names and numbers below 1 with a ``ValueError``."""
    if planner not in planners.PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; there are {', '.join(planners.PLANNERS)}")
    if schedule not in ("auto", "published"):
        rule_named(schedule)
    for what, number in (
        ("batch size", batch_size),
        ("micro-batch size", microbatch_size),
        ("number of replicas", max_replicas),
    ):
        if number is not None and number < 1:
            raise ValueError(f"the {what} is {number}; it must be at least 1")
    if microbatch_size is not None and microbatch_size > batch_size:
        raise ValueError(
            f"the micro-batch size {microbatch_size} is larger than the batch size {batch_size}"
        )


def start_of(
    start: Plan, planner: str, batch_size: int, microbatch_size: int | None, mode: str
) -> StageGraph:
    """Return the stages of the plan that a search begins with, for batches of this size."""
    if planner not in ("auto", "chain") or mode != "sync" or start.mode != "sync":
        raise ValueError(
            f"only planner auto begins with a plan, in mode sync and with a plan for it; this is "
            f"planner {planner} in mode {mode} and a plan for mode {start.mode}"
        )
    sizes = sorted({stage.microbatch_size for stage in start.stage_graph.stages})
    if microbatch_size is not None and sizes != [microbatch_size]:
        raise ValueError(
            f"the plan to begin with has micro-batches of {', '.join(map(str, sizes))} samples, "
            f"not of {microbatch_size}; leave the micro-batch size out"
        )
    graph = replace(start.stage_graph, batch_size=batch_size)
    return with_in_flight(graph, [0] * len(graph))
