"""DAPPLE's Table 4 again: the published plan, DAPPLE's planner here, and ours, row by row.

The V100 profiles are those that DAPPLE's authors published; they are not part of this repository,
``--profiles`` names their folder. Where the profiled model has another number of layers than that
of the table, the published split is scaled to it and the row says so. The published plan gets
every micro-batch size and the better warm-up, as ours does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.dapple import Dapple, latency
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import Profile
from anabranch.profile.readers import read_profile
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import AUTO
from benchmarks.planners.common import Row, plan_row, table

CLUSTERS = ("dapple-a:2x8", "dapple-b:16", "dapple-c:16")


@dataclass(frozen=True)
class Published:
    """A model of the table and its published plans.

    Attributes:
        file: the profile.
        model: name and layers as published.
        batch: samples of a step.
        plans: per cluster "DP", "straight", or (replicas of both stages, share of the layers that
            the first one has).
        first: name of the first operator that counts as a layer.
        last: number of operators after the last layer.
    """

    file: str
    model: str
    batch: int
    plans: tuple[str | tuple[int, int, float], ...]
    first: int
    last: int


TABLE = (
    Published("pipedream/resnet50/graph.txt", "ResNet-50", 2048, ("DP", "DP", "DP"), 0, 0),
    Published("dapple/vgg-19-pbs-32.txt", "VGG-19", 2048, ("DP", "DP", (15, 1, 13 / 19)), 0, 2),
    Published(
        "dapple/gnmt-32-pbs-64-simplified.txt",
        "GNMT-16 (profile: GNMT-32)",
        1024,
        ((8, 8, 9 / 16), (8, 8, 9 / 16), "straight"),
        1,
        1,
    ),
    Published(
        "dapple/bert-48-pbs-2.txt", "BERT-48", 64, ((8, 8, 23 / 48), "straight", "straight"), 3, 1
    ),
    Published(
        "dapple/xlnet-24-pbs-1.txt",
        "XLNet-36 (profile: XLNet-24)",
        128,
        ((8, 8, 0.5), (8, 8, 0.5), "straight"),
        5,
        1,
    ),
    Published(
        "dapple/amoeba-18-pbs-8.txt",
        "AmoebaNet-36 (profile: AmoebaNet-18)",
        128,
        ((8, 8, 24 / 36), (11, 5, 27 / 36), (11, 5, 27 / 36)),
        3,
        2,
    ),
)


def rows(folder: Path) -> list[Row]:
    """One row per model and cluster."""
    result = []
    for each in TABLE:
        profile = read_profile(folder / each.file)
        for cluster, what in zip(CLUSTERS, each.plans, strict=True):
            published = best_of(profile, cluster, each.batch, proposals(profile, each, what))
            result.append(
                {
                    "model": each.model,
                    "cluster": cluster,
                    "batch": each.batch,
                    "published_plan": describe(what),
                    "published": published,
                    "dapple": plan_row("dapple", profile, cluster, each.batch)
                    | objective(profile, cluster, each.batch),
                    "ours": plan_row("graphpipe", profile, cluster, each.batch),
                }
            )
    return result


def describe(what: str | tuple[int, int, float]) -> str:
    """A published plan in words."""
    if isinstance(what, str):
        return what
    return f"{what[0]}:{what[1]}, {what[2]:.0%} of the layers first"


def proposals(
    profile: Profile, of: Published, what: str | tuple[int, int, float]
) -> list[StageGraph]:
    """The published plan at every micro-batch size."""
    count = len(profile.graph)
    if what == "DP":
        cuts, replicas = [[0, count]], [16]
    elif what == "straight":
        cuts, replicas = [_even_cuts(profile, 16)], [1] * 16
    else:
        assert not isinstance(what, str)
        layers = count - of.first - of.last
        wanted = of.first + what[2] * layers
        # A share of another number of layers need not be whole: both neighbours are tried.
        places = sorted({int(wanted), -int(-wanted // 1)})
        cuts, replicas = [[0, place, count] for place in places], list(what[:2])
        if "VGG" in of.model:
            cuts = [[0, _before_layer(profile, 14), count]]
    return [
        _chain(profile, cut, replicas, of.batch, size)
        for cut in cuts
        for size in (1 << i for i in range(of.batch.bit_length()))
        if max(replicas) <= size <= of.batch
    ]


def _before_layer(profile: Profile, layer: int) -> int:
    """Place of the n-th operator with parameters, counted from 1."""
    return [i for i, op in enumerate(profile.graph.ops) if op.parameters][layer - 1]


def _even_cuts(profile: Profile, stages: int) -> list[int]:
    from anabranch.planner.even import even_runs

    seconds = [each.forward_s[0] + each.backward_s[0] for each in profile.costs]
    return [0, *(stop for _, stop in even_runs(seconds, stages))]


def _chain(
    profile: Profile, cuts: Sequence[int], replicas: Sequence[int], batch: int, size: int
) -> StageGraph:
    names = [op.name for op in profile.graph.ops]
    stages, first = [], 0
    for (start, stop), count in zip(pairwise(cuts), replicas, strict=True):
        devices = tuple(range(first, first + count))
        stages.append(Stage(tuple(names[start:stop]), devices, size))
        first += count
    home = {i: s for s, (a, b) in enumerate(pairwise(cuts)) for i in range(a, b)}
    edges = {(home[a], home[b]) for a, b in profile.graph.edges if home[a] != home[b]}
    edges |= set(pairwise(range(len(stages))))
    return StageGraph(tuple(stages), tuple(sorted(edges)), batch)


def best_of(profile: Profile, cluster: str, batch: int, graphs: list[StageGraph]) -> Row:
    """The simulated step of the best of some stage graphs, and its latency by DAPPLE's formula."""
    cost = CostModel(profile, Cluster.preset(cluster))
    judge = Judge(ShortestStep(cost, AUTO))
    judge.consider(graphs)
    try:
        best = judge.winner("published")
    except InfeasiblePlanError as error:
        return {"error": "InfeasiblePlanError", "message": str(error)}
    least = min(latency(graph, cost).total_s for graph in graphs)
    return {
        "step_s": judge.best_s,
        "microbatch_size": best.graph.stages[0].microbatch_size,
        "latency_s": least,
    }


