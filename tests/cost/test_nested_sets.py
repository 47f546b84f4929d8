"""Weights of the stages between nested sets, against those of single stages."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.cost.footprint import Border, Number, StageFootprint
from anabranch.cost.nested_sets import NestedSets, Pairs
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.toolkit.downsets import downsets, nested_pairs
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import prefixes
from tests.planner.piper.reference import rich_profiles
from tests.strategies import op_graphs

MACHINES = Cluster.preset("summit:1x2")


def cost_of(graph: OpGraph) -> CostModel:
    costs = tuple(
        OpCost((0.1 + i,), (0.7,), 3 * i, 5 * i % 7, kept_fixed_bytes=4 * i % 5)
        for i in range(len(graph))
    )
    return CostModel(Profile(graph, (1,), costs, "cpu", "imported", proportional=True), MACHINES)


def figures(footprint: StageFootprint) -> list[Number]:
    """All numbers, or arrays of them."""
    border = [getattr(footprint.border, kind.name) for kind in fields(Border)]
    rows = [*footprint.held, footprint.held.summed, footprint.kept, footprint.kept_fixed]
    rows.append(footprint.largest_gradient)
    rows += [*(footprint.passes.at(n) for n in (1, 3))]
    return rows + [column for traffic in border for column in (traffic.per_sample, traffic.fixed)]


def at(rows: list[Number], place: object) -> list[float]:
    """Those of one stage."""
    return [float(row[place]) if isinstance(row, np.ndarray) else float(row) for row in rows]


def last_first(graph: OpGraph) -> list[int]:
    """The topological order in which the last operator that may be next comes next."""
    order: list[int] = []
    while len(order) < len(graph):
        waiting = {b for a, b in graph.edges if a not in order}
        order.append(max({*range(len(graph))} - waiting - {*order}))
    return order


@given(rich_profiles())
def test_every_stage_weighs_as_the_cost_model_says(profile):
    """Any graph and all pairs of its downsets, rows of its operators in two orders: tied and frozen
    parameters, tables whose gradients are rows, values without a batch or a gradient, several
    readers.
    """
    sparse = {"sparse_embeddings": True, "batch_size": 2}
    cost = CostModel(profile, MACHINES, **sparse)
    rows = (prefixes(order) for order in (range(len(cost.graph)), last_first(cost.graph)))
    for masks in (downsets(cost.graph, 10**5), *rows):
        sets, pairs = NestedSets(cost, masks), nested_pairs(cost.graph, masks, 10**6)
        listed, matrices = figures(sets.between(pairs)), figures(sets.matrices)
        seconds = sets.compute_s(3, recompute=True)
        for i, (u, v) in enumerate(zip(pairs.lower, pairs.upper, strict=True)):
            mask = sets.mask(u, v)
            assert mask == masks[v] & ~masks[u]
            expected = at(figures(cost.footprint(mask)), ())
            assert at(listed, i) == at(matrices, (u, v)) == expected
            assert seconds[v] - seconds[u] == sum(cost.stage_s(mask, 3, recompute=True))


@given(op_graphs(), st.data())
def test_a_row_may_be_a_part_of_the_model(graph, data):
    """What comes from outside is there before the row; what is read outside is read after it."""
    cost = cost_of(graph)
    first = data.draw(st.integers(0, len(graph) - 1))
    last = data.draw(st.integers(first + 1, len(graph)))
    row = NestedSets.row(cost, [1 << op for op in range(first, last)])
    assert row.parts == tuple(1 << op for op in range(first, last))
    matrices = figures(row.matrices)
    for i in range(len(row)):
        for j in range(i + 1, len(row)):
            assert at(matrices, (i, j)) == at(figures(cost.footprint(row.mask(i, j))), ())


@given(op_graphs())
def test_nested_is_what_lies_inside(graph):
    """The listed pairs and the matrix are the same, and those of which one holds the other."""
    masks = downsets(graph, 10**5)
    sets, pairs = NestedSets(cost_of(graph), masks), nested_pairs(graph, masks, 10**6)
    expected = {
        (u, v) for u, a in enumerate(masks) for v, b in enumerate(masks) if a & ~b == 0 < b & ~a
    }
    assert set(zip(*np.nonzero(sets.nested), strict=True)) == expected
    assert list(zip(pairs.lower, pairs.upper, strict=True)) == sorted(expected)


@given(op_graphs())
def test_least_traffic_is_just_below_what_crosses(graph):
    """All that crosses the border per sample, rounded downwards."""
    masks = downsets(graph, 10**5)
    sets, pairs = NestedSets(cost_of(graph), masks), nested_pairs(graph, masks, 10**6)
    border = sets.border(pairs)
    crossing = border.comes.per_sample + border.goes.per_sample
    least = sets.least_traffic(pairs)
    assert (least <= crossing).all()
    assert least == pytest.approx(crossing, rel=2e-6)


def test_open_values():
    """A value that two read is open once; its gradient comes back, that of a mask does not."""
    ops = tuple(Op(name) for name in "abcd")
    values = (
        Value(0, (1, 3), 10),
        Value(0, (2,), 7, batched=False, grad=False),
        Value(1, (2,), 5),
        Value(2, (3,), 1),
    )
    sets = NestedSets(cost_of(OpGraph(ops, values)), prefixes(range(4)))
    assert sets.open_bytes.tolist() == [
        [0, 0, 0, 0],
        [10, 7, 10, 0],
        [15, 7, 15, 0],
        [11, 0, 11, 0],
        [0, 0, 0, 0],
    ]


def test_tied_parameters_count_once():
    """An embedding that the first and the last operator read: 100 bytes with either or both."""
    graph = OpGraph(
        ops=(Op("a", ("w",)), Op("b", ("own",)), Op("c", ("w",))),
        values=(Value(0, (1,), 1), Value(1, (2,), 1)),
        parameters=(Parameter("w", 100), Parameter("own", 1)),
    )
    sets = NestedSets(cost_of(graph), prefixes(range(3)))
    assert sets.matrices.held.trainable[0].tolist() == [0, 100, 101, 101]
    pairs = Pairs(np.array([0, 0, 1]), np.array([1, 3, 3]))
    assert sets.between(pairs).held.trainable.tolist() == [100, 101, 101]
