"""Where to put the nodes of a layered graph and how to lead its edges: pure geometry.

From left to right by longest distance from a source. An edge that spans several layers passes through a lane of its own in
each layer in between, so no edge ever crosses a node::

    layer 0     layer 1     layer 2     layer 3
    [  a  ] --> [  b  ] --> [  c  ] --> [  e  ]
    [  d  ] -------------------------->        the edge d -> e keeps a lane in layers 1 and 2

The order within a layer comes from barycentre sweeps, kept when they cross fewer edges (Sugiyama, Tagawa, Toda 1981); heights from
repeated isotonic regression: as near to the neighbours' mean as the order and the gaps allow (the pools of adjacent violators).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 24
LANE = 8.0
"""Height of the lane of a passing edge."""


@dataclass(frozen=True)
class Layered:
    """The layout.

    Attributes:
        layer: per node, its layer.
        y: per node, the middle of its height, the topmost node's top being 0.
        routes: edge -> per layer from source to target, the height at which it passes.
        height: of everything.
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
    sizes = [node_height if v < num_nodes else LANE for v in range(graph.size)]
    y = _heights(graph, order, sizes, num_nodes, gap)
    top = min(y[v] - sizes[v] / 2 for v in range(graph.size))
    bottom = max(y[v] + sizes[v] / 2 for v in range(graph.size))
    routes = {edge: tuple(y[v] - top for v in path) for edge, path in graph.paths.items()}
    return Layered(tuple(layer), tuple(y[v] - top for v in range(num_nodes)), routes, bottom - top)


def longest_distances(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Per node, the most edges on a way from a source to it."""
    layer = [0] * num_nodes
    for a, b in sorted(edges):
        layer[b] = max(layer[b], layer[a] + 1)
    return layer


class _Expanded:
    """The graph with a further node in every layer that an edge passes, so that edges join neighbouring layers.

    Nodes below ``len(layer)`` are the given ones. ``before`` and ``after`` are the neighbours in adjacent layers.
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
    for sweep in range(SWEEPS):
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
    """The layers in the order in which a walk from the sources meets them: branches start out side by side."""
    rank: dict[int, int] = {}
    stack = [v for v in reversed(graph.layers[0])]
    others = [v for layer in graph.layers[1:] for v in layer if not graph.before[v]]
    stack = [*reversed(others), *stack]
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
        flat = [end for of_node in ends for end in of_node]
        total += sum(a > b for i, a in enumerate(flat) for b in flat[i + 1 :])
    return total


def _heights(
    graph: _Expanded,
    order: Sequence[Sequence[int]],
    sizes: Sequence[float],
    num_nodes: int,
    gap: float,
) -> list[float]:
    y = [0.0] * graph.size
    for layer in order:
        offsets = _offsets(layer, sizes, gap)
        for v, offset in zip(layer, offsets, strict=True):
            y[v] = offset - offsets[-1] / 2
    for sweep in range(SWEEPS):
        sides = (graph.before,) if sweep % 3 == 0 else (graph.after,) if sweep % 3 == 1 else None
        for layer in order if sweep % 2 == 0 else reversed(order):
            wanted = []
            for v in layer:
                around = [w for side in sides or (graph.before, graph.after) for w in side[v]]
                wanted.append(sum(y[w] for w in around) / len(around) if around else y[v])
            weights = [1.0 if v < num_nodes else 4.0 for v in layer]
            _settle(layer, wanted, weights, _offsets(layer, sizes, gap), y)
    return y


def _offsets(layer: Sequence[int], sizes: Sequence[float], gap: float) -> list[float]:
    """Middles of the nodes if they were stacked with just the gaps between them, from 0."""
    result = [0.0]
    for v, w in pairwise(layer):
        result.append(result[-1] + (sizes[v] + sizes[w]) / 2 + gap)
    return result


def _settle(
    layer: Sequence[int],
    wanted: Sequence[float],
    weights: Sequence[float],
    offsets: Sequence[float],
    y: list[float],
) -> None:
    """Least squares towards the wanted heights under the least distances, which is isotonic regression of the differences."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, heavy, members = want - offset, weight, 1
        while pools and pools[-1][0] > mean:
            other, other_weight, count = pools.pop()
            mean = (mean * heavy + other * other_weight) / (heavy + other_weight)
            heavy, members = heavy + other_weight, members + count
        pools.append((mean, heavy, members))
    shifts = [mean for mean, _, members in pools for _ in range(members)]
    for v, shift, offset in zip(layer, shifts, offsets, strict=True):
        y[v] = shift + offset
