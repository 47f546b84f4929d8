"""The clock of the evaluator: stages as single machines, compiled.

Letters and records are those of ``stage_tables``. Ways of messages are 0 ahead and 1 back. When
ports are free to send, to receive and to sum is in ``leaving``, ``entering`` and ``summing``: first
links of stages, [s], then the cards of nodes, of which a stage takes all at once.
"""

from __future__ import annotations

import numpy as np

from anabranch.jit import compiled, entry
from anabranch.planner.auto.stage_tables import (
    Record,
    Table,
    chain_stages,
    count_devices,
    count_in_flight,
    fit_memory,
    join_stages,
    message_bytes,
    order_edges,
    price_messages,
    price_sums,
    sort_stages,
    split_samples,
    sum_operators,
)

SHOWN = 96
"""Micro-batches that are run; the others take as long each as those in the middle of these."""

MOST_SHOWN = 8 * SHOWN
"""That are run at most where stages differ in them, so that no period shows."""


@compiled
def _least_s(problem: Record, stages: Table, edges: Table) -> float:
    """No step is shorter than the busiest stage with the way to it and back from it, or than all
    work on the cores that are shared.
    """
    work, longest, update = 0.0, 0.0, 0.0
    for place in range(len(stages)):
        stage = stages[stages[place].ordered]
        stage.behind = stage.sums
        e = stage.entering
        while e >= 0:
            edge = edges[e]
            source = stages[edge.source]
            needed = -(-stage.microbatch // source.microbatch)
            first = min(source.microbatch, stage.microbatch)
            ahead = source.before + (needed - 1) * source.forward
            ahead += source.last_forward if needed == source.total else source.forward
            ahead += _message_s(edge, 0, first)
            back = source.behind + source.last_backward
            back += _message_s(edge, 1, min(source.last, stage.last))
            stage.before = max(stage.before, ahead)
            stage.behind = max(stage.behind, back)
            e = edge.next_entering
        compute = _compute_s(stage)
        work += compute * stage.devices
        if problem.flush:  # nobody updates before all have their sums
            longest = max(longest, stage.before + compute + stage.behind)
            update = max(update, stage.update)
        else:
            longest = max(longest, compute + stage.sums + stage.update)
    return max(longest, work / problem.cores if problem.cores > 0 else 0.0) + update


@compiled
def _compute_s(stage: Record) -> float:
    """Seconds of a step in which a stage computes."""
    full = (stage.total - 1) * (stage.forward + stage.backward)
    return float(full + stage.last_forward + stage.last_backward)


@compiled
def _message_s(edge: Record, way: int, samples: int) -> float:
    """Seconds of a message that waits for nothing."""
    nbytes = message_bytes(edge, way, samples)
    if nbytes == 0:
        return 0.0
    links = min(edge.source_links, edge.target_links)
    return float(nbytes * edge.byte_s / links + edge.latency)


@compiled
def _busiest_port_s(
    batch_size: int,
    count: int,
    stages: Table,
    edges: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
) -> float:
    """Seconds of the messages of a batch on the port that has most of them."""
    longest = 0.0
    for e in range(count):
        edge = edges[e]
        s, t, far = edge.source, edge.target, edge.far
        size = min(stages[s].microbatch, stages[t].microbatch)
        ahead = message_bytes(edge, 0, size) * edge.byte_s * batch_size / size
        back = message_bytes(edge, 1, size) * edge.byte_s * batch_size / size
        for ports, x, busy in (
            (leaving, s, ahead / edge.source_links),
            (entering, t, ahead / edge.target_links),
            (leaving, t, back / edge.target_links),
            (entering, s, back / edge.source_links),
        ):
            until = _free_at(ports, x, far, stages, nodes) + busy
            _occupy(ports, x, far, until, stages, nodes)
            longest = max(longest, until)
    return longest


@compiled
def _free_at(ports: Table, s: int, far: int, stages: Table, nodes: Table) -> float:
    """When all ports of a stage are free."""
    free = float(ports[s])
    if far > 0:
        for i in range(stages[s].nodes):
            free = max(free, ports[nodes[s, i]])
    return free


@compiled
def _occupy(ports: Table, s: int, far: int, until: float, stages: Table, nodes: Table) -> None:
    """Take all ports of a stage."""
    ports[s] = until
    if far > 0:
        for i in range(stages[s].nodes):
            ports[nodes[s, i]] = until


@compiled
def _transfer(
    edge: Record,
    way: int,
    samples: int,
    start: float,
    stages: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
) -> float:
    """When a message has been sent whose ports are taken from a start on, or as soon as they are
    free.
    """
    busy = message_bytes(edge, way, samples) * edge.byte_s
    if busy == 0:
        return start
    sender, receiver, far = edge.source, edge.target, edge.far
    leaves, enters = busy / edge.source_links, busy / edge.target_links
    if way == 1:
        sender, receiver, leaves, enters = receiver, sender, enters, leaves
    start = max(start, _free_at(leaving, sender, far, stages, nodes))
    start = max(start, _free_at(entering, receiver, far, stages, nodes))
    _occupy(leaving, sender, far, start + leaves, stages, nodes)
    _occupy(entering, receiver, far, start + enters, stages, nodes)
    return float(start + max(leaves, enters))


@compiled
def _count_shown(stages: Table) -> int:
    """Of many micro-batches, how many show the period: 0 for all, -1 where there are too many."""
    alike, depth, most = True, 0, 0
    for s in range(len(stages)):
        alike = alike and stages[s].microbatch == stages[0].microbatch
        depth = max(depth, stages[s].in_flight)
        most = max(most, stages[s].total)
    shown = min(max(SHOWN, 4 * depth), MOST_SHOWN)
    if alike and most > shown:
        return shown
    return -1 if most > MOST_SHOWN else 0


@compiled
def _goes_back(stage: Record) -> bool:
    """Whether a stage's next action is a backward: kFkB."""
    flight = stage.in_flight
    if stage.backwards % stage.k == 0:
        flight += stage.backwards
    return bool(stage.forwards >= min(stage.total, flight))


@compiled
def _turn(stage: Record, at: float) -> None:
    """A stage turns to its next action, if there is one."""
    stage.ready, stage.until, stage.begun = at, np.inf, 0
    stage.way = 1 if _goes_back(stage) else 0
    stage.taking = stage.leaving if stage.way == 1 else stage.entering


@compiled
def _take(
    s: int,
    batch_size: int,
    slots: int,
    stages: Table,
    edges: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    cores: Table,
    arrivals: Table,
) -> None:
    """A stage takes the messages of its next action, as far as they are sent; for each one it posts
    the receive of a later one, which may have waited for that. With the last it can begin.
    """
    stage = stages[s]
    way = stage.way
    done = stage.backwards if way == 1 else stage.forwards
    if done == stage.total:
        return
    size = stage.microbatch
    stop = min((done + 1) * size, batch_size)
    first = (done + slots) * size
    while stage.taking >= 0:
        e = stage.taking
        edge = edges[e]
        sender = stages[edge.target if way == 1 else edge.source]
        sent = (sender.backwards if way == 1 else sender.forwards) * sender.microbatch
        if sent < stop:
            return
        stage.ready = max(stage.ready, arrivals[way, e, done])
        if way == 1:
            edge.posted_back = done + slots + 1
        else:
            edge.posted_ahead = done + slots + 1
        samples = min(sent, batch_size, first + size) - first
        if samples > 0:
            gone = _transfer(edge, way, samples, stage.ready, stages, nodes, leaving, entering)
            arrivals[way, e, done + slots] = gone + edge.latency
        stage.taking = edge.next_leaving if way == 1 else edge.next_entering
    stage.until = stage.ready
    if len(cores) == 0:
        stage.until += _action_s(stage)


@compiled
def _action_s(stage: Record) -> float:
    """Seconds of a stage's next action."""
    if stage.way == 1:
        last = stage.backwards + 1 == stage.total
        return float(stage.last_backward if last else stage.backward)
    return float(stage.last_forward if stage.forwards + 1 == stage.total else stage.forward)


@compiled
def _compute(start: float, seconds: float, devices: int, cores: Table) -> float:
    """The end of an action that starts then, on so many devices.

    Args:
        cores: when each of those is free that devices share.
    """
    end = start + seconds
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
    s: int,
    end: float,
    stages: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    summing: Table,
) -> float:
    """When the gradients of a stage are summed. What is left of that when its last backward ends
    waits for messages on the same links; of those to come it lets each go first.
    """
    stage = stages[s]
    if stage.sums == 0:
        return end
    far = 1 if stage.nodes > 1 else 0
    start = max(end, _free_at(leaving, s, far, stages, nodes))
    start = max(start, _free_at(entering, s, far, stages, nodes))
    start = max(start, _free_at(summing, s, far, stages, nodes))
    _occupy(summing, s, far, start + stage.sums, stages, nodes)
    return float(start + stage.sums)


