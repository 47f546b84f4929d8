"""What the simulator is told about stages, beyond the formulas of the cost model."""

from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.graph.opgraph import LookupTable, Op, OpGraph, Parameter, Value
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, UpdateCost
from anabranch.schedule.schedule import Kind
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.stage_costs import StageCosts
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.simulator.test_overheads import machine


def test_times_of_other_sample_counts_are_in_proportion_to_the_nearest():
    """A short last micro-batch need not have been measured."""
    times = StageTimes([{4: 8.0, 8: 12.0}], [{4: 1.0}])
    assert times.compute_s(0, 4) == (8.0, 1.0)
    assert times.compute_s(0, 3) == (6.0, 0.75)
    assert times.compute_s(0, 7) == (10.5, 1.75)
    assert times.compute_s(0, 0) == (0.0, 0.0)


def test_a_stage_without_times_is_refused():
    """At once, with its number."""
    with pytest.raises(ValueError, match="backward_s of stage 1 needs a time"):
        StageTimes([{1: 1.0}] * 2, [{1: 1.0}, {}])


def test_one_all_reduce_per_set_of_holders():
    """Stages 0 and 2 share a parameter, stage 1 has two replicas of its own."""
    cost = cost_model(
        chain(3), [1] * 3, [1] * 3, cluster(4, bandwidth=8), parameter_bytes=16, tied=(0, 2)
    )
    costs = ModelCosts(stage_graph(chain(3), [(0,), (1, 2), (3,)], 4), cost)
    works = [(w.stages, w.devices, w.nbytes, w.seconds) for w in costs.all_reduces()]
    assert works == [((0, 2), (0, 3), 16, 2.0), ((1,), (1, 2), 16, 2.0)]


def test_a_ring_over_two_nodes_occupies_both_cards():
    """Its links inside the nodes and the cards between them, in both directions, each once."""
    cost = cost_model((), [1], [1], cluster(2, 2), parameter_bytes=16)
    (work,) = ModelCosts(stage_graph((), [(0, 1, 2, 3)], 4, [4]), cost).all_reduces()
    own = {(way, 0, device) for way in ("out", "in") for device in range(4)}
    cards = {(way, 1, node) for way in ("out", "in") for node in range(2)}
    assert set(map(cost.cluster.port, work.ports)) == own | cards
    assert len(work.ports) == 12


def test_rows_of_a_table_are_summed_and_updated() -> None:
    """2 samples on each of 2 replicas look up 2 rows of 12 bytes and 8 for the number: each sends
    40 bytes, as in a ring of 40, beside the 8 of the layer. 4 rows of 12 bytes are updated.
    """
    parameters = Parameter("table", 1000, table=LookupTable(1, 12)), Parameter("layer", 8)
    model = OpGraph((Op("op0", ("table", "layer")),), (), parameters)
    costs = (OpCost((1.0,), (1.0,), 5),)
    update = UpdateCost(0.0, 0.0, 1.0)
    profile = Profile(model, (1,), costs, "v100", "measured", True, update=update)
    graph = StageGraph((Stage(("op0",), (0, 1), 4),), (), 4)
    found = []
    for sparse in (False, True):
        machines = cluster(2, bandwidth=8)
        cost = CostModel(profile, machines, sparse_embeddings=sparse, batch_size=4)
        priced = ModelCosts(graph, cost)
        (work,) = priced.all_reduces()
        found.append((work.nbytes, work.seconds, priced.update_s(0)))
    assert found == [(1008, 126.0, 1008.0), (48, 6.0, 56.0)]


def test_shared_updates_take_as_long_as_the_longest_of_them() -> None:
    """A second each, 2 per parameter and 3 per byte: the first of two replicas updates the 9 bytes,
    the other one the three of 2, in 25 s of 30.
    """
    parameters = Parameter("large", 9), *(Parameter(name, 2) for name in "abc")
    model = OpGraph((Op("op0", ("large", "a", "b", "c")),), (), parameters)
    update = UpdateCost(1.0, 2.0, 3.0)
    costs = (OpCost((1.0,), (1.0,), 5),)
    profile = Profile(model, (1,), costs, "v100", "measured", True, update=update)
    graph = StageGraph((Stage(("op0",), (0, 1), 4),), (), 4)
    cost = CostModel(profile, cluster(2, bandwidth=8))
    shared = CostModel(profile, cluster(2, bandwidth=8), shard_optimizer=True)
    assert ModelCosts(graph, cost).update_s(0) == 1 + 2 * 4 + 3 * 15
    assert ModelCosts(graph, shared).update_s(0) == max(1 + 2 + 3 * 9, 1 + 2 * 3 + 3 * 6)


