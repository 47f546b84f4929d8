"""Small models and a picture of a timeline."""

from dataclasses import replace

from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.schedule import SCHEDULES
from anabranch.simulator.run import run
from anabranch.timeline import Timeline
from tests.strategies import calibrations, stage_graphs

Edges = tuple[tuple[int, int], ...]


def cluster(
    *sizes: int,
    bandwidth: float = 1e15,
    latency_s: float = 0.0,
    memory_bytes: int = 10**9,
    cards: int = 1,
) -> Cluster:
    """Levels of equal links, innermost first, and groups with so many cards."""
    levels = tuple(
        Level(f"l{i}", n, bandwidth, latency_s, cards if i else 1) for i, n in enumerate(sizes)
    )
    return Cluster("test", "v100", memory_bytes, levels)


def cost_model(
    edges: Edges,
    forward_s: list[float],
    backward_s: list[float],
    machines: Cluster,
    *,
    value_bytes: int = 0,
    parameter_bytes: int = 0,
    kept_bytes: int = 0,
    waiting_bytes: int = 0,
    tied: tuple[int, ...] = (),
) -> CostModel:
    """One operator per stage, times proportional to samples; ``tied`` ones share a parameter."""
    names = [("tied" if i in tied else f"p{i}") for i in range(len(forward_s))]
    ops = tuple(Op(f"op{i}", (name,)) for i, name in enumerate(names))
    values = tuple(
        Value(a, tuple(y for x, y in edges if x == a), value_bytes)
        for a in sorted({x for x, _ in edges})
    )
    parameters = tuple(Parameter(name, parameter_bytes) for name in dict.fromkeys(names))
    costs = tuple(
        OpCost((f,), (b,), kept_bytes, waiting_bytes=waiting_bytes)
        for f, b in zip(forward_s, backward_s, strict=True)
    )
    graph = OpGraph(ops, values, parameters)
    profile = Profile(graph, (1,), costs, "v100", "measured", True)
    return CostModel(profile, machines)


def stage_graph(
    edges: Edges, devices: list[tuple[int, ...]], batch_size: int, sizes: list[int] | None = None
) -> StageGraph:
    """Operator i alone in stage i."""
    size = sizes or [1] * len(devices)
    stages = tuple(Stage((f"op{i}",), d, size[i]) for i, d in enumerate(devices))
    return StageGraph(stages, edges, batch_size)


def chain(length: int) -> Edges:
    """0 -> 1 -> 2 ..."""
    return tuple((i, i + 1) for i in range(length - 1))


def simulate(graph: StageGraph, cost: CostModel, schedule: str = "1f1b") -> Timeline:
    """One step under a rule."""
    rule = SCHEDULES[schedule]()
    warm = rule.warm_up(graph)
    return run(warm, rule.order(warm), cost)


def draw(timeline: Timeline) -> list[str]:
    """One row per device, one column per second, dots for waiting; for compute in whole seconds."""
    rows = []
    for device in timeline.devices:
        cells = [" ."] * round(timeline.makespan_s)
        for span in timeline.spans:
            if span.device == device and span.action.kind.is_compute:
                for second in range(round(span.start), round(span.end)):
                    cells[second] = f"{span.action.kind}{span.action.microbatch}"
        rows.append(" ".join(cells).rstrip(" ."))
    return rows


@st.composite
def priced_stage_graphs(draw: st.DrawFn) -> tuple[StageGraph, CostModel, str]:
    """Stages with replicas, prices in small whole numbers, and a key of
    ``SCHEDULES``: shared ports, tied parameters, devices alone or on shared processors.
    """
    graph = draw(stage_graphs(max_stages=4))
    whole = st.lists(st.integers(0, 4), min_size=len(graph), max_size=len(graph))
    cards, nodes = draw(st.integers(1, 2)), -(-len(graph.devices) // 2)
    machines = cluster(2, nodes, bandwidth=2, latency_s=0.5, cards=cards)
    if draw(st.booleans()):
        machines = replace(machines, cores=2, calibration=draw(st.none() | calibrations()))
    cost = cost_model(
        graph.edges[::2],
        draw(whole),
        draw(whole),
        machines,
        value_bytes=draw(st.integers(0, 3)),
        parameter_bytes=draw(st.sampled_from([0, 12])),
        tied=draw(st.sampled_from([(), (0, 1)])),
    )
    stages = [(s.devices, s.microbatch_size) for s in graph.stages]
    devices, sizes = (list(column) for column in zip(*stages, strict=True))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    drawn = stage_graph(graph.edges, devices, graph.batch_size, sizes)
    return SCHEDULES[schedule]().warm_up(drawn), cost, schedule
