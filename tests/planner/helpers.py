"""Small clusters and models with numbers that are easy to follow."""

from collections.abc import Iterable
from itertools import accumulate

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.profile.profile import OpCost, Profile

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


def prefixes(order: Iterable[int]) -> list[int]:
    """The downsets of operators in a row."""
    return list(accumulate((1 << op for op in order), initial=0))


def cluster(
    devices: int,
    *,
    node: int | None = None,
    memory: int = 10**9,
    bandwidth: float = FAST,
    card: float | None = None,
    cards: int = 1,
    latency_s: float = 0.0,
) -> Cluster:
    """Devices on one level, or in nodes of ``node`` that share cards."""
    inner = Level("node", node or devices, bandwidth, latency_s)
    levels = (inner,)
    if node and node < devices:
        levels = (inner, Level("network", devices // node, card or bandwidth, latency_s, cards))
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


def two_priced(
    size: int = 4, *, cluster: Cluster = TWO_NODES, batch_size: int = 16
) -> MicrobatchPrices:
    """Prices of parts of the two operators at one micro-batch size."""
    cost = CostModel(TWO_PROFILED, cluster, optimizer_factor=1.0)
    return MicrobatchPrices(cost, batch_size, size, (1, 2, 4), cluster.memory_bytes)
