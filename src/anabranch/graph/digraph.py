"""Orders and cycles of directed graphs, given as node -> the nodes that its edges lead to, and
longest paths between numbered nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from anabranch.compiled import Floats

_T = TypeVar("_T", bound=Hashable)


def topological_order(after: Mapping[_T, Iterable[_T]], rank: Callable[[_T], Any]) -> list[_T]:
    """Sort keys of ``after`` topologically, then by rank; leave out those on or behind cycles."""
    waiting = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            waiting[target] += 1
    ready = [(rank(node), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (rank(target), target))
    return order


def strongly_connected(after: Mapping[_T, Iterable[_T]]) -> list[list[_T]]:
    """Return strongly connected components in topological order (Kosaraju's algorithm)."""
    before: dict[_T, list[_T]] = {node: [] for node in after}
    for node, targets in after.items():
        for target in targets:
            before[target].append(node)
    seen: set[_T] = set()
    components = []
    for root in reversed(_depth_first(after, after, set())):
        if root not in seen:
            components.append(_depth_first([root], before, seen)[::-1])
    return components


def _depth_first(roots: Iterable[_T], after: Mapping[_T, Iterable[_T]], seen: set[_T]) -> list[_T]:
    """Return unseen nodes that the roots reach, in postorder, and mark them as seen."""
    finished = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(after[root]))]
        while stack:
            node, rest = stack[-1]
            fresh = next((target for target in rest if target not in seen), None)
            if fresh is None:
                finished.append(node)
                stack.pop()
            else:
                seen.add(fresh)
                stack.append((fresh, iter(after[fresh])))
    return finished


def path_before(seconds: Floats, edges: Iterable[tuple[int, int]]) -> Floats:
    """Return the seconds of the longest path before each node, see ``longest_paths``."""
    return longest_paths(np.zeros(len(seconds)), seconds, edges)[0]


def longest_paths(
    begin_s: Floats, seconds: Floats, edges: Iterable[tuple[int, int]]
) -> tuple[Floats, list[int]]:
    """Return when the longest path before each node ends, and the path's last node, or -1.

    Args:
        begin_s: earliest begin of each node.
        edges: all from lower to higher nodes, or all back.
    """
    ends_s, previous = begin_s.copy(), [-1] * len(seconds)
    for a, b in sorted(edges, key=lambda edge: edge[0] if edge[0] < edge[1] else -edge[0]):
        if ends_s[a] + seconds[a] > ends_s[b]:
            ends_s[b], previous[b] = ends_s[a] + seconds[a], a
    return ends_s, previous
