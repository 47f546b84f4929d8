"""Pictures of a stage graph: a box per stage, branches side by side.

Boxes have names if all fit beside each other. Otherwise they are small, with the number only, in
rows of as many columns as fit; edges to another row go through the space between rows::

    [0] -> [1] -> [2] --+
    +-------------------+
    +-> [3] -> [4]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.plans.stages import StageGraph
from anabranch.report import names
from anabranch.report.layered import layered, longest_distances
from anabranch.report.theme import PIXELS, Drawing, escape, num, rect, shorten, text


@dataclass(frozen=True)
class Boxes:
    """Sizes of the boxes of a picture and of the space between them, in pixels.

    Attributes:
        gap: space between columns; ``below``: between boxes of a column, ``row_space``: between
            rows.
        side: space to the left and right of all boxes.
        tip: length of the head of an edge.
    """

    width: float
    height: float
    gap: float
    below: float
    side: float
    tip: float
    row_space: float = 0.0


NAMED = Boxes(208.0, 98.0, 54.0, 18.0, PIXELS.margin, 8.0)
"""Four short lines of text fit into a box."""

SMALL = Boxes(34.0, 26.0, 14.0, 8.0, PIXELS.margin + 14, 5.0, 26.0)

Edge = tuple[int, int]
Box = Callable[[int, float, float], Sequence[str]]
"""(stage, x, y) -> elements of its box with the left upper corner at x and y."""


def width_of(graph: StageGraph) -> float:
    columns = max(longest_distances(len(graph), graph.edges)) + 1
    return 2 * NAMED.side + columns * (NAMED.width + NAMED.gap) - NAMED.gap


def draw(graph: StageGraph, busy: Sequence[float] = ()) -> Drawing:
    """Draw a stage graph with names, from left to right by longest distance from a source.

    Args:
        busy: share of the time that each stage computes, which colours it; empty if not known.
    """
    count = f"{len(graph)} stage{'s' if len(graph) > 1 else ''}"
    title = f"{count}, {graph.depth} on the longest path"
    prefix = names.graph_prefix(graph)
    return _drawn(
        graph, NAMED, width_of(graph), title, partial(_named_box, graph, prefix=prefix, busy=busy)
    )


def draw_small(graph: StageGraph, width: float, busy: Sequence[float] = ()) -> Drawing:
    """Draw a stage graph in rows that are no wider, each stage with its number; see ``draw``."""

    def box(s: int, x: float, y: float) -> list[str]:
        share = f", busy {busy[s]:.0%}" if busy else ""
        where, operators = names.devices(graph.stages[s]), graph.stages[s].operators
        return [
            _group(s, f"stage {s} on {where}{share}: {', '.join(operators)}"),
            rect("card", x, y, SMALL.width, SMALL.height, radius=5),
            *_shade(s, busy, x, y, SMALL, 5),
            text("num", x + SMALL.width / 2, y + 17, PIXELS.small_type, s),
            "</g>",
        ]

    return _drawn(graph, SMALL, width, f"{len(graph)} stages in rows", box)


def _drawn(graph: StageGraph, boxes: Boxes, width: float, title: str, box: Box) -> Drawing:
    """Draw boxes and edges in as many columns as fit the width."""
    place = layered(len(graph), graph.edges, node_height=boxes.height, gap=boxes.below)
    step = boxes.width + boxes.gap
    columns = min(max(int((width - 2 * boxes.side + boxes.gap) / step), 1), max(place.layer) + 1)
    row_height = place.height + boxes.row_space
    rows = max(place.layer) // columns + 1
    right = boxes.side + columns * step - boxes.gap
    height = 2 * PIXELS.margin + rows * row_height - boxes.row_space
    drawing = Drawing(right + boxes.side, height, f"Stage graph: {title}")

    def at(layer: int, y: float) -> tuple[float, float]:
        row, column = divmod(layer, columns)
        return boxes.side + column * step, PIXELS.margin + row * row_height + y

    leaving, entering = _ports(graph, place.routes, boxes)
    for edge, heights in place.routes.items():
        levels = [heights[0] + leaving[edge], *heights[1:-1], heights[-1] + entering[edge]]
        first, last = (place.layer[s] for s in edge)
        x, y = at(first, levels[0])
        path = f"M{num(x + boxes.width)} {num(y)}"
        for layer, level in enumerate(levels[1:], first + 1):
            (x, y), before = at(layer, level), y
            end = num(x - (boxes.tip - 1) * (layer == last))
            if layer % columns:
                middle = num(x - boxes.gap / 2)
                path += f"C{middle} {num(before)} {middle} {num(y)} {end} {num(y)}"
            else:  # through the space between two rows
                space = PIXELS.margin + (layer // columns) * row_height - boxes.row_space / 2
                path += f"H{num(right + boxes.gap / 2)}V{num(space)}H{num(x - boxes.gap / 2)}"
                path += f"V{num(y)}H{end}"
            path += "" if layer == last else f"H{num(x + boxes.width)}"
        head = f"M{num(x)} {num(y)}l{num(-boxes.tip)} {num(-boxes.tip / 2)}v{num(boxes.tip)}z"
        drawing.add(f'<path class="edge" stroke-width="{1 + (boxes is NAMED) / 2}" d="{path}"/>')
        drawing.add(f'<path class="tip" d="{head}"/>')
    for s in range(len(graph)):
        drawing.add(*box(s, *at(place.layer[s], place.y[s] - boxes.height / 2)))
    return drawing


def _group(stage: int, title: str) -> str:
    """Begin the elements of a stage."""
    return f'<g data-stage="{stage}"><title>{escape(title)}</title>'


def _shade(
    s: int, busy: Sequence[float], x: float, y: float, boxes: Boxes, radius: float
) -> list[str]:
    """Draw how busy a stage is over its box."""
    if not busy:
        return []
    extra = f' fill-opacity="{num(0.75 * min(max(busy[s], 0.0), 1.0))}"'
    return [rect("f", x, y, boxes.width, boxes.height, radius=radius, extra=extra)]


def _ports(
    graph: StageGraph, routes: Mapping[Edge, Sequence[float]], boxes: Boxes
) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """Return vertical offsets of both ends of each edge, so that edges of a box do not cross."""
    leaving: dict[Edge, float] = {}
    entering: dict[Edge, float] = {}
    for s in range(len(graph)):
        out = sorted((routes[s, t][1], t) for t in graph.successors[s])
        into = sorted((routes[t, s][-2], t) for t in graph.predecessors[s])
        leaving |= {(s, t): _spread(n, len(out), boxes) for n, (_, t) in enumerate(out)}
        entering |= {(t, s): _spread(n, len(into), boxes) for n, (_, t) in enumerate(into)}
    return leaving, entering


def _spread(n: int, count: int, boxes: Boxes) -> float:
    distance = min(12.0, (boxes.height - 20) / max(count - 1, 1))
    return (n - (count - 1) / 2) * distance


def _named_box(
    graph: StageGraph, number: int, x: float, y: float, *, prefix: str, busy: Sequence[float]
) -> list[str]:
    stage, group = graph.stages[number], graph.group_size(number)
    size, room = PIXELS.small_type, NAMED.width - 26
    operators = [name.removeprefix(prefix) for name in stage.operators]
    count = len(operators)
    devices = names.devices(stage)
    if count > 2:
        operators = [operators[0], f".. {operators[-1]}"]
    facts = [
        f"{count} operator{'s' if count > 1 else ''} \u00b7 micro-batch {stage.microbatch_size}",
        f"{stage.in_flight} in flight"
        + (f" \u00b7 k {group}" if group > 1 else "")
        + (" \u00b7 recompute" if stage.recompute else "")
        + (f" \u00b7 busy {busy[number]:.0%}" if busy else ""),
    ]
    head = 64 if number < 100 else 72
    pieces = [
        _group(number, f"stage {number} on {devices}: {', '.join(stage.operators)}"),
        rect("card", x, y, NAMED.width, NAMED.height, radius=8, extra=' stroke-width="1.2"'),
        *_shade(number, [share / 2.5 for share in busy], x, y, NAMED, 8),
        rect("f", x, y + 12, 3.5, NAMED.height - 24, radius=1.75),
        text("bold", x + 14, y + 21, 13, f"stage {number}"),
        text("right", x + NAMED.width - 12, y + 21, size, shorten(devices, size, room - head)),
    ]
    middle = y + 46 if count == 1 else y + 39
    for i, line in enumerate(operators):
        pieces.append(text("", x + 14, middle + 15 * i, size, shorten(line, size, room)))
    for i, line in enumerate(facts):
        pieces.append(text("muted", x + 14, y + 73 + 15 * i, size, shorten(line, size, room + 8)))
    return [*pieces, "</g>"]
