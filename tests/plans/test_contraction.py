"""Sets of operators as one operator each: which come along, and that nothing is lost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.plans.contraction import contract, in_a_row
from anabranch.plans.partitions import partitions
from anabranch.plans.stages import Stage, StageGraph
from tests.planner.helpers import cluster as devices_of
from tests.planner.helpers import linked_model
from tests.strategies import planning_profiles


def test_a_circle_becomes_one_operator():
    """{0, 3} and {1, 2} with 0 -> 1 and 2 -> 3: neither could come first."""
    graph = linked_model(4, [(0, 1), (2, 3)]).profile
    assert contract(graph, [0b1001, 0b0110]).masks == (0b1111,)


def test_sets_that_overlap_become_one():
    """Two parameters with a reader in common."""
    profile = linked_model(4, [(0, 3), (1, 3), (2, 3)]).profile
    assert contract(profile, [0b0011, 0b0110]).masks == (0b0111, 0b1000)


def test_operators_in_a_row_are_cut_into_runs_alone():
    """Two branches, one after the other: the only cuts left are those of the order, and stages pass
    the same values.
    """
    profile = linked_model(4, [(0, 2), (1, 3)]).profile
    row = in_a_row(profile, [0, 2, 1, 3])
    assert [op.name for op in row.graph.ops] == ["op0", "op2", "op1", "op3"]
    assert [(v.producer, v.consumers) for v in row.graph.values[:2]] == [(0, (1,)), (2, (3,))]
    cut = {masks for masks, _ in partitions(CostModel(row, devices_of(2))) if len(masks) == 2}
    assert cut == {(0b0001, 0b1110), (0b0011, 0b1100), (0b0111, 0b1000)}


def test_what_a_member_works_with_lies_where_those_behind_it_keep():
    """In a backward the first operator takes 100 bytes when the 30 and 50 of the others are given
    back, so together they take 20 besides what they keep; the stage has as much memory as before.
    """
    plain = linked_model(3, [(0, 1), (1, 2)]).profile
    kept, working = (0, 30, 50), (100, 0, 10)
    costs = [
        replace(cost, kept_bytes=k, working_bytes=w)
        for cost, k, w in zip(plain.costs, kept, working, strict=True)
    ]
    profile = replace(plain, costs=tuple(costs))
    joined = contract(profile, [0b111]).profile
    assert [(cost.kept_bytes, cost.working_bytes) for cost in joined.costs] == [(80, 20)]
    sizes = {"microbatch_size": 4, "replicas": 1, "in_flight": 1}
    whole, one = (CostModel(p, devices_of(1)) for p in (profile, joined))
    assert whole.device_bytes([0, 1, 2], **sizes) == one.device_bytes([0], **sizes) == 400


@given(st.data())
def test_stages_cost_what_they_cost_in_the_whole_model(data):
    """Seconds, memory and traffic of every stage of every partition, and it is a partition. What
    has been given back when an operator inside of one makes its gradient is not known any more, nor
    which of its operators are on the way back to the inputs of a stage: gradients of weights that
    can wait are those of all of them, or fewer.
    """
    profile = data.draw(planning_profiles(max_ops=6, series_parallel=False))
    everything = (1 << len(profile.graph)) - 1
    sets = data.draw(st.lists(st.integers(1, everything), max_size=2))
    found = contract(profile, sets)
    whole = CostModel(profile, devices_of(4))
    fewer = CostModel(found.profile, devices_of(4))
    assert sum(found.masks) == everything
    for mask in sets:
        assert any(mask & ~group == 0 for group in found.masks)
    for masks, pairs in partitions(fewer):
        graph = StageGraph(
            tuple(Stage(fewer.graph.names(m), (s,), 2) for s, m in enumerate(masks)),
            tuple(sorted(pairs)),
            4,
        )
        for ours, theirs in zip(found.expand(graph).stages, graph.stages, strict=True):
            a = [whole.graph.index[name] for name in ours.operators]
            b = [fewer.graph.index[name] for name in theirs.operators]
            inside = whole.graph.mask(ours.operators), fewer.graph.mask(theirs.operators)
            assert whole.stage_s(inside[0], 2) == pytest.approx(fewer.stage_s(inside[1], 2))
            assert whole.weight_s(inside[0], 2) <= fewer.weight_s(inside[1], 2) * (1 + 1e-9)
            assert whole.border(inside[0]) == fewer.border(inside[1])
            sizes = {"microbatch_size": 2, "replicas": 1, "in_flight": 3}
            kept = 2 * whole.kept_bytes[a].sum()
            more = fewer.device_bytes(b, **sizes) - whole.device_bytes(a, **sizes)
            assert abs(more) <= kept
