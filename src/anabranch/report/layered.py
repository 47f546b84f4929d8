"""Layered layout of a graph: positions of nodes and routes of edges.

Layers run from left to right by longest distance from a source. An edge over several layers has a
lane in each layer in between, so no edge crosses a node::

    layer 0     layer 1     layer 2     layer 3
    [  a  ] --> [  b  ] --> [  c  ] --> [  e  ]
    [  d  ] -------------------------->        the edge d -> e keeps a lane in layers 1 and 2

The order within a layer comes from barycentre sweeps; the one with the fewest crossings is kept
(Sugiyama, Tagawa, Toda 1981). Heights: chains go to the mean of neighbours, nodes are pushed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from anabranch.graph.digraph import topological_order


@dataclass(frozen=True)
class LayoutParameters:
    """Parameters of the layout.

    Attributes:
        sweeps: most barycentre sweeps, and most passes over the heights.
        lane: height of the lane of a passing edge, in pixels.
        direct: weight of an edge between neighbouring layers; longer ones have weight 1.
    """

    sweeps: int = 24
    lane: float = 8.0
    direct: float = 4.0


PARAMETERS = LayoutParameters()


@dataclass(frozen=True)
class Layered:
    """A layout.

    Attributes:
        layer: layer of each node.
        y: middle of each node; the top of the topmost node is 0.
        routes: edge -> its height in each layer from source to target.
        height: height of the whole layout.
    """

    layer: tuple[int, ...]
    y: tuple[float, ...]
    routes: dict[tuple[int, int], tuple[float, ...]]
    height: float


def layered(
    num_nodes: int, edges: Sequence[tuple[int, int]], *, node_height: float, gap: float
) -> Layered:
    """Lay out a graph whose edges run from lower to higher numbers."""
    layer = longest_distances(num_nodes, edges)
    graph = _Expanded(layer, edges)
    order = _fewest_crossings(graph)
    sizes = [node_height if v < num_nodes else PARAMETERS.lane for v in range(graph.size)]
    y = _heights(graph, order, sizes, gap)
    top = min(y[v] - sizes[v] / 2 for v in range(graph.size))
    bottom = max(y[v] + sizes[v] / 2 for v in range(graph.size))
    routes = {edge: tuple(y[v] - top for v in path) for edge, path in graph.paths.items()}
    return Layered(tuple(layer), tuple(y[v] - top for v in range(num_nodes)), routes, bottom - top)


def longest_distances(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the longest distance from a source to each node, in edges."""
    layer = [0] * num_nodes
    for a, b in sorted(edges):
        layer[b] = max(layer[b], layer[a] + 1)
    return layer


