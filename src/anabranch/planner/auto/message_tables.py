"""Messages and all-reduces of a draft's stages, as records, and the ports that they take; compiled.

Letters are those of ``stage_records``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Table
from anabranch.cost.buckets import BUCKET_BYTES, piece_bytes, piece_count
from anabranch.cost.communication import all_reduce_price, all_reduce_s, transfer_s
from anabranch.cost.footprint import summed_bytes, touched_bytes
from anabranch.planner.auto.stage_records import (
    EdgeRecord,
    LevelRecord,
    PricedModel,
    StagePiece,
    StageRecord,
    State,
)
from anabranch.planner.auto.stage_tables import operator_s

Shares = tuple[float, float]
"""A share for the sender of a message, and one for its receiver."""


def level_of(first: int, last: int, levels: Table[LevelRecord]) -> int:
    """Return the level of the cluster on which two devices and all between them meet."""
    level = 0
    while first // levels[level].devices != last // levels[level].devices:
        level += 1
    return level


def message_bytes(edge: EdgeRecord, way: int, samples: int) -> float:
    return float(edge.per_sample[way] * samples + edge.fixed[way])


def price_messages(problem: PricedModel, stages: Table[StageRecord], state: State) -> None:
    """Price the messages of each edge, and add the seconds of processors at both of its ends."""
    for e in range(state.num_edges[0]):
        edge = state.edges[e]
        source, target = stages[edge.ends[0]], stages[edge.ends[1]]
        _route(edge, problem.levels, state)
        size = min(source.microbatch, target.microbatch)
        for way in range(2):
            edge.posted[way] = 1
            nbytes = message_bytes(edge, way, size)
            if nbytes > 0:
                target.apart = max(target.apart, nbytes * edge.apart_s)
                for end in range(2):
                    stage = stages[edge.ends[end]]
                    stage.seconds[0, way] += problem.numbers[0].send
                    stage.seconds[1, way] += problem.numbers[0].send
    state.ports[:] = 0.0


def _route(edge: EdgeRecord, levels: Table[LevelRecord], state: State) -> None:
    """Price a byte between two stages, by the slices that their replicas have in common::

        micro-batches of 4, 2 replicas     0 0 1 1 | 0 0 1 1     two messages: the first one goes
        micro-batches of 8, 4 replicas     0 0 1 1   2 2 3 3     to replicas 0 and 1

    Devices of a node take turns on their card. So messages to one stage, or receives from it, lie
    between those of other stages, and all of them wait for the slowest card at the other ends. A
    card of R devices is held for longer than it is used: by 1 - 1/R of the difference to the
    slowest. A card of one device is priced as its link.
    """
    devices, loads, s, t = state.devices, state.ports, edge.ends[0], edge.ends[1]
    source, target = state.stages[s], state.stages[t]
    loads[:] = 0.0
    b, c = source.microbatch, target.microbatch
    size, most, node, cards = min(b, c), max(b, c), levels[0].devices, levels[0].cards
    start, copies, farthest = 0, 0, 0
    edge.port_s[:] = 0.0
    while start < most:
        i = ((start % b + 1) * source.replicas - 1) // b
        j = ((start % c + 1) * target.replicas - 1) // c
        stop = min(
            start - start % b + b * (i + 1) // source.replicas,
            start - start % c + c * (j + 1) // target.replicas,
        )
        sender, receiver = devices[s, i], devices[t, j]
        level = level_of(min(sender, receiver), max(sender, receiver), levels)
        seconds = (stop - start) / levels[level].bandwidth / most
        for end in range(2):
            device = receiver if end else sender
            for kind in range(2 if level > 0 and cards < node else 1):
                port = len(devices) + device * cards // node if kind else device
                loads[end, port] += seconds
                edge.port_s[end, kind] = max(edge.port_s[end, kind], loads[end, port])
        farthest = max(farthest, level)
        start = stop
        copies += start <= size
        if start == size:
            link = max(edge.port_s[0, 0], edge.port_s[1, 0])
            card = max(edge.port_s[0, 1], edge.port_s[1, 1])
            edge.byte_s, edge.apart_s = link * most / size, max(0.0, card - link) * most / size
    edge.latency, edge.far = levels[farthest].latency, int(farthest > 0 and cards < node)
    slowest = max(edge.port_s[0, 1], edge.port_s[1, 1])
    for end in range(2):
        stage = state.stages[edge.ends[end]]
        edge.fixed[end] *= copies
        if edge.far:
            others, slower = 1 - stage.cards / stage.devices, slowest / edge.port_s[end, 1]
            stage.turns[end] = max(stage.turns[end], 1 + others * (slower - 1))


def price_sums(
    op_stage: NDArray[np.int32],
    sharded: bool,
    problem: PricedModel,
    stages: Table[StageRecord],
    pieces: Sequence[Table[StagePiece]],
) -> None:
    """Price what each stage's last backward leaves of its all-reduce, and its update.

    With a flush gradients are summed in pieces during the last backward, last operators first.
    Where replicas share the optimizer's state, half of the ring, an all-gather, follows the update.
    """
    numbers, levels = problem.numbers[0], problem.levels
    half = 0.5 if sharded and numbers.flush > 0 else 1.0
    for s in range(len(stages)):
        stage = stages[s]
        updated = touched_bytes(stage.trainable, stage.tables, stage.rows)
        if sharded:
            updated /= stage.replicas
        stage.gradients = summed_bytes(stage.trainable, stage.tables, stage.rows)
        reduce_s = all_reduce_s(stage.gradients, *_ring(stage, levels))
        stage.update, stage.gather = updated * numbers.update_byte, (1 - half) * reduce_s
        if not numbers.flush:
            stage.sums = reduce_s
    if not numbers.flush:
        return
    for i in range(len(op_stage) - 1, -1, -1):
        stage = stages[op_stage[i]]
        if stage.replicas > 1:
            held = problem.op_bytes[i]
            nbytes = summed_bytes(held.trainable, held.tables, held.rows)
            if stage.waiting > 0 and stage.waiting + nbytes > _piece(stage):
                _cut_piece(stage, half, levels, pieces[op_stage[i]])
            stage.passed += operator_s(i, 1, 1, stage, problem.op_seconds)
            if nbytes > 0:
                stage.final = stage.passed
                stage.waiting += nbytes
                stage.buckets += min(1.0, nbytes / BUCKET_BYTES)
    for s in range(len(stages)):
        stage = stages[s]
        if stage.waiting > 0:
            _cut_piece(stage, half, levels, pieces[s])
        stage.sums = max(0.0, stage.summed - stage.passed)


def free_at(inward: int, s: int, far: int, state: State) -> float:
    """Return when all ports of a stage in one direction are free, cards only for distant stages."""
    free = 0.0
    for i in range(1 + far * state.stages[s].cards):
        free = max(free, state.ports[inward, state.ports_of[s, i]])
    return free


def busiest_port_s(batch_size: int, state: State) -> float:
    """Return the seconds of the messages of a batch on the port that has most of them."""
    longest = 0.0
    for e in range(state.num_edges[0]):
        edge = state.edges[e]
        size = min(state.stages[edge.ends[0]].microbatch, state.stages[edge.ends[1]].microbatch)
        for way in range(2):
            nbytes = message_bytes(edge, way, size) * batch_size / size
            for end in range(2):
                x, inward = edge.ends[end], int(end != way)
                _occupy(edge, way, end, 1.0, free_at(inward, x, edge.far, state), nbytes, state)
                longest = max(longest, free_at(inward, x, edge.far, state))
    return longest


def _occupy(
    edge: EdgeRecord, way: int, end: int, turns: float, start: float, nbytes: float, state: State
) -> None:
    """Hold the ports at one end of an edge for a message that starts now, see ``send``."""
    s = edge.ends[end]
    stage, seconds = state.stages[s], nbytes * edge.port_s[end, 0]
    for i in range(1 + edge.far * stage.cards):
        state.ports[int(end != way), state.ports_of[s, i]] = start + seconds
        seconds = nbytes * edge.port_s[end, 1] * (1 + turns * (stage.turns[end] - 1))


def send(
    e: int, way: int, number: int, samples: int, start: float, turns: Shares, state: State
) -> None:
    """Send a message of the receiver's micro-batch ``number`` as soon as its ports are free, not
    before ``start``. ``turns`` are the shares of it in which the devices of either end take turns.
    """
    edge = state.edges[e]
    nbytes = message_bytes(edge, way, samples)
    if nbytes > 0:
        for end in range(2):
            start = max(start, free_at(int(end != way), edge.ends[end], edge.far, state))
        for end in range(2):
            _occupy(edge, way, end, turns[int(end != way)], start, nbytes, state)
    state.arrivals[way, e, number] = start + nbytes * edge.byte_s + edge.latency


def hold_ports(s: int, start: float, seconds: float, state: State) -> float:
    """Take the ports of a ring in both directions as soon as they are free; return the end."""
    far = state.stages[s].far
    end = max(start, free_at(0, s, far, state), free_at(1, s, far, state)) + seconds
    for inward in range(2):
        for i in range(1 + far * state.stages[s].cards):
            state.ports[inward, state.ports_of[s, i]] = end
    return end


def updated_after(stages: Table[StageRecord], state: State) -> float:
    """Return the seconds from the last sum until all replicas have the updated parameters. Replicas
    that share the optimizer's state gather them after their update, on the ports of their sums.
    """
    last, asked = 0.0, 0.0
    for s in range(len(stages)):
        stages[s].counted = 0
    for _ in range(len(stages)):
        following, asked = -1, np.inf
        for s in range(len(stages)):
            if stages[s].counted == 0 and stages[s].update < asked:
                following, asked = s, stages[s].update
        stages[following].counted = 1
        if stages[following].gather > 0:
            asked = hold_ports(following, asked, stages[following].gather, state)
        last = max(last, asked)
    state.ports[:] = 0.0
    return last


def _ring(stage: StageRecord, levels: Table[LevelRecord]) -> tuple[float, float]:
    """Return seconds per byte and of latency of a stage's all-reduces."""
    level = levels[level_of(stage.low, stage.high, levels)]
    return all_reduce_price(stage.ring, level.latency, stage.replicas, 1)


def _piece(stage: StageRecord) -> float:
    return piece_bytes(stage.cut, stage.gradients - stage.cut)


def _cut_piece(
    stage: StageRecord, half: float, levels: Table[LevelRecord], pieces: Table[StagePiece]
) -> None:
    """Make the waiting gradients one more piece, summed once final and behind the piece before."""
    byte_s, latency_s = _ring(stage, levels)
    latency_s *= max(1.0, stage.buckets)
    piece, sum_s = pieces[stage.pieces], transfer_s(stage.waiting, byte_s, latency_s) * half
    piece.parts = piece_count(stage.waiting, _piece(stage))
    piece.final, piece.seconds = stage.final, sum_s / piece.parts
    stage.pieces += 1
    stage.summed = max(stage.summed, stage.final) + sum_s
    stage.cut += stage.waiting
    stage.waiting, stage.buckets = 0.0, 0.0
