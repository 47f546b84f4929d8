"""Where the nodes and edges of a layered graph go."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.layered import PARAMETERS, layered

HEIGHT, GAP = 80.0, 20.0


def lay_out(nodes, edges):
    return layered(nodes, edges, node_height=HEIGHT, gap=GAP)


def test_a_chain_is_a_straight_line():
    """Every stage one layer further, all at one height."""
    place = lay_out(4, [(0, 1), (1, 2), (2, 3)])
    assert place.layer == (0, 1, 2, 3)
    assert place.y == (40, 40, 40, 40)
    assert place.height == HEIGHT


def test_two_towers_are_two_straight_lines_with_the_join_between_them():
    """0 -> 2 above, 1 -> 3 below, 4 in the middle."""
    place = lay_out(5, [(0, 2), (1, 3), (2, 4), (3, 4)])
    assert place.layer == (0, 0, 1, 1, 2)
    assert place.y == pytest.approx((40, 140, 40, 140, 90), abs=0.5)


def test_a_short_tower_reaches_the_join_in_a_straight_line():
    """1 -> 3 passes the layer of 2 at the height of 1."""
    place = lay_out(4, [(0, 2), (1, 3), (2, 3)])
    assert place.layer == (0, 0, 1, 2)
    assert place.y[0] == place.y[2]
    start, passing, _ = place.routes[1, 3]
    assert start == passing


def test_branches_that_are_numbered_crosswise_are_untangled():
    """0 -> 3 and 1 -> 2 would cross if layers were in the order of the numbers."""
    place = lay_out(5, [(0, 3), (1, 2), (2, 4), (3, 4)])
    assert (place.y[0] < place.y[1]) == (place.y[3] < place.y[2])


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 14))
    pairs = list(combinations(range(nodes), 2))
    return nodes, sorted(draw(st.sets(st.sampled_from(pairs), max_size=20))) if pairs else []


def check_geometry(nodes, edges):
    """Edges run to the right; in every layer nodes and passing edges keep clear of each other. A
    picture in a repository must not change by itself.
    """
    place = lay_out(nodes, edges)
    assert place == lay_out(nodes, edges)
    passing = [
        (place.layer[a] + i, y)
        for (a, _), route in place.routes.items()
        for i, y in list(enumerate(route))[1:-1]
    ]
    for (a, b), route in place.routes.items():
        assert len(route) == place.layer[b] - place.layer[a] + 1 >= 2
        assert (route[0], route[-1]) == (place.y[a], place.y[b])
    for at in range(max(place.layer) + 1):
        things = [(place.y[v], HEIGHT) for v in range(nodes) if place.layer[v] == at]
        things += [(y, PARAMETERS.lane) for layer, y in passing if layer == at]
        for (y1, h1), (y2, h2) in pairwise(sorted(things)):
            assert y2 - y1 >= (h1 + h2) / 2 + GAP - 1e-6
    assert min(place.y) >= HEIGHT / 2 - 1e-6
    assert max(place.y) <= place.height - HEIGHT / 2 + 1e-6


@given(graphs())
def test_nothing_overlaps(graph):
    """On any graph."""
    check_geometry(*graph)


@pytest.mark.parametrize("nodes", [1, 2, 33, 64])
def test_nothing_overlaps_in_large_graphs(nodes):
    """A tree in which every node feeds two others, with an edge from the root to the last node."""
    edges = {((v - 1) // 2, v) for v in range(1, nodes)} | (
        {(0, nodes - 1)} if nodes > 1 else set()
    )
    check_geometry(nodes, sorted(edges))
