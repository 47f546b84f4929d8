"""The stages of a plan as a picture: a box per stage, branches side by side, joins where they meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from anabranch.planner.stages import Plan, Stage, StageGraph
from anabranch.report import names
from anabranch.report.layered import layered
from anabranch.report.theme import Drawing, escape, num, rect, shorten, text

BOX_WIDTH = 196.0
BOX_HEIGHT = 84.0
COLUMN_GAP = 54.0
ROW_GAP = 18.0
MARGIN = 22.0
SMALL = 11.0


def stage_graph_svg(plan: Plan) -> str:
    """Draw the stages of a plan from left to right by longest distance from the source, as an SVG document.

    Its size in pixels follows from the number of stages side by side and behind each other.
    """
    return draw(plan.stage_graph).svg()


def draw(graph: StageGraph) -> Drawing:
    """The picture of a stage graph."""
    place = layered(len(graph), graph.edges, node_height=BOX_HEIGHT, gap=ROW_GAP)
    columns = max(place.layer) + 1
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * COLUMN_GAP
    count = f"{len(graph)} stage{'s' if len(graph) > 1 else ''}"
    title = f"Stage graph: {count}, {graph.depth} on the longest path"
    drawing = Drawing(width, place.height + 2 * MARGIN, title)
    ports = _ports(graph, place.y)
    for (a, b), heights in place.routes.items():
        out, into = ports[a, b]
        levels = [heights[0] + out, *heights[1:-1], heights[-1] + into]
        drawing.add(*_edge([MARGIN + y for y in levels], place.layer[a]))
    prefix = names.graph_prefix(graph)
    for s, stage in enumerate(graph.stages):
        x = _column(place.layer[s])
        drawing.add(*_stage_box(s, stage, prefix, x, MARGIN + place.y[s] - BOX_HEIGHT / 2))
    return drawing


def _column(layer: int) -> float:
    return MARGIN + layer * (BOX_WIDTH + COLUMN_GAP)


def _ports(graph: StageGraph, y: Sequence[float]) -> dict[tuple[int, int], tuple[float, float]]:
    """Edge -> where it leaves and enters, relative to the middles; spread so that a join shows every edge."""
    result: dict[tuple[int, int], tuple[float, float]] = {}
    leave, enter = {}, {}
    for s in range(len(graph)):
        for n, other in enumerate(sorted(graph.successors[s], key=lambda t: (y[t], t))):
            leave[s, other] = _spread(n, len(graph.successors[s]))
        for n, other in enumerate(sorted(graph.predecessors[s], key=lambda t: (y[t], t))):
            enter[other, s] = _spread(n, len(graph.predecessors[s]))
    for edge in graph.edges:
        result[edge] = leave[edge], enter[edge]
    return result


def _spread(n: int, count: int) -> float:
    distance = min(12.0, (BOX_HEIGHT - 20) / max(count - 1, 1))
    return (n - (count - 1) / 2) * distance


def _edge(levels: Sequence[float], layer: int) -> list[str]:
    """From the right side of a box, straight through the layers in between, to the left side of another."""
    x = _column(layer) + BOX_WIDTH
    path = f"M{num(x)} {num(levels[0])}"
    last = len(levels) - 2
    for i, (y1, y2) in enumerate(pairwise(levels)):
        reach = COLUMN_GAP - (7 if i == last else 0)
        bend = reach * 0.5
        if abs(y1 - y2) < 0.05:
            path += f"H{num(x + reach)}"
        else:
            path += f"C{num(x + bend)} {num(y1)} {num(x + reach - bend)} {num(y2)} {num(x + reach)} {num(y2)}"
        x += COLUMN_GAP
        if i < last:
            path += f"H{num(x + BOX_WIDTH)}"
            x += BOX_WIDTH
    tip = f"M{num(x)} {num(levels[-1])}l-8 -4v8z"
    return [f'<path class="edge" stroke-width="1.5" d="{path}"/>', f'<path class="tip" d="{tip}"/>']


def _stage_box(number: int, stage: Stage, prefix: str, x: float, y: float) -> list[str]:
    inner = BOX_WIDTH - 26
    first, last = names.ends(stage, prefix)
    count = len(stage.operators)
    devices = names.devices(stage)
    more = "".join(
        [
            f" \u00b7 k {stage.k}" if stage.k > 1 else "",
            " \u00b7 recompute" if stage.recompute else "",
        ]
    )
    shape = f"micro-batch {stage.microbatch_size} \u00b7 {stage.in_flight} in flight{more}"
    listing = "\n".join(stage.operators)
    right = x + BOX_WIDTH - 12
    return [
        f"<g><title>{escape(f'stage {number} on {devices}: {listing}')}</title>",
        rect("card", x, y, BOX_WIDTH, BOX_HEIGHT, radius=8, extra=' stroke-width="1.2"'),
        rect("f", x, y + 10, 3.5, BOX_HEIGHT - 20, radius=1.75),
        text("bold", x + 14, y + 21, 13, f"stage {number}"),
        text("right", right, y + 21, SMALL + 0.5, shorten(devices, SMALL + 0.5, inner - 66)),
        text("", x + 14, y + 39, SMALL, shorten(first, SMALL, inner)),
        text("", x + 14, y + 54, SMALL, _second_line(last, count, inner)),
        text("muted", x + 14, y + 72, SMALL, shorten(shape, SMALL, inner + 6)),
        "</g>",
    ]


def _second_line(last: str, count: int, room: float) -> str:
    if count == 1:
        return ""
    tail = f" ({count} operators)" if count > 2 else ""
    return shorten(f".. {last}", SMALL, room - 6.2 * len(tail)) + tail
