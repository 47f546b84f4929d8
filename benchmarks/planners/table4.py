"""The plans that DAPPLE's Table 4 prints, on the profiles that its authors published.

Where the profiled model has another number of layers than that of the table, the published split is
scaled to it. A published plan gets every micro-batch size and the better warm-up, as ours do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.even import even_runs
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import Profile
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import AUTO
from benchmarks.planners.cases import TABLE4_CLUSTERS, Case
from benchmarks.planners.common import Row

Split = str | tuple[int, int, float]
"""DP, straight, or replicas of both stages and the share of the layers that the first one has."""


@dataclass(frozen=True)
class Published:
    """The published plans of a model.

    Attributes:
        model: name and layers as published.
        plans: one per cluster.
        first: number of operators before the first layer.
        last: number of operators after the last layer.
    """

    model: str
    plans: tuple[Split, Split, Split]
    first: int
    last: int


TABLE = {
    "pipedream/resnet50/graph.txt": Published("ResNet-50", ("DP", "DP", "DP"), 0, 0),
    "dapple/vgg-19-pbs-32.txt": Published("VGG-19", ("DP", "DP", (15, 1, 13 / 19)), 0, 2),
    "dapple/gnmt-32-pbs-64-simplified.txt": Published(
        "GNMT-16", ((8, 8, 9 / 16), (8, 8, 9 / 16), "straight"), 1, 1
    ),
    "dapple/bert-48-pbs-2.txt": Published(
        "BERT-48", ((8, 8, 23 / 48), "straight", "straight"), 3, 1
    ),
    "dapple/xlnet-24-pbs-1.txt": Published(
        "XLNet-36", ((8, 8, 0.5), (8, 8, 0.5), "straight"), 5, 1
    ),
    "dapple/amoeba-18-pbs-8.txt": Published(
        "AmoebaNet-36", ((8, 8, 24 / 36), (11, 5, 27 / 36), (11, 5, 27 / 36)), 3, 2
    ),
}


def published(profile: Profile, case: Case) -> Row:
    """The published plan of a case under our simulator, at its best micro-batch size."""
    known = TABLE[case.model]
    split = known.plans[TABLE4_CLUSTERS.index(case.cluster)]
    judge = Judge(ShortestStep(CostModel(profile, case.machines()), AUTO))
    judge.consider(_proposals(profile, known, split, case.batch))
    try:
        best = judge.winner("published")
    except InfeasiblePlanError as error:
        return {"error": "InfeasiblePlanError", "message": str(error)[:300]}
    graph = best.graph
    return {
        "step_s": judge.best_s,
        "samples_per_s": case.batch / judge.best_s,
        "stages": len(graph),
        "depth": graph.depth,
        "replicas": [stage.replicas for stage in graph.stages],
        "microbatch_size": graph.stages[0].microbatch_size,
        "plan": describe(split),
    }


def describe(split: Split) -> str:
    """A published plan in words."""
    if isinstance(split, str):
        return split
    return f"{split[0]}:{split[1]}, {split[2]:.0%} of the layers first"


def _proposals(profile: Profile, known: Published, split: Split, batch: int) -> list[StageGraph]:
    """The published plan at every micro-batch size."""
    count = len(profile.graph)
    if split == "DP":
        cuts, replicas = [[0, count]], [16]
    elif split == "straight":
        seconds = [op.forward_s[0] + op.backward_s[0] for op in profile.costs]
        cuts = [[0, *(stop for _, stop in even_runs(seconds, 16))]]
        replicas = [1] * 16
    else:
        assert not isinstance(split, str)
        wanted = known.first + split[2] * (count - known.first - known.last)
        # A share of another number of layers need not be whole: both neighbours are tried.
        places = sorted({int(wanted), -int(-wanted // 1)})
        if known.model == "VGG-19":
            layers = [i for i, op in enumerate(profile.graph.ops) if op.parameters]
            places = [layers[13]]
        cuts, replicas = [[0, place, count] for place in places], list(split[:2])
    return [
        _chain(profile, cut, replicas, batch, size)
        for cut in cuts
        for size in (1 << i for i in range(batch.bit_length()))
        if max(replicas) <= size <= batch
    ]


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