def test_updates_of_parts_are_shared():
    """A second each, 2 per parameter and 3 per byte of 4 parameters of 8 bytes; of two replicas
    that share each updates two of them.
    """
    parameters = tuple(Parameter(name, 8) for name in "abcd")
    model = OpGraph((Op("op0", tuple("abcd")),), (), parameters)
    costs, update = (OpCost((1.0,), (1.0,), 5),), UpdateCost(1.0, 2.0, 3.0)
    profile = Profile(model, (1,), costs, "v100", "measured", True, update=update)
    stage = Stage(("op0",), (0, 1), 4)
    alone, shared = (
        StageCosts(CostModel(profile, cluster(4), shard_optimizer=shares), stage, 4)
        for shares in (False, True)
    )
    assert alone.update_s == 1 + 2 * 4 + 3 * 32
    assert shared.update_s == 1 + 2 * 2 + 3 * 16


def unbatched() -> ModelCosts:
    """Stage 0 sends 10 bytes per sample with a gradient, and 100 bytes in all without one."""
    values = (Value(0, (1,), 10), Value(0, (1,), 100, batched=False, grad=False))
    model = OpGraph((Op("op0", ("frozen",)), Op("op1")), values, (Parameter("frozen", 8, False),))
    profile = Profile(model, (1,), (OpCost((1.0,), (1.0,), 5),) * 2, "v100", "measured", True)
    stages = (Stage(("op0",), (0, 1), 2, recompute=True), Stage(("op1",), (2,), 2, recompute=True))
    return ModelCosts(StageGraph(stages, ((0, 1),), 2), CostModel(profile, cluster(3)))


def test_values_without_a_batch_dimension_go_whole():
    """With every message; only what has a gradient comes back."""
    assert unbatched().message_bytes(0, 1, 3) == (130, 30)
    assert unbatched().message_edges.back == {(0, 1)}


def test_frozen_parameters_are_not_summed():
    """Two replicas of nothing trainable."""
    assert list(unbatched().all_reduces()) == []


@pytest.mark.parametrize("recompute", [False, True])
def test_halves_of_a_backward_are_priced_apart(recompute):
    """3 of 4 s are gradients of weights, and each pass takes .25 s besides: 1.25 s to the gradients
    of inputs, after another forward of 1 s with recomputation, and 3.25 s behind them. A stage that
    begins the model has nobody who waits for gradients of inputs.
    """
    machines = machine(2, pass_s=0.25)
    cost = cost_model(chain(2), [1, 1], [4, 4], machines)
    known = tuple(replace(op, weight_s=(3.0,)) for op in cost.profile.costs)
    cost = replace(cost, profile=replace(cost.profile, costs=known))
    graph = stage_graph(chain(2), [(0,), (1,)], 4)
    stages = tuple(replace(stage, recompute=recompute) for stage in graph.stages)
    costs = ModelCosts(replace(graph, stages=stages), cost)
    assert costs.pass_s(1, Kind.INPUT_GRADIENT, 1) == pytest.approx(1.25 + recompute)
    assert costs.pass_s(1, Kind.WEIGHT_GRADIENT, 1) == pytest.approx(3.25)
    assert costs.pass_s(1, Kind.BACKWARD, 1) == 4.25 + recompute
    assert costs.weight_share(0, 1) == 0.0
    assert costs.pass_s(1, Kind.WEIGHT_GRADIENT, 0) == 0.0
    slow = replace(costs, slower={1: 2.0})
    assert slow.pass_s(1, Kind.WEIGHT_GRADIENT, 1) == pytest.approx(6.5)


def test_recomputing_stages_hold_what_enters():
    """Stage 1 takes in 130 bytes for 3 samples and keeps 15 more while its backward runs."""
    nbytes = unbatched().flight_bytes(1, 3)
    assert (nbytes.held, nbytes.forward, nbytes.backward) == (130, 0, 15)
    assert unbatched().compute_s(1, 3) == (3, 6)
