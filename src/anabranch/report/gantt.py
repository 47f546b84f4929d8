"""Picture of timelines: one row per device, time from left to right, several on one axis.

    predicted   step 12.3 ms . bubble 24%
    device 0 . stage 0   [0][1][2]......[0][1][2] [update]
                                         ====      all-reduces of its gradients
    device 1 . stage 1      [0][1][2][0][1][2]
                                            ====
    measured    step 13.1 ms . bubble 29%
    ...
    |----|----|----|----|----|----|----|----|---- ms

The page's script draws such boxes on a canvas; there, boxes narrower than a pixel are joined, and
many messages are marks below the boxes instead of arrows.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.plans.plan import time_text
from anabranch.report import lanes
from anabranch.report.theme import (
    PIXELS,
    Drawing,
    escape,
    num,
    rect,
    shorten,
    significant,
    text,
    text_width,
    ticks,
)
from anabranch.report.timeline_layout import Panel, ShownTimeline, TimelineLayout, arrange
from anabranch.schedule.schedule import Kind
from anabranch.timeline import Span, Timeline

NUMBER_SIZES = 12.0, 10.0, 8.0

CSS = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.INPUT_GRADIENT: "b", Kind.WEIGHT_GRADIENT: "w"}
"""Kind of compute -> CSS class."""


def timeline_svg(shown: Sequence[ShownTimeline], *, is_endless: bool = False) -> str:
    """Draw timelines below each other on a common axis, as an SVG document.

    Args:
        shown: timelines from top to bottom, at least one.
        is_endless: the timelines show several mini-batches without a flush, not a step.
    """
    layout = arrange(shown, is_endless=is_endless)
    drawing = Drawing(layout.width, layout.height, title(layout))
    _paint_legend(drawing, layout)
    drawing.add(*_axis(layout))
    for panel in layout.panels:
        _paint_frame(drawing, layout, panel)
        drawing.add('<g class="panel">', *_empty_rows(layout, panel))
        if panel.has_arrows:
            drawing.add(*_arrows(layout, panel))
        sizes = _number_sizes(layout, panel)
        for row, top in zip(panel.rows, panel.tops, strict=True):
            for span in row.computes:
                drawing.add(*_box(layout, panel, row, span, top, sizes[span.action.kind]))
            foot = top + panel.row_height - panel.sum_height + 1
            for update in row.updates:
                drawing.add(_plain_box(layout, update, "update", top, panel.box_height))
            for piece in row.sums:
                drawing.add(_plain_box(layout, piece, "sum", foot, panel.sum_height - 1))
        drawing.add(_step_end(layout, panel), "</g>")
    return drawing.svg()


def title(layout: TimelineLayout) -> str:
    """Return the name of a picture, for screen readers."""
    titles = ", ".join(panel.title for panel in layout.panels)
    what = "some mini-batches" if layout.is_endless else "one training step"
    return f"Timeline of {what}: {titles}"


def legend(layout: TimelineLayout) -> list[tuple[str, str]]:
    """Return (CSS class, text) of what the boxes are; class ``wires`` for messages."""
    kinds = {s.action.kind for p in layout.panels for s in p.timeline.spans}
    entries = [("f", "forward"), ("b", "backward")]
    if Kind.WEIGHT_GRADIENT in kinds:
        entries = [("f", "forward"), ("b", "backward, input gradient"), ("w", "weight gradient")]
    entries.append(("lane", "waiting"))
    has_sums = any(panel.sum_height for panel in layout.panels)
    if has_sums:
        entries.append(("sum", "all-reduce"))
    if any(row.updates for panel in layout.panels for row in panel.rows):
        entries.append(("update", "update"))
    if any(_tail(layout, panel) for panel in layout.panels):
        entries.append(("tail", "after the last action" if has_sums else "all-reduce and update"))
    if any(not kind.is_compute for kind in kinds):
        entries.append(("wires", "messages between devices"))
    return entries


def legend_note(layout: TimelineLayout) -> str:
    """Return what the numbers are."""
    has_several = any(len(row.stages) > 1 for panel in layout.panels for row in panel.rows)
    paler = "paler: later stages of a device \u00b7 " if has_several else ""
    return f"numbers: {layout.counted}es \u00b7 {paler}bubble: share of time without compute"


def _paint_legend(drawing: Drawing, layout: TimelineLayout) -> None:
    x, y = PIXELS.margin, 22.0
    has_arrows = any(panel.has_arrows for panel in layout.panels)
    for css, label in legend(layout):
        if css == "wires" and not has_arrows:
            continue
        if css == "wires":
            drawing.add(f'<path class="wf" stroke-width="1.6" d="M{num(x)} {num(y + 3)}h16"/>')
            drawing.add(f'<path class="wb" stroke-width="1.6" d="M{num(x)} {num(y + 9)}h16"/>')
        else:
            drawing.add(rect(css, x, y, 16, 12, radius=2.5))
        drawing.add(text("", x + 22, y + 10, PIXELS.label, label))
        x += 36 + text_width(label, PIXELS.label)
    if x + text_width(legend_note(layout), PIXELS.label) < layout.right:
        note = legend_note(layout)
        drawing.add(text("muted right", layout.right, y + 10, PIXELS.label, note))


def _axis(layout: TimelineLayout) -> list[str]:
    pieces = [text("muted right", layout.left - 12, layout.axis + 18, 11, "time in ms")]
    for time in ticks(0.0, layout.horizon_s * 1e3, round((layout.right - layout.left) / 90)):
        x = layout.x(time / 1e3)
        lines = "".join(
            f"M{num(x)} {num(p.tops[0] - 4)}V{num(p.bottom + 4)}" for p in layout.panels
        )
        pieces.append(f'<path class="rule" d="{lines}"/>')
        pieces.append(text("muted num", x, layout.axis + 18, 11, significant(time)))
    return pieces


def _paint_frame(drawing: Drawing, layout: TimelineLayout, panel: Panel) -> None:
    """Draw the heading and the labels of the rows."""
    place = f'x="{num(PIXELS.margin)}" y="{num(panel.heading)}"'
    drawing.add(
        f'<text {place} font-size="14"><tspan class="bold">'
        f'{escape(panel.title)}</tspan><tspan class="muted" dx="14">'
        f"{facts(panel.timeline, layout.is_endless)}</tspan></text>"
    )
    every = 1 if panel.row_height >= 9 else 4
    for row, top in list(zip(panel.rows, panel.tops, strict=True))[::every]:
        drawing.add(*_row_label(layout, panel, row, top))


def facts(timeline: Timeline, is_endless: bool) -> str:
    """Return length and bubble of a timeline, for its heading."""
    taken = time_text(timeline.step_s)
    length = f"{taken} shown" if is_endless else f"step {taken}"
    return f"{length} \u00b7 bubble {timeline.bubble:.1%}"


def _empty_rows(layout: TimelineLayout, panel: Panel) -> list[str]:
    wide = layout.x(max(panel.timeline.step_s, panel.timeline.makespan_s)) - layout.left
    high = panel.row_height
    pieces = [rect("lane", layout.left, top, wide, high, radius=2) for top in panel.tops]
    if tail := _tail(layout, panel):
        x = layout.x(panel.timeline.makespan_s)
        pieces += [rect("tail", x, top, tail, high) for top in panel.tops]
    return pieces


def _step_end(layout: TimelineLayout, panel: Panel) -> str:
    x = layout.x(panel.timeline.step_s)
    path = f"M{num(x)} {num(panel.tops[0] - 5)}V{num(panel.bottom + 5)}"
    return f'<path class="end" stroke-width="1.5" stroke-dasharray="4 3" d="{path}"/>'


def _row_label(layout: TimelineLayout, panel: Panel, row: lanes.DeviceRow, top: float) -> list[str]:
    x, size, small = layout.left - 12, panel.label_size, PIXELS.second_label
    room, middle = x - PIXELS.margin, top + panel.row_height / 2
    label = shorten(row.label, size, room)
    if not (panel.has_second_lines and (second := panel.operators(row))):
        return [text("right", x, middle + size * 0.36, size, label)]
    return [
        text("right", x, middle - 2, size, label),
        text("muted right", x, middle + 12, small, shorten(second, small, room)),
    ]


def _tail(layout: TimelineLayout, panel: Panel) -> float:
    """Return the pixels from the last action to the end of the step, 0 if too few to see."""
    pixels = layout.x(panel.timeline.step_s) - layout.x(panel.timeline.makespan_s)
    return pixels if pixels >= 2 else 0.0


def _box(
    layout: TimelineLayout,
    panel: Panel,
    row: lanes.DeviceRow,
    span: Span,
    top: float,
    size: float,
) -> list[str]:
    """Draw an action as a box, with the number of its micro-batch if that fits."""
    x, width, gap = _extent(layout, span)
    css, tone = CSS[span.action.kind], row.tone(span.action.stage)
    shade = f"{css} p{tone}" if tone else css
    corner = 2.0 if width > 6 else 0.0
    pieces = [rect(shade, x, top, width - gap, panel.box_height, radius=corner)]
    label = str(span.action.microbatch)
    if size and text_width(label, size) + 3 <= width:
        baseline = top + panel.box_height / 2 + size * 0.36
        ink = "num" if tone else f"num t{css}"
        pieces.append(text(ink, x + (width - gap) / 2, baseline, size, label))
    return pieces


def _plain_box(
    layout: TimelineLayout, span: lanes.TimedSpan, css: str, top: float, height: float
) -> str:
    """Draw an update, or an all-reduce at the foot of a row."""
    x, width, gap = _extent(layout, span)
    return rect(css, x, top, width - gap, height)


def _extent(layout: TimelineLayout, span: lanes.TimedSpan) -> tuple[float, float, float]:
    """Return left end and width of a box, and the gap behind it, in pixels."""
    x = layout.x(span.start)
    width = max(layout.x(span.end) - x, 0.4)
    return x, width, 0.5 if width > 4 else 0.0


def _number_sizes(layout: TimelineLayout, panel: Panel) -> dict[Kind, float]:
    """Map kinds to the largest type size that fits into a typical box; 0 if none does."""
    result = {}
    for kind, (seconds, digits) in lanes.typical(panel.timeline).items():
        width = layout.x(seconds) - layout.x(0.0)
        fitting = [
            size
            for size in NUMBER_SIZES
            if size + 2 <= panel.box_height and text_width("0" * digits, size) + 3 <= width
        ]
        result[kind] = fitting[0] if fitting else 0.0
    return result


def _arrows(layout: TimelineLayout, panel: Panel) -> list[str]:
    """Draw a curve from row to row for every message, with a colour per direction."""
    top_of = {row.device: top for row, top in zip(panel.rows, panel.tops, strict=True)}
    pieces = []
    for message in lanes.messages(panel.timeline):
        a, b = top_of[message.sent.device], top_of[message.received.device]
        y1, y2 = (a + panel.row_height, b) if a < b else (a, b + panel.row_height)
        x1, x2 = layout.x(message.start), layout.x(message.end)
        css = "f" if message.is_forward else "b"
        tip = 4.5 if a < b else -4.5
        bend = (y2 - tip - y1) / 2
        curve = (
            f"M{num(x1)} {num(y1)}C{num(x1)} {num(y1 + bend)} {num(x2)} {num(y1 + bend)} "
            f"{num(x2)} {num(y2 - tip)}"
        )
        pieces.append(f'<path class="w{css}" stroke-width="1.3" d="{curve}"/>')
        pieces.append(f'<path class="h{css}" d="M{num(x2)} {num(y2)}l-2.6 {num(-tip)}h5.2z"/>')
    return pieces
