"""Compute, memory and edges of a draft's stages, as records; compiled.

Every function fills fields of stages or edges. Those that return a bool return False if the draft
cannot run. Letters are those of ``stage_records``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import fewest_cards
from anabranch.compiled import Floats, Ints, Table
from anabranch.cost.footprint import pass_behind
from anabranch.cost.memory import MOST_TERMS, OptimizerBytes, StageBytes, device_memory
from anabranch.planner.auto.stage_records import (
    LevelRecord,
    Numbers,
    PricedModel,
    StageRecord,
    State,
)
from anabranch.plans.in_flight import in_flight_samples, waited_for_samples
from anabranch.profile.profile import interpolated, interpolation_at


def count_devices(
    device_stage: NDArray[np.int32],
    settings: NDArray[np.int32],
    levels: Table[LevelRecord],
    stages: Table[StageRecord],
    state: State,
) -> None:
    """Count the devices and shared cards of every stage, and copy its settings: ``settings`` has
    the sizes of micro-batches of all stages, then their k, then whether they recompute.
    """
    ports_of, node, cards = state.ports_of, levels[0].devices, levels[0].cards
    for s in range(len(stages)):
        stage = stages[s]
        stages[s] = state.stages[-1]
        stage.microbatch, stage.k = settings[s], settings[len(stages) + s]
        stage.recompute = settings[2 * len(stages) + s]
        ports_of[s, 0] = s
    for d in range(len(device_stage)):
        s, card = device_stage[d], len(device_stage) + d * cards // node
        stage = stages[s]
        if cards < node and ports_of[s, stage.cards] != card:
            stage.cards += 1
            ports_of[s, stage.cards] = card
        stage.low, stage.high = d if stage.devices == 0 else stage.low, d
        state.devices[s, stage.devices] = d
        stage.devices += 1
    for s in range(len(stages)):
        stage = stages[s]
        stage.far = int(stage.low // node != stage.high // node)
        stage.ring = _ring_bandwidth(stage, state.devices[s, : stage.devices], levels)


def _ring_bandwidth(stage: StageRecord, devices: Ints, levels: Table[LevelRecord]) -> float:
    """Return the bandwidth of a stage's all-reduces, that of ``Cluster.ring``."""
    bandwidth, level = levels[0].own_bandwidth, 0
    while stage.low // levels[level].devices != stage.high // levels[level].devices:
        cards = fewest_cards(devices, levels[level].devices, levels[level].cards)
        level += 1
        bandwidth = min(bandwidth, levels[level].own_bandwidth * cards)
    return float(bandwidth)


