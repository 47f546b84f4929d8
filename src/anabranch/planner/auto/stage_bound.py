"""Lower bound of a draft's step, which rejects most drafts before the clock runs; compiled."""

from __future__ import annotations

from anabranch.compiled import Table
from anabranch.planner.auto.message_tables import message_bytes
from anabranch.planner.auto.stage_records import EdgeRecord, Numbers, StageRecord, State


def least_s(numbers: Numbers, stages: Table[StageRecord], update: float, state: State) -> float:
    """Return a lower bound of the step: the compute of a stage with the way to it and back, or all
    work on the shared cores.
    """
    work, longest = 0.0, 0.0
    for position in range(len(stages)):
        s = stages[position].ordered
        stage = stages[s]
        stage.behind = stage.sums
        for i in range(stage.edges[0]):
            edge = state.edges[state.edges_of[0, s, i]]
            source = stages[edge.ends[0]]
            needed = -(-stage.microbatch // source.microbatch)
            first = min(source.microbatch, stage.microbatch)
            ahead = source.before + (needed - 1) * source.seconds[0, 0]
            ahead += source.seconds[int(needed == source.total), 0]
            ahead += _message_s(edge, 0, first)
            back = source.behind + source.seconds[1, 1] - source.weights[1]
            back += _message_s(edge, 1, min(source.last, stage.last))
            stage.before = max(stage.before, ahead)
            stage.behind = max(stage.behind, back)
        compute = _compute_s(stage)
        work += compute * stage.devices
        if numbers.flush:  # no stage updates before all gradients are summed
            after = max(compute + stage.sums, way_back_s(stage) + stage.behind)
            longest = max(longest, stage.before + after)
        else:
            longest = max(longest, compute + stage.sums + stage.update)
    apart = apart_s(stages) if numbers.flush else 0.0
    return max(longest, work / numbers.cores if numbers.cores > 0 else 0.0) + update + apart


def apart_s(stages: Table[StageRecord]) -> float:
    """Return the most seconds by which a last replica has its messages later than the first."""
    apart = 0.0
    for s in range(len(stages)):
        apart = max(apart, stages[s].apart)
    return apart


def _compute_s(stage: StageRecord) -> float:
    """Return the seconds of a step in which a stage computes."""
    full = (stage.total - 1) * period_s(stage)
    return float(full + stage.seconds[1, 0] + stage.seconds[1, 1])


def way_back_s(stage: StageRecord) -> float:
    """Return the seconds in which a stage computes, without gradients of weights that can wait."""
    waiting = (stage.total - 1) * stage.weights[0] + stage.weights[1]
    return _compute_s(stage) - float(waiting)


def period_s(stage: StageRecord) -> float:
    """Return the seconds of a micro-batch, forward and backward."""
    return float(stage.seconds[0, 0] + stage.seconds[0, 1])


def _message_s(edge: EdgeRecord, way: int, samples: int) -> float:
    """Return the seconds of a message that need not wait."""
    nbytes = message_bytes(edge, way, samples)
    return float(nbytes * edge.byte_s + edge.latency) if nbytes > 0 else 0.0
