"""The next event: what is due at each of many places, and the earliest of them.

A tournament. ``tree[1]`` is the place whose event comes first, by its time and then by its number;
the places below node i are those below nodes 2i and 2i + 1.
"""

from __future__ import annotations

import numpy as np

from anabranch.planner.auto.compiled.jit import compiled, making
from anabranch.planner.auto.tables import Floats, Ints


@making
def new_tree(count: int) -> Ints:
    """A tree of so many places at which nothing is due."""
    width = 1
    while width < count:
        width *= 2
    tree = np.zeros(2 * width, np.int64)
    for leaf in range(width):
        tree[width + leaf] = min(leaf, count - 1)
    for node in range(width - 1, 0, -1):
        tree[node] = tree[2 * node]
    return tree


@compiled
def settle(tree: Ints, times: Floats, numbers: Ints, place: int) -> None:
    """Play the matches again of a place whose event has changed."""
    node = (len(tree) // 2 + place) // 2
    while node >= 1:
        a, b = tree[2 * node], tree[2 * node + 1]
        if times[b] < times[a] or (times[b] == times[a] and numbers[b] < numbers[a]):
            a = b
        tree[node] = a
        node //= 2
