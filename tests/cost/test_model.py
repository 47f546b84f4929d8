"""Every formula of the cost model, worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.errors import ProfileError
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile, interpolated, interpolation_at
from tests.strategies import op_graphs

#  batch --> a --x--> b --y--> d      x: 10 bytes per sample, read by b and c
#            |                 ^      y: 6 bytes per sample, no gradient
#            +---x--> c --z----+      z: 100 bytes whatever the samples
OPS = (Op("a", ("w",)), Op("b", ("w", "v")), Op("c"), Op("d", ("f",)))
VALUES = (
    Value(BATCH, (0,), 50),
    Value(0, (1, 2), 10),
    Value(1, (3,), 6, grad=False),
    Value(2, (3,), 100, batched=False),
)
PARAMETERS = (Parameter("w", 1000), Parameter("v", 200), Parameter("f", 70, trainable=False))
GRAPH = OpGraph(OPS, VALUES, PARAMETERS)


def cost_model(**options: float) -> CostModel:
    costs = tuple(
        OpCost((1.0 * k, 1.5 * k, 3.5 * k), (2.0 * k, 3.0 * k, 7.0 * k), 10 * k)
        for k in (1, 2, 3, 4)
    )
    profile = Profile(GRAPH, (1, 2, 4), costs, device="cpu", source="measured")
    levels = (Level("node", 2, 100.0, 0.5), Level("network", 2, 10.0, 2.0))
    return CostModel(profile, Cluster("c", "cpu", 10**6, levels), **options)


def test_measured_sample_counts_are_taken_as_they_are():
    """Seconds add up: (1 + 2) * 1.5 for a and b at 2 samples, backward twice that."""
    assert cost_model().stage_s(0b11, 2) == (4.5, 9.0)


def with_weights(*seconds: tuple[float, ...]) -> CostModel:
    """The model above, with these seconds of gradients of weights."""
    cost = cost_model()
    known = zip(cost.profile.costs, seconds, strict=True)
    costs = tuple(replace(op, weight_s=weight_s) for op, weight_s in known)
    return replace(cost, profile=replace(cost.profile, costs=costs))


def test_gradients_of_weights_wait_on_the_way_back():
    """b and c send gradients to a, d to c alone. So nobody waits for a stage that begins with a; in
    one that begins behind it all are on the way. Seconds of 3 samples are half way between those of
    2 and 4, and half of a backward where they are unknown.
    """
    cost = with_weights((0.5, 1.0, 2.0), (1.0, 2.0, 4.0), (), (0.0, 1.0, 2.0))
    assert cost.weight_s(0b1111, 2) == cost.weight_s(0b0011, 2) == 0.0
    assert cost.weight_s(0b0010, 3) == 3.0
    assert cost.weight_s(0b0100, 2) == 4.5
    assert cost.weight_s(0b1110, 2) == 2.0 + 4.5 + 1.0
    assert cost.weight_s(0b1110, 0) == 0.0


def test_parameters_that_two_operators_of_a_stage_read_do_not_wait():
    """Autograd adds up both uses in one order: b and e share a weight, behind a."""
    ops = Op("a", ("v",)), Op("b", ("w",)), Op("e", ("w",))
    graph = OpGraph(ops, (Value(0, (1,), 4), Value(1, (2,), 4)), PARAMETERS[:2])
    costs = (OpCost((1.0,), (2.0,), 0, weight_s=(1.5,)),) * 3
    profile = Profile(graph, (1,), costs, device="cpu", source="measured")
    cost = CostModel(profile, Cluster.preset("summit:1x2"))
    assert cost.weight_s(0b110, 1) == 0.0
    assert cost.weight_s(0b010, 1) == cost.weight_s(0b100, 1) == 1.5


def test_interpolates_linearly():
    """At 3 samples a takes the mean of 1.5 s and 3.5 s; at 2.5 a quarter of the way."""
    assert cost_model().stage_s(0b1, 3)[0] == 2.5
    assert cost_model().stage_s(0b1, 2.5)[0] == 2.0


def test_refuses_what_was_not_measured():
    """Outside the range the message names the range."""
    with pytest.raises(ProfileError, match="between 1 and 4 samples"):
        cost_model().op_seconds(5)
    assert not cost_model().covers(0.5)
    assert cost_model().covers(4)


def test_proportional_profile_prices_any_count():
    """Measured at 4 samples only: 8 take twice as long, a half an eighth."""
    costs = tuple(OpCost((4.0,), (8.0,), 0) for _ in OPS)
    profile = Profile(GRAPH, (4,), costs, device="cpu", source="imported", proportional=True)
    cost = CostModel(profile, Cluster.preset("summit:1x2"))
    assert cost.stage_s(0b1, 8)[0] == 8.0
    assert cost.stage_s(0b11, 0.5)[1] == 2.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e-5)), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_sums_of_seconds_do_not_depend_on_the_order(seconds, random):
    """Planners take differences of prefix sums and products of matrices, the simulator adds up
    operators one by one: the seconds are rounded once, by next to nothing, so that all agree.
    """
    ops = tuple(Op(f"op{i}") for i in range(len(seconds)))
    costs = tuple(OpCost((forward,), (backward,), 0) for forward, backward in seconds)
    profile = Profile(OpGraph(ops, ()), (1,), costs, device="cpu", source="measured")
    forward, backward = CostModel(profile, Cluster.preset("summit:1x1")).op_seconds(1)
    total = forward.sum() * 2 + backward.sum()
    assert abs(forward - [s for s, _ in seconds]).max() <= total * 2**-52
    both = [*forward, *backward, *forward]
    random.shuffle(both)
    assert sum(both) == math.fsum(both) == total
    assert np.cumsum(both)[-1] - np.cumsum(both)[0] == math.fsum(both[1:])


def test_recomputation_adds_the_forward():
    """Backward 2 s plus forward 1 s."""
    assert cost_model().stage_s(0b1, 1, recompute=True) == (1.0, 3.0)


def test_no_samples_take_no_time():
    """A replica whose slice is empty."""
    assert cost_model().stage_s(0b11, 0, recompute=True) == (0.0, 0.0)


def test_bytes_of_values():
    """At 4 samples: y has 24 bytes, z 100; back flows only the gradient of z."""
    assert cost_model().message_bytes((2, 3), 4) == (124, 100)


def test_routes():
    """Inside a node 100 bytes per second after half a second, through both devices' own links."""
    route = cost_model().route(0, 1)
    assert (route.per_byte_s, route.latency_s) == (0.01, 0.5)
    ports = map(cost_model().cluster.port, route.ports)
    assert [*ports] == [("out", 0, 0), ("in", 0, 1)]
    assert cost_model().route(1, 2).latency_s == 2.0


