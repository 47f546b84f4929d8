"""Devices that are left find work, and stages that do not fit recompute."""

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.planner.toolkit.assemble import Assembler, Candidate
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.profile.profile import OpCost, Profile


def assembler(
    seconds: list[int], devices: int, *, size: int = 8, max_replicas: int = 8, chained: bool = False
) -> Assembler:
    """A chain of operators with these seconds per sample."""
    n = len(seconds)
    graph = OpGraph(
        tuple(Op(f"op{i}") for i in range(n)), tuple(Value(i, (i + 1,), 0) for i in range(n - 1))
    )
    costs = tuple(OpCost((float(s),), (0.0,), 0) for s in seconds)
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    cluster = Cluster("flat", "cpu", 10**9, (Level("node", devices, 1e9, 0.0),))
    prices = MicrobatchPrices(
        CostModel(profile, cluster), 16, size, (1, 2, 4, 8), cluster.memory_bytes
    )
    return Assembler(prices, tuple(range(n)), max_replicas, chained)


def stages(candidate: Candidate | None) -> list[str]:
    assert candidate is not None
    return [f"{len(s.operators)} x{s.replicas}" for s in candidate.graph.stages]


def test_replicas_for_the_slowest():
    """Two devices left: the stage of 4 s doubles, then it is one of two with 2 s."""
    parts = [Part(0b001, 1), Part(0b010, 1), Part(0b100, 1)]
    assert stages(assembler([1, 4, 1], 4).assemble(parts)) == ["1 x1", "1 x2", "1 x1"]
    assert stages(assembler([1, 4, 1], 6).assemble(parts)) == ["1 x1", "1 x4", "1 x1"]


def test_cuts_a_stage_where_replicas_are_not_allowed():
    """A straight pipeline: the stage of 3 operators gives two to the second device."""
    parts = [Part(0b0111, 1), Part(0b1000, 1)]
    found = assembler([3, 1, 1, 2], 3, max_replicas=1).assemble(parts)
    assert stages(found) == ["1 x1", "2 x1", "1 x1"]


def test_no_plan_for_more_devices_than_can_be_used():
    """Two operators, at most one replica each, three devices."""
    assert assembler([1, 1], 3, max_replicas=1).assemble([Part(0b11, 1)]) is None


def test_harmless_if_nothing_helps():
    """Micro-batches of 2 samples on 3 devices: a third replica would have none."""
    parts = [Part(0b1, 1), Part(0b10, 1)]
    assert stages(assembler([4, 1], 4, size=2).assemble(parts)) == ["1 x2", "1 x2"]
    assert assembler([4, 1], 5, size=2).assemble(parts) is None


def test_uneven_numbers_of_replicas():
    """3 operators, 7 devices, micro-batches of 3 samples: 3 stages of no more than 3 replicas."""
    found = assembler([4, 4, 4], 7, size=3).assemble([Part(0b111, 1)])
    assert sorted(stages(found)) == ["1 x2", "1 x2", "1 x3"]
    assert assembler([4, 4, 4], 10, size=3).assemble([Part(0b111, 1)]) is None


def test_cuts_a_stage_that_two_would_share_less_well():
    """Two stages of 2 replicas at most on 5 devices: the longer one is cut for the fifth."""
    parts = [Part(0b0111, 2), Part(0b1000, 2)]
    found = assembler([2, 2, 2, 1], 5, size=2).assemble(parts)
    assert sum(int(text[-1]) for text in stages(found)) == 5


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 3))
def test_shares_out_all_devices_in_the_best_way(seconds, devices, most):
    """The least longest period of all numbers of replicas, one by one."""
    makes = assembler(seconds, devices, size=3, max_replicas=most)
    parts = [Part(1 << op, 1) for op in range(len(seconds))]
    longest = [
        max(
            makes.prices.part_period_s(replace(p, replicas=n))
            for p, n in zip(parts, way, strict=True)
        )
        for way in product(range(1, most + 1), repeat=len(parts))
        if sum(way) == devices
    ]
    found = makes.shared_out(parts)
    assert bool(found) == bool(longest)
    if found:
        assert max(map(makes.prices.part_period_s, found)) == min(longest)


def test_chained_stages_follow_one_another():
    """Two independent operators: no edge, or one to order them."""
    graph = OpGraph((Op("a"), Op("b")), ())
    costs = tuple(OpCost((1.0,), (0.0,), 0) for _ in range(2))
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    cluster = Cluster("flat", "cpu", 10**9, (Level("node", 2, 1e9, 0.0),))
    prices = MicrobatchPrices(CostModel(profile, cluster), 4, 1, (1,), 1e9)
    for chained, edges in ((False, ()), (True, ((0, 1),))):
        found = Assembler(prices, (0, 1), 1, chained).assemble([Part(1, 1), Part(2, 1)])
        assert found is not None
        assert found.graph.edges == edges


def test_recomputes_what_does_not_fit_otherwise():
    """Two stages of 100 bytes per sample kept: three in flight are too many for the first."""
    n = 2
    graph = OpGraph((Op("a"), Op("b")), (Value(0, (1,), 1),))
    costs = tuple(OpCost((1.0,), (1.0,), 100) for _ in range(n))
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    cluster = Cluster("flat", "cpu", 150, (Level("node", 2, 1e9, 0.0),))
    for recompute in (False, True):
        cost = CostModel(profile, cluster)
        prices = MicrobatchPrices(cost, 4, 1, (1, 2), 150, recompute=recompute)
        found = Assembler(prices, (0, 1), 2).assemble([Part(1, 1), Part(2, 1)])
        if recompute:
            assert found is not None
            assert [stage.recompute for stage in found.graph.stages] == [True, False]
        else:
            assert found is None
