"""Layout: the stages of a draft in topological order, with their devices and edges."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.planner.auto.compiled.jit import making, part
from anabranch.planner.auto.compiled.records import EDGE, LANE, STAGE, Layout
from anabranch.planner.auto.tables import Bools, Ints, Records


@making
def lay_out(
    home: Ints,
    owner: Ints,
    microbatch: Ints,
    k: Ints,
    recompute: Bools,
    tensor: Ints,
    chained: bool,
    degrees: Ints,
    op_edges: Ints,
    batch_size: int,
) -> tuple[bool, Layout]:
    """The layout of a draft, and whether there is one: stages without operators or devices, in a
    circle, or with replicas that do not come out even have none.
    """
    count = len(microbatch)
    stages = np.zeros(count, STAGE)
    follows = np.zeros((count, count), np.bool_)
    for e in range(len(op_edges)):
        follows[home[op_edges[e, 0]], home[op_edges[e, 1]]] = True
    place = np.empty(count, np.int64)
    fine = _order(follows, place)
    for s in range(count):
        stage = stages[place[s]]
        stage.microbatch, stage.k, stage.tensor = microbatch[s], k[s], tensor[s]
        stage.recompute = recompute[s]
        stage.count = -(-batch_size // microbatch[s])
    here, ops = np.empty(len(home), np.int64), np.empty(len(home), np.int64)
    lanes = np.zeros(len(owner), LANE)
    ran, held = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in range(len(home)):
        here[i] = place[home[i]]
        ran[here[i]] += 1
    for device in range(len(owner)):
        held[place[owner[device]]] += 1
    op = lane = 0
    for s in range(count):
        stage = stages[s]
        stage.first_op = stage.end_op = op
        stage.first_lane = stage.end_lane = lane
        op, lane = op + ran[s], lane + held[s]
        stage.degree = _index(degrees, stage.tensor)
        stage.replicas = held[s] // stage.tensor
        fine &= stage.degree >= 0 and ran[s] > 0 and held[s] > 0 and held[s] % stage.tensor == 0
    for i in range(len(home)):
        stage = stages[here[i]]
        ops[stage.end_op] = i
        stage.end_op += 1
    for device in range(len(owner)):
        s = place[owner[device]]
        _put(lanes[stages[s].end_lane], device, s, stages[s])
    edges, in_edges, edge = _edges(stages, follows, place, chained)
    return fine, Layout(stages, lanes, edges, in_edges, edge, here, ops)


@part
def _put(lane: Any, device: int, s: int, stage: Any) -> None:
    """A device is the next lane of its stage."""
    lane.device, lane.stage = device, s
    lane.place = stage.end_lane - stage.first_lane
    lane.replica = lane.place // stage.tensor
    stage.end_lane += 1


@part
def _order(follows: Bools, place: Ints) -> bool:
    """Places of the stages in topological order, lower numbers first; whether there is one."""
    count = len(follows)
    missing = np.zeros(count, np.int64)
    for x in range(count):
        follows[x, x] = False
        place[x] = -1
        for y in range(count):
            missing[y] += follows[x, y]
    for at in range(count):
        s = 0
        while s < count and (place[s] >= 0 or missing[s] > 0):
            s += 1
        if s == count:
            for x in range(count):
                place[x] = x
            return False
        place[s] = at
        for y in range(count):
            missing[y] -= follows[s, y]
    return True


@part
def _edges(
    stages: Records, follows: Bools, place: Ints, chained: bool
) -> tuple[Records, Ints, Ints]:
    """Edges sorted by source and target, those by target and source, and the index of each."""
    count, found = len(place), 0
    edge = np.full((count, count), -1, np.int64)
    for x in range(count):
        for y in range(count):
            if follows[x, y]:
                edge[place[x], place[y]] = 0
                found += 1
    for s in range(count - 1):
        if chained and edge[s, s + 1] < 0:
            edge[s, s + 1] = 0
            found += 1
    edges, in_edges = np.zeros(found, EDGE), np.empty(found, np.int64)
    found = 0
    for x in range(count):
        stages[x].first_out = found
        for y in range(count):
            if edge[x, y] >= 0:
                edge[x, y] = found
                edges[found].source, edges[found].target = x, y
                found += 1
        stages[x].end_out = found
    found = 0
    for y in range(count):
        stages[y].first_in = found
        for x in range(count):
            if edge[x, y] >= 0:
                in_edges[found] = edge[x, y]
                found += 1
        stages[y].end_in = found
    return edges, in_edges, edge


@part
def _index(numbers: Ints, number: int) -> int:
    for i in range(len(numbers)):
        if numbers[i] == number:
            return i
    return -1
