"""Micro-batch sizes and k per stage: the best of all configurations, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import Op, OpGraph, Value, bits
from anabranch.planner.check import check
from anabranch.planner.exhaustive import best_replicas
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner import configured as module
from anabranch.planner.partitioner.configured import Search, configured
from anabranch.planner.partitioner.configured_menu import Configs
from anabranch.planner.partitioner.parts import Part, PartPrices
from anabranch.planner.partitioner.problem import Problem
from anabranch.planner.stages import Stage, StageGraph
from anabranch.planner.inflight import least_in_flight
from anabranch.profile.profile import OpCost, Profile
from anabranch.schedule.check import check as check_schedule
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.lower import lower
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import run
from tests.planner import shapes
from tests.planner.helpers import cost_model, expressible
from tests.strategies import planning_profiles


def problem(cost: CostModel, batch_size: int, max_replicas: int | None = None) -> Problem:
    """What graphpipe searches, to the last digit."""
    return GraphPipe(max_replicas=max_replicas, tolerance=0.0).problem(cost, batch_size)


def search(given: Problem, sizes: Sequence[int], *, kfkb: bool = False) -> Search:
    return Search(given, sizes, kfkb=kfkb, budget=10**9)


def paces(given: Problem, partition: Sequence[int], pairs: Sequence[tuple[int, int]]) -> float:
    """The least seconds per sample of a partition with these configurations."""
    total = given.cost.cluster.num_devices
    graph = StageGraph(
        tuple(
            Stage(given.cost.graph.names(mask), (s,), b, k)
            for s, (mask, (b, k)) in enumerate(zip(partition, pairs, strict=True))
        ),
        stage_edges(given.cost, partition),
        given.batch_size,
    )
    options = []
    for mask, (b, _), held in zip(partition, pairs, least_in_flight(graph), strict=True):
        prices = given.prices(b)
        parts = PartPrices(prices)
        each = []
        for mode in prices.modes:
            need = given.cost.device_bytes(
                bits(mask),
                microbatch_size=-(-b // mode.replicas) * mode.replicas,
                replicas=mode.replicas,
                in_flight=held,
                recompute=mode.recompute,
                tensor=mode.tensor,
            )
            if need <= given.cost.cluster.memory_bytes:
                part = Part(mask, mode.replicas, mode.recompute, mode.tensor)
                each.append((parts.period_s(part) / b, mode.devices))
        options.append(each)
    if not all(options):
        return math.inf
    for bound in sorted({pace for each in options for pace, _ in each}):
        fewest = [
            min((d for pace, d in each if pace <= bound), default=total + 1) for each in options
        ]
        if sum(fewest) <= total:
            return bound
    return math.inf


def stage_edges(cost: CostModel, masks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    home = {op: s for s, mask in enumerate(masks) for op in bits(mask)}
    pairs = {(home[a], home[b]) for a, b in cost.graph.edges}
    return tuple(sorted((x, y) for x, y in pairs if x != y))


def ordered(cost: CostModel, masks: Sequence[int]) -> tuple[int, ...]:
    """In topological order: by the place of the last operator, ancestors first."""
    left, done, result = list(masks), 0, []
    while left:
        mask = next(
            m for m in left if all(not cost.graph.ancestors[i] & ~(done | m) for i in bits(m))
        )
        left.remove(mask)
        done |= mask
        result.append(mask)
    return tuple(result)


def brute(given: Problem, configs: Configs) -> float:
    """The least seconds per sample of all partitions and configurations, one by one."""
    least = math.inf
    for partition in {ordered(given.cost, masks) for masks in expressible(given.chain)}:
        for pairs in product(configs.pairs, repeat=len(partition)):
            least = min(least, paces(given, partition, pairs))
    return least


def agree(found: float | None, expected: float) -> None:
    assert (math.inf if found is None else found) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(planning_profiles(4), st.integers(1, 4), st.booleans(), st.integers(8, 90))
def test_equals_the_best_of_all_configurations(profile, devices, kfkb, memory):
    """Under any memory, on graphs of up to four operators; sizes 1, 2 and 4."""
    given = problem(cost_model(profile, devices, memory=memory), 8)
    found = search(given, [1, 2, 4], kfkb=kfkb).least_bound()
    agree(found, brute(given, Configs.of([1, 2, 4], 8, kfkb=kfkb)))
