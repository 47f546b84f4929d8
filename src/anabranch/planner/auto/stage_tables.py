"""Records of a draft: what its stages and the edges between them take of the devices; compiled.

Every function fills fields of stages or edges and says whether the draft can run as far as it has
looked.

Letters are those of ``stage_records``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Floats, Table
from anabranch.cost.buckets import BUCKET_BYTES, piece_bytes
from anabranch.cost.communication import all_reduce_s, ring_price, transfer_s
from anabranch.cost.interpolation import between, row_below
from anabranch.cost.memory import MOST_TERMS, memory_terms
from anabranch.cost.passes import pass_behind
from anabranch.cost.stage_weights import summed_bytes, touched_bytes
from anabranch.planner.auto.stage_records import (
    EdgeRecord,
    LevelRecord,
    Numbers,
    PricedModel,
    StagePiece,
    StageRecord,
    State,
)
from anabranch.plans.in_flight import in_flight_samples, waited_for_samples


def _clear_ports(ports: Floats) -> None:
    for port in range(ports.shape[1]):
        ports[0, port] = ports[1, port] = 0.0


def count_devices(
    owner: NDArray[np.int32],
    setups: NDArray[np.void],
    levels: Table[LevelRecord],
    stages: Table[StageRecord],
    state: State,
) -> None:
    """Count the devices and nodes of every stage, and note how it runs."""
    ports_of, node = state.ports_of, levels[0].devices
    for s in range(len(stages)):
        stage, setup = stages[s], setups[s]
        stages[s] = state.stages[-1]
        stage.microbatch, stage.k = setup.microbatch, setup.k
        stage.recompute = setup.recompute
        ports_of[s, 0] = s
    for d in range(len(owner)):
        s, card = owner[d], len(owner) + d // node
        stage = stages[s]
        if ports_of[s, stage.nodes] != card:
            stage.nodes += 1
            ports_of[s, stage.nodes] = card
        stage.low, stage.high = d if stage.devices == 0 else stage.low, d
        state.devices[s, stage.devices] = d
        stage.devices += 1


def split_samples(problem: PricedModel, stages: Table[StageRecord]) -> bool:
    """Replicas and their samples; whether all have some that the profile covers."""
    numbers, measured = problem.numbers[0], problem.measured
    for s in range(len(stages)):
        stage = stages[s]
        b, replicas = stage.microbatch, stage.devices
        if not 0 < replicas <= min(b, numbers.most_replicas) or b > numbers.batch_size:
            return False
        stage.replicas, stage.samples = replicas, -(-b // replicas)
        stage.total = -(-numbers.batch_size // b)
        stage.last = numbers.batch_size - (stage.total - 1) * b
        if max(stage.last // replicas, 1) < numbers.fewest or stage.samples > numbers.most:
            return False
        stage.row[0], stage.above[0] = row_below(stage.samples, measured)
        stage.row[1], stage.above[1] = row_below(-(-stage.last // replicas), measured)
    return True


def _operator_s(i: int, way: int, last: int, stage: StageRecord, op_seconds: Floats) -> float:
    """Seconds of an operator in a micro-batch of a stage, all or the last one."""
    row = stage.row[last]
    low, high = op_seconds[row, i, way], op_seconds[row + 1, i, way]
    return float(between(low, high, stage.above[last]))


def sum_operators(
    home: NDArray[np.int32], problem: PricedModel, stages: Table[StageRecord]
) -> bool:
    """Seconds and bytes of the stages; whether every stage has operators."""
    action_s = problem.numbers[0].action
    for i in range(len(home)):
        stage = stages[home[i]]
        stage.operators += 1
        for last in range(2):
            for way in range(2):
                stage.seconds[last, way] += _operator_s(i, way, last, stage, problem.op_seconds)
        held = problem.op_bytes[i]
        stage.parameters += held.parameters
        stage.trainable += held.trainable
        stage.tables += held.tables
        stage.rows += held.rows
        stage.kept += held.kept
        stage.largest_gradient = max(stage.largest_gradient, held.largest_gradient)
        own = held.largest_gradient + held.working * stage.samples
        stage.passing = pass_behind(stage.passing, held.kept * stage.samples, own)
    for s in range(len(stages)):
        stage = stages[s]
        if stage.operators == 0:
            return False
        for last in range(2):
            stage.seconds[last, 1] += stage.recompute * stage.seconds[last, 0]
            for way in range(2):
                stage.seconds[last, way] += action_s
    return True


def _find_edge(s: int, t: int, state: State) -> int:
    """The number of an edge, which is made if there is none yet."""
    for i in range(state.stages[s].edges[1]):
        e = state.edges_of[1, s, i]
        if state.edges[e].ends[1] == t:
            return int(e)
    new = int(state.num_edges[0])
    state.num_edges[0] += 1
    edge = state.edges[new]
    edge.ends[0], edge.ends[1] = s, t
    for way in range(2):
        _add_edge(way, new, state)
        edge.per_sample[way] = edge.fixed[way] = 0.0
    return new


def _add_edge(way: int, e: int, state: State) -> None:
    """One more edge whose messages a stage takes."""
    s = state.edges[e].ends[1 - way]
    stage = state.stages[s]
    state.edges_of[way, s, stage.edges[way]] = e
    stage.edges[way] += 1


def join_stages(
    home: NDArray[np.int32], problem: PricedModel, stages: Table[StageRecord], state: State
) -> None:
    """Edges between stages and what flows along them."""
    state.num_edges[0] = 0
    for v in range(len(problem.values)):
        value = problem.values[v]
        s = int(home[value.producer])
        source, leaves = stages[s], False
        for reader in range(value.first, value.last):
            t = int(home[problem.readers[reader]])
            target = stages[t]
            if t == s or target.counted == v + 1:  # this value has come to it before
                continue
            target.counted, leaves = v + 1, True
            edge = state.edges[_find_edge(s, t, state)]
            for way in range(2):
                edge.per_sample[way] += value.per_sample[way]
                edge.fixed[way] += value.fixed[way]
            target.enters += value.per_sample[0]
            target.enters_fixed += value.fixed[0]
        if leaves:
            source.returns += value.per_sample[1]
            source.returns_fixed += value.fixed[1]


def sort_stages(stages: Table[StageRecord], state: State) -> bool:
    """A topological order, the lower number first; whether there is one."""
    for s in range(len(stages)):
        stages[s].counted = stages[s].edges[0]
    for place in range(len(stages)):
        s = 0
        while s < len(stages) and stages[s].counted != 0:
            s += 1
        if s == len(stages):
            return False
        stages[place].ordered, stages[s].counted = s, -1
        for i in range(stages[s].edges[1]):
            stages[state.edges[state.edges_of[1, s, i]].ends[1]].counted -= 1
    return True


def chain_stages(stages: Table[StageRecord], state: State) -> None:
    """Edges from every stage to the next in the order, as far as there are none."""
    for place in range(len(stages) - 1):
        _find_edge(stages[place].ordered, stages[place + 1].ordered, state)


def order_edges(stages: Table[StageRecord], state: State) -> None:
    """The edges of each end in the topological order of the other, in which messages are sent."""
    for way in range(1, -1, -1):
        for s in range(len(stages)):
            stages[s].edges[way] = 0
        for place in range(len(stages)):
            s = stages[place].ordered
            for i in range(stages[s].edges[1 - way]):
                _add_edge(way, state.edges_of[1 - way, s, i], state)


def count_in_flight(deep: bool, flush: bool, stages: Table[StageRecord], state: State) -> None:
    """Micro-batches in flight by Table 2 (``plans.in_flight``), at least and wanted."""
    hops = 2 if deep else 1
    for place in range(len(stages) - 1, -1, -1):
        s = stages[place].ordered
        stage = stages[s]
        b, k = stage.microbatch, stage.k
        least, wanted = k * b, k * b
        for i in range(stage.edges[1]):
            follower = stages[state.edges[state.edges_of[1, s, i]].ends[1]]
            c, g = follower.microbatch, follower.k
            more = max(in_flight_samples(k, b, g, c, 0), waited_for_samples(k, b, g, c))
            least = max(least, follower.least * c + more)
            wanted = max(wanted, follower.wanted * c + hops * more)
        stage.least, stage.wanted = -(-least // b), -(-wanted // b)
        if flush:
            stage.least = min(stage.least, stage.total)
            stage.wanted = min(stage.wanted, stage.total)


def fit_memory(sharded: bool, numbers: Numbers, stages: Table[StageRecord], state: State) -> bool:
    """Micro-batches in flight as memory allows (``cost.memory``); whether the least ones fit."""
    for place in range(len(stages)):
        s = stages[place].ordered
        stage = stages[s]
        n, trainable = stage.samples, stage.trainable
        resident, flight, backward, sums = memory_terms(
            stage.parameters,
            trainable,
            trainable / stage.replicas if sharded else trainable,
            stage.largest_gradient,
            stage.enters * n + stage.enters_fixed,
            stage.returns * n + stage.returns_fixed,
            stage.kept * n,
            stage.passing,
            stage.recompute,
            stage.replicas,
            min(stage.replicas - 1, MOST_TERMS),
            1 + numbers.more_versions + numbers.versions_in_flight * stage.least,
            numbers.optimizer_factor,
            numbers.receive_slots,
            stage.tables,
            stage.rows,
        )
        free = numbers.memory - resident - backward
        if stage.least * flight > free or resident + sums > numbers.memory:
            return False
        room = stage.wanted
        if flight > 0:
            room = min(room, int(free // flight))
        for i in range(stage.edges[0]):
            before = stages[state.edges[state.edges_of[0, s, i]].ends[0]]
            if before.in_flight < before.total:
                k, b = before.k, before.microbatch
                more = waited_for_samples(k, b, stage.k, stage.microbatch)
                room = min(room, (before.in_flight * b - more) // stage.microbatch)
        stage.in_flight = max(stage.least, room)
    return True


def level_of(first: int, last: int, levels: Table[LevelRecord]) -> int:
    """The level of the cluster on which these devices and all between them meet."""
    level = 0
    while first // levels[level].devices != last // levels[level].devices:
        level += 1
    return level


def message_bytes(edge: EdgeRecord, way: int, samples: int) -> float:
    """Bytes of a message of so many samples."""
    return float(edge.per_sample[way] * samples + edge.fixed[way])


def price_messages(problem: PricedModel, stages: Table[StageRecord], state: State) -> None:
    """Seconds of the messages of each edge, and of the processors at both ends of it."""
    numbers = problem.numbers[0]
    for e in range(state.num_edges[0]):
        edge = state.edges[e]
        source, target = stages[edge.ends[0]], stages[edge.ends[1]]
        _route(edge, problem.levels, state)
        size, last = min(source.microbatch, target.microbatch), min(source.last, target.last)
        for way in range(2):
            edge.posted[way] = numbers.receive_slots
            nbytes = message_bytes(edge, way, size)
            if nbytes > 0:
                target.apart = max(target.apart, nbytes * edge.apart_s)
                byte_s, replicas = numbers.send_byte, stages[edge.ends[way]].replicas
                seconds = numbers.send + byte_s * nbytes / replicas
                last_s = numbers.send + byte_s * message_bytes(edge, way, last) / replicas
                for end in range(2):
                    stage = stages[edge.ends[end]]
                    stage.seconds[0, way] += seconds
                    stage.seconds[1, way] += last_s
    _clear_ports(state.ports)


def _route(edge: EdgeRecord, levels: Table[LevelRecord], state: State) -> None:
    """Seconds of a byte between two stages, by the slices that their replicas have in common.

    ::

        micro-batches of 4, 2 replicas     0 0 1 1 | 0 0 1 1     two messages: the first one goes
        micro-batches of 8, 4 replicas     0 0 1 1   2 2 3 3     to replicas 0 and 1
    """
    devices, loads, s, t = state.devices, state.ports, edge.ends[0], edge.ends[1]
    source, target = state.stages[s], state.stages[t]
    _clear_ports(loads)
    b, c = source.microbatch, target.microbatch
    size, node = min(b, c), levels[0].devices
    start, copies, farthest = 0, 0, 0
    for end in range(2):
        edge.port_s[end, 0] = edge.port_s[end, 1] = 0.0
    while start < max(b, c):
        i = ((start % b + 1) * source.replicas - 1) // b
        j = ((start % c + 1) * target.replicas - 1) // c
        stop = min(
            start - start % b + b * (i + 1) // source.replicas,
            start - start % c + c * (j + 1) // target.replicas,
        )
        sender, receiver = devices[s, i], devices[t, j]
        level = level_of(min(sender, receiver), max(sender, receiver), levels)
        seconds = (stop - start) / levels[level].bandwidth
        for end in range(2):
            device = receiver if end else sender
            for kind in range(2 if level > 0 else 1):
                port = len(devices) + device // node if kind else device
                loads[end, port] += seconds
                edge.port_s[end, kind] = max(edge.port_s[end, kind], loads[end, port])
        farthest = max(farthest, level)
        start = stop
        copies += start <= size
        if start == size:
            link = max(edge.port_s[0, 0], edge.port_s[1, 0])
            card = max(edge.port_s[0, 1], edge.port_s[1, 1])
            edge.byte_s, edge.apart_s = link / size, max(0.0, card - link) / size
    edge.latency = levels[farthest].latency
    edge.far = 1 if farthest > 0 and node > 1 else 0
    for end in range(2):
        edge.fixed[end] *= copies
        for kind in range(2):
            edge.port_s[end, kind] /= max(b, c)


def price_sums(
    home: NDArray[np.int32],
    sharded: bool,
    problem: PricedModel,
    stages: Table[StageRecord],
    pieces: Sequence[Table[StagePiece]],
) -> None:
    """Seconds of each stage's all-reduce behind its last backward, and of its update.

    With a flush gradients are summed in pieces while the last backward goes on, the last operators
    first; where replicas share the optimizer's state half of the ring comes behind the update.
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
        stage.update = updated * numbers.update_byte + (1 - half) * reduce_s
        if not numbers.flush:
            stage.sums = reduce_s
    if not numbers.flush:
        return
    for i in range(len(home) - 1, -1, -1):
        stage = stages[home[i]]
        if stage.replicas > 1:
            held = problem.op_bytes[i]
            nbytes = summed_bytes(held.trainable, held.tables, held.rows)
            if stage.waiting > 0 and stage.waiting + nbytes > _piece(stage):
                _cut_piece(stage, half, levels, pieces[home[i]])
            stage.passed += _operator_s(i, 1, 1, stage, problem.op_seconds)
            if nbytes > 0:
                stage.final = stage.passed
                stage.waiting += nbytes
                stage.buckets += min(1.0, nbytes / BUCKET_BYTES)
    for s in range(len(stages)):
        stage = stages[s]
        if stage.waiting > 0:
            _cut_piece(stage, half, levels, pieces[s])
        stage.sums = max(0.0, stage.summed - stage.passed)


def _ring(stage: StageRecord, levels: Table[LevelRecord]) -> tuple[float, float]:
    """Seconds per byte and of latency of a stage's all-reduces."""
    level = levels[level_of(stage.low, stage.high, levels)]
    return ring_price(level.bandwidth, level.latency, stage.replicas, 1)


def _piece(stage: StageRecord) -> float:
    """Bytes of a stage's next piece."""
    return piece_bytes(stage.cut, stage.gradients - stage.cut)


def _cut_piece(
    stage: StageRecord, half: float, levels: Table[LevelRecord], pieces: Table[StagePiece]
) -> None:
    """Make the waiting gradients one more piece, summed once final and behind the piece before."""
    byte_s, latency_s = _ring(stage, levels)
    latency_s *= max(1.0, stage.buckets)
    piece, sum_s = pieces[stage.pieces], transfer_s(stage.waiting, byte_s, latency_s) * half
    piece.parts = max(1, round(stage.waiting / _piece(stage)))
    piece.final, piece.seconds = stage.final, sum_s / piece.parts
    stage.pieces += 1
    stage.summed = max(stage.summed, stage.final) + sum_s
    stage.cut += stage.waiting
    stage.waiting, stage.buckets = 0.0, 0.0
