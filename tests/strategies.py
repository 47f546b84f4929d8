"""Hypothesis strategies that several tests share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from anabranch.cluster import Calibration, Cluster, Level, Machine
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, UpdateCost
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import Span, SumSpan, Timeline

SECONDS = st.floats(0, 1e3)


@st.composite
def op_graphs(draw: st.DrawFn, max_ops: int = 6) -> OpGraph:
    """Any directed acyclic graph: values run from one operator (or the batch) to later ones."""
    n = draw(st.integers(1, max_ops))
    parameters = tuple(
        Parameter(f"p{i}", draw(st.integers(0, 2**40)), draw(st.booleans()))
        for i in range(draw(st.integers(0, 3)))
    )
    names = [p.name for p in parameters]
    ops = tuple(
        Op(
            f"op{i}",
            tuple(n for n in names if draw(st.booleans())),
            draw(st.sampled_from(["", "Linear"])),
        )
        for i in range(n)
    )
    values = []
    for i in range(draw(st.integers(0, 2 * n))):
        producer = draw(st.integers(BATCH, n - 1))
        consumers = tuple(c for c in range(producer + 1, n) if draw(st.booleans()))
        size = draw(st.integers(0, 2**40))
        values.append(
            Value(producer, consumers, size, draw(st.booleans()), draw(st.booleans()), f"v{i}")
        )
    return OpGraph(ops, tuple(values), parameters, name=draw(st.sampled_from(["", "a model"])))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any profile of any graph."""
    graph = draw(op_graphs())
    samples = tuple(sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3))))
    times = st.tuples(*[SECONDS] * len(samples))
    costs = []
    for _ in graph.ops:
        forward, backward = draw(times), draw(times)
        waiting = draw(st.sampled_from([(), (0.0,) * len(samples), backward]))
        costs.append(OpCost(forward, backward, draw(st.integers(0, 2**40)), weight_s=waiting))
    return Profile(
        graph,
        samples,
        tuple(costs),
        device=draw(st.sampled_from(["cpu", "v100"])),
        source=draw(st.sampled_from(["measured", "estimated", "imported"])),
        proportional=len(samples) == 1 and draw(st.booleans()),
        update=draw(st.none() | st.builds(UpdateCost, SECONDS, SECONDS, SECONDS)),
        read_sample_s=draw(SECONDS),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any cluster of up to 64 devices."""
    levels = tuple(
        Level(
            f"level {i}",
            draw(st.integers(1, 4)),
            bandwidth=draw(st.floats(1.0, 1e15)),
            latency_s=draw(st.floats(0, 1)),
            cards=draw(st.integers(1, 8)) if i else 1,
        )
        for i in range(draw(st.integers(1, 3)))
    )
    memory = draw(st.integers(1, 2**50))
    calibration = draw(st.none() | calibrations())
    return Cluster("drawn", "v100", memory, levels, draw(st.integers(0, 64)), calibration)


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    """What may have been measured on any machine."""
    slower = sorted(draw(st.lists(st.floats(1, 100), max_size=4)))
    seconds = [draw(st.floats(0, 1)) for _ in range(4)]
    return Calibration(
        Machine("processor", draw(st.integers(1, 64)), "2.13.0"),
        "2026-01-31",
        (1.0, *slower),
        *seconds,
        memory_bandwidth=draw(st.floats(1.0, 1e15)),
        version=draw(st.integers(1, 5)),
    )


@st.composite
def stage_graphs(draw: st.DrawFn, max_stages: int = 4, max_replicas: int = 2) -> StageGraph:
    """Any directed acyclic graph of stages with replicas, on devices 0, 1, 2 ..."""
    n = draw(st.integers(1, max_stages))
    batch_size = draw(st.integers(1, 64))
    stages: list[Stage] = []
    devices = 0
    for s in range(n):
        replicas = draw(st.integers(1, max_replicas))
        stages.append(
            Stage(
                operators=tuple(f"op{s}.{i}" for i in range(draw(st.integers(1, 3)))),
                devices=tuple(range(devices, devices + replicas)),
                microbatch_size=draw(st.integers(1, batch_size)),
                k=draw(st.integers(1, 2)),
                in_flight=draw(st.integers(0, 8)),
                recompute=draw(st.booleans()),
            )
        )
        devices += replicas
    pairs = [(x, y) for y in range(n) for x in range(y)]
    edges = tuple(sorted(pair for pair in pairs if draw(st.booleans())))
    return StageGraph(tuple(stages), edges, batch_size)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan, as a file may hold it: nothing says that its stages fit a model."""
    graph = draw(stage_graphs())
    mode, policy = draw(
        st.sampled_from([("sync", ""), ("async", "2bw"), ("async", "predict-stash")])
    )
    predicted = Prediction(
        step_s=draw(st.floats(1e-9, 1e6)),
        bottleneck_s_per_sample=draw(SECONDS),
        bubble=draw(st.floats(0, 1)),
        device_peak_bytes=tuple(draw(st.integers(0, 2**50)) for _ in graph.devices),
    )
    return Plan(
        graph,
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "1f1b-deep"])),
        planner="graphpipe",
        model=draw(st.sampled_from(["mmt", "package.module:function", "folder/profile.json"])),
        cluster="summit:8x4",
        profile="estimated, v100, at 1, 2 samples",
        search_s=draw(SECONDS),
        simulate_s=draw(SECONDS),
        improve_s=draw(SECONDS),
        predicted=predicted,
        granularity=draw(st.sampled_from(["operator", "layer", "block"])),
        device=draw(st.sampled_from(["", "v100", "cpu"])),
        options=draw(st.sampled_from([(), (("layers", "8"), ("branches", "4"))])),
        notes=tuple(draw(st.lists(st.sampled_from(["a note", "größer"]), max_size=2))),
        mode=mode,
        policy=policy,
        round_robin=mode == "async" and draw(st.booleans()),
    )


