"""Tables of the versions that the passes of a policy read."""

from anabranch.plans.stages import StageGraph
from anabranch.schedule.asynchronous import stage_actions, units_in_flight
from anabranch.schedule.schedule import Kind
from anabranch.weights import Reading, VersionTracker, WeightPolicy, versions_held


def draw(policy: WeightPolicy, graph: StageGraph, count: int, *, microbatches: int = 1) -> str:
    """Per stage and mini-batch what forward (F) and backward (B) read, from a fill on.

    ``2`` are the weights after two updates, ``2+3`` the same extrapolated by three; in front of a
    stage's rows stands how many copies of its weights are alive at most.
    """
    lines = [["", "copies", "mini-batch", *map(str, range(count))]]
    units = [units_in_flight(stage.in_flight, microbatches) for stage in graph.stages]
    deepest = max(units)
    for s, stage in enumerate(graph.stages):
        tracker = VersionTracker(policy, in_flight=units[s], deepest=deepest)
        read: dict[Kind, dict[int, Reading]] = {Kind.FORWARD: {}, Kind.BACKWARD: {}}
        for action in stage_actions(s, stage.in_flight, microbatches, count * microbatches):
            if action.kind is Kind.UPDATE:
                tracker.finish()
                continue
            number = action.microbatch // microbatches
            begin = tracker.forward if action.kind is Kind.FORWARD else tracker.backward
            read[action.kind][number] = begin(number)
        held = versions_held(
            policy, in_flight=stage.in_flight, deepest=deepest, microbatches=microbatches
        )
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
