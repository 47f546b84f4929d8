"""The clock of the evaluator, compiled: each stage is one machine.

A stage takes the shared cards of all its devices at once. It continues when its first replica has a
message; the delay of its last replica is added to the step once. Letters and records are those of
``stage_records``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Table, compiled
from anabranch.planner.auto.message_tables import (
    busiest_port_s,
    hold_ports,
    price_messages,
    price_sums,
    send,
    updated_after,
)
from anabranch.planner.auto.stage_bound import apart_s, least_s, period_s, way_back_s
from anabranch.planner.auto.stage_records import PricedModel, StagePiece, StageRecord, State
from anabranch.planner.auto.stage_tables import (
    chain_stages,
    count_devices,
    count_in_flight,
    fit_memory,
    join_stages,
    order_edges,
    sort_stages,
    split_backwards,
    split_samples,
    sum_operators,
)

SHOWN = 96
"""Micro-batches that are run; each other one takes as long as those in the middle of the run."""

LEAST_PERIODS = 12
"""Least micro-batches of the largest size to run, where stages differ in their size."""

MOST_SHOWN = 8 * SHOWN
"""Most micro-batches to run, where all stages have one size."""


def _count_periods(stages: Table[StageRecord]) -> tuple[int, int, int]:
    """Return the samples of a period, and how many periods to run and to leave out.

    All stages repeat themselves after the largest micro-batch, if it is a multiple of all sizes. If
    it is not, no period is left out.
    """
    least = largest = stages[0].microbatch
    held, samples = 0, 0
    for s in range(len(stages)):
        stage = stages[s]
        least, largest = min(least, stage.microbatch), max(largest, stage.microbatch)
        held = max(held, stage.in_flight * stage.microbatch)
        samples = max(samples, stage.total * stage.microbatch)
    for s in range(len(stages)):
        if largest % stages[s].microbatch != 0:
            return largest, 0, 0
    shown = max(-(-SHOWN * least // largest), 4 * (-(-held // largest)))
    shown = max(shown, LEAST_PERIODS) if least < largest else min(shown, MOST_SHOWN)
    return largest, shown, max(-(-samples // largest) - shown, 0)


def _turn(stage: StageRecord, at: float) -> None:
    """Choose the next action of a stage by kFkB, if one is left."""
    stage.ready, stage.until, stage.begun, stage.taken, stage.idle = at, np.inf, 0, 0, at
    between = stage.k > 1 and stage.done[1] % stage.k != 0
    flight = stage.in_flight + (0 if between else stage.done[1])
    stage.way = int(stage.done[0] >= min(stage.total, flight))
    last = int(stage.done[stage.way] + 1 == stage.total)
    stage.takes = stage.seconds[last, stage.way] - stage.way * stage.weights[last]


def _take(s: int, batch_size: int, state: State) -> None:
    """Take the messages of a stage's next action that were sent, and begin it if these are all.

    Each message taken posts a receive for the next one, which may have waited to be sent. Devices
    take turns in receiving for the share of time in which the stage waits.
    """
    stage = state.stages[s]
    way, size = stage.way, stage.microbatch
    done = stage.done[way]
    if done == stage.total or stage.until < np.inf:
        return
    stop = min((done + 1) * size, batch_size)
    first = (done + 1) * size
    while stage.taken < stage.edges[way]:
        e = state.edges_of[way, s, stage.taken]
        edge = state.edges[e]
        sender = state.stages[edge.ends[way]]
        sent = sender.done[way] * sender.microbatch
        if sent < stop:
            return
        wait = max(0.0, state.arrivals[way, e, done] - stage.ready)
        stage.ready = max(stage.ready, state.arrivals[way, e, done])
        edge.posted[way] = done + 2
        samples = min(sent, batch_size, first + size) - first
        if samples > 0:
            share = wait / (wait + period_s(stage)) if wait > 0 else 0.0
            send(e, way, done + 1, samples, stage.ready, (share, 1.0), state)
        stage.taken += 1
    if len(state.paces) > 0:  # its pace depends on the devices that compute when it begins
        stage.until = stage.ready
    else:
        _compute(stage, stage.ready, 1.0, state.pieces[s])


def _work_off(stage: StageRecord, start: float) -> float:
    """Compute owed gradients of weights while a stage waits until ``start``, and before a forward
    those that hold memory for it. Return when the stage can begin.
    """
    if stage.owed > 0:
        least = 0.0
        if stage.way == 0:
            held = stage.done[0] - stage.done[1] - stage.most + 1
            least = min(stage.owed, held * stage.weights[0] + stage.owed)
        worked = max(min(stage.owed, start - stage.idle), least)
        stage.owed -= worked
        start = max(start, stage.idle + worked)
    return start


def _compute(stage: StageRecord, start: float, pace: float, pieces: Table[StagePiece]) -> None:
    """Begin a stage's next action, which takes ``pace`` times as long as alone. The last backward
    also sets when its first piece is summed.
    """
    stage.until, stage.pace = _work_off(stage, start) + stage.takes * pace, pace
    if stage.way == 1 and stage.done[1] + 1 == stage.total:
        stage.passed_all = stage.until
        if stage.weights[1] > 0:  # gradients are final one after the other in the part that waits
            stage.passed_all += stage.owed + stage.weights[1]
            stage.pace *= stage.weights[1] / stage.seconds[1, 1]
        _ask(stage, 0.0, pieces)


def _share_cores(s: int, now: float, running: int, stages: Table[StageRecord], state: State) -> int:
    """Begin the next action of a stage, or end it if it has begun, and change the ends of those of
    other stages, as ``running`` devices have shared cores. Return the number that now do.
    """
    stage, paces = stages[s], state.paces
    begins, stage.begun = stage.begun == 0, 0
    more = stage.devices if begins else -stage.devices
    factor = paces[running + more] / paces[running]
    for t in range(len(stages)):
        other = stages[t]
        if other.begun > 0:
            other.until = now + (other.until - now) * factor
    if begins:
        stage.begun = 1
        _compute(stage, now, paces[running + more], state.pieces[s])
    return running + more


def _ask(stage: StageRecord, at: float, pieces: Table[StagePiece]) -> None:
    """Set when a stage's next piece of gradients requests links: once final, not before ``at``."""
    stage.asks = np.inf
    if stage.pieces_done < stage.pieces:
        left = stage.passed - pieces[stage.pieces_done].final
        stage.asks = max(at, stage.passed_all - left * stage.pace)