def split_samples(problem: PricedModel, stages: Table[StageRecord]) -> bool:
    """Split micro-batches over replicas; False if replicas or samples are out of range."""
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
        stage.row[0], stage.above[0] = interpolation_at(stage.samples, measured)
        stage.row[1], stage.above[1] = interpolation_at(-(-stage.last // replicas), measured)
    return True


def operator_s(i: int, way: int, last: int, stage: StageRecord, op_seconds: Floats) -> float:
    """Return the seconds of an operator in a micro-batch of a stage, at a way of ``op_seconds``."""
    row = stage.row[last]
    low, high = op_seconds[row, i, way], op_seconds[row + 1, i, way]
    return float(interpolated(low, high, stage.above[last]))


def sum_operators(
    op_stage: NDArray[np.int32], problem: PricedModel, stages: Table[StageRecord]
) -> bool:
    """Sum seconds and bytes of operators by stage; False if a stage has none."""
    action_s = problem.numbers[0].action
    for i in range(len(op_stage)):
        stage = stages[op_stage[i]]
        stage.operators += 1
        for last in range(2):
            for way in range(2):
                stage.seconds[last, way] += operator_s(i, way, last, stage, problem.op_seconds)
        held = problem.op_bytes[i]
        stage.parameters += held.parameters
        stage.trainable += held.trainable
        stage.tables += held.tables
        stage.rows += held.rows
        stage.kept += held.kept
        stage.kept_fixed += held.kept_fixed
        stage.largest_gradient = max(stage.largest_gradient, held.largest_gradient)
        own = held.largest_gradient + held.working * stage.samples
        kept = held.kept * stage.samples + held.kept_fixed
        stage.passing = pass_behind(stage.passing, kept, own)
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
    """Return the number of the edge from s to t; add it if there is none yet."""
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
    """Add an edge to those whose messages the stage at its end takes."""
    s = state.edges[e].ends[1 - way]
    stage = state.stages[s]
    state.edges_of[way, s, stage.edges[way]] = e
    stage.edges[way] += 1


def join_stages(
    op_stage: NDArray[np.int32], problem: PricedModel, stages: Table[StageRecord], state: State
) -> None:
    """Find the edges between stages and the bytes that flow along them."""
    state.num_edges[0] = 0
    for i in range(len(op_stage)):
        state.behind[i] = 0
    for v in range(len(problem.values)):
        value = problem.values[v]
        s = int(op_stage[value.producer])
        source, leaves = stages[s], False
        for reader in range(value.first, value.last):
            t = int(op_stage[problem.readers[reader]])
            target = stages[t]
            returned = value.per_sample[1] + value.fixed[1] > 0
            if (t != s and returned) or state.behind[value.producer] > 0:
                state.behind[problem.readers[reader]] = 1
            if t == s or target.counted == v + 1:  # the stage has this value already
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


def split_backwards(
    op_stage: NDArray[np.int32], problem: PricedModel, stages: Table[StageRecord], state: State
) -> None:
    """Sum the seconds of backwards that can wait: gradients of weights of the operators through
    which gradients of the stage's inputs come.
    """
    for i in range(len(op_stage)):
        stage = stages[op_stage[i]]
        for last in range(2):
            if state.behind[i] > 0:
                stage.weights[last] += operator_s(i, 2, last, stage, problem.op_seconds)


def sort_stages(stages: Table[StageRecord], state: State) -> bool:
    """Sort stages topologically, lower numbers first; False if they wait for each other."""
    for s in range(len(stages)):
        stages[s].counted = stages[s].edges[0]
    for position in range(len(stages)):
        s = 0
        while s < len(stages) and stages[s].counted != 0:
            s += 1
        if s == len(stages):
            return False
        stages[position].ordered, stages[s].counted = s, -1
        for i in range(stages[s].edges[1]):
            stages[state.edges[state.edges_of[1, s, i]].ends[1]].counted -= 1
    return True


def chain_stages(stages: Table[StageRecord], state: State) -> None:
    """Add edges from every stage to the next in the order, where there are none."""
    for position in range(len(stages) - 1):
        _find_edge(stages[position].ordered, stages[position + 1].ordered, state)


def order_edges(stages: Table[StageRecord], state: State) -> None:
    """Sort the edges of each stage by the order of the other stage: messages are sent so."""
    for way in range(1, -1, -1):
        for s in range(len(stages)):
            stages[s].edges[way] = 0
        for position in range(len(stages)):
            s = stages[position].ordered
            for i in range(stages[s].edges[1 - way]):
                _add_edge(way, state.edges_of[1 - way, s, i], state)


def count_in_flight(deep: bool, flush: bool, stages: Table[StageRecord], state: State) -> None:
    """Count micro-batches in flight by Table 2 (``plans.in_flight``): the least, and wanted."""
    hops = 2 if deep else 1
    for position in range(len(stages) - 1, -1, -1):
        s = stages[position].ordered
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
    """Limit micro-batches in flight by memory (``cost.memory``); False if the least do not fit."""
    optimizer = OptimizerBytes(
        numbers.optimizer_factor, numbers.all_temporary, numbers.largest_temporary
    )
    largest = 0
    for s in range(len(stages)):
        largest = max(largest, stages[s].least * stages[s].microbatch)
    for position in range(len(stages)):
        s = stages[position].ordered
        stage = stages[s]
        n, trainable = stage.samples, stage.trainable
        held = StageBytes(
            parameters=stage.parameters,
            trainable=trainable,
            tables=stage.tables,
            rows=stage.rows,
            updated=trainable / stage.replicas if sharded else trainable,
            largest_gradient=stage.largest_gradient,
            entering=stage.enters * n + stage.enters_fixed,
            returning=stage.returns * n + stage.returns_fixed,
            kept=stage.kept * n + stage.kept_fixed,
            passing=stage.passing,
        )
        memory = device_memory(
            held,
            optimizer,
            recompute=stage.recompute,
            replicas=stage.replicas,
            terms=min(stage.replicas - 1, MOST_TERMS),
            versions=1 + numbers.more_versions + numbers.versions_in_flight * stage.least,
        )
        free = numbers.memory - memory.resident - memory.backward
        if stage.least * memory.flight > free or memory.resident + memory.sums > numbers.memory:
            return False
        room, stage.most = stage.wanted, -(-largest // stage.microbatch)
        if memory.flight > 0:
            fitting = int(free // memory.flight)
            room, stage.most = min(room, fitting), min(stage.most, fitting)
        for i in range(stage.edges[0]):
            before = stages[state.edges[state.edges_of[0, s, i]].ends[0]]
            if before.in_flight < before.total:
                k, b = before.k, before.microbatch
                more = waited_for_samples(k, b, stage.k, stage.microbatch)
                room = min(room, (before.in_flight * b - more) // stage.microbatch)
        stage.in_flight = max(stage.least, room)
        stage.most = max(stage.most, stage.in_flight)
    return True