@compiled
def _run(
    batch_size: int,
    slots: int,
    stages: Table,
    edges: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    summing: Table,
    cores: Table,
    arrivals: Table,  # [way, e, micro-batch of the receiver] of the last of its messages
    limit: float,
) -> float:
    """The clock: of all stages the one whose next action ends first, message after message.

    Returns:
        Seconds of the step; infinity where they are beyond the limit.
    """
    shown, count = _count_shown(stages), stages[0].total
    if shown < 0:
        return np.inf
    slow, actions, update = 0, 0, 0.0
    if shown > 0:
        batch_size -= (count - shown) * stages[0].microbatch
    for s in range(len(stages)):
        stage = stages[s]
        if shown > 0:
            stage.total = shown
        stage.left = _compute_s(stage) + stage.behind
        update = max(update, stage.update)
        actions += 2 * stage.total
        if stage.forward + stage.backward > stages[slow].forward + stages[slow].backward:
            slow = s
        _turn(stage, 0.0)
    for s in range(len(stages)):
        _take(s, batch_size, slots, stages, edges, nodes, leaving, entering, cores, arrivals)
    if shown > 0:
        limit -= (count - shown) * (stages[slow].forward + stages[slow].backward)
    first, last, period = shown // 3, 2 * shown // 3, 0.0
    step = 0.0
    while actions > 0:
        s, end = len(stages), np.inf
        for t in range(len(stages)):
            if stages[t].until < end:
                s, end = t, stages[t].until
        if s == len(stages):
            return np.inf
        stage = stages[s]
        way, seconds = stage.way, _action_s(stage)
        if len(cores) > 0 and stage.begun == 0:
            stage.begun = 1
            stage.until = _compute(end, seconds, stage.devices, cores)
            continue
        actions -= 1
        stage.left -= seconds
        if end + stage.left + update > limit:
            return np.inf
        if way == 1:
            done = stage.backwards
            stage.backwards += 1
        else:
            done = stage.forwards
            stage.forwards += 1
        if way == 1 and s == slow and shown > 0:
            if done == first:
                period -= end / (last - first)
            elif done == last:
                period += end / (last - first)
        low = done * stage.microbatch
        high = min(low + stage.microbatch, batch_size)
        e = stage.entering if way == 1 else stage.leaving
        while e >= 0:
            edge = edges[e]
            size = stages[edge.source if way == 1 else edge.target].microbatch
            posted = edge.posted_back if way == 1 else edge.posted_ahead
            for j in range(low // size, min(-(-high // size), posted)):
                samples = min(high, (j + 1) * size) - max(low, j * size)
                gone = _transfer(edge, way, samples, end, stages, nodes, leaving, entering)
                arrivals[way, e, j] = gone + edge.latency
            e = edge.next_entering if way == 1 else edge.next_leaving
        _turn(stage, end)
        _take(s, batch_size, slots, stages, edges, nodes, leaving, entering, cores, arrivals)
        e = stage.entering if way == 1 else stage.leaving
        while e >= 0:
            edge = edges[e]
            receiver = edge.source if way == 1 else edge.target
            if stages[receiver].taking == e:
                _take(
                    receiver,
                    batch_size,
                    slots,
                    stages,
                    edges,
                    nodes,
                    leaving,
                    entering,
                    cores,
                    arrivals,
                )
            e = edge.next_entering if way == 1 else edge.next_leaving
        if way == 1 and done + 1 == stage.total:
            step = max(step, _sum(s, end, stages, nodes, leaving, entering, summing))
    return step + update + (count - shown) * period if shown > 0 else step + update


@entry
def step_s(
    home: Table,
    owner: Table,
    microbatch: Table,
    k: Table,
    recompute: Table,
    tensor: Table,
    count: int,
    deep: bool,
    chained: bool,
    sharded: bool,
    limit: float,
    stages: Table,
    problems: Table,  # the only one
    degree_of: Table,
    measured: Table,
    op_seconds: Table,
    op_bytes: Table,
    values: Table,
    readers: Table,
    levels: Table,
    edges: Table,
    edge_of: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    summing: Table,
    cores: Table,
    arrivals: Table,
) -> float:
    """Seconds of a step, or of a period without a flush; infinity where there is none in the limit.

    Args:
        count: of stages; tables of stages have more entries.
        stages: this and the next ones: see ``stage_tables``; stages, ``edge_of``, ports and cores
            are all zeros.
    """
    stages, microbatch, recompute = stages[:count], microbatch[:count], recompute[:count]
    problem = problems[0]
    batch_size, flush = problem.batch_size, problem.flush > 0
    if not count_devices(owner, tensor, levels[0].devices, stages, nodes):
        return np.inf
    if not split_samples(microbatch, tensor, degree_of, measured, problem, stages):
        return np.inf
    if not sum_operators(home, recompute, op_seconds, op_bytes, problem.action, stages):
        return np.inf
    for s in range(len(stages)):
        stage = stages[s]
        stage.k, stage.entering, stage.leaving = k[s], -1, -1
        for i in range(stage.nodes):  # their ports come behind those of stages
            nodes[s, i] += len(owner)
    joined = join_stages(home, values, readers, stages, edges, edge_of)
    if not sort_stages(edges, stages):
        return np.inf
    if chained:
        joined = chain_stages(joined, stages, edges, edge_of)
    order_edges(stages, edges)
    count_in_flight(deep, flush, stages, edges)
    if not fit_memory(recompute, sharded, problem, stages, edges):
        return np.inf
    price_messages(joined, levels, problem, stages, edges)
    price_sums(home, sharded, op_seconds, op_bytes, levels, problem, stages)
    least = _least_s(problem, stages, edges)
    if not flush:
        least = max(
            least, _busiest_port_s(batch_size, joined, stages, edges, nodes, leaving, entering)
        )
    if least > limit or not flush:
        return least if least <= limit else np.inf
    # Work takes cores in turn instead of sharing them, which adds up to the same.
    seconds = _run(
        batch_size,
        problem.receive_slots,
        stages,
        edges,
        nodes,
        leaving,
        entering,
        summing,
        cores,
        arrivals,
        limit,
    )
    seconds = max(seconds, least)
    return seconds if seconds <= limit else np.inf
