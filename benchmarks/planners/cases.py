"""The cases of the benchmark: a model, a cluster, a mini-batch.

=========  =========================================================================================
models     the papers' three models on Summit nodes, the mini-batches of GraphPipe, appendix A.2
map        the same models with few and with many samples for each device, on 4 to 256 devices, with
           other networks between nodes, and more memory
branches   candle-uno with 2 to 16 branches (GraphPipe, 7.3); the case study of its Figure 10
table4     DAPPLE's Table 4, with the plans that it publishes (``table4``)
drawn      models, public profiles and random graphs of up to 20 operators; clusters of 4 to 16
           devices and mini-batches are drawn for each
small      random graphs of 3 to 6 operators on 4 devices, where every plan can be enumerated
scale      1,000 operators on 1,024 devices
=========  =========================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from anabranch.cluster import GB, Cluster, Level
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile
from benchmarks.planners.common import profile_of
from benchmarks.planners.published import read_profile

BATCHES = {
    "mmt": {4: 64, 8: 128, 16: 256, 32: 512},
    "dlrm": {4: 256, 8: 512, 16: 1024, 32: 2048},
    "candle-uno": {4: 4096, 8: 8192, 16: 16384, 32: 32768},
}
"""Mini-batch per number of devices: GraphPipe, appendix A.2."""

CHANGES = ("network x4", "network x1/4", "80 GB")
"""What is changed of the cluster in some cases of the map."""

PRESETS = (
    "local:{d}",
    "summit:{n4}x4",
    "dapple-a:{n8}x{s8}",
    "dapple-b:{d}",
    "dapple-c:{d}",
    "dgx-h100:{n8}x{s8}",
)

TABLE4 = {
    "pipedream/resnet50/graph.txt": 2048,
    "dapple/vgg-19-pbs-32.txt": 2048,
    "dapple/gnmt-32-pbs-64-simplified.txt": 1024,
    "dapple/bert-48-pbs-2.txt": 64,
    "dapple/xlnet-24-pbs-1.txt": 128,
    "dapple/amoeba-18-pbs-8.txt": 128,
}
"""Profile and mini-batch of DAPPLE's Table 4, on 16 devices."""

SMALL, LARGER = 6, 20
"""Operators of random graphs at most: so few that every plan can be enumerated, and more."""

TABLE4_CLUSTERS = ("dapple-a:2x8", "dapple-b:16", "dapple-c:16")


@dataclass(frozen=True, slots=True)
class Case:
    """A planning problem.

    Attributes:
        group: a line of the table above.
        model: a built-in model, with options behind it (``candle-uno branches=4``); the path of a
            public profile; or ``random N``, with the most operators behind it where these are not
            ``SMALL``, and ``synthetic N``.
        cluster: a preset; ``flat`` and ``2x2`` are those of the small graphs.
        change: one of ``CHANGES``, or nothing.
    """

    group: str
    model: str
    cluster: str
    batch: int
    change: str = ""

    @property
    def name(self) -> str:
        """What identifies the case."""
        change = f", {self.change}" if self.change else ""
        return f"{self.model} on {self.cluster}{change}, batch {self.batch}"

    @property
    def needs_profiles(self) -> bool:
        """Whether the model is a public profile."""
        return self.model.endswith((".txt", ".json"))

    def profile(self, folder: Path | None) -> Profile:
        """The model; public profiles lie in a folder."""
        if self.needs_profiles:
            if folder is None:
                raise ValueError(f"{self.model} is a public profile: --profiles names their folder")
            return read_profile(folder / self.model)
        name, *rest = self.model.split()
        if name == "random":
            return random_graph(int(rest[0]), int(rest[1]) if rest[1:] else SMALL)
        if name == "synthetic":
            return synthetic(int(rest[0]), 1000)
        largest = max(BATCHES.get(name, {0: 64}).values())
        return profile_of(name, largest, **dict(option.split("=") for option in rest))

    def machines(self) -> Cluster:
        """The cluster."""
        if self.cluster == "flat":
            return Cluster("flat", "synthetic", 1 << 34, (Level("node", 4, 10e9, 5e-6),))
        if self.cluster == "2x2":
            node, network = Level("node", 2, 10e9, 5e-6), Level("network", 2, 2e9, 20e-6)
            return Cluster("2x2", "synthetic", 1 << 34, (node, network))
        return changed(Cluster.preset(self.cluster), self.change)


def changed(cluster: Cluster, change: str) -> Cluster:
    """A cluster of two levels with one thing changed."""
    if change == "80 GB":
        return replace(cluster, memory_bytes=80 * GB)
    if not change:
        return cluster
    node, network = cluster.levels
    factor = {"network x4": 4.0, "network x1/4": 0.25}[change]
    faster = replace(network, bandwidth=network.bandwidth * factor)
    return replace(cluster, levels=(node, faster))


