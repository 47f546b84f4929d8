"""The clock of the evaluator: stages as single machines, compiled.

Letters and records are those of ``stage_tables``. Ways of messages are 0 ahead and 1 back. When
ports are free to send, to receive and to sum is in ``leaving``, ``entering`` and ``summing``: first
links of stages inside a node, [s], then the cards of nodes, of which a stage takes all at once.
"""

from __future__ import annotations

import numpy as np

from anabranch.planner.auto.stage_tables import (
    Record,
    Table,
    chain_stages,
    count_devices,
    count_in_flight,
    fit_memory,
    join_stages,
    order_edges,
    price_messages,
    price_sums,
    sort_stages,
    split_samples,
    sum_operators,
)
from anabranch.planner.toolkit.jit import compiled, entry

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
            ahead = source.before + needed * source.forward + _message_s(edge, edge.ahead)
            back = source.behind + source.backward + _message_s(edge, edge.back)
            stage.before = max(stage.before, ahead)
            stage.behind = max(stage.behind, back)
            e = edge.next_entering
        compute = (stage.forward + stage.backward) * problem.batch_size / stage.microbatch
        work += compute * stage.devices
        if problem.flush:  # nobody updates before all have their sums
            longest = max(longest, stage.before + compute + stage.behind)
            update = max(update, stage.update)
        else:
            longest = max(longest, compute + stage.sums + stage.update)
    return max(longest, work / problem.cores if problem.cores > 0 else 0.0) + update


@compiled
def _message_s(edge: Record, busy: float) -> float:
    """Seconds of a message that waits for nothing."""
    if busy == 0:
        return 0.0
    return float(busy / min(edge.source_links, edge.target_links) + edge.latency)


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
        messages = batch_size / min(stages[s].microbatch, stages[t].microbatch)
        ahead, back = edge.ahead * messages, edge.back * messages
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
    if far == 0:
        return float(ports[s])
    free = 0.0
    for i in range(stages[s].nodes):
        free = max(free, ports[nodes[s, i]])
    return free


@compiled
def _occupy(ports: Table, s: int, far: int, until: float, stages: Table, nodes: Table) -> None:
    """Take all ports of a stage."""
    if far == 0:
        ports[s] = until
    else:
        for i in range(stages[s].nodes):
            ports[nodes[s, i]] = until


