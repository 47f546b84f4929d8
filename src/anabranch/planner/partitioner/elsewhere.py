"""The same stages otherwise: on other devices, or one waiting for the other where they share cores.

Of two neighbours with as many replicas, each with as many devices of every node as the other, all
transfers stay inside nodes and only all-reduces leave::

    nodes of 2      x on 0 1 2, y on 3 4 5: every transfer leaves       x on 0 2 4, y on 1 3 5: none
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.place import place
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph

Where = list[tuple[int, ...]]
"""Devices of every stage."""


def elsewhere(
    cluster: Cluster,
    parts: Sequence[Part],
    pairs: Iterable[tuple[int, int]],
    where: Where,
    focus: Sequence[int],
) -> Iterator[Where]:
    """Other devices for stages that have some.

    Args:
        cluster: has the devices.
        parts: the stages.
        pairs: stage edges.
        where: devices of the stages.
        focus: stages that are worth moving.
    """
    yield from _woven(cluster, parts, sorted(pairs))
    yield from _exchanged(cluster, parts, where, focus)
    sizes = [part.devices for part in parts]
    placed = place(sizes, cluster.group_sizes, [part.tensor for part in parts])
    if placed:
        yield from _exchanged(cluster, parts, [tuple(each) for each in placed], focus)


def _woven(
    cluster: Cluster, parts: Sequence[Part], pairs: Sequence[tuple[int, int]]
) -> Iterator[Where]:
    """Two neighbours placed as if they were one, the devices in turns to each."""
    for x, y in pairs:
        a, b = parts[x], parts[y]
        if not a.replicas == b.replicas > 1 or a.tensor > 1 or b.tensor > 1:
            continue
        alone = [s for s in range(len(parts)) if s != y]
        placed = place(
            [parts[s].devices * (1 + (s == x)) for s in alone],
            cluster.group_sizes,
            [parts[s].tensor for s in alone],
        )
        if placed:
            where = dict(zip(alone, map(tuple, placed), strict=True))
            where[x], where[y] = where[x][::2], where[x][1::2]
            yield [where[s] for s in range(len(parts))]


def _exchanged(
    cluster: Cluster, parts: Sequence[Part], where: Where, focus: Sequence[int]
) -> Iterator[Where]:
    """The devices of two stages exchanged, or in turns to each."""
    node = cluster.group_sizes[0]
    for x in focus:
        for y in range(len(parts)):
            a, b = where[x], where[y]
            if x == y or len(a) != len(b):
                continue
            ways = []
            if a[0] // node != b[0] // node:
                ways.append((b, a))
            if len(a) > 1 and parts[x].tensor == parts[y].tensor == 1:
                both = sorted((*a, *b))
                ways.append((tuple(both[::2]), tuple(both[1::2])))
            for one, other in ways:
                changed = list(where)
                changed[x], changed[y] = one, other
                yield changed


def in_turn(cost: CostModel, graphs: Iterable[StageGraph]) -> list[StageGraph]:
    """Where devices share few cores, the same stage graphs with each stage waiting for the last.

    Stages side by side then take the cores from the stage that others wait for; in a row, as
    ``planner.sequential`` has them, they do not. That takes more memory, so some do not fit.
    """
    if not 0 < cost.cluster.cores < cost.cluster.num_devices:
        return []
    found = []
    for graph in graphs:
        edges = {*graph.edges, *((s, s + 1) for s in range(len(graph) - 1))}
        found.append(replace(graph, edges=tuple(sorted(edges))))
    return [graph for graph in found if not check(graph, cost)]