def _sum(s: int, state: State) -> float:
    """Return the end of an all-reduce of a piece that requests links now, behind earlier ones."""
    stage = state.stages[s]
    piece = state.pieces[s][stage.pieces_done]
    end = hold_ports(s, stage.asks, piece.seconds, state)
    piece.parts -= 1
    stage.pieces_done += piece.parts == 0
    _ask(stage, end, state.pieces[s])
    return end


def _slowest(stages: Table[StageRecord]) -> int:
    """Return the stage that computes for the most seconds per sample."""
    slow = 0
    for s in range(1, len(stages)):
        busy = period_s(stages[s]) * stages[slow].microbatch
        if busy > period_s(stages[slow]) * stages[s].microbatch:
            slow = s
    return slow


def _next_event(late: bool, stages: Table[StageRecord]) -> tuple[int, float, bool]:
    """Return the stage of the next event, its time, and whether a piece of gradients requests links
    then; else an action ends. Without an event the stage is their number.

    Args:
        late: whether a stage has come to its last backward; until then no piece requests links, and
            not to look for that saves 5 % of an evaluation.
    """
    s, at, sums = len(stages), np.inf, False
    for t in range(len(stages)):
        if stages[t].until < at:
            s, at, sums = t, stages[t].until, False
        if late and stages[t].asks < at:
            s, at, sums = t, stages[t].asks, True
    return s, at, sums


