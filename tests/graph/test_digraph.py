"""Orders, cycles and longest paths of directed graphs, against networkx."""

import networkx as nx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.graph.digraph import path_before, strongly_connected, topological_order

EDGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)


def successors(edges: list[tuple[int, int]]) -> dict[int, set[int]]:
    return {node: {b for a, b in edges if a == node} for node in range(8)}


def test_the_least_node_that_may_come_next() -> None:
    """2 -> 0 and 3 -> 1: 0 waits for 2, then comes before 3."""
    assert topological_order({0: [], 1: [], 2: [0], 3: [1]}, lambda node: node) == [2, 0, 3, 1]


def test_a_cycle_and_what_is_behind_it_are_left_out() -> None:
    """0 -> 1 <-> 2 -> 3."""
    assert topological_order({0: [1], 1: [2], 2: [1, 3], 3: []}, lambda node: node) == [0]


@given(edges=EDGES)
def test_components_are_those_of_networkx_in_topological_order(
    edges: list[tuple[int, int]],
) -> None:
    """No edge leads from a component to one before it."""
    after = successors(edges)
    found = strongly_connected(after)
    expected = nx.strongly_connected_components(nx.DiGraph(after))
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
    place = {node: i for i, component in enumerate(found) for node in component}
    assert all(place[a] <= place[b] for a, b in edges)


@given(edges=EDGES)
def test_an_order_without_cycles_has_every_edge_forward(edges: list[tuple[int, int]]) -> None:
    """And it is the least one by rank, as networkx gives it."""
    after = successors([(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]])
    expected = nx.lexicographical_topological_sort(nx.DiGraph(after), key=lambda node: -node)
    assert topological_order(after, lambda node: -node) == list(expected)


@given(edges=EDGES)
def test_the_longest_path_is_that_of_networkx(edges: list[tuple[int, int]]) -> None:
    """Nodes take 1, 2, ... 8 s; backwards the path is the same."""
    forward = {(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]}
    seconds = np.arange(1.0, 9.0)
    graph = nx.DiGraph([(a, b, {"weight": seconds[b]}) for a, b in forward])
    graph.add_weighted_edges_from(("begin", node, seconds[node]) for node in range(8))
    expected = nx.dag_longest_path_length(graph)
    for way in (forward, {(b, a) for a, b in forward}):
        assert (path_before(seconds, way) + seconds).max() == expected
