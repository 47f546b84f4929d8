"""Small random graphs, where every plan can be enumerated: how far from the best is ours?

Two questions (series-parallel graphs and others, up to 7 operators, 4 devices; a launch cost per
operator, links that matter, all-reduces):

- the longest period under GraphPipe's own objective against that of all partitions;
- the simulated step against the least over all partitions, replicas and micro-batch sizes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.errors import AnabranchError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.graph.series_parallel import decompose, is_series_parallel
from anabranch.planner.exhaustive import Exhaustive
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices, degrees
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.solve import plan
from benchmarks.planners.common import Row, table

SAMPLES = (1, 2, 4, 8)
BATCH = 8


def profiles(count: int, largest: int = 7, seed: int = 0) -> Iterator[Profile]:
    """Random directed acyclic graphs, each operator with a launch cost and work per sample."""
    draw = random.Random(seed)
    for number in range(count):
        n = draw.randint(3, largest)
        reads: list[set[int]] = [set() for _ in range(n)]
        for b in range(1, n):
            for a in draw.sample(range(b), min(b, draw.choice((1, 1, 1, 2)))):
                reads[a].add(b)
        for a in range(n - 1):
            if not reads[a]:
                reads[a].add(draw.randint(a + 1, n - 1))
        ops, costs, parameters = [], [], []
        for i in range(n):
            launch, work = draw.choice((10e-6, 40e-6)), draw.choice((5e-6, 20e-6, 80e-6))
            ops.append(Op(f"op{i}", (f"p{i}",)))
            parameters.append(Parameter(f"p{i}", draw.choice((0, 1 << 16, 1 << 20))))
            costs.append(
                OpCost(
                    tuple(launch + work * s for s in SAMPLES),
                    tuple(launch + 2 * work * s for s in SAMPLES),
                    1 << 10,
                )
            )
        values = tuple(
            Value(a, tuple(sorted(to)), draw.choice((1 << 10, 1 << 16, 1 << 18)))
            for a, to in enumerate(reads)
            if to
        )
        graph = OpGraph(tuple(ops), values, tuple(parameters), name=f"random {number}")
        yield Profile(graph, SAMPLES, tuple(costs), "synthetic", "estimated")


def clusters() -> Iterator[Cluster]:
    """Four devices: on one fast level, and in two nodes that share a slow network."""
    yield Cluster("flat", "synthetic", 1 << 34, (Level("node", 4, 10e9, 5e-6),))
    node, network = Level("node", 2, 10e9, 5e-6), Level("network", 2, 2e9, 20e-6)
    yield Cluster("2x2", "synthetic", 1 << 34, (node, network))


def period_rows(count: int = 300) -> list[Row]:
    """The least period of ours and of all partitions at micro-batches of 2 samples."""
    result = []
    for profile in profiles(count):
        for cluster in clusters():
            cost = CostModel(profile, cluster)
            found = [
                least_period_s(cost, planner(cost, batch_size=BATCH, microbatch_size=2))
                for planner in (GraphPipe(), Exhaustive(candidates=None))
            ]
            result.append(
                {
                    "graph": profile.graph.name,
                    "cluster": cluster.name,
                    "series_parallel": is_series_parallel(decompose(profile.graph)),
                    "factor": found[0] / found[1],
                }
            )
    return result


def least_period_s(cost: CostModel, graphs: object) -> float:
    """The least longest period of some stage graphs."""
    least = float("inf")
    for graph in graphs:  # type: ignore[attr-defined]
        least = min(least, _period_s(cost, graph))
    return least


def _period_s(cost: CostModel, graph: StageGraph) -> float:
    size = graph.stages[0].microbatch_size
    chosen = degrees(cost, size, cost.cluster.num_devices)
    prices = PartPrices(MicrobatchPrices(cost, BATCH, size, chosen, cost.cluster.memory_bytes))
    parts = (
        Part(cost.graph.mask(s.operators), s.replicas, s.recompute, s.tensor) for s in graph.stages
    )
    return max(prices.period_s(part) for part in parts)


def step_rows(count: int = 60, largest: int = 6) -> list[Row]:
    """Our step over the least of all partitions, replicas and micro-batch sizes, simulated."""
    result = []
    every = {"every": True, "candidates": None}
    for profile in profiles(count, largest, seed=1):
        for cluster in clusters():
            ours = plan(profile, cluster, BATCH).predicted.step_s
            try:
                best = plan(
                    profile, cluster, BATCH, planner="exhaustive", planner_options=every
                ).predicted.step_s
            except AnabranchError as error:
                result.append({"graph": profile.graph.name, "error": str(error)})
                continue
            result.append(
                {"graph": profile.graph.name, "cluster": cluster.name, "factor": ours / best}
            )
    return result


def show(periods: list[Row], steps: list[Row]) -> str:
    """Both questions in one table."""
    lines = []
    for name, found in (("longest period", periods), ("simulated step", steps)):
        factors = [row["factor"] for row in found if "factor" in row]
        equal = sum(factor <= 1 + 1e-6 for factor in factors) / len(factors)
        lines.append(
            [
                name,
                str(len(factors)),
                f"{equal:.1%}",
                f"{statistics.median(factors) - 1:.2%}",
                f"{max(factors) - 1:.2%}",
            ]
        )
    return table(["ours against the best of all", "cases", "equal", "median loss", "worst"], lines)
