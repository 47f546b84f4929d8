"""The estimate by which candidates are ranked, against small steps drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.toolkit.estimate import step_s
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.profile.profile import OpCost, Profile


def parts_prices(
    reads: list[tuple[int, int]],
    *,
    seconds: list[int],
    out: int = 0,
    weights: int = 0,
    batch_size: int = 4,
    size: int = 1,
    bandwidth: float = 1e12,
    latency_s: float = 0.0,
    node: int = 8,
    memory: int = 10**9,
    cores: int = 0,
) -> PartPrices:
    n = len(seconds)
    readers: dict[int, list[int]] = {}
    for a, b in reads:
        readers.setdefault(a, []).append(b)
    graph = OpGraph(
        tuple(Op(f"op{i}", (f"w{i}",)) for i in range(n)),
        tuple(Value(a, tuple(b), out) for a, b in readers.items()),
        tuple(Parameter(f"w{i}", weights) for i in range(n)),
    )
    costs = tuple(OpCost((float(s),), (float(s),), 1) for s in seconds)
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    levels = (Level("node", node, 1e12, latency_s), Level("net", 8 // node, bandwidth, latency_s))
    cost = CostModel(profile, Cluster("c", "cpu", memory, levels, cores), 0.0, 0)
    return PartPrices(MicrobatchPrices(cost, batch_size, size, (1, 2, 4), memory))


CHAIN = [(0, 1), (1, 2)]
CHAIN_PARTS = [Part(1, 1), Part(2, 1), Part(4, 1)]
CHAIN_PAIRS = {(0, 1), (1, 2)}


def test_chain_of_equal_stages():
    """(M + S - 1) (F + B) = (4 + 3 - 1) * 2."""
    prices = parts_prices(CHAIN, seconds=[1, 1, 1])
    assert step_s(prices, CHAIN_PARTS, [[0], [1], [2]], CHAIN_PAIRS) == pytest.approx(12)


def test_slow_stage_sets_the_pace():
    """The middle stage is busy from 1 s to 25 s, and the first ends one backward later."""
    prices = parts_prices(CHAIN, seconds=[1, 3, 1])
    assert step_s(prices, CHAIN_PARTS, [[0], [1], [2]], CHAIN_PAIRS) == pytest.approx(26)


def test_branches_are_as_deep_as_the_longest():
    """Two branches side by side into a join: (4 + 2 - 1) * 2."""
    prices = parts_prices([(0, 2), (1, 2)], seconds=[1, 1, 1])
    pairs = {(0, 2), (1, 2)}
    assert step_s(prices, CHAIN_PARTS, [[0], [1], [2]], pairs) == pytest.approx(10)


def test_order_without_data_still_waits():
    """The same two branches one after the other, as a sequential pipeline: (4 + 3 - 1) * 2."""
    prices = parts_prices([(0, 2), (1, 2)], seconds=[1, 1, 1])
    pairs = {(0, 1), (0, 2), (1, 2)}
    assert step_s(prices, CHAIN_PARTS, [[0], [1], [2]], pairs) == pytest.approx(12)


def test_latency_is_paid_on_the_way_there_and_back():
    """Two stages 1 s apart: 12 - 2 for the chain of two, and 2 s in the fill and drain.

    Three micro-batches in flight hide the round trip of 6 s: it needs 2 s each.
    """
    prices = parts_prices([(0, 1)], seconds=[1, 1], latency_s=1.0)
    parts, pairs = CHAIN_PARTS[:2], {(0, 1)}
    assert step_s(prices, parts, [[0], [1]], pairs) == pytest.approx(10 + 2)


def test_short_warm_up_does_not_hide_a_round_trip():
    """Memory for two in flight only: a period of 3 s, half the round trip of 6 s."""
    prices = parts_prices([(0, 1)], seconds=[1, 1], latency_s=1.0, memory=2)
    parts, pairs = CHAIN_PARTS[:2], {(0, 1)}
    assert step_s(prices, parts, [[0], [1]], pairs) == pytest.approx(3 * 3 + 6)


def test_join_waits_for_its_card():
    """Two branches on one node send 10 bytes each over the other node's card at 5 bytes/s.

    Each transfer takes 2 s alone and the card 4 s for both, more than 2 s of compute: 3 * 4 s, and
    once through 1 + 2 + 2 + 2 + 1 s.
    """
    prices = parts_prices([(0, 2), (1, 2)], seconds=[1, 1, 1], out=10, bandwidth=5.0, node=2)
    pairs = {(0, 2), (1, 2)}
    assert step_s(prices, CHAIN_PARTS, [[0], [1], [2]], pairs) == pytest.approx(3 * 4 + 8)


def test_all_reduce_of_an_early_stage_is_hidden():
    """The sink ends 4 s before the source, so its all-reduce of 3 s does not show.

    Both replicas of a stage take half a micro-batch of 2: 1 s forward and backward each. The ring
    moves 2 * 1/2 * 15 bytes at 5 bytes/s.
    """
    prices = parts_prices(
        [(0, 1)], seconds=[1, 1], weights=15, batch_size=8, size=2, bandwidth=5.0, node=1
    )
    parts, pairs = [Part(1, 1), Part(2, 2)], {(0, 1)}
    # Stage 0 takes 2 + 2 s per micro-batch and is never idle; its last forward ends at 10 s.
    assert step_s(prices, parts, [[0], [2, 3]], pairs) == pytest.approx(16)
    both = [Part(1, 2), Part(2, 2)]
    # (4 + 2 - 1) * 2 s, then the all-reduce of stage 0; that of stage 1 began 1 s before.
    assert step_s(prices, both, [[0, 1], [2, 3]], pairs) == pytest.approx(10 + 3)


def test_shared_cores_bound_the_period():
    """Three processes on two cores: 6 s of compute per micro-batch take 3 s."""
    prices = parts_prices(CHAIN, seconds=[1, 1, 1], cores=2)
    step = step_s(prices, CHAIN_PARTS, [[0], [1], [2]], CHAIN_PAIRS)
    assert step == pytest.approx(3 * 3 + 6)


def tied(bandwidth: float, *, weights: int) -> PartPrices:
    """Two operators in a row that read the same parameter."""
    graph = OpGraph(
        (Op("op0", ("w",)), Op("op1", ("w",))), (Value(0, (1,), 0),), (Parameter("w", weights),)
    )
    costs = tuple(OpCost((1.0,), (1.0,), 1) for _ in range(2))
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    cluster = Cluster("c", "cpu", 10**9, (Level("node", 4, bandwidth, 0.0),))
    return PartPrices(MicrobatchPrices(CostModel(profile, cluster, 0.0, 0), 4, 1, (1, 2), 10**9))


def test_tied_parameters_are_summed_over_all_holders():
    """Two stages of one device: a ring of 2 * 1/2 * 15 bytes at 5 bytes/s after the last of them.

    Both in one stage: nothing to sum.
    """
    prices = tied(5.0, weights=15)
    apart = [Part(1, 1), Part(2, 1)]
    assert step_s(prices, apart, [[0], [1]], {(0, 1)}) == pytest.approx((4 + 1) * 2 + 3)
    assert step_s(prices, [Part(3, 1)], [[0]], set()) == pytest.approx(4 * 4)


def test_tied_parameters_are_summed_once():
    """A stage of two replicas beside one of one: a ring of three, 2 * 2/3 * 15 bytes in 4 s."""
    prices = tied(5.0, weights=15)
    assert prices.all_reduces([Part(1, 2), Part(2, 1)], [[0, 1], [2]]) == [
        ((0, 1), 15, pytest.approx(4)),
    ]


def test_no_wait_for_a_gradient_that_does_not_come():
    """The source ends its last backward without the sink: the sink's four of 2 s after 1 s."""
    prices = parts_prices([(0, 1)], seconds=[1, 1])
    values = tuple(Value(0, (1,), 0, grad=False) for _ in range(1))
    graph = OpGraph(prices.cost.graph.ops, values, prices.cost.graph.parameters)
    cost = CostModel(replace(prices.cost.profile, graph=graph), prices.cost.cluster, 0.0, 0)
    free = PartPrices(MicrobatchPrices(cost, 4, 1, (1,), 10**9))
    parts, pairs = CHAIN_PARTS[:2], {(0, 1)}
    assert step_s(prices, parts, [[0], [1]], pairs) == pytest.approx(10)
    assert step_s(free, parts, [[0], [1]], pairs) == pytest.approx(9)


def test_shared_cores_are_slow_from_the_start():
    """One micro-batch on two stages side by side and one core: 4 s of work."""
    prices = parts_prices([], seconds=[1, 1], cores=1, batch_size=1)
    assert step_s(prices, CHAIN_PARTS[:2], [[0], [1]], set()) == pytest.approx(4)