def test_allreduce():
    """Over the network 2 * 3/4 * 80 / 10 + 2 * 2 * 2; in a node 2 * 1/2 * 80 / 100 + 2 * 0.5."""
    assert cost_model().all_reduce_s(80, (0, 1, 2, 3)) == 12.0 + 8.0
    assert cost_model().all_reduce_s(80, (2, 3)) == 0.8 + 1.0
    assert cost_model().all_reduce_s(80, (1,)) == 0.0
    assert cost_model().all_reduce_s(0, (0, 1)) == 0.0


def test_tied_parameters_count_once_per_stage():
    """a and b share w; f takes no gradient."""
    assert cost_model().stage_parameter_bytes([0, 1]).parameters == 1200
    assert cost_model().stage_parameter_bytes([0, 3])[:2] == (1070, 1000)


def test_border_of_a_stage():
    """{b, c} at 2 samples: x enters (20), y and z leave (12 + 100), z has a gradient."""
    border = cost_model().border(0b0110)
    assert border.entering.at(2) == border.leaving_gradients.at(2) == 20
    assert (border.leaving.at(2), border.entering_gradients.at(2)) == (112, 100)


def test_memory_of_a_device():
    """{b, c} with micro-batches of 4 on 2 replicas, 3 in flight, Adam.

    parameters w and v          1200 * (1 + 1 + 2)                  = 4800
    kept                        3 in flight * 2 samples * (20 + 30) =  300
    what entered, held          3 in flight * 2 samples * 10        =   60
    posted ahead                20 of x, 100 of the gradient of z   =  120
    gradient of w, made when    1000
    c has given back               - 2 * 30
    the others', all at once    1200
    """
    need = cost_model().device_bytes([1, 2], microbatch_size=4, replicas=2, in_flight=3)
    assert need == 4800 + 300 + 60 + 120 + 1000 - 60
    need = cost_model().device_bytes([1, 2], microbatch_size=4, replicas=2, in_flight=1)
    assert need == 4800 + 120 + 1200