def objective(profile: Profile, cluster: str, batch: int) -> Row:
    """What DAPPLE's own objective likes best, all-reduce overlapped or not."""
    cost = CostModel(profile, Cluster.preset(cluster))
    result: Row = {}
    for overlap in (False, True):
        try:
            best = next(iter(Dapple(overlap_allreduce=overlap)(cost, batch_size=batch)))
        except InfeasiblePlanError:
            continue
        key = "objective_overlapped" if overlap else "objective"
        result[key] = {
            "latency_s": latency(best, cost, overlap_allreduce=overlap).total_s,
            "replicas": [stage.replicas for stage in best.stages],
            "operators": [len(stage.operators) for stage in best.stages],
            "microbatch_size": best.stages[0].microbatch_size,
        }
    return result


def _short(row: Row) -> str:
    if "step_s" not in row:
        return "does not fit"
    text = f"{row['step_s'] * 1e3:.0f}"
    if "replicas" in row:
        shape = ":".join(map(str, row["replicas"]))
        text += f" ({shape if len(row['replicas']) < 5 else str(len(row['replicas'])) + ' stages'})"
    return text


def show(found: list[Row]) -> str:
    """One line per row of the table; steps in ms."""
    lines = []
    for row in found:
        mine, theirs = row["ours"].get("step_s"), row["published"].get("step_s")
        own = row["dapple"].get("objective")
        lines.append(
            [
                row["model"],
                row["cluster"],
                row["published_plan"],
                _short(row["published"]),
                ":".join(map(str, own["replicas"])) if own and len(own["replicas"]) < 5 else "deep",
                _short(row["dapple"]),
                _short(row["ours"]),
                f"{theirs / mine:.2f}x" if mine and theirs else "-",
            ]
        )
    columns = ["model", "cluster", "published plan", "its step", "DAPPLE's objective, here"]
    return table([*columns, "dapple, here", "graphpipe", "published over ours"], lines)
