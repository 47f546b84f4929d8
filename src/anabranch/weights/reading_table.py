"""A table of what every pass of a pipeline reads, by walking its schedule."""

from __future__ import annotations

from anabranch.plans.stages import StageGraph
from anabranch.schedule.kfkb import alternate
from anabranch.schedule.schedule import Kind
from anabranch.weights.base import Reading, WeightPolicy
from anabranch.weights.version_tracker import VersionTracker, units_in_flight, versions_held


def draw(policy: WeightPolicy, graph: StageGraph, count: int, *, microbatches: int = 1) -> str:
    """Per stage and mini-batch what forward (F) and backward (B) read, from a fill on.

    ``2`` are the weights after two updates, ``2+3`` the same extrapolated by three; in front of a
    stage's rows stands how many copies of its weights are alive at most.

    Args:
        policy: what passes read.
        graph: stages with their in-flight counts, in micro-batches.
        count: mini-batches.
        microbatches: M, per mini-batch.
    """
    lines = [["", "copies", "mini-batch", *map(str, range(count))]]
    for s, stage in enumerate(graph.stages):
        where = {"distance": graph.height[s], "depth": graph.depth}
        units = units_in_flight(stage.in_flight, microbatches)
        tracker = VersionTracker(policy, in_flight=units, **where)
        read: dict[Kind, dict[int, Reading]] = {Kind.FORWARD: {}, Kind.BACKWARD: {}}
        for action in alternate(s, count * microbatches, stage.in_flight, 1):
            number, i = divmod(action.microbatch, microbatches)
            enter = tracker.forward if action.kind is Kind.FORWARD else tracker.backward
            read[action.kind][number] = enter(number)
            if action.kind is Kind.BACKWARD and i == microbatches - 1:
                tracker.finish()
        held = versions_held(policy, in_flight=stage.in_flight, microbatches=microbatches, **where)
        for kind, first in ((Kind.FORWARD, True), (Kind.BACKWARD, False)):
            head = [f"stage {s}", str(held)] if first else ["", ""]
            lines.append([*head, str(kind), *(_text(read[kind][n]) for n in range(count))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _text(reading: Reading) -> str:
    return f"{reading.version}+{reading.ahead}" if reading.ahead else str(reading.version)
