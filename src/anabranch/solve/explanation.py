"""Explanation of a plan: why its step takes as long as it does, and what would shorten it.

Three things tell: floors that no plan, or no step of this one, is faster than (``solve.floors``);
the critical path of the simulated step, whose parts add up to it (``simulator.critical_path``); and
steps simulated without one bottleneck (``solve.what_ifs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any, TypeVar

from anabranch.cluster import Cluster
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.critical_path import Cause, PathSegment, critical_path
from anabranch.simulator.run import run
from anabranch.solve.floors import Floor, floors
from anabranch.solve.simulation import scheduled
from anabranch.solve.what_ifs import WhatIf, what_ifs

Key = TypeVar("Key")

WIDTH = 80
"""Characters of a line."""

MOST_NAMED = 4
"""Stages, edges and changes that are named; the other stages and edges are one line each."""

TOO_LITTLE = 0.0005
"""Share of a step that is not worth a line."""

LABEL = 28
"""Characters of the first column."""

_FLOORS = {
    "work": "work",
    "largest_operator": "largest operator",
    "longest_path": "longest path, there and back",
    "busiest_link": "this plan, by busiest link",
    "all_reduce": "this plan, by all-reduce",
    "data_parallel_all_reduce": "data parallelism, likewise",
}

_CAUSES = {
    Cause.ALL_REDUCE: ("all-reduce", "beyond the last backward"),
    Cause.AGREEMENT: ("agreement on the loss", "of all devices"),
    Cause.UPDATE: ("update", "of parameters"),
    Cause.GATHER: ("all-gather", "of updated parameters"),
    Cause.OVERHEAD: ("messages and bookkeeping", "of processors"),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of the step.

    Attributes:
        stages: that compute or sum gradients; of a message, from which to which.
    """

    cause: Cause
    seconds: float
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Reasons for the length of a step.

    Attributes:
        step_s: as simulated.
        device: the one that the critical path is on longest.
        floors: what no plan, or no step of this plan, can be faster than.
        losses: the parts of the critical path; their seconds add up to the step.
        what_ifs: changes and the step with them, the shortest first.
    """

    plan: Plan
    graph: StageGraph
    step_s: float
    device: int
    floors: tuple[Floor, ...]
    losses: tuple[Loss, ...]
    what_ifs: tuple[WhatIf, ...]

    def saves(self, what_if: WhatIf) -> float:
        """Share of the step."""
        return 1 - what_if.step_s / self.step_s if self.step_s else 0.0

    @property
    def verdict(self) -> str:
        """Data parallelism against a graph of stages, where the floors decide that; else empty."""
        return _verdict(self)

    def parts(self) -> list[tuple[str, float, str]]:
        """Name, seconds and remark of the parts of the step that are worth a line; the rest is one
        of them, so that they add up to it.
        """
        return list(_parts(self))

    def to_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        return {
            "device": self.device,
            "floors": [asdict(floor) for floor in self.floors],
            "losses": [
                {"cause": loss.cause.value, "stages": list(loss.stages), "seconds": loss.seconds}
                for loss in self.losses
            ],
            "changes": [
                {"change": w.change, "step_s": w.step_s, "saves": self.saves(w)}
                for w in self.what_ifs
            ],
            "verdict": self.verdict,
        }

    def summary(self) -> str:
        """All of it for people, on one screen of 80 columns."""
        return "\n".join(line.rstrip() for line in _lines(self))


def explain(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float = 2.0,
) -> Explanation:
    """Say what the step of a plan is spent on, and what would shorten it.

    Args:
        plan_: any synchronous plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: where it shall run.
        schedule: another schedule than the plan's, as for ``simulate``.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster.
        ValueError: for an asynchronous plan, which has no step.
    """
    if plan_.mode == "async":
        raise ValueError(
            "only the step of a synchronous plan can be explained; without a flush, the slowest "
            "stage decides the time from one mini-batch to the next"
        )
    cost = prices_of(plan_, profile, cluster, optimizer_factor=optimizer_factor)
    graph, name = scheduled(plan_, cost, schedule)
    costs = ModelCosts(graph, cost)
    order = compute_order(graph, name)
    timeline = run(graph, order, costs, messages=False)
    path = critical_path(timeline, graph, costs.message_edges)
    seconds = _gathered(path, lambda part: (part.cause, part.stages))
    devices = _gathered(path, lambda part: part.device)
    return Explanation(
        plan_,
        graph,
        timeline.step_s,
        max(devices, key=lambda device: devices[device], default=graph.devices[0]),
        tuple(floors(graph, costs)),
        tuple(Loss(cause, s, stages) for (cause, stages), s in seconds.items()),
        tuple(what_ifs(graph, name, cost, timeline)),
    )


def _gathered(path: list[PathSegment], key: Callable[[PathSegment], Key]) -> dict[Key, float]:
    """Seconds of the parts of a path by a key, most first."""
    seconds: dict[Key, float] = {}
    for part in path:
        seconds[key(part)] = seconds.get(key(part), 0.0) + part.end - part.start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _lines(why: Explanation) -> Iterator[str]:
    yield "why this plan: no step can be shorter than"
    for floor in why.floors:
        label, ms = f"{_FLOORS[floor.kind]:{LABEL}s}", _ms(floor.seconds)
        yield f"  {label}{ms}  {shorten(floor.what, WIDTH - LABEL - 16)}"
    yield "the critical path of its step is"
    for label, seconds, remark in _parts(why):
        share = seconds / why.step_s if why.step_s else 0.0
        yield f"  {label:{LABEL}s}{_ms(seconds)} {share:6.1%}  {remark}"
    yield f"  {'together':{LABEL}s}{_ms(why.step_s)} {1:6.1%}"
    yield from _helps(why)
    yield from wrap(why.verdict, WIDTH)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.2f} ms"


def shorten(line: str, room: int) -> str:
    """A line without its middle, if it is too long; both ends of an operator's name matter."""
    half = (room - 2) // 2
    return line if len(line) <= room else f"{line[: room - 2 - half]}..{line[-half:]}"


