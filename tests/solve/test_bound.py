"""The bound of a step: by eye, below any simulated step, and below all plans of small models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import LookupTable, Op, OpGraph, Parameter, Value
from anabranch.planner.exhaustive import Exhaustive
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, UpdateCost
from anabranch.schedule import SCHEDULES, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import simulate
from anabranch.solve import search, step_search
from anabranch.solve.bound import step_bound, work_floor
from tests.planner.helpers import cost_model as planning_cost
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph
from tests.strategies import planning_profiles


def test_work_is_shared_by_all_devices():
    """Operators without parameters: 8 samples of 10 s over 4 devices, each with two of them."""
    cost = cost_model(chain(2), [1, 3], [2, 4], cluster(4))
    assert step_bound(cost, 8) == pytest.approx(20.0, rel=1e-3)


def test_gradients_that_are_large_keep_an_operator_on_one_device():
    """10 s a sample, but an all-reduce of 1,000 s between two devices: 4 samples on one of them."""
    cost = cost_model((), [4], [6], cluster(2, bandwidth=1.0), parameter_bytes=1000, value_bytes=0)
    assert step_bound(cost, 4) == pytest.approx(40.0, rel=1e-3)


def test_gradients_are_summed_behind_their_own_backward():
    """One sample each on two devices, 4 s forward and 6 s backward, behind which 9 s of all-reduce
    begin: 19 s, less than the 20 s of one device. No plan takes less.
    """
    cost = cost_model((), [4], [6], cluster(2, bandwidth=1.0), parameter_bytes=9, value_bytes=0)
    assert step_bound(cost, 2) == pytest.approx(19.0, rel=1e-3)
    assert _least_step_s(cost, 2) == pytest.approx(19.0)


def test_gradients_are_summed_while_other_backwards_run():
    """Two operators in a row like that. In a stage of two replicas the gradients of the second are
    summed while the first has its backward.
    """
    cost = cost_model(
        chain(2), [4, 4], [6, 6], cluster(2, bandwidth=1.0), parameter_bytes=9, value_bytes=0
    )
    assert step_bound(cost, 2) <= _least_step_s(cost, 2)
    assert step_bound(cost, 2) >= 4 + 4 + 6 + 9 - 1e-2


def test_what_a_stage_computes_precedes_its_largest_all_reduce():
    """Two devices, 8 samples. The second operator takes 16 s, and on both devices 8 s and 4 s of
    all-reduce; one device is no quicker. The first, of 4 s on both, is beside it then: only its
    last backward, of 2 s at most, may come while gradients are summed.
    """
    graph = OpGraph((Op("a"), Op("h", ("p",))), (Value(0, (1,), 0),), (Parameter("p", 4),))
    costs = OpCost((0.5,), (0.5,), 0), OpCost((1.0,), (1.0,), 0)
    profile = Profile(graph, (1,), costs, "v100", "measured", proportional=True)
    cost = CostModel(profile, cluster(2, bandwidth=1.0))
    assert step_bound(cost, 8) == pytest.approx(8 + 4 + 4 - 2, rel=1e-3)
    assert _least_step_s(cost, 8) == pytest.approx(14.0)


def test_a_device_is_idle_until_its_first_micro_batch_comes():
    """Of two operators that allow one device each, the second waits for a forward of the first: 8
    samples of 2 s, 1 s to it. The way back of 1 s is no longer than the last gradients of weights
    of two samples, which may be computed meanwhile.
    """
    cost = cost_model(
        chain(2), [1, 1], [1, 1], cluster(2, bandwidth=1.0), parameter_bytes=10**6, value_bytes=0
    )
    assert step_bound(cost, 8) == pytest.approx(17.0, rel=1e-3)


def test_a_slice_may_have_samples_between_those_measured():
    """Two replicas with 3 of 6 samples each: 4 + 8 s, half way between those of 2 and 4."""
    seconds = [2.0, 3.0, 5.0, 9.0]
    costs = (OpCost(tuple(seconds), tuple(2 * s for s in seconds), 0),)
    profile = Profile(OpGraph((Op("a"),), ()), (1, 2, 4, 8), costs, "v100", "measured")
    assert step_bound(CostModel(profile, cluster(2)), 6) == pytest.approx(12.0, rel=1e-3)


def test_an_update_of_a_table_is_of_the_rows_of_the_batch():
    """A second a byte, for 4 samples that look up a row of 12 bytes each and for 8 bytes of a
    layer, behind 4 forwards and backwards of a second: 64 s, though the table has 1,000 bytes.
    """
    parameters = Parameter("table", 1000, table=LookupTable(1, 12, True)), Parameter("layer", 8)
    graph = OpGraph((Op("a", ("table", "layer")),), (), parameters)
    update = UpdateCost(0.0, 0.0, 1.0)
    profile = Profile(
        graph, (1,), (OpCost((1.0,), (1.0,), 0),), "v100", "measured", True, update=update
    )
    cost = CostModel(profile, cluster(1), batch_size=4)
    assert step_bound(cost, 4) == pytest.approx(64.0, rel=1e-3)
    assert _least_step_s(cost, 4) == pytest.approx(64.0)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_chain_without_bubbles_meets_the_bound(stages: int):
    """Equal operators on a device each, with memory for every micro-batch: of each device's work
    only what is left of the first stage's last backward cannot be filled.
    """
    costs = [1.0] * stages, [2.0] * stages, cluster(stages, bandwidth=1.0)
    cost = cost_model(chain(stages), *costs, parameter_bytes=10**6)
    plain = stage_graph(chain(stages), [(i,) for i in range(stages)], 8)
    graph = SCHEDULES["zb-h2"]().warm_up(plain)
    step = simulate(graph, compute_order(graph, "zb-h2"), ModelCosts(graph, cost))
    assert step_bound(cost, 8) == pytest.approx(step.end, rel=1e-3)
    assert step_bound(cost, 8) <= step.end


def test_gradients_of_inputs_go_back_by_what_they_take():
    """Of a backward of 2 s, gradients of weights take nothing: the step waits for the whole way."""
    cost = cost_model(
        chain(3), [1] * 3, [2] * 3, cluster(3, bandwidth=1.0), parameter_bytes=10**6, value_bytes=0
    )
    costs = tuple(replace(op, weight_s=(0.0,)) for op in cost.profile.costs)
    cost = replace(cost, profile=replace(cost.profile, costs=costs))
    assert step_bound(cost, 8) == pytest.approx(2 + 8 * 3 + 4, rel=1e-3)


@pytest.mark.parametrize("several", [False, True])
def test_large_slices_make_the_way_long_and_small_ones_the_work(several: bool):
    """Three operators in a row on three devices, 3 s to launch and 1 s a sample, forward and back,
    half of a backward for weights. Four samples in slices of up to two take 20 s of work on each
    device. Slices of three and four take 16 and 14 s, but a first one of two and three takes 25 and
    30 s to the end and back: no mean of both is below 20 s for all.
    """
    counts = (1, 2, 3, 4)
    times = tuple(3.0 + n for n in counts)
    waiting = tuple(t / 2 for t in times)
    values = (Value(0, (1,), 0), Value(1, (2,), 0))
    graph = OpGraph((Op("a"), Op("b"), Op("c")), values)
    costs = (OpCost(times, times, 0, weight_s=waiting),) * 3
    cost = CostModel(Profile(graph, counts, costs, "v100", "measured"), cluster(3))
    assert work_floor(cost, 4) == pytest.approx(14.0)
    assert step_bound(cost, 4, several=several) == pytest.approx(20.0, rel=1e-3)
    assert _least_step_s(cost, 4) >= 20.0


@pytest.mark.parametrize(("value_bytes", "expected"), [(3, 3 + 16), (100, 8 + 16)])
def test_what_a_stage_reads_comes_to_its_node_or_is_made_there(value_bytes: int, expected: float):
    """Two nodes of one device, and gradients that keep each operator on one of them. The second
    computes 16 s for 8 samples, after 3 s of link for the first of these. Where a message takes
    longer, one stage has both, and at least all forwards of the first precede its last backward.
    """
    times = (1.0, 2.0, 4.0, 8.0)
    values = (Value(0, (1,), value_bytes),)
    graph = OpGraph(
        (Op("a", ("p",)), Op("b", ("q",))), values, (Parameter("p", 10**6), Parameter("q", 10**6))
    )
    profile = Profile(graph, (1, 2, 4, 8), (OpCost(times, times, 0),) * 2, "v100", "measured")
    cost = CostModel(profile, cluster(1, 2, bandwidth=1.0))
    assert step_bound(cost, 8) == pytest.approx(expected, rel=1e-3)
    assert _least_step_s(cost, 8) >= expected


def test_the_last_backward_may_be_of_the_whole_batch():
    """Times in proportion to samples, and 16 of them on four devices in one slice each: gradients
    of the third operator and of the second are summed, 12 s each, while the second and the first
    have their last backward, which is their only one, of 12 s.
    """
    gradients = 2**25
    graph = OpGraph(
        (Op("a"), Op("b", ("p",)), Op("c", ("q",))),
        (Value(0, (1,), 0), Value(1, (2,), 0)),
        (Parameter("p", gradients), Parameter("q", gradients)),
    )
    costs = (OpCost((0.0,), (3.0,), 0),) * 3
    profile = Profile(graph, (1,), costs, "v100", "measured", proportional=True)
    cost = CostModel(profile, cluster(4, bandwidth=gradients / 8))
    together = StageGraph((Stage(("a", "b", "c"), (0, 1, 2, 3), 16, in_flight=1),), (), 16)
    assert simulate(together, compute_order(together, "gpipe"), cost).end == pytest.approx(36.0)
    assert step_bound(cost, 16) <= 36.0


def test_a_device_with_several_stages_makes_some_of_what_one_of_them_reads():
    """Two nodes of one device, 3 s to make each of two samples, 10 s forward and back to read it,
    on one node for its gradients. The first sample is made there and the other comes meanwhile, in
    6 s: 43 s, though neither two forwards of 3 s nor 6 s come before the 40 s of the second stage.
    """
    graph = OpGraph(
        (Op("a"), Op("b", ("p",))), (Value(0, (1,), 6, grad=False),), (Parameter("p", 10**6),)
    )
    costs = OpCost((3.0,), (0.0,), 0), OpCost((10.0,), (10.0,), 0)
    cost = CostModel(Profile(graph, (1,), costs, "v100", "measured"), cluster(1, 2, bandwidth=1.0))
    stages = Stage(("a",), (0, 1), 2), Stage(("b",), (0,), 1)
    shared = SCHEDULES["1f1b"]().warm_up(StageGraph(stages, ((0, 1),), 2))
    assert simulate(shared, compute_order(shared, "1f1b"), cost).end == pytest.approx(43.0)
    assert step_bound(cost, 2, several=True) <= 43.0
    assert step_bound(cost, 2) == pytest.approx(46.0, rel=1e-3)


@given(priced_stage_graphs())
def test_no_step_is_below_the_bound(drawn):
    """Stages, replicas, micro-batches, schedule and links as they may be."""
    graph, cost, schedule = drawn
    step = simulate(graph, compute_order(graph, schedule), ModelCosts(graph, cost))
    assert step_bound(cost, graph.batch_size) <= step.end * (1 + 1e-9)


@given(
    planning_profiles(4, series_parallel=False),
    st.sampled_from([(1, None), (2, None), (3, None), (4, None), (4, 2), (4, 1), (6, 2), (6, 3)]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([1.0, 4.0, 1e9]),
    st.sampled_from([0.0, 0.0, 2.0]),
    st.booleans(),
    st.sampled_from([0, 0, 8]),
)
def test_no_plan_of_a_small_model_is_below_the_bound(
    profile, devices, cards, batch, bandwidth, latency, shared, heavy
):
    """Of all partitions, replicas and micro-batch sizes, under the schedules of the planner, on one
    level of links and on nodes that share network cards; one operator may have most gradients.
    """
    *others, last = profile.graph.parameters
    parameters = (*others, replace(last, nbytes=last.nbytes + heavy))
    profile = replace(profile, graph=replace(profile.graph, parameters=parameters))
    total, node = devices
    network = {"card": bandwidth / 3, "cards": cards, "latency_s": latency}
    links = {"node": node, "bandwidth": bandwidth, **network}
    cost = replace(planning_cost(profile, total, **links), shard_optimizer=shared)
    bound = step_bound(cost, batch)
    assert bound >= work_floor(cost, batch) * (1 - 1e-3)
    assert bound <= _least_step_s(cost, batch) * (1 + 1e-9)
    assert step_bound(cost, batch, several=True) <= bound


def _least_step_s(cost: CostModel, batch: int) -> float:
    """The shortest step of all plans that planner ``exhaustive`` tries."""
    planner, least = Exhaustive(), float("inf")
    try:
        for graph in planner(cost, batch_size=batch):
            for schedule in planner.schedules:
                filled = SCHEDULES[schedule]().warm_up(graph)
                order = compute_order(filled, schedule)
                least = min(least, simulate(filled, order, ModelCosts(filled, cost)).end)
    except InfeasiblePlanError:
        pass
    return least


def test_a_search_ends_where_the_bound_is_met(monkeypatch):
    """Four samples of an operator without gradients to sum, on four devices: no step is shorter.
    With gradients, steps are above the bound, and the search goes on.
    """

    def fail(_: object) -> None:
        raise AssertionError("nothing is left to find")

    for name in ("improve", "share", "split", "search_on"):
        monkeypatch.setattr(step_search.Contest, name, fail)
    cost = cost_model((), [4.0], [6.0], cluster(4))
    best = search.plan(cost.profile, cost.cluster, 4)
    assert best.figures.step_s == pytest.approx(step_bound(cost, 4), rel=1e-3)
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, bandwidth=9.0), parameter_bytes=9)
    with pytest.raises(AssertionError, match="nothing is left"):
        search.plan(cost.profile, cost.cluster, 4)
