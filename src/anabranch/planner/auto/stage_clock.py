"""The clock of the evaluator: stages as single machines, compiled.

Only ``evaluator`` imports this file, when something is searched: importing numba takes a quarter of
a second, and compiling the first time some seconds; machine code is kept on disk.

Axes: s, t stages; e stage edges; v values of the model; n rows of the table of sample counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.planner.toolkit.jit import compiled, entry
from anabranch.plans.in_flight import in_flight_samples

_FULL = 96
"""Micro-batches that are run; the others take as long each as those in the middle of these."""

_table_2 = cast(Callable[..., int], compiled(in_flight_samples))


def _step_s(
    home: Any,
    owner: Any,
    microbatch: Any,
    k: Any,
    recompute: Any,
    tensor: Any,
    deep: bool,
    chained: bool,
    sharded: bool,
    batch_size: int,
    most_replicas: int,
    row_of: Any,  # [samples] row of the table, or -1 where the profile has none
    degree_of: Any,  # [tensor degree] its index, or -1
    forward_s: Any,  # [degree, n, operator]
    backward_s: Any,
    kept: Any,  # [degree, operator] bytes
    parameters: Any,
    trainable: Any,
    producers: Any,  # [v]
    first_reader: Any,  # [v + 1] into readers
    readers: Any,
    per_sample: Any,  # [v] bytes
    fixed: Any,
    gradient: Any,  # [v] 1 where one flows back
    sizes: Any,  # [level] devices of a group
    byte_s: Any,  # [level]
    latency_s: Any,
    memory: float,
    optimizer_factor: float,
    update_byte_s: float,
    action_s: float,
    send_s: float,
    send_byte_s: float,
    cores: float,  # that all devices share; 0 where each has its own
    in_flight_versions: float,  # of the weights, per micro-batch in flight; without a flush
    more_versions: float,
    flush: bool,
    limit: float,
) -> float:
    nothing = np.inf
    count, devices, levels = len(microbatch), len(owner), len(sizes)
    node = sizes[0]

    # Devices: how many, between which, on how many nodes.
    held = np.zeros(count, np.int64)
    low, high = np.full(count, devices), np.full(count, -1)
    nodes, latest = np.zeros(count, np.int64), np.full(count, -1)
    for d in range(devices):
        s = owner[d]
        held[s] += 1
        low[s], high[s] = min(low[s], d), max(high[s], d)
        if d // node != latest[s]:
            latest[s] = d // node
            nodes[s] += 1
    replicas, row, degree = np.zeros(count, np.int64), np.zeros(count, np.int64), held.copy()
    samples = np.zeros(count)
    for s in range(count):
        if held[s] == 0 or held[s] % tensor[s] or node % tensor[s]:
            return nothing
        replicas[s] = held[s] // tensor[s]
        b = microbatch[s]
        degree[s] = degree_of[tensor[s]] if tensor[s] < len(degree_of) else -1
        if replicas[s] > min(b, most_replicas) or b > batch_size or degree[s] < 0:
            return nothing
        samples[s] = -(-b // replicas[s])
        row[s] = row_of[-(-b // replicas[s])]
        short = batch_size % b
        smallest = (short if short else b) // replicas[s]
        if row[s] < 0 or (smallest > 0 and row_of[smallest] < 0) or row_of[b // replicas[s]] < 0:
            return nothing
        if tensor[s] > 1:  # a replica lies inside a node
            seen = 0
            begins = 0
            for d in range(devices):
                if owner[d] == s:
                    if seen % tensor[s] == 0:
                        begins = d
                    elif d // node != begins // node:
                        return nothing
                    seen += 1

    # Operators: seconds and bytes of the stages.
    there, back = np.zeros(count), np.zeros(count)
    weights, updated, inside = np.zeros(count), np.zeros(count), np.zeros(count)
    filled = np.zeros(count, np.bool_)
    for i in range(len(home)):
        s = home[i]
        g = degree[s]
        there[s] += forward_s[g, row[s], i]
        back[s] += backward_s[g, row[s], i]
        weights[s] += parameters[g, i]
        updated[s] += trainable[g, i]
        inside[s] += kept[g, i]
        filled[s] = True
    for s in range(count):
        if not filled[s]:
            return nothing
        if recompute[s]:
            back[s] += there[s]
        there[s] += action_s
        back[s] += action_s

    # Values: bytes between stages.
    edge = np.full((count, count), -1)
    most = len(readers) + count
    source, target = np.zeros(most, np.int64), np.zeros(most, np.int64)
    ahead = np.zeros((most, 2))  # bytes per sample, and whatever the samples
    behind = np.zeros((most, 2))
    enters = np.zeros((count, 2))
    edges = 0
    told = np.full(count, -1)
    for v in range(len(producers)):
        s = home[producers[v]]
        for c in range(first_reader[v], first_reader[v + 1]):
            t = home[readers[c]]
            if t == s or told[t] == v:
                continue
            told[t] = v
            e = edge[s, t]
            if e < 0:
                e = edges
                edges += 1
                edge[s, t], source[e], target[e] = e, s, t
            ahead[e, 0] += per_sample[v]
            ahead[e, 1] += fixed[v]
            behind[e, 0] += per_sample[v] * gradient[v]
            behind[e, 1] += fixed[v] * gradient[v]
            enters[t, 0] += per_sample[v]
            enters[t, 1] += fixed[v]

    # A topological order, the lower number first, and heights.
    waiting = np.zeros(count, np.int64)
    for e in range(edges):
        waiting[target[e]] += 1
    order, place = np.zeros(count, np.int64), np.full(count, -1)
    for at in range(count):
        s = -1
        for t in range(count):
            if waiting[t] == 0 and place[t] < 0:
                s = t
                break
        if s < 0:
            return nothing
        order[at], place[s] = s, at
        for e in range(edges):
            if source[e] == s:
                waiting[target[e]] -= 1
    if chained:
        for at in range(count - 1):
            s, t = order[at], order[at + 1]
            if edge[s, t] < 0:
                edge[s, t], source[edges], target[edges] = edges, s, t
                edges += 1

    # Micro-batches in flight: Table 2 of GraphPipe, and memory.
    total = np.zeros(count, np.int64)
    least, wanted = np.zeros(count, np.int64), np.zeros(count, np.int64)
    per_hop = 2 if deep else 1
    for at in range(count - 1, -1, -1):
        s = order[at]
        b = microbatch[s]
        total[s] = -(-batch_size // b)
        for wide in range(2):
            flight = wanted if wide else least
            hop = per_hop if wide else 1
            need = k[s] * b
            for e in range(edges):
                if source[e] == s:
                    t = target[e]
                    after = flight[t] * microbatch[t]
                    more = _table_2(k[s], b, k[t], microbatch[t], after) - after
                    need = max(need, after + hop * more)
            flight[s] = -(-need // b)
            if flush:
                flight[s] = min(flight[s], total[s])
    in_flight = least.copy()
    for at in range(count):
        s = order[at]
        arriving = enters[s, 0] * samples[s] + enters[s, 1]
        state = updated[s] / (replicas[s] if sharded else 1)
        versions = 1 + more_versions + in_flight_versions * least[s]
        resident = weights[s] + updated[s] * versions + state * optimizer_factor + 2 * arriving
        flying = arriving
        if recompute[s]:
            resident += inside[s] * samples[s]
        else:
            flying += inside[s] * samples[s]
        if resident + least[s] * flying > memory:
            return nothing
        if wanted[s] > least[s]:
            room = wanted[s]
            if flying > 0:
                room = min(room, np.int64((memory - resident) // flying))
            for e in range(edges):
                if target[e] == s:
                    x = source[e]
                    room = min(room, in_flight[x] * microbatch[x] // microbatch[s])
            in_flight[s] = max(least[s], room)

    # Links: seconds of a message, what it occupies, processors.
    occupies, occupies_back = np.zeros(edges), np.zeros(edges)
    delay = np.zeros(edges)
    out, into = np.zeros(edges, np.int64), np.zeros(edges, np.int64)
    for e in range(edges):
        s, t = source[e], target[e]
        size = min(microbatch[s], microbatch[t])
        forward_bytes = ahead[e, 0] * size + ahead[e, 1] * min(replicas[s], replicas[t])
        backward_bytes = behind[e, 0] * size + behind[e, 1] * min(replicas[s], replicas[t])
        first, last = min(low[s], low[t]), max(high[s], high[t])
        level = levels - 1
        for i in range(levels):
            if first // sizes[i] == last // sizes[i]:
                level = i
                break
        lanes = min(held[s], held[t]) if level == 0 else min(nodes[s], nodes[t])
        occupies[e] = forward_bytes * byte_s[level] / lanes
        occupies_back[e] = backward_bytes * byte_s[level] / lanes
        delay[e] = latency_s[level]
        # Stages of one node share its card; others have ports of their own.
        own = level == 0 or node == 1
        out[e] = s if own or nodes[s] > 1 else count + low[s] // node
        into[e] = t if own or nodes[t] > 1 else count + low[t] // node
        if forward_bytes > 0:
            share = send_s + send_byte_s * forward_bytes / replicas[s]
            there[s] += share
            there[t] += share
        if backward_bytes > 0:
            share = send_s + send_byte_s * backward_bytes / replicas[t]
            back[s] += share
            back[t] += share

    # All-reduces and updates behind the last backward.
    tail = np.zeros(count)
    for s in range(count):
        reduced = 0.0
        if replicas[s] > 1:
            level = levels - 1
            for i in range(levels):
                if low[s] // sizes[i] == high[s] // sizes[i]:
                    level = i
                    break
            hops = 2.0 * (replicas[s] - 1)
            reduced = hops / replicas[s] * updated[s] * byte_s[level]
            reduced += hops * latency_s[level] * max(1.0, updated[s] / BUCKET_BYTES)
        # The first bucket is ready when a share of the backward is done, the last at its end.
        bucket = min(1.0, BUCKET_BYTES / max(updated[s], 1.0))
        if flush:
            reduced = max(bucket * reduced, reduced - (1 - bucket) * back[s])
        tail[s] = reduced + updated[s] * update_byte_s / (replicas[s] if sharded else 1)

    # No step is shorter than the busiest stage, or than all work on the cores that are shared.
    work = 0.0
    busiest = 0.0
    for s in range(count):
        seconds = (there[s] + back[s]) * batch_size / microbatch[s]
        busiest = max(busiest, seconds + tail[s])
        work += seconds * held[s]
    if cores > 0:
        busiest = max(busiest, work / cores)
    if busiest > limit:
        return nothing
    if not flush:
        links = np.zeros((2, count + devices))
        for e in range(edges):
            messages = batch_size / min(microbatch[source[e]], microbatch[target[e]])
            links[0, out[e]] += occupies[e] * messages
            links[1, into[e]] += occupies[e] * messages
            links[0, into[e]] += occupies_back[e] * messages
            links[1, out[e]] += occupies_back[e] * messages
        for port in range(count + devices):
            busiest = max(busiest, links[0, port], links[1, port])
        return busiest if busiest <= limit else nothing

    # Of many micro-batches, as many are run as show the period.
    alike = True
    for s in range(count):
        alike = alike and microbatch[s] == microbatch[0]
    fewer = total.copy()
    depth = 0
    for s in range(count):
        depth = max(depth, in_flight[s])
    shown = max(_FULL, 4 * depth)
    if alike and total[0] > shown:
        fewer[:] = shown
    elif total.max() > 8 * shown:
        return nothing

    # The clock: of all stages the one whose next action begins first, message after message.
    longest = fewer.max()
    arrived = np.zeros((edges, longest))  # when the forward of the source's micro-batch is there
    returned = np.zeros((edges, longest))  # when the backward of the target's is
    free = np.zeros(count)
    ahead_of, behind_of = np.zeros(count, np.int64), np.zeros(count, np.int64)
    port_out, port_in = np.zeros(count + devices), np.zeros(count + devices)
    ready = np.full(count, -1.0)  # when the next action may begin; -1 unknown, infinity for waits
    slow = 0
    for s in range(count):
        if there[s] + back[s] > there[slow] + back[slow]:
            slow = s
    marks = np.zeros(longest)
    left = 2 * fewer.sum()
    while left:
        s, soonest = -1, np.inf
        for t in range(count):
            if ready[t] < 0:
                begun, ended = ahead_of[t], behind_of[t]
                goes = begun < fewer[t] and (
                    (ended % k[t] == 0 and begun < in_flight[t] + ended) or begun < in_flight[t]
                )
                start = free[t]
                if ended == fewer[t]:
                    start = np.inf
                for e in range(edges):
                    if start == np.inf:
                        break
                    if goes and target[e] == t:
                        x = source[e]
                        stop = min((begun + 1) * microbatch[t], batch_size)
                        need = min(-(-stop // microbatch[x]), fewer[x])
                        known = ahead_of[x] >= need
                        start = max(start, arrived[e, need - 1]) if known else np.inf
                    elif not goes and source[e] == t:
                        x = target[e]
                        stop = min((ended + 1) * microbatch[t], batch_size)
                        need = min(-(-stop // microbatch[x]), fewer[x])
                        known = behind_of[x] >= need
                        start = max(start, returned[e, need - 1]) if known else np.inf
                ready[t] = start
            if ready[t] < soonest:
                s, soonest = t, ready[t]
        if s < 0:
            return nothing
        begun, ended = ahead_of[s], behind_of[s]
        goes = begun < fewer[s] and (
            (ended % k[s] == 0 and begun < in_flight[s] + ended) or begun < in_flight[s]
        )
        end = soonest + (there[s] if goes else back[s])
        free[s] = end
        ready[s] = -1.0
        if goes:
            ahead_of[s] += 1
        else:
            behind_of[s] += 1
            if s == slow:
                marks[ended] = end
        for e in range(edges):
            if goes and source[e] == s:
                t, busy, a, b = target[e], occupies[e], out[e], into[e]
            elif not goes and target[e] == s:
                t, busy, a, b = source[e], occupies_back[e], into[e], out[e]
            else:
                continue
            there_at = end
            if busy > 0:
                # A larger micro-batch is several messages.
                busy *= max(1.0, microbatch[s] / microbatch[t])
                there_at = max(end, port_out[a], port_in[b]) + busy
                port_out[a] = port_in[b] = there_at
                there_at += delay[e]
            if goes:
                arrived[e, begun] = there_at
            else:
                returned[e, ended] = there_at
            if ready[t] == np.inf:
                ready[t] = -1.0
        if end > limit:
            return nothing
        left -= 1
    step = 0.0
    for s in range(count):
        step = max(step, free[s] + tail[s])
    if fewer[0] < total[0]:
        a, b = fewer[slow] // 3, 2 * fewer[slow] // 3
        step += (total[0] - fewer[0]) * (marks[b] - marks[a]) / (b - a)
    step = max(step, busiest)
    return step if step <= limit else nothing


step_s = cast(Callable[..., float], entry(_step_s))
"""Seconds of a step, or of a period without a flush; infinity where there is none in the limit."""