@st.composite
def timelines(draw: st.DrawFn, graph: StageGraph, max_actions: int = 12) -> Timeline:
    """Any step of a stage graph: per device one action after the other, some of them very short."""
    spans = []
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            now = 0.0
            for _ in range(draw(st.integers(0, max_actions))):
                now += draw(st.sampled_from([0.0, 1e-6, 0.5]))
                end = now + draw(st.sampled_from([0.0, 1e-6, 1e-4, 1.0]))
                kind = draw(st.sampled_from([k for k in Kind if k.is_compute]))
                spans.append(Span(device, now, end, Action(s, kind, draw(st.integers(0, 9)))))
                now = end
    last = max((span.end for span in spans), default=0.0)
    return Timeline(
        spans=tuple(sorted(spans, key=lambda span: (span.device, span.start))),
        devices=graph.devices,
        source=draw(st.sampled_from(["predicted", "measured"])),
        step_s=last + draw(st.sampled_from([0.0, 0.3])),
        memory={d: ((0.0, draw(st.integers(0, 2**40))),) for d in graph.devices},
        sums=tuple(draw(sum_spans(graph, last))),
    )


@st.composite
def sum_spans(draw: st.DrawFn, graph: StageGraph, end: float) -> list[SumSpan]:
    """All-reduces of the stages of some devices, in pieces of any length, until ``end``."""
    spans = []
    for s, stage in enumerate(graph.stages):
        cuts = sorted(draw(st.lists(st.floats(0, end), max_size=4)))
        nbytes = draw(st.integers(1, 2**40))
        for device in stage.devices:
            spans += [SumSpan(device, a, b, (s,), nbytes) for a, b in pairwise(cuts)]
    return sorted(spans, key=lambda span: (span.device, span.start, span.end))


@dataclass(frozen=True)
class Sketch:
    """A series-parallel graph as drawn: the leaves are operators in topological order."""

    kind: str  # "op", "series" or "parallel"
    parts: tuple[Sketch, ...] = ()

    @property
    def size(self) -> int:
        """Number of operators."""
        return 1 if self.kind == "op" else sum(part.size for part in self.parts)


def sketches(max_ops: int) -> st.SearchStrategy[Sketch]:
    """Any series-parallel structure."""

    def compose(inner: st.SearchStrategy[Sketch]) -> st.SearchStrategy[Sketch]:
        return st.builds(
            Sketch,
            st.sampled_from(["series", "parallel"]),
            st.lists(inner, min_size=2, max_size=4).map(tuple),
        )

    return st.recursive(st.just(Sketch("op")), compose, max_leaves=max_ops)


def sketch_edges(sketch: Sketch) -> list[tuple[int, int]]:
    """Edges from every sink of a part to every source of the next part in series."""
    edges: list[tuple[int, int]] = []

    def walk(part: Sketch, first: int) -> tuple[list[int], list[int]]:
        if part.kind == "op":
            return [first], [first]
        ends = []
        for child in part.parts:
            ends.append(walk(child, first))
            first += child.size
        if part.kind == "parallel":
            return [i for e in ends for i in e[0]], [i for e in ends for i in e[1]]
        for (_, sinks), (sources, _) in pairwise(ends):
            edges.extend((a, b) for a in sinks for b in sources)
        return ends[0][0], ends[-1][1]

    walk(sketch, 0)
    return sorted(edges)


@st.composite
def planning_profiles(
    draw: st.DrawFn, max_ops: int = 7, *, series_parallel: bool = True, max_bytes: int = 4
) -> Profile:
    """A profile to plan with: few distinct costs, so that branches are often alike."""
    if series_parallel:
        sketch = draw(sketches(max_ops))
        n, edges = sketch.size, sketch_edges(sketch)
    else:
        n = draw(st.integers(1, max_ops))
        pairs = [(a, b) for b in range(n) for a in range(b)]
        edges = sorted(draw(st.sets(st.sampled_from(pairs), max_size=2 * n))) if pairs else []
    sizes = st.integers(0, max_bytes)
    readers: dict[int, list[int]] = {}
    for a, b in edges:
        readers.setdefault(a, []).append(b)
    values = tuple(
        Value(a, tuple(b), draw(sizes), grad=draw(st.booleans())) for a, b in readers.items()
    )
    parameters = tuple(Parameter(f"p{i}", draw(sizes)) for i in range(n))
    ops = tuple(Op(f"op{i}", (f"p{i}",)) for i in range(n))
    samples = (1, 2, 4, 8)
    costs = []
    for _ in range(n):
        launch, sample = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        times = tuple(float(launch + sample * b) for b in samples)
        waiting = draw(st.sampled_from([(), tuple(0.5 * t for t in times)]))
        costs.append(OpCost(times, tuple(2 * t for t in times), draw(sizes), weight_s=waiting))
    graph = OpGraph(ops, values, parameters, name="drawn")
    return Profile(graph, samples, tuple(costs), device="cpu", source="measured")