@compiled
def _transfer(
    edge: Record,
    way: int,
    start: float,
    busy: float,
    stages: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
) -> float:
    """When a message has been sent whose ports are taken from a start on, or as soon as they are
    free.

    Args:
        busy: seconds on a single link.
    """
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
def _starts_at(
    stage: Record, batch_size: int, stages: Table, edges: Table, arrivals: Table
) -> float:
    """When the next action of a stage may begin; infinity where that is not known yet."""
    back = _goes_back(stage)
    done = stage.backwards if back else stage.forwards
    if done == stage.total:
        return np.inf
    start: float = stage.free
    stop = min((done + 1) * stage.microbatch, batch_size)
    e = stage.leaving if back else stage.entering
    while e >= 0:
        edge = edges[e]
        sender = stages[edge.target if back else edge.source]
        need = min(-(-stop // sender.microbatch), sender.total)
        if (sender.backwards if back else sender.forwards) < need:
            return np.inf
        start = max(start, arrivals[1 if back else 0, e, need - 1])
        e = edge.next_leaving if back else edge.next_entering
    return start


@compiled
def _compute(start: float, seconds: float, devices: int, cores: Table) -> float:
    """The end of an action that starts then, on so many devices.

    Args:
        cores: when each of those is free that devices share; empty where each has its own.
    """
    end = start + seconds
    if len(cores) == 0:
        return end
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
    sent: float,
    stages: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    summing: Table,
) -> float:
    """When the gradients of a stage are summed. What is left of that when its last backward ends
    waits for messages on the same links; of those to come it lets each go first.

    Args:
        sent: when the messages of the last backward have left.
    """
    stage = stages[s]
    if stage.sums == 0:
        return end
    if stage.nodes == 1:
        return float(sent + stage.sums)
    far = stage.nodes
    start = max(sent, _free_at(leaving, s, far, stages, nodes))
    start = max(start, _free_at(entering, s, far, stages, nodes))
    start = max(start, _free_at(summing, s, far, stages, nodes))
    _occupy(summing, s, far, start + stage.sums, stages, nodes)
    return float(start + stage.sums)


@compiled
def _run(
    batch_size: int,
    stages: Table,
    edges: Table,
    nodes: Table,
    leaving: Table,
    entering: Table,
    summing: Table,
    cores: Table,
    arrivals: Table,  # [way, e, micro-batch of the sender] of its messages
    limit: float,
) -> float:
    """The clock: of all stages the one whose next action begins first, message after message.

    Returns:
        Seconds of the step; infinity where they are beyond the limit.
    """
    shown, count = _count_shown(stages), stages[0].total
    if shown < 0:
        return np.inf
    slow, actions, update = 0, 0, 0.0
    for s in range(len(stages)):
        stage = stages[s]
        if shown > 0:
            stage.total = shown
        both = stage.forward + stage.backward
        stage.left = both * stage.total + stage.behind
        update = max(update, stage.update)
        actions += 2 * stage.total
        stage.ready = -1.0
        if both > stages[slow].forward + stages[slow].backward:
            slow = s
    if shown > 0:
        limit -= (count - shown) * (stages[slow].forward + stages[slow].backward)
    first, last, period = shown // 3, 2 * shown // 3, 0.0
    step = 0.0
    for _ in range(actions):
        s, soonest = len(stages), np.inf
        for t in range(len(stages)):
            stage = stages[t]
            if stage.ready < 0:
                stage.ready = _starts_at(stage, batch_size, stages, edges, arrivals)
            if stage.ready < soonest:
                s, soonest = t, stage.ready
        if s == len(stages):
            return np.inf
        stage = stages[s]
        way = 1 if _goes_back(stage) else 0
        seconds, done = stage.forward, stage.forwards
        if way == 1:
            seconds, done = stage.backward, stage.backwards
            stage.backwards += 1
        else:
            stage.forwards += 1
        end = _compute(soonest, seconds, stage.devices, cores)
        stage.left -= seconds
        if end + stage.left + update > limit:
            return np.inf
        stage.free, stage.ready = end, -1.0
        if way == 1 and s == slow and shown > 0:
            if done == first:
                period -= end / (last - first)
            elif done == last:
                period += end / (last - first)
        sent = end
        e = stage.entering if way == 1 else stage.leaving
        while e >= 0:
            edge = edges[e]
            receiver = stages[edge.source if way == 1 else edge.target]
            # A larger micro-batch than the receiver's is several messages.
            size = max(1.0, stage.microbatch / receiver.microbatch)
            busy = (edge.back if way == 1 else edge.ahead) * size
            arrival = end
            if busy > 0:
                gone = _transfer(edge, way, end, busy, stages, nodes, leaving, entering)
                arrival = gone + edge.latency
                sent = max(sent, gone)
            arrivals[way, e, done] = arrival
            if receiver.ready == np.inf:
                receiver.ready = -1.0
            e = edge.next_entering if way == 1 else edge.next_leaving
        if way == 1 and done + 1 == stage.total:
            step = max(step, _sum(s, end, sent, stages, nodes, leaving, entering, summing))
    return step + update + (count - shown) * period if shown > 0 else step + update


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
        stages: this and the next ones: see ``stage_tables``; stages, ``edge_of``, ports and cores
            are all zeros.
    """
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
    count = join_stages(home, values, readers, stages, edges, edge_of)
    if not sort_stages(edges, stages):
        return np.inf
    if chained:
        count = chain_stages(count, stages, edges, edge_of)
    order_edges(stages, edges)
    count_in_flight(deep, flush, stages, edges)
    if not fit_memory(recompute, sharded, problem, stages, edges):
        return np.inf
    price_messages(count, levels, problem, stages, edges)
    price_sums(home, sharded, op_seconds, op_bytes, levels, problem, stages)
    least = _least_s(problem, stages, edges)
    if not flush:
        least = max(
            least, _busiest_port_s(batch_size, count, stages, edges, nodes, leaving, entering)
        )
    if least > limit or not flush:
        return least if least <= limit else np.inf
    # Work takes cores in turn instead of sharing them, which adds up to the same.
    seconds = _run(
        batch_size, stages, edges, nodes, leaving, entering, summing, cores, arrivals, limit
    )
    seconds = max(seconds, least)
    return seconds if seconds <= limit else np.inf
