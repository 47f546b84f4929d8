"""How many samples and micro-batches a stage must hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.in_flight import in_flight_samples, least_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.check import check
from anabranch.schedule.kfkb import KFKB
from tests.strategies import stage_graphs

POWERS = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("k_x", "b_x", "k_y", "b_y", "more"),
    [
        (2, 2, 4, 2, 2 * 2),  # max(bx,by) < kx*bx < ky*by: 2 max
        (1, 4, 4, 2, 4),  # max(bx,by) = kx*bx < ky*by: max
        (8, 1, 2, 2, 8 - 4 + 2 * 2),  # bx <= by < ky*by < kx*bx: kx*bx - ky*by + 2 by
        (8, 1, 1, 2, 8),  # bx <= by = ky*by < kx*bx: kx*bx
        (4, 2, 4, 1, 8 - 4 + 2 * 2),  # by <= bx < ky*by < kx*bx: kx*bx - ky*by + 2 bx
        (4, 2, 2, 1, 8),  # by <= bx = ky*by < kx*bx: kx*bx
        (1, 4, 1, 4, 4),  # max(bx,by) = ky*by = kx*bx: ky*by
        (4, 1, 2, 2, 2 * 2),  # max(bx,by) < ky*by = kx*bx: 2 max
        (1, 1, 1, 4, 4),  # bx <= kx*bx < by <= ky*by: by
        (2, 4, 1, 2, 8 - 2 + 4),  # by <= ky*by < bx <= kx*bx: kx*bx - ky*by + bx
    ],
)
def test_every_row_of_table_2(k_x, b_x, k_y, b_y, more):
    """On top of what y holds."""
    assert in_flight_samples(k_x, b_x, k_y, b_y, 10) == 10 + more


@given(POWERS, POWERS, POWERS, POWERS, st.integers(0, 50))
def test_x_holds_more_than_y(k_x, b_x, k_y, b_y, held):
    """By a micro-batch of either at least: the warm-up falls along every stage edge."""
    assert in_flight_samples(k_x, b_x, k_y, b_y, held) >= held + max(b_x, b_y)


@given(*[st.tuples(POWERS, POWERS) for _ in range(3)])
def test_a_detour_never_asks_for_less(x, y, z):
    """A value that skips a stage is covered by the stages between, so a chain decides."""
    (k_x, b_x), (k_y, b_y), (k_z, b_z) = x, y, z
    between = -(-in_flight_samples(k_y, b_y, k_z, b_z, 16) // b_y) * b_y
    around = in_flight_samples(k_x, b_x, k_y, b_y, between)
    assert around >= in_flight_samples(k_x, b_x, k_z, b_z, 16)


def graph(sizes: list[int], edges: str, batch_size: int) -> StageGraph:
    """Stages of these micro-batch sizes, edges as ``01 12``."""
    stages = tuple(Stage((f"op{i}",), (i,), b) for i, b in enumerate(sizes))
    pairs = tuple((int(edge[0]), int(edge[1])) for edge in edges.split())
    return StageGraph(stages, pairs, batch_size)


def test_least_in_flight():
    """Height + 1 with one size, no more than there are; in samples where sizes differ."""
    diamond = graph([2, 2, 2, 2], "01 02 13 23", 8)
    assert least_in_flight(diamond) == [3, 2, 2, 1]
    assert least_in_flight(replace(diamond, batch_size=4)) == [2, 2, 2, 1]
    # stage 2 holds 2 samples; stage 1 then 2 + 4 - 2 + 4 = 8, two micro-batches; stage 0 8 + 4
    assert least_in_flight(graph([1, 4, 2], "01 12", 16)) == [12, 2, 1]
    # GraphPipe, Figure 5
    assert least_in_flight(graph([4, 4, 4], "01 12", 32)) == [3, 2, 1]
    assert least_in_flight(graph([1, 2, 4], "01 12", 32)) == [10, 4, 1]


@given(
    stage_graphs(),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=4, max_size=4),
    st.none() | st.lists(st.integers(0, 12), min_size=4, max_size=4),
)
def test_no_sizes_deadlock(stages, pairs, room):
    """Any sizes and groups, also where they divide neither each other nor the batch, with the least
    warm-up and with a deep one, as far as there is room.
    """
    chosen = tuple(
        replace(stage, microbatch_size=b, k=k)
        for stage, (b, k) in zip(stages.stages, pairs, strict=False)
    )
    graph = replace(stages, stages=chosen)
    rule = KFKB() if room is None else KFKB(per_hop=2)
    decided = rule.warm_up(graph, None if room is None else room.__getitem__)
    check(KFKB().order(decided), decided)
