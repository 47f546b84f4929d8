"""The clock of the evaluator: stages as single machines, compiled.

Only ``evaluator`` imports this file, when something is searched: importing numba takes a quarter of
a second, and compiling the first time some twenty; machine code is kept on disk.

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
    FAR,
    FORWARD,
    FORWARDS,
    FREE,
    HELD,
    IN_FLIGHT,
    LANES,
    LATENCY,
    LEAVING,
    LEFT,
    NODES,
    OCCUPIES,
    READY,
    SECONDS,
    SIZE,
    SOURCE,
    SUMMED,
    SUMS,
    TARGET,
    TOTAL,
    TRAFFIC,
    UPDATE,
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
    microbatch: Table, batch_size: int, flush: bool, cores: float, counts: Table, seconds: Table
) -> float:
    """No step is shorter than the busiest stage, or than all work on the cores that are shared."""
    work, busiest, update = 0.0, 0.0, 0.0
    for s in range(len(microbatch)):
        compute_s = (seconds[FORWARD, s] + seconds[BACKWARD, s]) * batch_size / microbatch[s]
        if flush:  # nobody updates before all have their sums
            busiest = max(busiest, compute_s + seconds[SUMS, s])
            update = max(update, seconds[UPDATE, s])
        else:
            busiest = max(busiest, compute_s + seconds[SUMS, s] + seconds[UPDATE, s])
        work += compute_s * counts[HELD, s]
    return max(busiest, work / cores if cores > 0 else 0.0) + update


@compiled
def _busiest_port_s(
    microbatch: Table,
    batch_size: int,
    edges: int,
    ends: Table,
    traffic: Table,
    on_node: Table,
    ports: Table,
) -> float:
    """Seconds of the messages of a batch on the port that has most of them."""
    for e in range(edges):
        messages = batch_size / min(microbatch[ends[SOURCE, e]], microbatch[ends[TARGET, e]])
        for way in range(2):
            for side in range(2):
                busy = traffic[OCCUPIES + way, e] * messages
                _occupy(e, way, side, 0.0, busy, ends, traffic, on_node, ports)
    longest = 0.0
    for port in range(ports.shape[1]):
        longest = max(longest, ports[0, port], ports[1, port])
    return longest


@compiled
def _free_at(e: int, way: int, side: int, ends: Table, on_node: Table, ports: Table) -> float:
    """When all ports at one end of a message are free.

    Args:
        way: 0 forward, 1 back.
        side: 0 where it leaves, 1 where it enters.
    """
    stage = ends[SOURCE + (way + side) % 2, e]
    count, free = on_node.shape[0], 0.0
    if ends[FAR, e] == 0:
        free = ports[side, stage]
    else:
        for i in range(on_node.shape[1]):
            if on_node[stage, i] > 0:
                free = max(free, ports[side, count + i])
    return free


@compiled
def _occupy(
    e: int,
    way: int,
    side: int,
    start: float,
    busy: float,
    ends: Table,
    traffic: Table,
    on_node: Table,
    ports: Table,
) -> float:
    """Take all ports at one end of a message from a start on, or as soon as they are free; until
    when.

    Args:
        busy: seconds on a single link.
    """
    end = (way + side) % 2
    stage, count = ends[SOURCE + end, e], on_node.shape[0]
    seconds: float = busy / traffic[LANES + end, e]
    if ends[FAR, e] == 0:
        ports[side, stage] = max(start, ports[side, stage]) + seconds
    else:
        for i in range(on_node.shape[1]):
            if on_node[stage, i] > 0:
                ports[side, count + i] = max(start, ports[side, count + i]) + seconds
    return start + seconds


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
    e: int,
    way: int,
    size: float,
    end: float,
    ends: Table,
    traffic: Table,
    on_node: Table,
    ports: Table,
) -> float:
    """When the messages of a micro-batch along an edge arrive that are sent at its end.

    Args:
        size: samples of the sender's micro-batch per one of the receiver's; a larger one is several
            messages.
    """
    busy = traffic[OCCUPIES + way, e] * max(1.0, size)
    if busy == 0:
        return end
    start = max(end, _free_at(e, way, 0, ends, on_node, ports))
    start = max(start, _free_at(e, way, 1, ends, on_node, ports))
    left = _occupy(e, way, 0, start, busy, ends, traffic, on_node, ports)
    entered = _occupy(e, way, 1, start, busy, ends, traffic, on_node, ports)
    arrival: float = max(left, entered) + traffic[LATENCY, e]
    return arrival


@compiled
def _compute(start: float, seconds: float, devices: int, cores: Table) -> float:
    """The end of an action that starts then, on so many devices.

    Args:
        cores: when each of those is free that devices share; empty where each has its own.
    """
    if len(cores) == 0:
        return start + seconds
    end = start
    for _ in range(devices):
        core = 0
        for c in range(len(cores)):
            if cores[c] < cores[core]:
                core = c
        cores[core] = max(start, cores[core]) + seconds
        end = max(end, cores[core])
    return end


@compiled
def _sum(
    s: int, end: float, sent: float, counts: Table, seconds: Table, on_node: Table, ports: Table
) -> float:
    """When the gradients of a stage are summed. What is left of that when its last backward ends
    waits for messages on the same links; of those to come it lets each go first.

    Args:
        sent: when the messages of the last backward have left.
    """
    if seconds[SUMS, s] == 0:
        return end
    start, count = sent, on_node.shape[0]
    far = counts[NODES, s] > 1
    for i in range(on_node.shape[1]):
        if far and on_node[s, i] > 0:
            start = max(start, ports[0, count + i], ports[1, count + i], ports[2, count + i])
    summed: float = start + seconds[SUMS, s]
    for i in range(on_node.shape[1]):
        if far and on_node[s, i] > 0:
            ports[2, count + i] = summed
    return summed


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
    on_node: Table,  # [s, node] devices
    ports: Table,  # [leaving or entering or summing, stage or node] when it is free
    cores: Table,
    arrivals: Table,  # [forward or backward, e, micro-batch of the sender] of its message
    marks: Table,  # [micro-batch] ends of the backwards of the slowest stage
    limit: float,
) -> bool:
    """The clock: of all stages the one whose next action begins first, message after message.

    Returns:
        Whether the step ends within the limit; ``seconds[SUMMED]`` has the end of each stage.
    """
    count = len(microbatch)
    slow, actions, update = 0, 0, 0.0
    for s in range(count):
        seconds[READY, s] = -1.0  # not known; infinity while it waits
        both = seconds[FORWARD, s] + seconds[BACKWARD, s]
        seconds[LEFT, s] = both * counts[TOTAL, s] + seconds[SUMS, s]
        update = max(update, seconds[UPDATE, s])
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
        end = _compute(soonest, took, counts[HELD, s], cores)
        seconds[LEFT, s] -= took
        if end + seconds[LEFT, s] + update > limit:
            return False
        seconds[FREE, s], seconds[READY, s] = end, -1.0
        counts[FORWARDS + way, s] = done + 1
        if way == 1 and s == slow:
            marks[done] = end
        side = LEAVING - way
        sent = end
        for i in range(first[side, s], first[side, s + 1]):
            e = listed[side, i]
            t = ends[TARGET - way, e]
            size = microbatch[s] / microbatch[t]
            arrival = _send(e, way, size, end, ends, traffic, on_node, ports)
            arrivals[way, e, done] = arrival
            sent = max(sent, arrival - traffic[LATENCY, e])
            if seconds[READY, t] == np.inf:
                seconds[READY, t] = -1.0
        if way == 1 and done + 1 == counts[TOTAL, s]:
            seconds[SUMMED, s] = _sum(s, end, sent, counts, seconds, on_node, ports)
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
    on_node = np.zeros((count, -(-devices // node)), np.int64)
    count_devices(owner, node, counts, on_node)
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
    price_sums(home, sharded, flush, op_seconds, op_bytes, levels, rates, counts, nbytes, seconds)

    busiest = _busiest_s(microbatch, batch_size, flush, rates[CORES], counts, seconds)
    ports = np.zeros((3, count + on_node.shape[1]))
    if not flush:
        busiest = max(
            busiest, _busiest_port_s(microbatch, batch_size, edges, ends, traffic, on_node, ports)
        )
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
    # Work takes cores in turn instead of sharing them, which adds up to the same.
    cores = np.zeros(round(rates[CORES]))
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
        on_node,
        ports,
        cores,
        arrivals,
        marks,
        limit,
    ):
        return never
    step, update = 0.0, 0.0
    for s in range(count):
        step = max(step, seconds[SUMMED, s])
        update = max(update, seconds[UPDATE, s])
    step = max(step + update, busiest)
    if fewer > 0:
        a, b = fewer // 3, 2 * fewer // 3
        step += (total - fewer) * (marks[b] - marks[a]) / (b - a)
    return step if step <= limit else never
