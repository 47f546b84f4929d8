"""Tables of a draft: what its stages and the edges between them take of the devices; compiled.

Every function fills rows of tables that ``stage_clock`` makes, all of them 0 at first, and says
whether the draft can run as far as it has looked. Only ``stage_clock`` imports this file.

Axes: s, t stages; e stage edges; v values of the model; i operators; n rows of the table of sample
counts; g tensor degrees; l levels of the cluster. Tables have what they hold as their first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.cost.communication import all_reduce_s, ring_price, transfer_s
from anabranch.cost.memory import memory_terms, updated_bytes
from anabranch.cost.passes import pass_behind
from anabranch.cost.stage_weights import summed_bytes, touched_bytes
from anabranch.planner.toolkit.jit import compiled
from anabranch.plans.in_flight import in_flight_samples

Table = Any
"""An array; the comment beside it says its axes."""

# Whole numbers of a stage: operators; devices, the first, the last, nodes that they are on;
# replicas, samples on the fullest, its row of the table of sample counts, tensor degree;
# micro-batches of a step, in flight at least, in flight if memory were endless, and as it is; its
# place in a topological order, and what a function counts; forwards and backwards so far.
OPERATORS, HELD, LOW, HIGH, NODES, REPLICAS, SAMPLES, ROW, DEGREE = range(9)
TOTAL, LEAST, WANTED, IN_FLIGHT, ORDER, COUNTED, FORWARDS, BACKWARDS = range(9, 17)
COUNTS = 17

# Seconds of a stage: forward, backward, what the last one leaves of its all-reduce, and its update;
# when it is free, when its next action may begin, and what it has left to do.
# In the last backward, what operators have passed, and until when gradients are summed.
FORWARD, BACKWARD, SUMS, UPDATE, FREE, READY, LEFT, PASSED, SUMMED = range(9)
SECONDS = 9

# Bytes of a stage: parameters, those that are trained, of these tables whose gradients are rows,
# these rows, the largest parameter, the largest gradient; of a sample what is kept; what a pass
# takes besides, of an operator and a sample or of a stage and all its samples; that enter and that
# return, per sample and whatever the samples; gradients that wait for a bucket to be full. The
# first eight are also an operator's.
PARAMETERS, TRAINABLE, TABLES, ROWS, LARGEST, LARGEST_GRADIENT, KEPT, PASS = range(8)
ENTERS, ENTERS_FIXED, RETURNS, RETURNS_FIXED, WAITING = range(8, 13)
BYTES = 13

# Whole numbers of an edge: its ends, and whether it leaves a node.
SOURCE, TARGET, FAR = range(3)
ENDS = 3

# Edges listed by one of their ends: those into a stage, and those out of it.
ENTERING, LEAVING = range(2)

# Of an edge: bytes forward and back, per sample and whatever the samples; seconds of a message
# forward and back on a single link, and of latency; links that share it at either end.
AHEAD, AHEAD_FIXED, BEHIND, BEHIND_FIXED, OCCUPIES, OCCUPIES_BACK, LATENCY = range(7)
LANES, LANES_IN = range(7, 9)
TRAFFIC = 9

# Of a value: bytes per sample and whatever the samples, and 1 where a gradient flows back.
PER_SAMPLE, FIXED, GRADIENT = range(3)

# Of a level of the cluster: devices of a group, and the slowest link up to it.
SIZE, BANDWIDTH, LINK_LATENCY = range(3)

# Rates of the problem. Devices that compute at full speed together, 0 where all do; versions of
# the weights per micro-batch in flight, and more.
(
    MEMORY,
    OPTIMIZER_FACTOR,
    RECEIVE_SLOTS,
    UPDATE_BYTE_S,
    ACTION_S,
    SEND_S,
    SEND_BYTE_S,
    CORES,
    VERSIONS_IN_FLIGHT,
    MORE_VERSIONS,
) = range(10)

_in_flight_samples = cast(Callable[..., int], compiled(in_flight_samples))
_updated_bytes = cast(Callable[..., float], compiled(updated_bytes))
_memory_terms = cast(Callable[..., tuple[float, float, float, float]], compiled(memory_terms))
_summed_bytes = cast(Callable[..., float], compiled(summed_bytes))
_touched_bytes = cast(Callable[..., float], compiled(touched_bytes))
_pass_behind = cast(Callable[..., float], compiled(pass_behind))
_ring_price = cast(Callable[..., tuple[float, float]], compiled(ring_price))
_all_reduce_s = cast(Callable[..., float], compiled(all_reduce_s))
_transfer_s = cast(Callable[..., float], compiled(transfer_s))


@compiled
def count_devices(owner: Table, node: int, counts: Table, on_node: Table) -> None:
    """How many devices every stage has, between which, and on which nodes, [s, node]."""
    for d in range(len(owner)):
        s = owner[d]
        if counts[HELD, s] == 0:
            counts[LOW, s] = d
        if on_node[s, d // node] == 0:
            counts[NODES, s] += 1
        on_node[s, d // node] += 1
        counts[HELD, s] += 1
        counts[HIGH, s] = d


@compiled
def split_samples(
    owner: Table,
    node: int,
    microbatch: Table,
    tensor: Table,
    batch_size: int,
    most_replicas: int,
    row_of: Table,  # [samples] row of the table, or -1 where the profile has none
    degree_of: Table,  # [devices of a replica] its index, or -1
    counts: Table,
) -> bool:
    """Replicas and their samples; whether all have some that the profile covers, and the devices of
    a replica lie inside a node.
    """
    for s in range(len(microbatch)):
        b, held = microbatch[s], counts[HELD, s]
        if held == 0 or held % tensor[s] or node % tensor[s] or tensor[s] >= len(degree_of):
            return False
        replicas = held // tensor[s]
        counts[REPLICAS, s], counts[DEGREE, s] = replicas, degree_of[tensor[s]]
        if replicas > min(b, most_replicas) or b > batch_size or counts[DEGREE, s] < 0:
            return False
        counts[SAMPLES, s] = -(-b // replicas)
        counts[ROW, s] = row_of[counts[SAMPLES, s]]
        short = batch_size % b
        smallest = (short if short else b) // replicas
        covered = counts[ROW, s] >= 0 and row_of[b // replicas] >= 0
        if not covered or (smallest > 0 and row_of[smallest] < 0):
            return False
        counts[TOTAL, s] = -(-batch_size // b)
        if tensor[s] > 1:
            seen, first = 0, 0
            for d in range(len(owner)):
                if owner[d] == s:
                    if seen % tensor[s] == 0:
                        first = d
                    elif d // node != first // node:
                        return False
                    seen += 1
    return True


@compiled
def sum_operators(
    home: Table,
    recompute: Table,
    op_seconds: Table,  # [forward or backward, g, n, i]
    op_bytes: Table,  # [g, parameters to pass, i]
    action_s: float,
    counts: Table,
    seconds: Table,
    nbytes: Table,
) -> bool:
    """Seconds and bytes of the stages; whether every stage has operators."""
    for i in range(len(home)):
        s = home[i]
        g, n = counts[DEGREE, s], counts[ROW, s]
        counts[OPERATORS, s] += 1
        seconds[FORWARD, s] += op_seconds[FORWARD, g, n, i]
        seconds[BACKWARD, s] += op_seconds[BACKWARD, g, n, i]
        for kind in (PARAMETERS, TRAINABLE, TABLES, ROWS, KEPT):
            nbytes[kind, s] += op_bytes[g, kind, i]
        for kind in (LARGEST, LARGEST_GRADIENT):
            nbytes[kind, s] = max(nbytes[kind, s], op_bytes[g, kind, i])
        samples = counts[SAMPLES, s]
        own = op_bytes[g, LARGEST_GRADIENT, i] + op_bytes[g, PASS, i] * samples
        nbytes[PASS, s] = _pass_behind(nbytes[PASS, s], op_bytes[g, KEPT, i] * samples, own)
    for s in range(len(recompute)):
        if counts[OPERATORS, s] == 0:
            return False
        if recompute[s]:
            seconds[BACKWARD, s] += seconds[FORWARD, s]
        seconds[FORWARD, s] += action_s
        seconds[BACKWARD, s] += action_s
    return True


@compiled
def _add_edge(s: int, t: int, edges: int, edge_of: Table, ends: Table) -> int:
    """An edge, if there is none yet; how many there are then."""
    if edge_of[s, t] > 0:
        return edges
    edge_of[s, t], ends[SOURCE, edges], ends[TARGET, edges] = edges + 1, s, t
    return edges + 1


@compiled
def join_stages(
    home: Table,
    producers: Table,  # [v]
    first_reader: Table,  # [v + 1] into readers
    readers: Table,
    values: Table,
    edge_of: Table,  # [s, t] edge and 1, or 0
    counts: Table,
    nbytes: Table,
    ends: Table,
    traffic: Table,
) -> int:
    """Edges between stages and what flows along them; how many there are."""
    edges = 0
    for v in range(len(producers)):
        s = home[producers[v]]
        leaves = False
        for c in range(first_reader[v], first_reader[v + 1]):
            t = home[readers[c]]
            if t == s or counts[COUNTED, t] == v + 1:  # this value has come to it before
                continue
            counts[COUNTED, t], leaves = v + 1, True
            edges = _add_edge(s, t, edges, edge_of, ends)
            e = edge_of[s, t] - 1
            traffic[AHEAD, e] += values[PER_SAMPLE, v]
            traffic[AHEAD_FIXED, e] += values[FIXED, v]
            traffic[BEHIND, e] += values[PER_SAMPLE, v] * values[GRADIENT, v]
            traffic[BEHIND_FIXED, e] += values[FIXED, v] * values[GRADIENT, v]
            nbytes[ENTERS, t] += values[PER_SAMPLE, v]
            nbytes[ENTERS_FIXED, t] += values[FIXED, v]
        if leaves:
            nbytes[RETURNS, s] += values[PER_SAMPLE, v] * values[GRADIENT, v]
            nbytes[RETURNS_FIXED, s] += values[FIXED, v] * values[GRADIENT, v]
    return edges


@compiled
def list_edges(edges: int, ends: Table, first: Table, listed: Table) -> None:
    """Edges by each of their ends: those that enter stage s are ``listed[ENTERING, i]`` for all i
    from ``first[ENTERING, s]`` to ``first[ENTERING, s + 1]``; likewise ``LEAVING``.
    """
    for side, end in ((ENTERING, TARGET), (LEAVING, SOURCE)):
        for s in range(first.shape[1]):
            first[side, s] = 0
        for e in range(edges):
            first[side, ends[end, e]] += 1
        for s in range(1, first.shape[1]):
            first[side, s] += first[side, s - 1]
        # Filled from behind: where a stage ends moves to where it begins.
        for e in range(edges - 1, -1, -1):
            s = ends[end, e]
            first[side, s] -= 1
            listed[side, first[side, s]] = e


@compiled
def sort_stages(ends: Table, first: Table, listed: Table, counts: Table) -> bool:
    """A topological order, the lower number first; whether there is one."""
    count = counts.shape[1]
    for s in range(count):
        counts[COUNTED, s] = first[ENTERING, s + 1] - first[ENTERING, s]
    for at in range(count):
        s = 0
        while s < count and counts[COUNTED, s] != 0:
            s += 1
        if s == count:
            return False
        counts[ORDER, at], counts[COUNTED, s] = s, -1
        for i in range(first[LEAVING, s], first[LEAVING, s + 1]):
            counts[COUNTED, ends[TARGET, listed[LEAVING, i]]] -= 1
    return True


@compiled
def chain_stages(edges: int, edge_of: Table, ends: Table, counts: Table) -> int:
    """Edges from every stage to the next in the order, as far as there are none; how many edges
    there are then.
    """
    for at in range(counts.shape[1] - 1):
        edges = _add_edge(counts[ORDER, at], counts[ORDER, at + 1], edges, edge_of, ends)
    return edges


@compiled
def count_in_flight(
    microbatch: Table,
    k: Table,
    deep: bool,
    flush: bool,
    ends: Table,
    first: Table,
    listed: Table,
    counts: Table,
) -> None:
    """Micro-batches in flight by Table 2 (``plans.in_flight``), at least and wanted."""
    for at in range(len(microbatch) - 1, -1, -1):
        s = counts[ORDER, at]
        b = microbatch[s]
        for flight, hop in ((LEAST, 1), (WANTED, 2 if deep else 1)):
            need = k[s] * b
            for i in range(first[LEAVING, s], first[LEAVING, s + 1]):
                t = ends[TARGET, listed[LEAVING, i]]
                after = counts[flight, t] * microbatch[t]
                more = _in_flight_samples(k[s], b, k[t], microbatch[t], after) - after
                need = max(need, after + hop * more)
            held = -(-need // b)
            counts[flight, s] = min(held, counts[TOTAL, s]) if flush else held


@compiled
def fit_memory(
    microbatch: Table,
    recompute: Table,
    sharded: bool,
    rates: Table,
    ends: Table,
    first: Table,
    listed: Table,
    nbytes: Table,
    counts: Table,
) -> bool:
    """Micro-batches in flight as memory allows (``cost.memory``); whether the least ones fit."""
    for at in range(len(microbatch)):
        s = counts[ORDER, at]
        n, replicas, least = counts[SAMPLES, s], counts[REPLICAS, s], counts[LEAST, s]
        trainable, largest = nbytes[TRAINABLE, s], nbytes[LARGEST, s]
        resident, flight, backward, sums = _memory_terms(
            nbytes[PARAMETERS, s],
            trainable,
            _updated_bytes(trainable, largest, replicas) if sharded else trainable,
            nbytes[LARGEST_GRADIENT, s],
            nbytes[ENTERS, s] * n + nbytes[ENTERS_FIXED, s],
            nbytes[RETURNS, s] * n + nbytes[RETURNS_FIXED, s],
            nbytes[KEPT, s] * n,
            nbytes[PASS, s],
            1.0 if recompute[s] else 0.0,
            replicas,
            1 + rates[MORE_VERSIONS] + rates[VERSIONS_IN_FLIGHT] * least,
            rates[OPTIMIZER_FACTOR],
            rates[RECEIVE_SLOTS],
            nbytes[TABLES, s],
            nbytes[ROWS, s],
        )
        free = rates[MEMORY] - resident - backward
        if least * flight > free or resident + sums > rates[MEMORY]:
            return False
        room = counts[WANTED, s]
        if room > least:
            if flight > 0:
                room = min(room, int(free // flight))
            for i in range(first[ENTERING, s], first[ENTERING, s + 1]):
                x = ends[SOURCE, listed[ENTERING, i]]
                room = min(room, counts[IN_FLIGHT, x] * microbatch[x] // microbatch[s])
        counts[IN_FLIGHT, s] = max(least, room)
    return True


@compiled
def level_of(first: int, last: int, levels: Table) -> int:
    """The level of the cluster on which these devices and all between them meet."""
    for i in range(levels.shape[1] - 1):
        if first // int(levels[SIZE, i]) == last // int(levels[SIZE, i]):
            return i
    return int(levels.shape[1] - 1)


@compiled
def price_messages(
    microbatch: Table,
    node: int,
    edges: int,
    levels: Table,
    rates: Table,
    counts: Table,
    ends: Table,
    traffic: Table,
    seconds: Table,
) -> None:
    """Seconds of the messages of each edge, and of the processors at both ends of it."""
    for e in range(edges):
        s, t = ends[SOURCE, e], ends[TARGET, e]
        size = min(microbatch[s], microbatch[t])
        copies = min(counts[REPLICAS, s], counts[REPLICAS, t])
        forward = traffic[AHEAD, e] * size + traffic[AHEAD_FIXED, e] * copies
        back = traffic[BEHIND, e] * size + traffic[BEHIND_FIXED, e] * copies
        first = min(counts[LOW, s], counts[LOW, t])
        level = level_of(first, max(counts[HIGH, s], counts[HIGH, t]), levels)
        # The devices of a node share its card; inside of one everyone has a link.
        ends[FAR, e] = 1 if level > 0 and node > 1 else 0
        what = NODES if level > 0 else HELD
        traffic[LANES, e], traffic[LANES_IN, e] = counts[what, s], counts[what, t]
        traffic[OCCUPIES, e] = forward / levels[BANDWIDTH, level]
        traffic[OCCUPIES_BACK, e] = back / levels[BANDWIDTH, level]
        traffic[LATENCY, e] = levels[LINK_LATENCY, level]
        if forward > 0:
            share = rates[SEND_S] + rates[SEND_BYTE_S] * forward / counts[REPLICAS, s]
            seconds[FORWARD, s] += share
            seconds[FORWARD, t] += share
        if back > 0:
            share = rates[SEND_S] + rates[SEND_BYTE_S] * back / counts[REPLICAS, t]
            seconds[BACKWARD, s] += share
            seconds[BACKWARD, t] += share


@compiled
def price_sums(
    home: Table,
    sharded: bool,
    flush: bool,
    op_seconds: Table,
    op_bytes: Table,
    levels: Table,
    rates: Table,
    counts: Table,
    nbytes: Table,
    seconds: Table,
) -> None:
    """Seconds of each stage's all-reduce behind its last backward, and of its update.

    With a flush gradients are summed in buckets while the last backward goes on, the last operators
    first; where replicas share the optimizer's state half of the ring comes behind the update.
    """
    half = 0.5 if sharded and flush else 1.0
    for s in range(counts.shape[1]):
        held = nbytes[TRAINABLE, s], nbytes[TABLES, s], nbytes[ROWS, s]
        updated, replicas = _touched_bytes(*held), counts[REPLICAS, s]
        if sharded:
            updated = _updated_bytes(updated, nbytes[LARGEST, s], replicas)
        byte_s, latency_s = _ring(s, levels, counts)
        reduce_s = _all_reduce_s(_summed_bytes(*held), byte_s, latency_s)
        seconds[UPDATE, s] = updated * rates[UPDATE_BYTE_S] + (1 - half) * reduce_s
        if not flush:
            seconds[SUMS, s] = reduce_s
    if not flush:
        return
    for i in range(len(home) - 1, -1, -1):
        s = home[i]
        if counts[REPLICAS, s] > 1:
            g = counts[DEGREE, s]
            seconds[PASSED, s] += op_seconds[BACKWARD, g, counts[ROW, s], i]
            nbytes[WAITING, s] += _summed_bytes(
                op_bytes[g, TRAINABLE, i], op_bytes[g, TABLES, i], op_bytes[g, ROWS, i]
            )
            if nbytes[WAITING, s] > BUCKET_BYTES:
                _sum_bucket(s, half, levels, counts, nbytes, seconds)
    for s in range(counts.shape[1]):
        if counts[REPLICAS, s] > 1:
            _sum_bucket(s, half, levels, counts, nbytes, seconds)
            seconds[SUMS, s] = max(0.0, seconds[SUMMED, s] - seconds[PASSED, s])


@compiled
def _ring(s: int, levels: Table, counts: Table) -> tuple[float, float]:
    """Seconds per byte and of latency of a stage's all-reduces."""
    level = level_of(counts[LOW, s], counts[HIGH, s], levels)
    return _ring_price(
        levels[BANDWIDTH, level], levels[LINK_LATENCY, level], counts[REPLICAS, s], 1
    )


@compiled
def _sum_bucket(
    s: int, half: float, levels: Table, counts: Table, nbytes: Table, seconds: Table
) -> None:
    """Sum what waits, when the operators so far have been passed and the sums before have ended."""
    byte_s, latency_s = _ring(s, levels, counts)
    sum_s = _transfer_s(nbytes[WAITING, s], byte_s, latency_s) * half
    seconds[SUMMED, s] = max(seconds[SUMMED, s], seconds[PASSED, s]) + sum_s
    nbytes[WAITING, s] = 0.0
