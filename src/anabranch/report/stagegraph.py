"""Picture of a stage graph: a box per stage, branches side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from anabranch.plans.stages import StageGraph
from anabranch.report import names
from anabranch.report.layered import layered
from anabranch.report.theme import PIXELS, Drawing, escape, num, rect, shorten, text

BOX_WIDTH, BOX_HEIGHT = 208.0, 98.0
COLUMN_GAP, ROW_GAP = 54.0, 18.0
"""Pixels of the boxes and between them: four short lines of text fit into a box."""

Edge = tuple[int, int]


def draw(graph: StageGraph) -> Drawing:
    """Draw a stage graph, from left to right by longest distance from a source."""
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
        drawing.add(*_stage_box(graph, s, prefix, x, PIXELS.margin + place.y[s] - BOX_HEIGHT / 2))
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


def _stage_box(graph: StageGraph, number: int, prefix: str, x: float, y: float) -> list[str]:
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
        + (" \u00b7 recompute" if stage.recompute else ""),
    ]
    listing = escape(f"stage {number} on {devices}: " + ", ".join(stage.operators))
    head = 64 if number < 100 else 72
    pieces = [
        f"<g><title>{listing}</title>",
        rect("card", x, y, BOX_WIDTH, BOX_HEIGHT, radius=8, extra=' stroke-width="1.2"'),
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
