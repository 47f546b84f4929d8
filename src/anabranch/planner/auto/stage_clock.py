"""The clock of the evaluator: stages as single machines, compiled.

Only ``evaluator`` imports this file, when something is searched: importing numba takes a quarter of
a second, and compiling the first time some seconds; machine code is kept on disk.

Axes and the rows of tables are those of ``stage_tables``.
"""

from __future__ import annotations

import numpy as np

from anabranch.planner.auto.stage_tables import (
    ACTION_S,
    BACKWARD,
    BACKWARDS,
    BYTES,
    CORES,
    COUNTS,
    ENDS,
    ENTERING,
    FORWARD,
    FORWARDS,
    FREE,
    HELD,
    IN_FLIGHT,
    INTO,
    LATENCY,
    LEAVING,
    LEFT,
    OCCUPIES,
    OCCUPIES_BACK,
    OUT,
    READY,
    SECONDS,
    SIZE,
    SOURCE,
    TAIL,
    TARGET,
    TOTAL,
    TRAFFIC,
    Table,
    chain_stages,
    count_devices,
    count_in_flight,
    fit_memory,
    join_stages,
    list_edges,
    price_messages,
    price_sums,
    sort_stages,
    split_samples,
    sum_operators,
)
from anabranch.planner.toolkit.jit import compiled, entry

_FULL = 96
"""Micro-batches that are run; the others take as long each as those in the middle of these."""


@compiled
def _busiest_s(
    microbatch: Table, batch_size: int, cores: float, counts: Table, seconds: Table
) -> float:
    """No step is shorter than the busiest stage, or than all work on the cores that are shared."""
    work, busiest = 0.0, 0.0
    for s in range(len(microbatch)):
        compute_s = (seconds[FORWARD, s] + seconds[BACKWARD, s]) * batch_size / microbatch[s]
        busiest = max(busiest, compute_s + seconds[TAIL, s])
        work += compute_s * counts[HELD, s]
    return max(busiest, work / cores) if cores > 0 else busiest


@compiled
def _busiest_port_s(
    microbatch: Table, batch_size: int, edges: int, ends: Table, traffic: Table, ports: Table
) -> float:
    """Seconds of the messages of a batch on the port that has most of them."""
    for e in range(edges):
        s, t = ends[SOURCE, e], ends[TARGET, e]
        messages = batch_size / min(microbatch[s], microbatch[t])
        ports[0, ends[OUT, e]] += traffic[OCCUPIES, e] * messages
        ports[1, ends[INTO, e]] += traffic[OCCUPIES, e] * messages
        ports[0, ends[INTO, e]] += traffic[OCCUPIES_BACK, e] * messages
        ports[1, ends[OUT, e]] += traffic[OCCUPIES_BACK, e] * messages
    longest = 0.0
    for port in range(ports.shape[1]):
        longest = max(longest, ports[0, port], ports[1, port])
    return longest


@compiled
def _fewer_microbatches(microbatch: Table, counts: Table) -> int:
    """Of many micro-batches, how many show the period: 0 for all, -1 where there are too many."""
    alike, depth, most = True, 0, 0
    for s in range(len(microbatch)):
        alike = alike and microbatch[s] == microbatch[0]
        depth = max(depth, counts[IN_FLIGHT, s])
        most = max(most, counts[TOTAL, s])
    shown = max(_FULL, 4 * depth)
    if alike and most > shown:
        return shown
    return -1 if most > 8 * shown else 0


@compiled
def _next_way(s: int, k: Table, counts: Table) -> int:
    """Whether a stage's next action is a forward, 0, or a backward, 1: kFkB."""
    begun, ended = counts[FORWARDS, s], counts[BACKWARDS, s]
    flight = counts[IN_FLIGHT, s] + (ended if ended % k[s] == 0 else 0)
    return 0 if begun < counts[TOTAL, s] and begun < flight else 1