def test_replicas_share_what_they_update():
    """Of {a, b} the first of two replicas gets 600 of the 1,000 bytes of w, the second the others
    and the 200 of v.
    """
    cost = cost_model(shard_optimizer=True)
    assert cost.updated_bytes(0b11, 2) == (600, 600)
    assert cost.updated_bytes(0b1, 3) == (334, 334, 332)
    assert cost_model().updated_bytes(0b11, 2) == (1200, 1200)
    shape = {"microbatch_size": 4, "replicas": 2, "in_flight": 3}
    whole, shared = (model.device_bytes([1, 2], **shape) for model in (cost_model(), cost))
    assert whole - shared == 2 * 600


def test_what_a_pass_takes_besides() -> None:
    """When b has its 60 bytes and the gradient of w, the 30 that c keeps behind it are not there;
    when a has its 40 likewise. So of b and c b counts, of a and c with few samples a, then c. Of a
    to c a counts: b's gradient of w waits for a's, and there is their sum.
    """
    working = {"a": 40, "b": 60, "c": 25, "d": 0}
    plain = cost_model()
    costs = tuple(
        replace(cost, working_bytes=working[op.name])
        for op, cost in zip(OPS, plain.profile.costs, strict=True)
    )
    cost = replace(plain, profile=replace(plain.profile, costs=costs))
    assert cost.footprint(0b111).passes.at(2) == 3 * 1000 + 2 * (40 - 30 - 20)
    assert cost.footprint(0b110).passes.at(2) == 1000 + 2 * (60 - 30)
    assert cost.footprint(0b101).passes.at(2) == 1000 + 2 * (40 - 30)
    assert cost.footprint(0b101).passes.at(100) == 100 * 25
    assert cost.footprint(0b1).passes.at(2) == 1000 + 2 * 40


@given(op_graphs(), st.data())
def test_border_agrees_with_the_definition(graph, data):
    """Whatever the graph: summed value by value over all values."""
    costs = tuple(OpCost((1.0,), (1.0,), 0) for _ in graph.ops)
    cost = CostModel(
        Profile(graph, (1,), costs, device="cpu", source="measured"), Cluster.preset("summit:1x1")
    )
    chosen = data.draw(st.sets(st.integers(0, len(graph) - 1), min_size=1))
    made = [v for v in graph.values if v.producer in chosen and set(v.consumers) - chosen]
    read = [v for v in graph.values if v.producer not in chosen and set(v.consumers) & chosen]
    read = [v for v in read if v.producer != BATCH]
    border = cost.border(sum(1 << op for op in chosen))
    assert border.entering.at(3) == sum(v.size(3) for v in read)
    assert border.leaving.at(3) == sum(v.size(3) for v in made)
    assert border.entering_gradients.at(3) == sum(v.size(3) for v in made if v.grad)
    assert border.leaving_gradients.at(3) == sum(v.size(3) for v in read if v.grad)


def test_seconds_are_exact_where_they_were_measured():
    """At either end of a line between counts; planners that compile it find the same."""
    assert interpolation_at(1, (1, 2, 4)) == (0, 0.0)
    assert interpolation_at(2, (1, 2, 4)) == (0, 1.0)
    assert interpolation_at(3, (1, 2, 4)) == (1, 0.5)
    assert [interpolated(0.1, 0.7, share) for share in (0.0, 1.0)] == [0.1, 0.7]
