"""Branches, the case study and scale: how gain and search time change with the model.

- candle-uno with 2 to 16 branches on 32 devices (GraphPipe, 7.3: the gain grows to 2x);
- two branches on 8 devices (GraphPipe, Figure 10: 20 %, half of it from depth);
- 1,024 devices and 1,000 operators.
"""

from __future__ import annotations

import resource
import time

from anabranch.cluster import Cluster
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.plans.plan import Plan
from anabranch.profile.profile import OpCost, Profile
from anabranch.solve import plan
from benchmarks.planners.common import Row, milliseconds, plan_row, profile_of, table

BRANCHES = (2, 4, 8, 16)
SAMPLES = (1, 2, 4, 8, 16, 32, 64)


def branch_rows() -> list[Row]:
    """Ours, the strongest sequential plan and the straight pipeline, by number of branches."""
    result = []
    for branches in BRANCHES:
        profile = profile_of("candle-uno", 32768, branches=str(branches))
        for name, planner, most in (
            ("graphpipe", "graphpipe", None),
            ("sequential", "sequential", None),
            ("straight", "sequential", 1),
        ):
            row = plan_row(planner, profile, "summit:8x4", 32768, max_replicas=most)
            result.append(row | {"planner": name, "branches": branches})
    return result


def show_branches(found: list[Row]) -> str:
    """One line per number of branches."""
    lines = []
    for branches in BRANCHES:
        of = {row["planner"]: row for row in found if row["branches"] == branches}
        ours = of["graphpipe"]["step_s"]
        over = [of[name].get("step_s", 0.0) / ours for name in ("sequential", "straight")]
        lines.append(
            [str(branches)]
            + [milliseconds(of[name]) for name in ("graphpipe", "sequential", "straight")]
            + [f"{each:.2f}x" if each else "-" for each in over]
        )
    columns = ["branches", "graphpipe", "sequential", "straight", "over sequential"]
    return table([*columns, "over straight"], lines)


def case_rows() -> list[Row]:
    """Two branches on 8 devices, mini-batch 32, no replicas; the published micro-batches too."""
    profile = profile_of("two-branch", 32)
    result = []
    for planner in ("graphpipe", "sequential"):
        for size in (2, 4, None):
            row = plan_row(planner, profile, "summit:2x4", 32, microbatch_size=size, max_replicas=1)
            result.append(row | {"size": size or "searched"})
    return result


def show_case(found: list[Row]) -> str:
    """One line per planner and micro-batch size."""
    lines = [
        [
            row["planner"],
            str(row["size"]),
            str(row.get("microbatch_size", "-")),
            str(row.get("depth", "-")),
            milliseconds(row),
        ]
        for row in found
    ]
    return table(["planner", "micro-batch asked", "micro-batch", "depth", "step ms"], lines)


def scale_rows() -> list[Row]:
    """1,000 operators on 1,024 V100 as one chain, as 8 and as 32 branches."""
    result = []
    cluster = Cluster.preset("summit:256x4")
    for branches in (1, 8, 32):
        profile = synthetic(branches, 1000)
        started = time.process_time()
        found: Plan = plan(profile, cluster, 16384)
        result.append(
            {
                "branches": branches,
                "operators": len(profile.graph),
                "step_s": found.predicted.step_s,
                "depth": found.stage_graph.depth,
                "stages": len(found.stage_graph),
                "search_s": found.search_s,
                "simulate_s": found.simulate_s + found.improve_s,
                "cpu_s": time.process_time() - started,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    return result


def synthetic(branches: int, operators: int) -> Profile:
    """Branches of equal operators from one stem into one head; 4 MiB of parameters each."""
    count = (operators - 2) // branches
    edges: list[list[int]] = [[] for _ in range(2 + branches * count)]
    for b in range(branches):
        first = 1 + b * count
        edges[0].append(first)
        for i in range(first, first + count - 1):
            edges[i].append(i + 1)
        edges[first + count - 1].append(len(edges) - 1)
    parameters = tuple(Parameter(f"p{i}", 4 << 20) for i in range(len(edges)))
    graph = OpGraph(
        tuple(Op(f"op{i}", (f"p{i}",)) for i in range(len(edges))),
        tuple(Value(i, tuple(sorted(to)), 16 << 10) for i, to in enumerate(edges) if to),
        parameters,
        name=f"{branches} branches",
    )
    # A launch of 20 us and 10 us of work per sample; every third operator takes twice as long.
    costs = tuple(
        OpCost(
            tuple(20e-6 + 10e-6 * n * (1 + (i % 3 == 0)) for n in SAMPLES),
            tuple(40e-6 + 20e-6 * n * (1 + (i % 3 == 0)) for n in SAMPLES),
            32 << 10,
        )
        for i in range(len(edges))
    )
    return Profile(graph, SAMPLES, costs, "synthetic", "estimated")


def show_scale(found: list[Row]) -> str:
    """One line per shape."""
    lines = [
        [
            str(row["branches"]),
            str(row["operators"]),
            f"{row['depth']} / {row['stages']}",
            milliseconds(row),
            f"{row['search_s']:.2f}",
            f"{row['simulate_s']:.2f}",
            f"{row['peak_rss_bytes'] / 2**30:.2f}",
        ]
        for row in found
    ]
    columns = ["branches", "operators", "depth / stages", "step ms", "search s", "simulation s"]
    return table([*columns, "peak GiB"], lines)
