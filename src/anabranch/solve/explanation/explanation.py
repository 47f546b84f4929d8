"""Explanation of a plan: why its step takes as long as it does, and what would shorten it.

It consists of floors, lower bounds of the step of any plan or of this one (``floors``); the
critical path of the simulated step, whose parts add up to it (``simulator.critical_path``); and
steps simulated without one bottleneck (``what_ifs``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from anabranch.cluster import Cluster
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.critical_path import critical_path
from anabranch.simulator.run import run
from anabranch.solve.explanation.floors import Floor, floors
from anabranch.solve.explanation.what_ifs import WhatIf, what_ifs
from anabranch.solve.schedule_choice import scheduled
from anabranch.timeline import Cause

_WIDTH, _LABEL = 80, 28
"""Characters of a line, and of its first column."""

_MOST_NAMED, _TOO_LITTLE = 4, 0.0005
"""Stages, edges and changes that are named (other stages and edges are one line each), and the
share of a step that is not worth a line.
"""

_FLOORS = {
    "work": "work",
    "largest_operator": "largest operator",
    "longest_path": "longest path, there and back",
    "busiest_link": "this plan, by busiest link",
    "all_reduce": "this plan, by all-reduce",
    "data_parallel_all_reduce": "data parallelism, all-reduce",
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
        stages: stages that compute or sum gradients; sender and receiver of a message.
    """

    cause: Cause
    seconds: float
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Reasons for the length of a step.

    Attributes:
        step_s: seconds of the simulated step.
        device: the device on which the critical path is longest.
        floors: lower bounds of the step of any plan, or of this one.
        losses: parts of the critical path, the longest first; their seconds add up to the step.
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
        """Return the share of the step that a change saves."""
        return 1 - what_if.step_s / self.step_s if self.step_s else 0.0

    @property
    def verdict(self) -> str:
        """Data parallelism against a graph of stages, where the floors decide that; else empty."""
        seconds = {floor.kind: floor.seconds for floor in self.floors}
        if len(self.graph.devices) == 1 or not self.step_s:
            return ""
        if len(self.graph) > 1:
            if seconds.get("data_parallel_all_reduce", 0.0) > self.step_s:
                return "data parallelism cannot be faster: its all-reduce alone takes longer"
            return ""
        known = self.plan.planner in ("", "data-parallel")
        sums, hides = seconds.get("all_reduce", 0.0), ""
        if sums:
            share = max(1 - self._seconds(Cause.ALL_REDUCE) / sums, 0)
            hides = f"the last backward hides {share:.0%} of the all-reduce, and "
        return (
            f"{'this is data parallelism' if known else 'data parallelism is best here'}: "
            f"{hides}a graph of stages would have to lose less than "
            f"{1 - seconds['work'] / self.step_s:.1%} of its step to small slices, warm-up, "
            "imbalance, messages and update."
        )

    @property
    def limit(self) -> str:
        """The largest part of the step, and what would help most; empty if nothing stands out."""
        name, seconds, _ = max(self.parts(), key=lambda part: part[1], default=("", 0.0, ""))
        if not name or not self.step_s:
            return ""
        helps = [what_if for what_if in self.what_ifs[:1] if self.saves(what_if) >= 0.001]
        more = (f"; with {w.what} this plan would take {self.saves(w):.1%} less" for w in helps)
        return f"{name}, {seconds / self.step_s:.0%}{''.join(more)}"

    def parts(self) -> list[tuple[str, float, str]]:
        """Return (name, seconds, remark) of the parts of the step that are worth a line. The rest
        is a line as well, so that they add up to the step.
        """
        graph, room = self.graph, _WIDTH - _LABEL - 24
        computes, messages = self._of(Cause.COMPUTE), self._of(Cause.MESSAGE)
        lines: list[tuple[str, float, str]] = []
        for loss in computes[:_MOST_NAMED]:
            operators = graph.stages[loss.stages[0]].operators
            names = _pair(operators[0], operators[-1], "..", room)
            lines.append((f"stage {loss.stages[0]} computes", loss.seconds, names))
        lines.append(_others("stage", computes[_MOST_NAMED:]))
        for loss in messages[:_MOST_NAMED]:
            (x, y), (source, target) = loss.stages, (graph.stages[s].operators for s in loss.stages)
            ends = (source[-1], target[0]) if x < y else (source[0], target[-1])
            lines.append((f"edge {x} -> {y}", loss.seconds, _pair(*ends, "->", room)))
        lines.append(_others("edge", messages[_MOST_NAMED:]))
        lines += [(label, self._seconds(c), remark) for c, (label, remark) in _CAUSES.items()]
        least = self.step_s * _TOO_LITTLE
        lines = [line for line in lines if line[1] > least]
        rest_s = self.step_s - sum(seconds for _, seconds, _ in lines)
        if abs(rest_s) > least:
            lines.append(("the rest", rest_s, "less than 0.05 % each"))
        return lines

    def _of(self, cause: Cause) -> list[Loss]:
        return [loss for loss in self.losses if loss.cause is cause]

    def _seconds(self, cause: Cause) -> float:
        return sum(loss.seconds for loss in self._of(cause))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON document."""
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
        """Return the explanation as text, on one screen of 80 columns."""
        return "\n".join(line.rstrip() for line in self._lines())

    def _lines(self) -> Iterator[str]:
        has_others = False
        yield "why this plan: no step can be shorter than"
        for floor in sorted(self.floors, key=lambda floor: not floor.any_plan):
            if not (floor.any_plan or has_others):
                has_others = True
                yield "messages and all-reduces alone take at least"
            label, ms = f"{_FLOORS[floor.kind]:{_LABEL}s}", _ms(floor.seconds)
            yield f"  {label}{ms}  {shorten(floor.what, _WIDTH - _LABEL - 16)}"
        yield "the critical path of its step is"
        for label, seconds, remark in self.parts():
            share = seconds / self.step_s if self.step_s else 0.0
            yield f"  {label:{_LABEL}s}{_ms(seconds)} {share:6.1%}  {remark}"
        yield f"  {'together':{_LABEL}s}{_ms(self.step_s)} {1:6.1%}"
        best = [what_if for what_if in self.what_ifs if self.saves(what_if) >= 0.001][:_MOST_NAMED]
        if not self.what_ifs and len(self.graph.devices) > 1:
            yield "the step has too many actions to simulate what would help"
        elif not best:
            yield "no single change of links, updates, memory or balance would save 0.1% of it"
        else:
            yield "the same plan, with one thing of machine or model changed, would save"
        yield from (f"  {what_if.what:41s}{self.saves(what_if):6.1%}" for what_if in best)
        yield from wrap(self.verdict, _WIDTH)


def explain(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float | None = None,
) -> Explanation:
    """Say what the step of a plan is spent on, and what would shorten it.

    Args:
        plan_: any synchronous plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: cluster on which the plan shall run.
        schedule: another schedule than the plan's, as for ``simulate``.
        optimizer_factor: see ``CostModel``.

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
    losses: dict[tuple[Cause, tuple[int, ...]], float] = defaultdict(float)
    devices: dict[int, float] = defaultdict(float)
    for part in path:
        losses[part.cause, part.stages] += part.end - part.start
        devices[part.device] += part.end - part.start
    longest = sorted(losses.items(), key=lambda item: -item[1])
    return Explanation(
        plan_,
        graph,
        timeline.step_s,
        max(devices, key=devices.__getitem__, default=graph.devices[0]),
        tuple(floors(graph, costs)),
        tuple(Loss(cause, seconds, stages) for (cause, stages), seconds in longest),
        tuple(what_ifs(graph, name, cost, timeline)),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.2f} ms"


def shorten(line: str, room: int) -> str:
    """Leave out the middle of a line that is too long; both ends of an operator's name matter."""
    half = (room - 2) // 2
    return line if len(line) <= room else f"{line[: room - 2 - half]}..{line[-half:]}"


def _others(what: str, losses: list[Loss]) -> tuple[str, float, str]:
    count = f"{len(losses)} other {what}{'s' if len(losses) > 1 else ''}"
    return count, sum(loss.seconds for loss in losses), ""


def _pair(a: str, b: str, between: str, room: int) -> str:
    """Join two names, or return one if they are equal; a short one leaves its room to the other."""
    if a == b:
        return shorten(a, room)
    first = shorten(a, max((room - 4) // 2, room - 4 - len(b)))
    return f"{first} {between} {shorten(b, room - 4 - len(first))}"
