"""Small clusters, and the plans that GraphPipe may express, enumerated one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.toolkit.parts import PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.profile.profile import OpCost, Profile, Sharded

FAST = 1e18

#  a --100 bytes per sample--> b;   1 s forward and 2 s backward per sample, 900 bytes of weights
TWO_OPERATORS = OpGraph(
    (Op("a", ("a.w",)), Op("b", ("b.w",))),
    (Value(0, (1,), 100),),
    (Parameter("a.w", 900), Parameter("b.w", 900)),
)
TWO_PROFILED = Profile(
    TWO_OPERATORS,
    (1, 2, 4, 8),
    tuple(OpCost((1.0, 2.0, 4.0, 8.0), (2.0, 4.0, 8.0, 16.0), 10) for _ in range(2)),
    device="cpu",
    source="measured",
)
TWO_NODES = Cluster("2x2", "cpu", 10**5, (Level("node", 2, 100.0, 0.0), Level("net", 2, 50.0, 1.0)))


def cluster(
    devices: int,
    *,
    node: int | None = None,
    memory: int = 10**9,
    bandwidth: float = FAST,
    card: float | None = None,
    latency_s: float = 0.0,
) -> Cluster:
    """Devices on one level, or in nodes of ``node`` that share a card."""
    inner = Level("node", node or devices, bandwidth, latency_s)
    levels = (inner,)
    if node and node < devices:
        levels = (inner, Level("network", devices // node, card or bandwidth, latency_s))
    return Cluster(f"{devices} devices", "cpu", memory, levels)


def cost_model(profile: Profile, devices: int, **options: object) -> CostModel:
    """The profile on a small cluster."""
    return CostModel(profile, cluster(devices, **options), optimizer_factor=1.0)


def linked_model(
    n: int, edges: list[tuple[int, int]], seconds: list[int] | None = None
) -> CostModel:
    """Operators with values of no bytes between them, on two devices."""
    graph = OpGraph(
        tuple(Op(f"op{i}") for i in range(n)), tuple(Value(a, (b,), 0) for a, b in edges)
    )
    costs = tuple(OpCost((float(s),), (0.0,), 0) for s in seconds or [1] * n)
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    return CostModel(profile, cluster(2))


def two_priced(size: int = 4, *, cluster: Cluster = TWO_NODES, batch_size: int = 16) -> PartPrices:
    """Prices of parts of the two operators at one micro-batch size."""
    cost = CostModel(TWO_PROFILED, cluster, optimizer_factor=1.0)
    return PartPrices(MicrobatchPrices(cost, batch_size, size, (1, 2, 4), cluster.memory_bytes))


def sharded(profile: Profile, degree: int = 2) -> Profile:
    """The same with tensor parallelism: a launch more, the rest of everything split."""
    costs = tuple(
        OpCost(
            tuple(0.5 + t / degree for t in cost.forward_s),
            tuple(0.5 + t / degree for t in cost.backward_s),
            cost.kept_bytes // degree,
        )
        for cost in profile.costs
    )
    nbytes = {p.name: p.nbytes for p in profile.graph.parameters}
    held = tuple(sum(nbytes[n] for n in op.parameters) // degree for op in profile.graph.ops)
    return replace(profile, sharded=(Sharded(degree, costs, held),))


def expressible(chain: Chain, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, ...]]:
    """Partitions into stages of the four kinds that ``planner.graphpipe`` lists, as bit masks."""
    stop = len(chain.items) if stop is None else stop
    if start == stop:
        yield ()
        return
    for end in range(start + 1, stop + 1):
        # kind 1: a run of items
        for rest in expressible(chain, end, stop):
            yield (chain.row.mask(start, end), *rest)
    block = chain.items[start]
    if isinstance(block, Block):
        # boundaries on both sides of the block, kind 2 inside
        for inside in _placed(block, {}):
            for rest in expressible(chain, start + 1, stop):
                yield (*inside, *rest)
        # kind 3: a run behind the block with the last operators of branches
        for end in range(start + 2, stop + 1):
            for taken, inside in _shared(block, tails=True):
                for rest in expressible(chain, end, stop):
                    yield (*inside, taken | chain.row.mask(start + 1, end), *rest)
    # kind 4: a run before a block with the first operators of branches
    for p in range(start + 1, stop):
        block = chain.items[p]
        if isinstance(block, Block):
            for taken, inside in _shared(block, tails=False):
                for rest in expressible(chain, p + 1, stop):
                    yield (*inside, taken | chain.row.mask(start, p), *rest)


def _shared(block: Block, *, tails: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cuts of the branches: what goes to the stage outside, and stages for the remainder."""
    sizes = [len(branch.items) for branch in block.branches]
    for cuts in product(*(range(size + 1) for size in sizes)):
        taken = 0
        remaining = {}
        for j, (branch, cut) in enumerate(zip(block.branches, cuts, strict=True)):
            taken |= branch.row.mask(cut, sizes[j]) if tails else branch.row.mask(0, cut)
            remaining[j] = (0, cut) if tails else (cut, sizes[j])
        for inside in _placed(block, remaining):
            yield taken, inside


def _placed(block: Block, remaining: dict[int, tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Stages for what remains of the branches; runs of whole ones may be one stage."""

    def extend(j: int) -> Iterator[tuple[int, ...]]:
        if j == len(block.branches):
            yield ()
            return
        branch = block.branches[j]
        start, stop = remaining.get(j, (0, len(branch.items)))
        for own in expressible(branch, start, stop):
            for rest in extend(j + 1):
                yield (*own, *rest)
        for end in range(j + 2, len(block.branches) + 1):
            run = range(j, end)
            if all(remaining.get(i, whole) == whole for i in run if (whole := _whole(block, i))):
                for rest in extend(end):
                    yield (block.row.mask(j, end), *rest)

    yield from extend(0)


def _whole(block: Block, j: int) -> tuple[int, int]:
    return 0, len(block.branches[j].items)
