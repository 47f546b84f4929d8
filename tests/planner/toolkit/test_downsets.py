"""All downsets, each once, and an end where there are too many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import BudgetError
from anabranch.graph.opgraph import Op, OpGraph, Value, bits
from anabranch.planner.toolkit.downsets import downsets
from tests.strategies import op_graphs

MOST = 100_000


def graph_of(count: int, edges: list[tuple[int, int]]) -> OpGraph:
    """Operators 0, 1, 2 ... and edges between them."""
    return OpGraph(
        tuple(Op(f"op{i}") for i in range(count)),
        tuple(Value(a, (b,), 1) for a, b in edges),
        name="drawn",
    )


def branches(count: int, length: int) -> OpGraph:
    """Chains side by side and an operator that joins them."""
    ops = range(count * length)
    edges = [(i, i + 1) for i in ops if (i + 1) % length]
    edges += [(i, count * length) for i in ops if (i + 1) % length == 0]
    return graph_of(count * length + 1, edges)


def by_definition(graph: OpGraph) -> list[int]:
    """Every set of operators that holds what its operators read."""
    return sorted(
        (
            mask
            for mask in range(1 << len(graph))
            if all(graph.predecessors[i] & ~mask == 0 for i in bits(mask))
        ),
        key=lambda mask: (mask.bit_count(), mask),
    )


@given(graph=op_graphs(max_ops=9))
def test_lists_them_all(graph):
    """The same as testing every set of operators, in ascending order."""
    assert downsets(graph, MOST) == by_definition(graph)


def test_a_diamond_by_eye():
    """a, then b and c in any order, then d."""
    diamond = graph_of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert downsets(diamond, 6) == [0, 0b1, 0b11, 0b101, 0b111, 0b1111]


@pytest.mark.parametrize(
    ("count", "length", "expected"), [(1, 500, 502), (2, 30, 962), (4, 8, 6562), (5, 5, 7777)]
)
def test_counts_of_branches(count, length, expected):
    """k chains of n operators with a join: (n + 1) ** k and the whole."""
    found = downsets(branches(count, length), MOST)
    assert len(found) == len(set(found)) == expected == (length + 1) ** count + 1


@given(graph=op_graphs(max_ops=7), budget=st.integers(1, 40))
def test_the_budget_is_exact(graph, budget):
    """As many as the budget are listed; one more and there is none."""
    count = len(by_definition(graph))
    if count <= budget:
        assert len(downsets(graph, budget)) == count
    else:
        with pytest.raises(BudgetError, match=rf"at least {budget + 1} .* budget of {budget},"):
            downsets(graph, budget)


def test_many_branches_end_in_a_paragraph():
    """9 ** 7 is nearly 5 million; the paragraph has both numbers and a way on."""
    graph = branches(7, 8)
    with pytest.raises(BudgetError) as error:
        downsets(graph, MOST)
    assert f"{MOST + 1:,} downsets" in str(error.value)
    assert f"budget of {MOST:,}" in str(error.value)
    for way in ("coarser", "planner graphpipe", "larger budget"):
        assert way in str(error.value)
