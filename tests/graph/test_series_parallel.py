"""Decomposition into series and parallel parts."""

from collections.abc import Iterator

import pytest
from hypothesis import given

from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value
from anabranch.graph.series_parallel import (
    Leaf,
    Node,
    Parallel,
    Series,
    decompose,
    operators,
    signature,
)
from tests.strategies import Sketch, op_graphs, sketch_edges, sketches


def graph_of(n: int, edges: list[tuple[int, int]]) -> OpGraph:
    return OpGraph(
        tuple(Op(f"op{i}") for i in range(n)), tuple(Value(a, (b,), 1) for a, b in edges)
    )


def show(node: Node) -> str:
    """``0 (1 2 | 3) 4`` for a fork at 0 and a join at 4; ``!`` before an order that was added."""
    if isinstance(node, Leaf):
        return str(node.op)
    texts = [show(child) for child in node.children]
    if isinstance(node, Parallel):
        return f"({' | '.join(texts)})"
    return ("!" if node.forced else "") + " ".join(texts)


@pytest.mark.parametrize(
    ("n", "edges", "expected"),
    [
        (1, [], "0"),
        (3, [(0, 1), (1, 2)], "0 1 2"),
        (2, [], "(0 | 1)"),
        (5, [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)], "0 (1 2 | 3) 4"),
        # two towers without a common source, and two losses at the end
        (5, [(0, 2), (1, 2), (2, 3), (2, 4)], "(0 | 1) 2 (3 | 4)"),
        # every operator of the first pair feeds every operator of the second
        (4, [(0, 2), (0, 3), (1, 2), (1, 3)], "(0 | 1) (2 | 3)"),
        # a block within a branch
        (6, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (0, 5)], "0 (1 (2 | 3) 4 | 5)"),
    ],
)
def test_decomposes(n, edges, expected):
    """Drawn by hand."""
    assert show(decompose(graph_of(n, edges))) == expected


def test_implied_edges_do_not_matter():
    """A mask that feeds every layer, as in BERT, and a skip connection."""
    layers = [(0, 1), (1, 2), (2, 3), (3, 4)]
    masks = [(0, 2), (0, 3), (0, 4)]
    assert show(decompose(graph_of(5, layers + masks))) == "0 1 2 3 4"


def test_mask_beside_the_embedding():
    """Embedding 0 and mask 1 are both needed by the first layer."""
    edges = [(0, 2), (1, 2), (1, 3), (2, 3)]
    assert show(decompose(graph_of(4, edges))) == "(0 | 1) 2 3"


def test_adds_order_to_what_is_not_series_parallel():
    """An N with long legs: both upper legs before both lower ones, so each pair stays parallel.

        0 1 2 ---> 6 7 8
              \\
        3 4 5 ---> 9 10 11
    """
    legs = [(i, i + 1) for start in (0, 3, 6, 9) for i in range(start, start + 2)]
    tree = decompose(graph_of(12, [*legs, (2, 6), (2, 9), (5, 9)]))
    assert show(tree) == "!(0 1 2 | 3 4 5) (6 7 8 | 9 10 11)"
    assert "!" in show(tree)


def test_series_parallel_parts_of_a_core_are_kept():
    """What surrounds an N is decomposed as if it were not there."""
    edges = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (3, 5), (4, 5), (5, 6), (5, 7)]
    text = show(decompose(graph_of(8, edges)))
    assert text.startswith("0 ")
    assert text.endswith(" 5 (6 | 7)")


def test_ladder_becomes_a_chain():
    """Every operator reads two back, as NASNet cells do: nothing is left to run side by side."""
    edges = [(0, 1), *((i, i + 2) for i in range(6)), *((i, i + 1) for i in range(2, 7))]
    tree = decompose(graph_of(8, edges))
    assert list(operators(tree)) == list(range(8))


@given(sketches(12))
def test_series_parallel_graphs_need_no_order(sketch: Sketch):
    """Whatever is drawn as series and parallel is found again."""
    tree = decompose(graph_of(sketch.size, sketch_edges(sketch)))
    assert "!" not in show(tree)
    assert depth(tree) <= 2 * sketch.size


def depth(node: Node) -> int:
    return 1 if isinstance(node, Leaf) else 1 + max(depth(child) for child in node.children)


@given(op_graphs(max_ops=9))
def test_order_of_the_tree_is_that_of_the_graph(graph):
    """Any graph: every operator once; what one reads is not parallel to it nor after it."""
    tree = decompose(graph)
    assert sorted(operators(tree)) == list(range(len(graph)))
    ordered = set(ordered_pairs(tree))
    assert set(graph.edges) <= ordered
    if "!" not in show(tree):
        closure = {
            (a, b) for b in range(len(graph)) for a in range(b) if graph.ancestors[b] >> a & 1
        }
        assert ordered == closure


def ordered_pairs(node: Node) -> Iterator[tuple[int, int]]:
    if isinstance(node, Leaf):
        return
    for child in node.children:
        yield from ordered_pairs(child)
    if isinstance(node, Series):
        parts = [list(operators(child)) for child in node.children]
        for i, before in enumerate(parts):
            for after in parts[i + 1 :]:
                yield from ((a, b) for a in before for b in after)


def two_branches(*, bytes_of_second: int = 8) -> OpGraph:
    """0 -> 1 and 2 -> 3, both into 4; both read the batch."""
    values = (
        Value(BATCH, (0, 2), 1),
        Value(0, (1,), 8),
        Value(1, (4,), 8),
        Value(2, (3,), bytes_of_second),
        Value(3, (4,), 8),
    )
    return OpGraph(tuple(Op(f"op{i}") for i in range(5)), values)


def signatures(graph: OpGraph, keys: list[int]) -> list[object]:
    tree = decompose(graph)
    assert isinstance(tree, Series)
    block = tree.children[0]
    assert isinstance(block, Parallel)
    return [signature(graph, child, keys) for child in block.children]


def test_equal_branches_have_one_signature():
    """Same costs, same sizes, same places."""
    first, second = signatures(two_branches(), [1, 2, 1, 2, 9])
    assert first == second


def test_branches_of_other_costs_or_sizes_differ():
    """One operator that costs more, or one value that is larger."""
    first, second = signatures(two_branches(), [1, 2, 1, 3, 9])
    assert first != second
    first, second = signatures(two_branches(bytes_of_second=9), [1, 2, 1, 2, 9])
    assert first != second
