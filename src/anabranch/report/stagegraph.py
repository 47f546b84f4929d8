"""Pictures of a stage graph: a box per stage, branches side by side.

Boxes with names where all fit beside each other; else small ones with the number alone, in rows of
as many columns as fit, an edge to the next row in the space between::

    [0] -> [1] -> [2] --+
    +-------------------+
    +-> [3] -> [4]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from anabranch.plans.stages import StageGraph
from anabranch.report import names
from anabranch.report.layered import layered, longest_distances
from anabranch.report.theme import PIXELS, Drawing, escape, num, rect, shorten, text

BOX_WIDTH, BOX_HEIGHT = 208.0, 98.0
COLUMN_GAP, ROW_GAP = 54.0, 18.0
"""Pixels of the boxes and between them: four short lines of text fit into a box."""

SMALL_WIDTH, SMALL_HEIGHT, SMALL_GAP, ROW_SPACE = 34.0, 26.0, 14.0, 26.0
"""Pixels of small boxes, between them, and between rows of them."""

Edge = tuple[int, int]


def width_of(graph: StageGraph) -> float:
    """Width of the picture with names."""
    columns = max(longest_distances(len(graph), graph.edges)) + 1
    return 2 * PIXELS.margin + columns * (BOX_WIDTH + COLUMN_GAP) - COLUMN_GAP


def draw_small(graph: StageGraph, width: float, busy: Sequence[float] = ()) -> Drawing:
    """Draw a stage graph in rows that are no wider, each stage with its number.

    Args:
        busy: share of the time that each stage computes, which colours it; empty if not known.
    """
    place = layered(len(graph), graph.edges, node_height=SMALL_HEIGHT, gap=8)
    step, edge_of_row = SMALL_WIDTH + SMALL_GAP, PIXELS.margin + SMALL_GAP
    columns = min(max(int((width - 2 * edge_of_row + SMALL_GAP) / step), 1), max(place.layer) + 1)
    row_height = place.height + ROW_SPACE
    rows = max(place.layer) // columns + 1
    right = edge_of_row + columns * step - SMALL_GAP
    drawing = Drawing(
        right + edge_of_row,
        2 * PIXELS.margin + rows * row_height - ROW_SPACE,
        f"Stage graph: {len(graph)} stages in {rows} row{'s' if rows > 1 else ''}",
    )

    def at(layer: int, y: float) -> tuple[float, float]:
        row, column = divmod(layer, columns)
        return edge_of_row + column * step, PIXELS.margin + row * row_height + y

    for (source, _), heights in place.routes.items():
        x, y = at(place.layer[source], heights[0])
        path = f"M{num(x + SMALL_WIDTH)} {num(y)}"
        for layer, level in enumerate(heights[1:], place.layer[source] + 1):
            (x, y), last = at(layer, level), y
            if layer % columns:
                middle = num(x - SMALL_GAP / 2)
                path += f"C{middle} {num(last)} {middle} {num(y)} {num(x)} {num(y)}"
            else:  # through the space between two rows
                space = PIXELS.margin + (layer // columns) * row_height - ROW_SPACE / 2
                path += f"H{num(right + SMALL_GAP / 2)}V{num(space)}H{num(x - SMALL_GAP / 2)}"
                path += f"V{num(y)}H{num(x)}"
            path += (
                f"H{num(x + SMALL_WIDTH)}" if layer < place.layer[source] + len(heights) - 1 else ""
            )
        drawing.add(
            f'<path class="edge" d="{path}"/>',
            f'<path class="tip" d="M{num(x)} {num(y)}l-5 -3v6z"/>',
        )
    for s, stage in enumerate(graph.stages):
        x, y = at(place.layer[s], place.y[s] - SMALL_HEIGHT / 2)
        share = f", busy {busy[s]:.0%}" if busy else ""
        said = escape(f"stage {s} on {names.devices(stage)}{share}: {', '.join(stage.operators)}")
        drawing.add(
            f'<g data-stage="{s}"><title>{said}</title>',
            rect("card", x, y, SMALL_WIDTH, SMALL_HEIGHT, radius=5),
            *_shade(s, busy, x, y, SMALL_WIDTH, SMALL_HEIGHT, 5),
            text("num", x + SMALL_WIDTH / 2, y + 17, PIXELS.small_type, s),
            "</g>",
        )
    return drawing


def _shade(
    s: int, busy: Sequence[float], x: float, y: float, width: float, height: float, radius: float
) -> list[str]:
    """Draw how busy a stage is over its box."""
    if not busy:
        return []
    extra = f' fill-opacity="{num(0.75 * min(max(busy[s], 0.0), 1.0))}"'
    return [rect("f", x, y, width, height, radius=radius, extra=extra)]


def draw(graph: StageGraph, busy: Sequence[float] = ()) -> Drawing:
    """Draw a stage graph with names, from left to right by longest distance from a source.

    Args:
        busy: see ``draw_small``.
    """
    place = layered(len(graph), graph.edges, node_height=BOX_HEIGHT, gap=ROW_GAP)
    columns = max(place.layer) + 1
    width = 2 * PIXELS.margin + columns * BOX_WIDTH + (columns - 1) * COLUMN_GAP
    count = f"{len(graph)} stage{'s' if len(graph) > 1 else ''}"
    title = f"Stage graph: {count}, {graph.depth} on the longest path"
    drawing = Drawing(width, place.height + 2 * PIXELS.margin, title)
    leaving, entering = _ports(graph, place.routes)
    for edge, heights in place.routes.items():
        levels = [heights[0] + leaving[edge], *heights[1:-1], heights[-1] + entering[edge]]
        drawing.add(*_edge([PIXELS.margin + y for y in levels], place.layer[edge[0]]))
    prefix = names.graph_prefix(graph)
    for s in range(len(graph)):
        x = _column(place.layer[s])
        y = PIXELS.margin + place.y[s] - BOX_HEIGHT / 2
        drawing.add(*_stage_box(graph, s, prefix, x, y, busy))
    return drawing


def _column(layer: int) -> float:
    return PIXELS.margin + layer * (BOX_WIDTH + COLUMN_GAP)


def _ports(
    graph: StageGraph, routes: Mapping[Edge, Sequence[float]]
) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """Return vertical offsets of both ends of each edge, so that edges of a box do not cross."""
    leaving: dict[Edge, float] = {}
    entering: dict[Edge, float] = {}
    for s in range(len(graph)):
        out = sorted((routes[s, t][1], t) for t in graph.successors[s])
        into = sorted((routes[t, s][-2], t) for t in graph.predecessors[s])
        leaving |= {(s, t): _spread(n, len(out)) for n, (_, t) in enumerate(out)}
        entering |= {(t, s): _spread(n, len(into)) for n, (_, t) in enumerate(into)}
    return leaving, entering


def _spread(n: int, count: int) -> float:
    distance = min(12.0, (BOX_HEIGHT - 20) / max(count - 1, 1))
    return (n - (count - 1) / 2) * distance


def _edge(levels: Sequence[float], layer: int) -> list[str]:
    """Draw an edge to a box further right, straight through the layers in between."""
    x = _column(layer) + BOX_WIDTH
    path = f"M{num(x)} {num(levels[0])}"
    last = len(levels) - 2
    for i, (y1, y2) in enumerate(pairwise(levels)):
        reach = COLUMN_GAP - (7 if i == last else 0)
        bend = reach * 0.5
        if abs(y1 - y2) < 0.05:
            path += f"H{num(x + reach)}"
        else:
            path += f"C{num(x + bend)} {num(y1)} {num(x + reach - bend)} {num(y2)} "
            path += f"{num(x + reach)} {num(y2)}"
        x += COLUMN_GAP
        if i < last:
            path += f"H{num(x + BOX_WIDTH)}"
            x += BOX_WIDTH
    tip = f"M{num(x)} {num(levels[-1])}l-8 -4v8z"
    return [f'<path class="edge" stroke-width="1.5" d="{path}"/>', f'<path class="tip" d="{tip}"/>']


def _stage_box(
    graph: StageGraph, number: int, prefix: str, x: float, y: float, busy: Sequence[float]
) -> list[str]:
    stage, group = graph.stages[number], graph.group_size(number)
    room = BOX_WIDTH - 26
    first, last = names.ends(stage, prefix)
    count = len(stage.operators)
    devices = names.devices(stage)
    operators = [first] if count == 1 else [first, last if count == 2 else f".. {last}"]
    facts = [
        f"{count} operator{'s' if count > 1 else ''} \u00b7 micro-batch {stage.microbatch_size}",
        f"{stage.in_flight} in flight"
        + (f" \u00b7 k {group}" if group > 1 else "")
        + (" \u00b7 recompute" if stage.recompute else "")
        + (f" \u00b7 busy {busy[number]:.0%}" if busy else ""),
    ]
    listing = escape(f"stage {number} on {devices}: " + ", ".join(stage.operators))
    head = 64 if number < 100 else 72
    pieces = [
        f'<g data-stage="{number}"><title>{listing}</title>',
        rect("card", x, y, BOX_WIDTH, BOX_HEIGHT, radius=8, extra=' stroke-width="1.2"'),
        *_shade(number, [share / 2.5 for share in busy], x, y, BOX_WIDTH, BOX_HEIGHT, 8),
        rect("f", x, y + 12, 3.5, BOX_HEIGHT - 24, radius=1.75),
        text("bold", x + 14, y + 21, 13, f"stage {number}"),
        text(
            "right",
            x + BOX_WIDTH - 12,
            y + 21,
            PIXELS.small_type,
            shorten(devices, PIXELS.small_type, room - head),
        ),
    ]
    middle = y + 46 if count == 1 else y + 39
    for i, line in enumerate(operators):
        pieces.append(
            text(
                "",
                x + 14,
                middle + 15 * i,
                PIXELS.small_type,
                shorten(line, PIXELS.small_type, room),
            )
        )
    for i, line in enumerate(facts):
        pieces.append(
            text(
                "muted",
                x + 14,
                y + 73 + 15 * i,
                PIXELS.small_type,
                shorten(line, PIXELS.small_type, room + 8),
            )
        )
    return [*pieces, "</g>"]