def _parts(why: Explanation) -> Iterator[tuple[str, float, str]]:
    """Label, seconds and remark of every part that is worth a line."""
    stages, least = why.graph.stages, why.step_s * TOO_LITTLE
    room, shown = WIDTH - LABEL - 24, 0.0

    def of(cause: Cause) -> list[Loss]:
        return [loss for loss in why.losses if loss.cause is cause]

    computes, edges = of(Cause.COMPUTE), of(Cause.MESSAGE)
    lines = [
        (
            f"stage {s} computes",
            loss.seconds,
            _pair(stages[s].operators[0], stages[s].operators[-1], "..", room),
        )
        for loss in computes[:MOST_NAMED]
        for s in loss.stages
    ]
    lines.append(_others("stage", computes[MOST_NAMED:]))
    lines += [
        (f"edge {x} -> {y}", loss.seconds, _pair(*_ends(why.graph, x, y), "->", room))
        for loss in edges[:MOST_NAMED]
        for x, y in [loss.stages]
    ]
    lines.append(_others("edge", edges[MOST_NAMED:]))
    for cause, (label, remark) in _CAUSES.items():
        lines.append((label, sum(loss.seconds for loss in of(cause)), remark))
    for line in lines:
        if line[1] > least:
            shown += line[1]
            yield line
    if abs(why.step_s - shown) > least:
        yield "the rest", why.step_s - shown, "less than 0.05 % each"


def _others(what: str, losses: list[Loss]) -> tuple[str, float, str]:
    count = f"{len(losses)} other {what}{'s' if len(losses) > 1 else ''}"
    return count, sum(loss.seconds for loss in losses), ""


def _ends(graph: StageGraph, x: int, y: int) -> tuple[str, str]:
    """The operators at both ends of an edge."""
    source, target = graph.stages[x].operators, graph.stages[y].operators
    return (source[-1], target[0]) if x < y else (source[0], target[-1])


def _pair(a: str, b: str, between: str, room: int) -> str:
    """Two names, or one if they are the same; a short one leaves its room to the other."""
    if a == b:
        return shorten(a, room)
    first = shorten(a, max((room - 4) // 2, room - 4 - len(b)))
    return f"{first} {between} {shorten(b, room - 4 - len(first))}"


def _helps(why: Explanation) -> Iterator[str]:
    if not why.what_ifs and len(why.graph.devices) > 1:
        yield "the step has too many actions to simulate what would help"
        return
    best = [what_if for what_if in why.what_ifs if why.saves(what_if) >= 0.001][:MOST_NAMED]
    if not best:
        yield "no single change of links, updates, memory or balance would save 0.1% of it"
    for what_if in best:
        head = "what would help most" if what_if is best[0] else "  then"
        yield f"{head}: {what_if.what} would save {why.saves(what_if):.1%}"


def _verdict(why: Explanation) -> str:
    graph, seconds = why.graph, {floor.kind: floor.seconds for floor in why.floors}
    if len(graph.devices) == 1 or not why.step_s:
        return ""
    if len(graph) > 1:
        if seconds.get("data_parallel_all_reduce", 0.0) > why.step_s:
            return "data parallelism cannot be faster: its all-reduce alone takes longer"
        return ""
    known = why.plan.planner in ("", "data-parallel")
    sums = seconds.get("all_reduce", 0.0)
    exposed = sum(loss.seconds for loss in why.losses if loss.cause is Cause.ALL_REDUCE)
    hides = ""
    if sums:
        hides = f"the last backward hides {max(1 - exposed / sums, 0):.0%} of the all-reduce, and "
    return (
        f"{'this is data parallelism' if known else 'data parallelism is best here'}: "
        f"{hides}a graph of stages would have to lose less than "
        f"{1 - seconds['work'] / why.step_s:.1%} of its step to small slices, warm-up, imbalance, "
        "messages and update."
    )
