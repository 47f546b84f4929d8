"""OpGraph: what it refuses, and its masks."""

import pytest

from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value, bits


def diamond() -> OpGraph:
    r"""A batch, two branches and a join.

         +-> b -+
    a ---+      +--> d
         +-> c -+
    """
    return OpGraph(
        ops=(Op("a", ("w",)), Op("b"), Op("c", ("w",)), Op("d")),
        values=(
            Value(BATCH, (0,), 4, grad=False, name="x"),
            Value(0, (1, 2), 8),
            Value(1, (3,), 8),
            Value(2, (3,), 8),
        ),
        parameters=(Parameter("w", 40),),
    )


def test_edges_are_pairs_of_operators_without_the_batch():
    """One value read twice makes two edges; the batch is at hand everywhere and makes none."""
    assert diamond().edges == ((0, 1), (0, 2), (1, 3), (2, 3))


def test_masks_name_neighbours_and_everything_beyond():
    """Bit i stands for operator i."""
    graph = diamond()
    assert graph.successors == (0b0110, 0b1000, 0b1000, 0)
    assert graph.predecessors == (0, 0b0001, 0b0001, 0b0110)
    assert graph.descendants == (0b1110, 0b1000, 0b1000, 0)
    assert graph.ancestors == (0, 0b0001, 0b0001, 0b0111)


@pytest.mark.parametrize(
    ("names", "convex"),
    [("ab", True), ("bc", True), ("ad", False), ("abd", False), ("abcd", True), ("ac", True)],
)
def test_a_set_is_convex_if_no_path_leaves_and_returns(names, convex):
    """a -> b -> d leaves {a, d} and returns."""
    graph = diamond()
    assert graph.is_convex(graph.mask(names)) is convex


def test_masks_and_names_are_inverse():
    """Names come back in topological order."""
    graph = diamond()
    assert graph.names(graph.mask(["d", "a"])) == ("a", "d")
    assert list(bits(0b1010)) == [1, 3]


def test_size_of_a_value_without_batch_dimension_is_fixed():
    """A position bias is as large for one sample as for eight."""
    assert Value(0, (1,), 8).size(4) == 32
    assert Value(0, (1,), 8, batched=False).size(4) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": ()}, "at least one operator"),
        ({"ops": (Op("a"), Op("a"))}, "more than once: a"),
        ({"ops": (Op("a", ("w",)), Op("b"))}, "a reads parameter w"),
        ({"values": (Value(1, (0,), 4),)}, "against the order"),
        ({"values": (Value(0, (2,), 4),)}, "does not exist"),
        ({"values": (Value(0, (1,), -4),)}, "no size or no producer"),
        ({"values": (Value(0, (1, 1), 4),)}, "not ascending"),
        ({"parameters": (Parameter("w", 1), Parameter("w", 1))}, "listed more than once"),
    ],
)
def test_a_broken_graph_cannot_exist(change, message):
    """Whatever holds an OpGraph may rely on it."""
    whole = {"ops": (Op("a"), Op("b")), "values": (Value(0, (1,), 4),), "parameters": ()}
    with pytest.raises(ValueError, match=message):
        OpGraph(**{**whole, **change})
