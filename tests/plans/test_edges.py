"""Values between stages."""

from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value
from anabranch.plans.edges import edge_values, message_edges
from anabranch.plans.stages import Stage, StageGraph


def test_edges_that_carry_data_and_gradients():
    """Value 1 is a mask and has no gradient; the edge 0 -> 2 only orders, both ways."""
    ops = (Op("a"), Op("b"), Op("c"))
    values = (Value(BATCH, (0, 2), 4), Value(0, (1,), 8), Value(1, (2,), 2, grad=False))
    model = OpGraph(ops, values)
    stages = tuple(Stage((op.name,), (i,), 1) for i, op in enumerate(ops))
    graph = StageGraph(stages, ((0, 1), (0, 2), (1, 2)), 4)
    assert edge_values(graph, model) == {(0, 1): (1,), (1, 2): (2,)}
    everything = {(0, 1), (0, 2), (1, 2)}
    assert message_edges(graph, model) == (everything, {(0, 1), (0, 2)})
