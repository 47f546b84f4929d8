"""Weights of spans as matrix products against the cost model, one span at a time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value, bits
from anabranch.planner.downsets import downsets
from anabranch.planner.pipedream.spans import Spans
from anabranch.profile.profile import OpCost, Profile
from tests.planner.pipedream.reference import nodes
from tests.strategies import op_graphs


@settings(max_examples=80, deadline=None)
@given(op_graphs(), st.integers(1, 4))
def test_weighs_as_the_cost_model_does(graph, samples):
    """Tied and frozen parameters, values without a batch or a gradient, several readers: all
    bytes of a span that fits nowhere exactly.
    """
    costs = tuple(OpCost((1.0 + i,), (2.0,), 3 * i) for i in range(len(graph)))
    profile = Profile(graph, (1,), costs, device="cpu", source="imported", proportional=True)
    cost = CostModel(profile, nodes(2), optimizer_factor=2.0)
    spans = Spans(cost, downsets(graph))
    fixed, each = spans.memory(samples)
    seconds = spans.seconds(samples)
    for u, before in enumerate(spans.states):
        for v, after in enumerate(spans.states):
            assert spans.nested[u, v] == (before != after and before & ~after == 0)
            if not spans.nested[u, v]:
                continue
            ops = list(bits(after & ~before))
            shape = {"microbatch_size": samples, "replicas": 1}
            none, one = (cost.device_bytes(ops, in_flight=k, **shape) for k in (0, 1))
            assert (fixed[u, v], each[u, v]) == (none, one - none)
            assert spans.reduced_bytes[u, v] == cost.parameter_bytes(ops, trainable=True)
            assert seconds[v] - seconds[u] == sum(3 + i for i in ops) * samples


def test_what_crosses():
    """A value that two read crosses once; its gradient comes back, that of a mask does not."""
    graph = OpGraph(
        ops=(Op("a"), Op("b"), Op("c"), Op("d")),
        values=(
            Value(0, (1, 3), 10),
            Value(0, (2,), 7, batched=False, grad=False),
            Value(1, (2,), 5),
            Value(2, (3,), 1),
        ),
    )
    costs = tuple(OpCost((1.0,), (1.0,), 0) for _ in graph.ops)
    profile = Profile(graph, (1,), costs, device="cpu", source="imported", proportional=True)
    spans = Spans(CostModel(profile, nodes(2)), [0, 0b1, 0b11, 0b111, 0b1111])
    assert spans.crossing_bytes(2).tolist() == [0, 40 + 7, 40 + 7 + 20, 40 + 4, 0]


def test_tied_parameters_count_once():
    """An embedding that the first and the last operator read."""
    graph = OpGraph(
        ops=(Op("a", ("w",)), Op("b", ("own",)), Op("c", ("w",))),
        values=(Value(0, (1,), 1), Value(1, (2,), 1)),
        parameters=(Parameter("w", 100), Parameter("own", 1)),
    )
    costs = tuple(OpCost((1.0,), (1.0,), 0) for _ in graph.ops)
    profile = Profile(graph, (1,), costs, device="cpu", source="imported", proportional=True)
    spans = Spans(CostModel(profile, nodes(2)), [0, 0b1, 0b11, 0b111])
    assert spans.reduced_bytes[0].tolist() == [0, 100, 101, 101]
    assert spans.reduced_bytes[1, 2:].tolist() == [1, 101]
