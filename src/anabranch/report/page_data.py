"""Data of the page's script: geometry of the picture of timelines, actions and messages.

The script redraws zoomed boxes by the rules of ``gantt`` and finds the action under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from anabranch.plans.plan import memory_text, ranges
from anabranch.report import gantt, lanes, names, timeline_layout
from anabranch.report.theme import PIXELS
from anabranch.schedule.schedule import Kind
from anabranch.timeline import OverheadSpan, Span, SumSpan

KINDS = [kind for kind in Kind if kind.is_compute]


def as_json(value: Any) -> str:
    """Convert to JSON for a script element; it cannot end the element or start a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(layout: timeline_layout.TimelineLayout) -> dict[str, Any]:
    """Return the data of all timelines; times in microseconds."""
    return {
        "left": layout.left,
        "right": layout.right,
        "axis": layout.axis,
        "counted": layout.counted,
        "isEndless": layout.is_endless,
        "horizon": _us(layout.horizon_s),
        "mergedPixels": PIXELS.merged,
        "mark": timeline_layout.STYLE.mark_height,
        "numberSizes": gantt.NUMBER_SIZES,
        "mostBoxes": gantt.MOST_BOXES,
        "kinds": [[gantt.CSS[kind], names.KINDS[kind]] for kind in KINDS],
        "panels": [_panel(panel) for panel in layout.panels],
    }


def _panel(panel: timeline_layout.Panel) -> dict[str, Any]:
    prefix = names.graph_prefix(panel.graph)
    typical = lanes.typical(panel.timeline)
    row_of = {row.device: i for i, row in enumerate(panel.rows)}
    return {
        "title": panel.title,
        "tops": [round(top, 2) for top in panel.tops],
        "bottom": round(panel.bottom, 2),
        "rowHeight": panel.row_height,
        "boxHeight": panel.box_height,
        "sumHeight": panel.sum_height,
        "hasArrows": panel.has_arrows,
        "step": _us(panel.timeline.step_s),
        "makespan": _us(panel.timeline.makespan_s),
        # per kind: median duration, digits of the largest micro-batch
        "typical": [[_us(typical[k][0]), typical[k][1]] if k in typical else [0, 1] for k in KINDS],
        "devices": [row.device for row in panel.rows],
        "operators": [names.operators(stage, prefix) for stage in panel.graph.stages],
        "microbatchSize": [stage.microbatch_size for stage in panel.graph.stages],
        "batchSize": panel.graph.batch_size,
        # start, end, kind, stage, micro-batch
        "rows": _once(
            [
                [*_times(s), KINDS.index(s.action.kind), s.action.stage, s.action.microbatch]
                for s in row.computes
            ]
            for row in panel.rows
        ),
        # start, end, bytes, stages
        "sums": _once(
            [[*_times(s), memory_text(s.nbytes), ranges(s.stages)] for s in row.sums]
            for row in panel.rows
        ),
        # start, end, kind
        "updates": _once(
            [[*_times(s), lanes.UPDATES[s.what]] for s in row.updates] for row in panel.rows
        ),
        # from row, to row, start, end, 1 for activations or 0 for gradients
        "messages": [
            [row_of[m.sent.device], row_of[m.received.device], *_times(m), int(m.is_forward)]
            for m in lanes.messages(panel.timeline)
        ],
    }


def _once(rows: Iterable[list[list[Any]]]) -> list[list[list[Any]] | int]:
    """Rows, or the index of an equal one before it: replicas of a stage are alike."""
    first: dict[str, int] = {}
    result: list[list[list[Any]] | int] = []
    for i, row in enumerate(rows):
        same = first.setdefault(str(row), i)
        result.append(row if same == i or not row else same)
    return result


def _times(span: Span | SumSpan | OverheadSpan | lanes.DrawnMessage) -> list[float]:
    return [_us(span.start), _us(span.end)]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