class _Expanded:
    """The graph with additional nodes where edges pass layers, so that edges join adjacent layers.

    ``before`` and ``after`` are the neighbours of each node.
    """

    def __init__(self, layer: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
        self.layers: list[list[int]] = [[] for _ in range(max(layer) + 1)]
        self.paths: dict[tuple[int, int], list[int]] = {}
        for v, at in enumerate(layer):
            self.layers[at].append(v)
        self.size = len(layer)
        for a, b in sorted(edges):
            path = [a]
            for at in range(layer[a] + 1, layer[b]):
                self.layers[at].append(self.size)
                path.append(self.size)
                self.size += 1
            self.paths[a, b] = [*path, b]
        self.before: list[list[int]] = [[] for _ in range(self.size)]
        self.after: list[list[int]] = [[] for _ in range(self.size)]
        for path in self.paths.values():
            for v, w in pairwise(path):
                self.after[v].append(w)
                self.before[w].append(v)


def _fewest_crossings(graph: _Expanded) -> list[list[int]]:
    order = [list(layer) for layer in _depth_first(graph)]
    best, fewest = order, _crossings(graph, order)
    for sweep in range(PARAMETERS.sweeps):
        if fewest == 0:
            break
        order = [list(layer) for layer in order]
        forward = sweep % 2 == 0
        neighbours = graph.before if forward else graph.after
        for i in range(1, len(order)) if forward else range(len(order) - 2, -1, -1):
            place = {v: k for k, v in enumerate(order[i - 1 if forward else i + 1])}
            order[i] = _by_barycentre(order[i], neighbours, place)
        crossings = _crossings(graph, order)
        if crossings < fewest:
            best, fewest = order, crossings
    return best


def _depth_first(graph: _Expanded) -> list[list[int]]:
    """Order the layers by a depth-first walk from the sources, so that branches are adjacent."""
    rank: dict[int, int] = {}
    stack = list(reversed(graph.layers[0]))
    while stack:
        v = stack.pop()
        if v not in rank:
            rank[v] = len(rank)
            stack.extend(reversed(graph.after[v]))
    return [sorted(layer, key=lambda v: rank[v]) for layer in graph.layers]


def _by_barycentre(
    layer: Sequence[int], neighbours: Sequence[Sequence[int]], place: dict[int, int]
) -> list[int]:
    def key(item: tuple[int, int]) -> tuple[float, int]:
        at, v = item
        beside = [place[w] for w in neighbours[v]]
        return (sum(beside) / len(beside) if beside else at, at)

    return [v for _, v in sorted(enumerate(layer), key=key)]


def _crossings(graph: _Expanded, order: Sequence[Sequence[int]]) -> int:
    total = 0
    for left, right in pairwise(order):
        place = {v: k for k, v in enumerate(right)}
        ends = [sorted(place[w] for w in graph.after[v]) for v in left]
        flat = [end for node_ends in ends for end in node_ends]
        total += sum(a > b for i, a in enumerate(flat) for b in flat[i + 1 :])
    return total


def _heights(
    graph: _Expanded, order: Sequence[Sequence[int]], sizes: Sequence[float], gap: float
) -> list[float]:
    """Return the middle of every node; those of a chain without forks are equal."""
    above = [(v, w, (sizes[v] + sizes[w]) / 2 + gap) for layer in order for v, w in pairwise(layer)]
    chain = _chains(graph)
    ranks = _ranks(chain, above)
    apart: dict[tuple[int, int], float] = {}
    for v, w, distance in above:
        pair = chain[v], chain[w]
        apart[pair] = max(apart.get(pair, 0.0), distance)
    pairs = sorted(apart, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    y = _pushed_apart(dict.fromkeys(chain, 0.0), pairs, apart)
    around = _neighbours(graph, chain)
    for _ in range(PARAMETERS.sweeps):
        for c in sorted(y, key=lambda c: ranks[c]):
            if around[c]:
                weight = sum(around[c].values())
                y[c] = sum(y[other] * w for other, w in around[c].items()) / weight
        y = _pushed_apart(y, pairs, apart)
    return [y[c] for c in chain]


def _chains(graph: _Expanded) -> list[int]:
    """Return the first node of each node's chain."""
    first = list(range(graph.size))
    for layer in graph.layers:
        for v in layer:
            if len(graph.before[v]) == 1 and len(graph.after[graph.before[v][0]]) == 1:
                first[v] = first[graph.before[v][0]]
    return first


def _ranks(chain: Sequence[int], above: Sequence[tuple[int, int, float]]) -> dict[int, int]:
    """Map chains to positions from top to bottom.

    Such positions exist because chains never cross: they are unbroken in a depth-first walk, and by
    barycentres a node of a chain has the same place as its neighbour in the chain.
    """
    below: dict[int, set[int]] = {c: set() for c in chain}
    for v, w, _ in above:
        below[chain[v]].add(chain[w])
    return {c: i for i, c in enumerate(topological_order(below, lambda c: c))}


def _neighbours(graph: _Expanded, chain: Sequence[int]) -> dict[int, dict[int, float]]:
    """Map chains to neighbouring chains with the weights of the edges between them."""
    result: dict[int, dict[int, float]] = {c: {} for c in chain}
    for path in graph.paths.values():
        weight = PARAMETERS.direct if len(path) == 2 else 1.0
        for v, w in pairwise(path):
            a, b = chain[v], chain[w]
            if a != b:
                result[a][b] = result[a].get(b, 0.0) + weight
                result[b][a] = result[b].get(a, 0.0) + weight
    return result


def _pushed_apart(
    y: dict[int, float], pairs: Sequence[tuple[int, int]], apart: dict[tuple[int, int], float]
) -> dict[int, float]:
    """Move chains that are too close: each to the middle between its place if only lower chains
    moved and its place if only upper ones did. ``pairs`` are sorted from top to bottom.
    """
    lower, upper = dict(y), dict(y)
    for a, b in pairs:
        lower[b] = max(lower[b], lower[a] + apart[a, b])
    for a, b in reversed(pairs):
        upper[a] = min(upper[a], upper[b] - apart[a, b])
    return {c: (lower[c] + upper[c]) / 2 for c in y}