def cases(folder: Path | None) -> Iterator[Case]:
    """All cases; those of public profiles only if their folder is known."""
    for model, batches in BATCHES.items():
        for devices, batch in batches.items():
            yield Case("models", model, f"summit:{devices // 4}x4", batch)
    for model, batches in BATCHES.items():
        for batch in (batches[4], batches[32]):
            for devices in (4, 8, 16, 32, 64, 128, 256):
                yield Case("map", model, f"summit:{devices // 4}x4", batch)
            for change in CHANGES:
                yield Case("map", model, "summit:8x4", batch, change)
    for branches in (2, 4, 8, 16):
        yield Case("branches", f"candle-uno branches={branches}", "summit:8x4", 32768)
    yield Case("branches", "two-branch", "summit:2x4", 32)
    for number in range(60):
        for cluster in ("flat", "2x2"):
            yield Case("small", f"random {number}", cluster, 8)
    for branches in (1, 8, 32):
        yield Case("scale", f"synthetic {branches}", "summit:256x4", 16384)
    if folder is not None:
        for file, batch in TABLE4.items():
            for cluster in TABLE4_CLUSTERS:
                yield Case("table4", file, cluster, batch)
    yield from _drawn(folder)


def _drawn(folder: Path | None) -> Iterator[Case]:
    """Every model once, then again: any first part of it is a fair sample."""
    models = {name: sizes[4] // 8 for name, sizes in BATCHES.items()}
    models |= {"two-branch": 2, "transformer": 4}
    models |= {f"random {number} {LARGER}": 2 for number in range(20)}
    if folder is not None:
        files = sorted([*folder.rglob("*.txt"), *folder.rglob("*.json")])
        for path in files:
            known = "plans" not in path.parts[-2] and "LICENSE" not in path.name
            if known and "nasnet" not in path.parts[-2]:  # takes some planners many minutes
                models[str(path.relative_to(folder))] = read_profile(path).samples[0]
    seen = set()
    for turn in range(4):
        for model, samples in models.items():
            draw = random.Random(f"{model} {turn}")
            devices = draw.choice((4, 8, 16))
            sizes = {"d": devices, "n4": devices // 4, "n8": max(1, devices // 8)}
            cluster = draw.choice(PRESETS).format(**sizes, s8=min(8, devices))
            case = Case("drawn", model, cluster, draw.choice((1, 2, 4)) * samples * devices)
            if case not in seen:
                seen.add(case)
                yield case


@cache
def random_graph(number: int, most: int) -> Profile:
    """A random graph, each operator with a launch cost and work per sample."""
    draw, samples = random.Random(number), (1, 2, 4, 8)
    n = draw.randint(3, most)
    reads: list[set[int]] = [set() for _ in range(n)]
    for b in range(1, n):
        for a in draw.sample(range(b), min(b, draw.choice((1, 1, 1, 2)))):
            reads[a].add(b)
    for a in range(n - 1):
        if not reads[a]:
            reads[a].add(draw.randint(a + 1, n - 1))
    costs, parameters = [], []
    for i in range(n):
        launch, work = draw.choice((10e-6, 40e-6)), draw.choice((5e-6, 20e-6, 80e-6))
        forward = tuple(launch + work * count for count in samples)
        backward = tuple(launch + 2 * work * count for count in samples)
        parameters.append(Parameter(f"p{i}", draw.choice((0, 1 << 16, 1 << 20))))
        costs.append(OpCost(forward, backward, 1 << 10))
    values = tuple(
        Value(a, tuple(sorted(to)), draw.choice((1 << 10, 1 << 16, 1 << 18)))
        for a, to in enumerate(reads)
        if to
    )
    ops = tuple(Op(f"op{i}", (f"p{i}",)) for i in range(n))
    graph = OpGraph(ops, values, tuple(parameters), name=f"random {number}")
    return Profile(graph, samples, tuple(costs), "synthetic", "estimated")


def synthetic(branches: int, operators: int) -> Profile:
    """Branches of equal operators from one stem into one head; 4 MiB of parameters each."""
    samples = (1, 2, 4, 8, 16, 32, 64)
    count = (operators - 2) // branches
    edges: list[list[int]] = [[] for _ in range(2 + branches * count)]
    for b in range(branches):
        first = 1 + b * count
        edges[0].append(first)
        for i in range(first, first + count - 1):
            edges[i].append(i + 1)
        edges[first + count - 1].append(len(edges) - 1)
    graph = OpGraph(
        tuple(Op(f"op{i}", (f"p{i}",)) for i in range(len(edges))),
        tuple(Value(i, tuple(sorted(to)), 16 << 10) for i, to in enumerate(edges) if to),
        tuple(Parameter(f"p{i}", 4 << 20) for i in range(len(edges))),
        name=f"{branches} branches",
    )
    # A launch of 20 us and 10 us of work per sample; every third operator takes twice as long.
    costs = tuple(
        OpCost(
            tuple(20e-6 + 10e-6 * n * (1 + (i % 3 == 0)) for n in samples),
            tuple(40e-6 + 20e-6 * n * (1 + (i % 3 == 0)) for n in samples),
            32 << 10,
        )
        for i in range(len(edges))
    )
    return Profile(graph, samples, costs, "synthetic", "estimated")
