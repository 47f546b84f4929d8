"""Options of a planner, arguments that it takes, and its proposals up to an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import anabranch.planner as planners
from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.planner.base import Planner
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.schedule import rule_named


def options_of(name: str) -> dict[str, str]:
    """The options of a planner: {field: the types it takes, such as ``int | None``}."""
    search = planners.PLANNERS[name]()
    if not is_dataclass(search):
        return {}
    # The names of types: annotations are text.
    return {f.name: getattr(f.type, "__name__", str(f.type)) for f in fields(search)}


def planner_with(
    name: str, max_replicas: int | None, options: Mapping[str, object]
) -> tuple[Planner, bool]:
    """The planner with its options, and whether the limit on replicas had to be ignored.

    Raises:
        ValueError: for an option that the planner does not have or not with this value.
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


Stop = KeyboardInterrupt | BudgetError
"""What ends a search early."""


def collect(proposals: Iterable[StageGraph]) -> tuple[list[StageGraph], Stop | None]:
    """What a planner proposes, and what ended it early, if anything did."""
    found: list[StageGraph] = []
    try:
        found.extend(proposals)
    except (KeyboardInterrupt, BudgetError) as stopped:
        if not found:
            raise
        return found, stopped
    return found, None


def stop_note(stop: Stop, count: int) -> str:
    """The note on a search that was ended after so many proposals."""
    return f"{str(stop) or 'interrupted'}: the best of the first {count} proposals"


def uninterrupted(work: Callable[[], object]) -> bool:
    """Do some work; False if that was interrupted."""
    try:
        work()
    except KeyboardInterrupt:
        return False
    return True


def to_its_end(make: Callable[[], Plan]) -> Plan:
    """The plan of a search that is over: a moment is left, which only a second interrupt ends."""
    try:
        return make()
    except KeyboardInterrupt:
        found = make()
        notes = (*found.notes, "interrupted when the search was over")
        return replace(found, notes=notes, interrupted=True)


def bottleneck_s_per_sample(graph: StageGraph, cost: CostModel) -> float:
    """Compute seconds per sample of the slowest stage, GraphPipe's TPS without communication."""

    def seconds(s: int) -> float:
        stage = graph.stages[s]
        ops = [cost.graph.index[name] for name in stage.operators]
        samples = stage.microbatch_size / stage.replicas
        backward = cost.backward_s(ops, samples, recompute=stage.recompute, tensor=stage.tensor)
        return (
            cost.forward_s(ops, samples, tensor=stage.tensor) + backward
        ) / stage.microbatch_size

    return max(seconds(s) for s in range(len(graph)))