def _end_action(s: int, end: float, batch_size: int, state: State) -> float:
    """End the action of a stage: send its messages, and begin what waited for it. Return when the
    stage has computed everything, if this was its last action, else 0.
    """
    stage = state.stages[s]
    way, done = stage.way, stage.done[stage.way]
    is_last = done + 1 == stage.total
    stage.done[way] += 1
    stage.owed += way * stage.weights[int(is_last)]
    low = done * stage.microbatch
    high = min(low + stage.microbatch, batch_size)
    for i in range(stage.edges[1 - way]):
        e = state.edges_of[1 - way, s, i]
        edge = state.edges[e]
        # A receive is posted when all before it have their samples, so one is open at most.
        posted = edge.posted[way]
        stop = min(high, posted * state.stages[edge.ends[1 - way]].microbatch)
        if low < stop:
            send(e, way, posted - 1, stop - low, end, (1.0, 0.0), state)
    _turn(stage, end)
    _take(s, batch_size, state)
    for i in range(stage.edges[1 - way]):
        receiver = state.edges[state.edges_of[1 - way, s, i]].ends[1 - way]
        _take(receiver, batch_size, state)
    return float(end + stage.owed) if way == 1 and is_last else 0.0


def _run(
    batch_size: int, stages: Table[StageRecord], update: float, state: State, limit: float
) -> float:
    """Run the clock, event by event. Return the seconds of the step; infinity beyond the limit, or
    if stages wait for each other.
    """
    samples, shown, hidden = _count_periods(stages)
    batch_size -= hidden * samples
    late = False
    for s in range(len(stages)):
        stage = stages[s]
        stage.total -= hidden * samples // stage.microbatch
        stage.left = way_back_s(stage) + stage.behind
        stage.asks = np.inf
        late = late or stage.total == 1
        _turn(stage, 0.0)
    for s in range(len(stages)):
        _take(s, batch_size, state)
    slow, apart = _slowest(stages), apart_s(stages)
    passes = samples // stages[slow].microbatch  # of the slowest stage in a period
    limit -= hidden * passes * period_s(stages[slow]) + update + apart
    # A period is measured between two backwards of the slowest stage.
    early, later, period = shown // 3 * passes, 2 * shown // 3 * passes, 0.0
    step, running = 0.0, 0  # the end so far; devices that compute, where they share cores
    while True:
        s, end, sums = _next_event(late, stages)
        if s == len(stages):
            break
        stage = stages[s]
        if sums:
            step = max(step, _sum(s, state))
            if step > limit:
                return np.inf
            continue
        if len(state.paces) > 0:
            running = _share_cores(s, end, running, stages, state)
            if stage.begun > 0:
                continue
        stage.left -= stage.takes
        if end + stage.left > limit:
            return np.inf
        if hidden > 0 and s == slow and stage.way == 1:
            if stage.done[1] == early:
                period -= end * passes / (later - early)
            elif stage.done[1] == later:
                period += end * passes / (later - early)
        step = max(step, _end_action(s, end, batch_size, state))
        late = late or stage.done[1] + 1 >= stage.total
    for s in range(len(stages)):
        if stages[s].done[1] < stages[s].total:
            return np.inf
    return step + apart + update + hidden * period


@compiled
def step_s(
    op_stage: NDArray[np.int32],
    device_stage: NDArray[np.int32],
    settings: NDArray[np.int32],
    count: int,
    deep: bool,
    chained: bool,
    sharded: bool,
    split: bool,
    limit: float,
    problem: PricedModel,
    state: State,
) -> float:
    """Return the seconds of a step of ``count`` stages, or of a period without a flush; infinity if
    the draft cannot run or takes longer than the limit.
    """
    stages, numbers = state.stages[:count], problem.numbers[0]
    batch_size, flush = numbers.batch_size, numbers.flush > 0
    count_devices(device_stage, settings, problem.levels, stages, state)
    if not split_samples(problem, stages):
        return np.inf
    join_stages(op_stage, problem, stages, state)
    if not sort_stages(stages, state):
        return np.inf
    if not sum_operators(op_stage, problem, stages):
        return np.inf
    if split:
        split_backwards(op_stage, problem, stages, state)
    if chained:
        chain_stages(stages, state)
    order_edges(stages, state)
    count_in_flight(deep, flush, stages, state)
    if not fit_memory(sharded, numbers, stages, state):
        return np.inf
    price_messages(problem, stages, state)
    price_sums(op_stage, sharded, problem, stages, state.pieces)
    update = updated_after(stages, state) if flush else 0.0
    least = least_s(numbers, stages, update, state)
    if not flush:
        least = max(least, busiest_port_s(batch_size, state))
    if flush and least <= limit:
        least = max(_run(batch_size, stages, update, state, limit), least)
    return least if least <= limit else np.inf
