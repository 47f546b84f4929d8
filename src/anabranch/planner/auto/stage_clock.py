"""The clock of the evaluator, compiled: each stage is one machine.

A stage takes the shared cards of all its devices at once. It continues when its first replica has a
message; the delay of its last replica is added to the step once. Letters and records are those of
``stage_records``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Floats, Table, compiled
from anabranch.planner.auto.message_tables import (
    busiest_port_s,
    hold_ports,
    message_bytes,
    price_messages,
    price_sums,
    send,
    updated_after,
)
from anabranch.planner.auto.stage_records import (
    EdgeRecord,
    Numbers,
    PricedModel,
    StagePiece,
    StageRecord,
    State,
)
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


def _least_s(numbers: Numbers, stages: Table[StageRecord], update: float, state: State) -> float:
    """Return a lower bound of the step: the compute of a stage with the way to it and back, or all
    work on the shared cores.
    """
    work, longest, apart = 0.0, 0.0, 0.0
    for place in range(len(stages)):
        s = stages[place].ordered
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
            after = max(compute + stage.sums, _way_back_s(stage) + stage.behind)
            longest = max(longest, stage.before + after)
            apart = max(apart, stage.apart)
        else:
            longest = max(longest, compute + stage.sums + stage.update)
    return max(longest, work / numbers.cores if numbers.cores > 0 else 0.0) + update + apart


def _compute_s(stage: StageRecord) -> float:
    """Return the seconds of a step in which a stage computes."""
    full = (stage.total - 1) * _period_s(stage)
    return float(full + stage.seconds[1, 0] + stage.seconds[1, 1])


def _way_back_s(stage: StageRecord) -> float:
    """Return the seconds in which a stage computes, without gradients of weights that can wait."""
    waiting = (stage.total - 1) * stage.weights[0] + stage.weights[1]
    return _compute_s(stage) - float(waiting)


def _period_s(stage: StageRecord) -> float:
    """Return the seconds of a micro-batch, forward and backward."""
    return float(stage.seconds[0, 0] + stage.seconds[0, 1])


def _message_s(edge: EdgeRecord, way: int, samples: int) -> float:
    """Return the seconds of a message that need not wait."""
    nbytes = message_bytes(edge, way, samples)
    return float(nbytes * edge.byte_s + edge.latency) if nbytes > 0 else 0.0


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
            share = wait / (wait + _period_s(stage)) if wait > 0 else 0.0
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


def _share(now: float, more: int, running: int, paces: Floats, stages: Table[StageRecord]) -> int:
    """Change the number of devices that compute by ``more``, and with it the ends of all actions,
    as their devices share cores. Return the new number.
    """
    factor = paces[running + more] / paces[running]
    for s in range(len(stages)):
        stage = stages[s]
        if stage.begun > 0:
            stage.until = now + (stage.until - now) * factor
    return running + more


def _ask(stage: StageRecord, at: float, pieces: Table[StagePiece]) -> None:
    """Set when the next piece of a stage's gradients requests links: once it is final, not before
    ``at``.
    """
    stage.asks = np.inf
    if stage.pieces_done < stage.pieces:
        left = stage.passed - pieces[stage.pieces_done].final
        stage.asks = max(at, stage.passed_all - left * stage.pace)


def _sum(s: int, state: State) -> float:
    """Return the end of the all-reduce of a piece that requests links now; it waits for earlier
    requests.
    """
    stage = state.stages[s]
    piece = state.pieces[s][stage.pieces_done]
    end = hold_ports(s, stage.asks, piece.seconds, state)
    piece.parts -= 1
    stage.pieces_done += piece.parts == 0
    _ask(stage, end, state.pieces[s])
    return end


def _run(
    batch_size: int, stages: Table[StageRecord], update: float, state: State, limit: float
) -> float:
    """Run the clock: end the earliest action of all stages, send its messages, and repeat. From the
    first last backward on, pieces of gradients that request links are events, too.

    Returns:
        Seconds of the step; infinity beyond the limit.
    """
    paces = state.paces
    samples, shown, hidden = _count_periods(stages)
    batch_size -= hidden * samples
    slow, actions, summing, running, late, apart = 0, 0, 0, 0, False, 0.0
    for s in range(len(stages)):
        stage = stages[s]
        stage.total -= hidden * samples // stage.microbatch
        stage.left = _way_back_s(stage) + stage.behind
        apart = max(apart, stage.apart)
        actions += 2 * stage.total
        stage.asks = np.inf
        summing += stage.pieces > 0
        late = late or stage.total == 1
        busy = _period_s(stage) * stages[slow].microbatch
        if busy > _period_s(stages[slow]) * stage.microbatch:
            slow = s
        _turn(stage, 0.0)
    for s in range(len(stages)):
        _take(s, batch_size, state)
    passes = samples // stages[slow].microbatch  # of the slowest stage in a period
    limit -= hidden * passes * _period_s(stages[slow]) + update + apart
    early, later, period = shown // 3 * passes, 2 * shown // 3 * passes, 0.0
    step = 0.0
    while actions + summing > 0:
        s, end, sums = len(stages), np.inf, False
        for t in range(len(stages)):
            if stages[t].until < end:
                s, end, sums = t, stages[t].until, False
            if late and stages[t].asks < end:
                s, end, sums = t, stages[t].asks, True
        if s == len(stages):
            return np.inf
        stage = stages[s]
        if sums:
            step = max(step, _sum(s, state))
            if step > limit:
                return np.inf
            summing -= stage.pieces_done == stage.pieces
            continue
        way = stage.way
        if len(paces) > 0:
            if stage.begun == 0:
                running = _share(end, stage.devices, running, paces, stages)
                stage.begun = 1
                _compute(stage, end, paces[running], state.pieces[s])
                continue
            stage.begun = 0
            running = _share(end, -stage.devices, running, paces, stages)
        actions -= 1
        stage.left -= stage.takes
        if end + stage.left > limit:
            return np.inf
        done = stage.done[way]
        stage.done[way] += 1
        stage.owed += way * stage.weights[int(done + 1 == stage.total)]
        late = late or stage.done[1] + 1 >= stage.total
        if way == 1 and s == slow and hidden > 0:
            if done == early:
                period -= end * passes / (later - early)
            elif done == later:
                period += end * passes / (later - early)
        low = done * stage.microbatch
        high = min(low + stage.microbatch, batch_size)
        for i in range(stage.edges[1 - way]):
            e = state.edges_of[1 - way, s, i]
            edge = state.edges[e]
            # A receive is posted when all before it have their samples, so one is open at most.
            posted = edge.posted[way]
            stop = min(high, posted * stages[edge.ends[1 - way]].microbatch)
            if low < stop:
                send(e, way, posted - 1, stop - low, end, (1.0, 0.0), state)
        _turn(stage, end)
        _take(s, batch_size, state)
        for i in range(stage.edges[1 - way]):
            receiver = state.edges[state.edges_of[1 - way, s, i]].ends[1 - way]
            _take(receiver, batch_size, state)
        if way == 1 and done + 1 == stage.total:
            step = max(step, end + stage.owed)
    return step + apart + update + hidden * period


@compiled
def step_s(
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
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
    count_devices(owner, settings, problem.levels, stages, state)
    if not split_samples(problem, stages):
        return np.inf
    join_stages(home, problem, stages, state)
    if not sort_stages(stages, state):
        return np.inf
    if not sum_operators(home, problem, stages):
        return np.inf
    if split:
        split_backwards(home, problem, stages, state)
    if chained:
        chain_stages(stages, state)
    order_edges(stages, state)
    count_in_flight(deep, flush, stages, state)
    if not fit_memory(sharded, numbers, stages, state):
        return np.inf
    price_messages(problem, stages, state)
    price_sums(home, sharded, problem, stages, state.pieces)
    update = updated_after(stages, state) if flush else 0.0
    least = _least_s(numbers, stages, update, state)
    if not flush:
        least = max(least, busiest_port_s(batch_size, state))
    if flush and least <= limit:
        least = max(_run(batch_size, stages, update, state, limit), least)
    return least if least <= limit else np.inf
