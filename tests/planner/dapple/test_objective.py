"""L by hand, the growing suffix against the formulas, and the bounds that the search relies on."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.dapple.objective import NOTHING, latency_s, prepended
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from tests.planner.dapple.latency import hop_price, latency, phases, pivot

SECONDS = st.floats(0, 10)
PREPENDED, LATENCY_S = cast(Any, prepended), cast(Any, latency_s)
ROWS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=7)


def test_three_stages_by_hand_with_the_last_as_pivot():
    """Equal stages: the last is the pivot, the first ends last.

    F 1, B 2, no transfers, 4 micro-batches: three forwards up to stage 2, three more of its
    periods, three backwards down to stage 0, whose all-reduce takes 5.
    """
    found = phases([1, 1, 1], [2, 2, 2], [5, 0, 0], 4)
    assert (found.warmup_s, found.steady_s, found.ending_s, found.pivot) == (3, 9, 11, 2)
    assert found.total_s == 23


def test_three_stages_by_hand_with_the_middle_as_pivot():
    """Stage 1 is slow: 3 * 9 is more than 3 * 3, and for stage 0 3 * 3 is not more than 3 * 9.

    T_w = 1 + 3, T_s = 3 * 9. T_e: stage 0 after 2 + 6 at 8; stage 1 after 6; stage 2 was done
    6 + 2 before the pivot, so of its all-reduce of 20 the last 12 stick out, and it ends at 12.
    """
    found = phases([1, 3, 1], [2, 6, 2], [0, 0, 20], 4)
    assert (found.warmup_s, found.steady_s, found.ending_s, found.pivot) == (4, 27, 12, 1)


def test_what_lies_between_keeps_the_pivot_behind():
    """Stage 0 does 10 per micro-batch, stage 2 only 9, but 5 lie between: not worth it for 2."""
    both = [10, 5, 9]
    assert pivot(both, 2) == 2  # 10 is not more than 9 + 5
    assert pivot(both, 7) == 0  # 60 is more than 54 + 5
    assert pivot(both, 1) == 2  # one micro-batch: no steady phase


def test_transfers_are_stages_that_reduce_nothing():
    """A slow link is the pivot: 2 stages of 1 and 1, a link of 4 each way, 3 micro-batches."""
    found = phases([1, 4, 1], [1, 4, 1], [0, 0, 0], 3)
    assert found.pivot == 1
    assert found.total_s == (1 + 4) + 2 * 8 + (4 + 1)


@given(ROWS, st.integers(1, 6))
def test_the_suffix_grows_into_the_formulas(row, num_microbatches):
    """Prepending one stage after the other gives T_w + T_s + T_e of the whole row."""
    suffix = NOTHING
    for stage in reversed(row):
        suffix = PREPENDED(suffix, *stage, num_microbatches)
    forward, backward, reduce = zip(*row, strict=True)
    expected = phases(forward, backward, reduce, num_microbatches)
    assert LATENCY_S(suffix, num_microbatches) == pytest.approx(expected.total_s)
    assert suffix.pivot_s == forward[expected.pivot] + backward[expected.pivot]


@given(ROWS, ROWS, st.integers(1, 6))
def test_the_bounds_hold(front, back, num_microbatches):
    """Whatever is put in front of a suffix, L is at least what the search assumes."""
    suffix = NOTHING
    for stage in reversed(back):
        suffix = PREPENDED(suffix, *stage, num_microbatches)
    forward, backward, reduce = zip(*front, *back, strict=True)
    total = phases(forward, backward, reduce, num_microbatches).total_s * (1 + 1e-9)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    assert total >= num_microbatches * max(both)
    assert total >= (num_microbatches - 1) * suffix.pivot_s + suffix.between_s


def two_machines(**options: float) -> Cluster:
    """2 machines of 4 devices: 1 byte/s on a device's link, 1 byte/s on a machine's card."""
    inner = Level("node", 4, options.get("bandwidth", 1.0), 0.25)
    return Cluster("2x4", "cpu", 10**9, (inner, Level("network", 2, 1.0, 0.5)))


@pytest.mark.parametrize(
    ("source", "target", "per_byte", "latency_s"),
    [
        # One machine: a device sends or gets half of it.
        ((2, 0), (2, 0), 1 / 2, 0.25),
        ((1, 0), (3, 0), 1.0, 0.25),
        # From one machine to the other everything crosses the card.
        ((4, 0), (0, 4), 1.0, 0.5),
        # Half of each: every slice, a quarter, stays in its machine.
        ((2, 2), (2, 2), 1 / 4, 0.25),
        # 3/4 are made where 1/4 is needed: half crosses.
        ((3, 1), (1, 3), 1 / 2, 0.5),
    ],
)
def test_a_hop_is_as_slow_as_its_fullest_link(source, target, per_byte, latency_s):
    """Slices stay in their machine where they can; what is left over crosses its card."""
    assert hop_price(two_machines(), source, target) == (per_byte, latency_s)


@pytest.mark.parametrize(
    ("source", "target", "per_byte"),
    [
        ((4, 0), (0, 4), 1 / 4),  # each device has a card
        ((4, 0), (0, 1), 1.0),  # one has all that comes
        ((3, 1), (1, 3), 1 / 6),  # half crosses, on 3 cards
    ],
)
def test_a_hop_takes_the_cards_of_its_devices(source, target, per_byte):
    """Nodes of four devices with four cards, beside which links inside are fast."""
    inner, network = two_machines(bandwidth=100.0).levels
    machines = replace(two_machines(), levels=(inner, replace(network, cards=4)))
    assert hop_price(machines, source, target)[0] == pytest.approx(per_byte)


def chain_model() -> CostModel:
    """a -> b -> c, 1 s forward and 2 s backward per sample, 8 bytes between, 4 of weights each."""
    ops = tuple(Op(name, (name,)) for name in "abc")
    values = (Value(0, (1,), 8), Value(1, (2,), 8))
    graph = OpGraph(ops, values, tuple(Parameter(name, 4) for name in "abc"))
    costs = tuple(OpCost((1.0,), (2.0,), 0) for _ in ops)
    profile = Profile(graph, (1,), costs, "v100", "imported", proportional=True)
    return CostModel(profile, two_machines())


def test_the_latency_of_a_stage_graph_by_hand():
    """Two stages of 2 and 1 replicas, micro-batches of 4 samples, 4 of them.

    Stage 0: 4 operator-samples on each device, F 4 and B 8. Hop: 4 * 8 bytes, all received by one
    device, 32.25 s each way: the pivot. Stage 1: F 4, B 8. All-reduce of 8 bytes over 2 devices:
    8 bytes, 2 latencies: 8.5 s.
    """
    graph = StageGraph(
        (Stage(("a", "b"), (0, 1), 4), Stage(("c",), (2,), 4)), ((0, 1),), batch_size=16
    )
    found = latency(graph, chain_model())
    assert found.pivot == 1
    assert found.warmup_s == 4 + 32.25
    assert found.steady_s == 3 * 64.5
    assert found.ending_s == 32.25 + 8 + 8.5


def test_an_overlapped_allreduce_counts_what_sticks_out():
    """b's gradients are there after 4 of the 8 s of backward and need 4 s: they are through at 8.

    Then those of a: 4 bytes more stick out, and the latency of the ring.
    """
    graph = StageGraph(
        (Stage(("a", "b"), (0, 1), 4), Stage(("c",), (2,), 4)), ((0, 1),), batch_size=16
    )
    found = latency(graph, chain_model(), overlap_allreduce=True)
    assert found.ending_s == 32.25 + 8 + 4 + 0.5


def test_slices_are_whole_samples():
    """4 samples on 3 devices: the fullest has 2, which three operators take 6 s forward."""
    graph = StageGraph((Stage(("a", "b", "c"), (0, 1, 2), 4),), (), batch_size=4)
    assert latency(graph, chain_model()).warmup_s == 6


def test_one_microbatch_size():
    """DAPPLE's formula has one; two are an error that names both."""
    stages = (Stage(("a", "b"), (0, 1), 4), Stage(("c",), (2,), 2))
    graph = StageGraph(stages, ((0, 1),), batch_size=16)
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        latency(graph, chain_model())


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 7))
def test_which_devices_of_a_machine_does_not_matter(devices, count):
    """Only how many of each machine: any two stages, renumbered inside the machines."""
    cost = chain_model()
    first, second = devices[:count], devices[count:]

    def priced(a: list[int], b: list[int]) -> float:
        stages = (Stage(("a",), tuple(a), 8), Stage(("b", "c"), tuple(b), 8))
        return latency(StageGraph(stages, ((0, 1),), 16), cost).total_s

    shifted = [[d // 4 * 4 + (d + 1) % 4 for d in devices] for devices in (first, second)]
    assert priced(first, second) == priced(*shifted)
