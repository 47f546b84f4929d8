"""What a step is made of, as data and as one screen of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.simulator.critical_path import Cause
from anabranch.solve.floors import Floor
from anabranch.solve.relaxations import Relaxation

WIDTH = 80
"""Characters of a line."""

MOST_EDGES = 3
"""Stage edges that are named; what the others hold up is one line."""

MOST_CHANGES = 3
"""Changes that are named."""

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
    "work": ("work", "evenly, in its best slices"),
    "small_slices": ("smaller slices", "of fewer samples each"),
    "summing": ("summing gradients", "of its processor, the mean"),
    "recompute": ("recompute", "the mean of all devices"),
    "idle_devices": ("devices without a stage", ""),
    "imbalance": ("imbalance", "above the mean device"),
    "sharing": ("shared processors", "with ranks of its host"),
    "overhead": ("messages and bookkeeping", "of its processor"),
    "warm_up": ("warm-up", "until its first backward"),
    "other_stages": ("waiting for other stages", "to compute"),
    "drain": ("drain", "after its last forward"),
    "all_reduce": ("all-reduce that sticks out", "of the last backward"),
    "agreement": ("agreement on the loss", "of all devices"),
    "update": ("update", "of its parameters"),
    "other_updates": ("waiting for other updates", "of more or larger parameters"),
    "gather": ("sending what was updated", "to replicas that share the optimizer"),
}

_MERGED = {Cause.ALL_REDUCE_PORTS.value: "all_reduce"}


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of the step.

    Attributes:
        cause: see ``solve.attribution``; for waiting, ``warm_up``, ``drain``, ``other_stages``,
            ``other_updates`` or a value of ``Cause``.
        stages: whose compute, all-reduce or update; of messages, from which stage to which.
    """

    cause: str
    seconds: float
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What a step is made of.

    Attributes:
        step_s: as simulated.
        device: the one that computes most.
        floors: what no plan, or no step of this plan, can be faster than.
        losses: the parts of the step; their seconds add up to it.
        relaxations: what would change, the best first.
        too_few_samples: of plain data parallelism, the most samples on a device whose backward is
            shorter than the all-reduce; 0 if none are known to be.
    """

    plan: Plan
    graph: StageGraph
    step_s: float
    device: int
    floors: tuple[Floor, ...]
    losses: tuple[Loss, ...]
    relaxations: tuple[Relaxation, ...]
    too_few_samples: int = 0

    def saves(self, relaxation: Relaxation) -> float:
        """Share of the step."""
        return 1 - relaxation.step_s / self.step_s if self.step_s else 0.0

    def lost_s(self, *causes: str) -> float:
        """Seconds of the step that go to some causes."""
        return sum(loss.seconds for loss in self.losses if loss.cause in causes)

    @property
    def work_s(self) -> float:
        """What no plan can be faster than."""
        return self.floors[0].seconds

    @property
    def verdict(self) -> str:
        """Data parallelism against a graph of stages, where the floors decide that; else empty."""
        return _verdict(self)

    def parts(self) -> list[tuple[str, float, str]]:
        """Name, seconds and remark of the parts of the step that are worth a line; the rest is one
        of them, so that they add up to it.
        """
        return list(_losses(self))

    def to_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        return {
            "device": self.device,
            "floors": [asdict(floor) for floor in self.floors],
            "losses": [
                {"cause": loss.cause, "stages": list(loss.stages), "seconds": loss.seconds}
                for loss in self.losses
            ],
            "changes": [
                {
                    "change": relaxation.change,
                    "step_s": relaxation.step_s,
                    "saves": self.saves(relaxation),
                }
                for relaxation in self.relaxations
            ],
            "verdict": self.verdict,
        }

    def summary(self) -> str:
        """All of it for people, on one screen of 80 columns."""
        return "\n".join(line.rstrip() for line in _lines(self))


def _lines(why: Explanation) -> Iterator[str]:
    yield "why this plan: no step can be shorter than"
    for floor in why.floors:
        label, ms = f"{_FLOORS[floor.kind]:{LABEL}s}", _ms(floor.seconds)
        yield f"  {label}{ms}  {shorten(floor.what, WIDTH - LABEL - 16)}"
    stages = [s for s, stage in enumerate(why.graph.stages) if why.device in stage.devices]
    held = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    yield f"the step of device {why.device} ({held}), which computes most, is"
    for label, seconds, remark in _losses(why):
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


def _losses(why: Explanation) -> Iterator[tuple[str, float, str]]:
    """Label, seconds and remark of every part that is worth a line."""
    least = why.step_s * TOO_LITTLE
    seconds: dict[str, float] = defaultdict(float)
    edges: dict[tuple[int, ...], list[Loss]] = defaultdict(list)
    for loss in why.losses:
        if loss.cause in (Cause.MESSAGE.value, Cause.MESSAGE_PORTS.value):
            edges[loss.stages].append(loss)
        else:
            seconds[_MERGED.get(loss.cause, loss.cause)] += loss.seconds
    shown = 0.0
    for cause, (label, remark) in _CAUSES.items():
        if cause == "all_reduce":
            for line in _edges(why.graph, edges, least):
                shown += line[1]
                yield line
        if abs(seconds[cause]) > least or cause == "work":
            shown += seconds[cause]
            yield label, seconds[cause], remark
    if abs(why.step_s - shown) > least:
        yield "the rest", why.step_s - shown, "less than 0.05 % each"


def _edges(
    graph: StageGraph, edges: dict[tuple[int, ...], list[Loss]], least: float
) -> Iterator[tuple[str, float, str]]:
    """The stage edges whose messages hold up most, then the others together."""
    whole = {ends: sum(loss.seconds for loss in losses) for ends, losses in edges.items()}
    worst = sorted(whole, key=lambda ends: -whole[ends])
    for ends in worst[:MOST_EDGES]:
        if whole[ends] > least:
            queued = sum(
                loss.seconds for loss in edges[ends] if loss.cause == Cause.MESSAGE_PORTS.value
            )
            source, target = (graph.stages[s].operators for s in ends)
            names = (source[-1], target[0]) if ends[0] < ends[1] else (source[0], target[-1])
            label = f"edge {ends[0]} -> {ends[1]}, {queued / whole[ends]:.0%} queued"
            yield label, whole[ends], _pair(*names, room=WIDTH - LABEL - 25)
    others = sum(whole[ends] for ends in worst[MOST_EDGES:])
    if others > least:
        more = len(worst) - MOST_EDGES
        yield f"{more} other edge{'s' if more > 1 else ''}", others, ""


def _pair(a: str, b: str, room: int) -> str:
    """Two operators with an arrow between them; a short one leaves its room to the other."""
    half = (room - 4) // 2
    first = shorten(a, max(half, room - 4 - len(b)))
    return f"{first} -> {shorten(b, room - 4 - len(first))}"


def _helps(why: Explanation) -> Iterator[str]:
    if not why.relaxations and len(why.graph.devices) > 1:
        yield "the step has too many actions to simulate what would help"
        return
    best = [r for r in why.relaxations if why.saves(r) >= 0.001][:MOST_CHANGES]
    if not best:
        yield "no single change of links, updates, memory or balance would save 0.1% of it"
        return
    yield f"what would help most: {_said(why, best[0])}"
    if best[1:]:
        yield from (f"  then: {_said(why, other)}" for other in best[1:])


def _said(why: Explanation, relaxation: Relaxation) -> str:
    return f"{relaxation.what} would save {why.saves(relaxation):.1%}"


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
    sticks = why.lost_s(Cause.ALL_REDUCE.value, Cause.ALL_REDUCE_PORTS.value)
    hides = (
        f"the last backward hides {max(1 - sticks / sums, 0):.0%} of the all-reduce" if sums else ""
    )
    said = (
        f"{'this is data parallelism' if known else 'data parallelism is best here'}: "
        f"{f'{hides}, and ' if hides else ''}a graph of stages would have to lose less than "
        f"{1 - why.work_s / why.step_s:.1%} of its step to small slices, warm-up, imbalance, "
        "messages and update."
    )
    if why.too_few_samples:
        samples = "1 sample" if why.too_few_samples == 1 else f"{why.too_few_samples} samples"
        said += (
            f" It can win with slower links or from {samples} on a device down, where the "
            "all-reduce outlasts a backward."
        )
    return said