@compiled
def _starts_at(
    t: int,
    way: int,
    batch_size: int,
    microbatch: Table,
    counts: Table,
    seconds: Table,
    ends: Table,
    first: Table,
    listed: Table,
    arrivals: Table,
) -> float:
    """When the next action of a stage may begin; infinity where that is not known yet."""
    done = counts[FORWARDS + way, t]
    if done == counts[TOTAL, t]:
        return np.inf
    start: float = seconds[FREE, t]
    stop = min((done + 1) * microbatch[t], batch_size)
    side = ENTERING + way
    for i in range(first[side, t], first[side, t + 1]):
        e = listed[side, i]
        x = ends[SOURCE + way, e]
        need = min(-(-stop // microbatch[x]), counts[TOTAL, x])
        if counts[FORWARDS + way, x] < need:
            return np.inf
        start = max(start, arrivals[way, e, need - 1])
    return start


@compiled
def _send(
    e: int, way: int, size: float, end: float, ends: Table, traffic: Table, ports: Table
) -> float:
    """When the messages of a micro-batch along an edge arrive that are sent at its end.

    Args:
        size: samples of the sender's micro-batch per one of the receiver's; a larger one is several
            messages.
    """
    busy: float = traffic[OCCUPIES + way, e]
    if busy == 0:
        return end
    a, b = ends[OUT + way, e], ends[INTO - way, e]
    free: float = max(end, ports[0, a], ports[1, b]) + busy * max(1.0, size)
    ports[0, a] = ports[1, b] = free
    arrival: float = free + traffic[LATENCY, e]
    return arrival


@compiled
def _run(
    batch_size: int,
    microbatch: Table,
    k: Table,
    counts: Table,
    seconds: Table,
    ends: Table,
    traffic: Table,
    first: Table,
    listed: Table,
    ports: Table,  # [leaving or entering, port] when it is free
    arrivals: Table,  # [forward or backward, e, micro-batch of the sender] of its message
    marks: Table,  # [micro-batch] ends of the backwards of the slowest stage
    limit: float,
) -> bool:
    """The clock: of all stages the one whose next action begins first, message after message.

    Returns:
        Whether the step ends within the limit; ``seconds[FREE]`` has the last end of each stage.
    """
    count = len(microbatch)
    slow, actions = 0, 0
    for s in range(count):
        seconds[READY, s] = -1.0  # not known; infinity while it waits
        both = seconds[FORWARD, s] + seconds[BACKWARD, s]
        seconds[LEFT, s] = both * counts[TOTAL, s] + seconds[TAIL, s]
        actions += 2 * counts[TOTAL, s]
        if both > seconds[FORWARD, slow] + seconds[BACKWARD, slow]:
            slow = s
    for _ in range(actions):
        s, soonest = -1, np.inf
        for t in range(count):
            if seconds[READY, t] < 0:
                way = _next_way(t, k, counts)
                seconds[READY, t] = _starts_at(
                    t, way, batch_size, microbatch, counts, seconds, ends, first, listed, arrivals
                )
            if seconds[READY, t] < soonest:
                s, soonest = t, seconds[READY, t]
        if s < 0:
            return False
        way = _next_way(s, k, counts)
        took, done = seconds[FORWARD + way, s], counts[FORWARDS + way, s]
        end = soonest + took
        seconds[LEFT, s] -= took
        if end + seconds[LEFT, s] > limit:
            return False
        seconds[FREE, s], seconds[READY, s] = end, -1.0
        counts[FORWARDS + way, s] = done + 1
        if way == 1 and s == slow:
            marks[done] = end
        side = LEAVING - way
        for i in range(first[side, s], first[side, s + 1]):
            e = listed[side, i]
            t = ends[TARGET - way, e]
            size = microbatch[s] / microbatch[t]
            arrivals[way, e, done] = _send(e, way, size, end, ends, traffic, ports)
            if seconds[READY, t] == np.inf:
                seconds[READY, t] = -1.0
    return True


@entry
def step_s(
    home: Table,
    owner: Table,
    microbatch: Table,
    k: Table,
    recompute: Table,
    tensor: Table,
    deep: bool,
    chained: bool,
    sharded: bool,
    batch_size: int,
    most_replicas: int,
    flush: bool,
    row_of: Table,
    degree_of: Table,
    op_seconds: Table,
    op_bytes: Table,
    producers: Table,
    first_reader: Table,
    readers: Table,
    values: Table,
    levels: Table,
    rates: Table,
    limit: float,
) -> float:
    """Seconds of a step, or of a period without a flush; infinity where there is none in the limit.

    Args:
        row_of: this and the next ones: see ``stage_tables``.
    """
    never = np.inf
    count, devices, node = len(microbatch), len(owner), int(levels[SIZE, 0])
    counts = np.zeros((COUNTS, count), np.int64)
    seconds, nbytes = np.zeros((SECONDS, count)), np.zeros((BYTES, count))
    count_devices(owner, node, counts)
    if not split_samples(
        owner, node, microbatch, tensor, batch_size, most_replicas, row_of, degree_of, counts
    ):
        return never
    if not sum_operators(
        home, recompute, op_seconds, op_bytes, rates[ACTION_S], counts, seconds, nbytes
    ):
        return never

    most = min(len(readers), count * count) + count
    ends, traffic = np.zeros((ENDS, most), np.int64), np.zeros((TRAFFIC, most))
    edge_of = np.zeros((count, count), np.int64)
    edges = join_stages(
        home, producers, first_reader, readers, values, edge_of, counts, nbytes, ends, traffic
    )
    first, listed = np.zeros((2, count + 1), np.int64), np.zeros((2, most), np.int64)
    list_edges(edges, ends, first, listed)
    if not sort_stages(ends, first, listed, counts):
        return never
    if chained:
        edges = chain_stages(edges, edge_of, ends, counts)
        list_edges(edges, ends, first, listed)

    count_in_flight(microbatch, k, deep, flush, ends, first, listed, counts)
    if not fit_memory(microbatch, recompute, sharded, rates, ends, first, listed, nbytes, counts):
        return never
    price_messages(microbatch, node, edges, levels, rates, counts, ends, traffic, seconds)
    price_sums(sharded, flush, levels, rates, counts, nbytes, seconds)

    busiest = _busiest_s(microbatch, batch_size, rates[CORES], counts, seconds)
    ports = np.zeros((2, count + devices))
    if not flush:
        busiest = max(busiest, _busiest_port_s(microbatch, batch_size, edges, ends, traffic, ports))
    if busiest > limit:
        return never
    if not flush:
        return busiest

    fewer, total = _fewer_microbatches(microbatch, counts), counts[TOTAL, 0]
    if fewer < 0:
        return never
    longest = 0
    for s in range(count):
        if fewer > 0:
            counts[TOTAL, s] = fewer
        longest = max(longest, counts[TOTAL, s])
    arrivals, marks = np.zeros((2, edges, longest)), np.zeros(longest)
    if not _run(
        batch_size,
        microbatch,
        k,
        counts,
        seconds,
        ends,
        traffic,
        first,
        listed,
        ports,
        arrivals,
        marks,
        limit,
    ):
        return never
    step = busiest
    for s in range(count):
        step = max(step, seconds[FREE, s] + seconds[TAIL, s])
    if fewer > 0:
        a, b = fewer // 3, 2 * fewer // 3
        step += (total - fewer) * (marks[b] - marks[a]) / (b - a)
    return step if step <= limit else never
