"""Data of the page's script: actions, messages and memory of the timelines.

The script draws them by the rules of ``gantt``, on a canvas, and finds what is under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from anabranch.plans.plan import memory_text, ranges
from anabranch.report import gantt, lanes, names, timeline_layout
from anabranch.schedule.schedule import Kind
from anabranch.timeline import OverheadSpan, Span, SumSpan

KINDS = [kind for kind in Kind if kind.is_compute]

VARIABLES = {"f": "forward", "b": "backward", "w": "weight"} | {
    name: name for name in ("lane", "sum", "update", "tail", "wires")
}
"""CSS class of a picture -> name of its colour."""


def as_json(value: Any) -> str:
    """Convert to JSON for a script element; it cannot end the element or start a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(layout: timeline_layout.TimelineLayout) -> dict[str, Any]:
    """Return the data of all timelines; times in microseconds."""
    kinds = [names.same_stages(panel.graph) for panel in layout.panels]
    graphs = [*dict.fromkeys(kinds)]
    return {
        "legend": [[VARIABLES[css], label] for css, label in gantt.legend(layout)],
        "note": gantt.legend_note(layout),
        "rowSizes": timeline_layout.ROW_SIZES,
        "counted": layout.counted,
        "isEndless": layout.is_endless,
        "horizon": _us(layout.horizon_s),
        "numberSizes": gantt.NUMBER_SIZES,
        "kinds": [[VARIABLES[gantt.CSS[kind]], names.KINDS[kind]] for kind in KINDS],
        "panels": [
            _panel(panel, layout.is_endless)
            | {"graph": graphs.index(names.same_stages(panel.graph))}
            for panel in layout.panels
        ],
    }


def _panel(panel: timeline_layout.Panel, is_endless: bool) -> dict[str, Any]:
    prefix = names.graph_prefix(panel.graph)
    typical = lanes.typical(panel.timeline)
    row_of = {row.device: i for i, row in enumerate(panel.rows)}
    messages = lanes.messages(panel.timeline)
    sends: list[list[Any]] = [[] for _ in panel.rows]
    for m in messages:
        if not panel.has_arrows:
            sends[row_of[m.sent.device]].append([*_times(m), int(m.is_forward)])
    return {
        "title": panel.title,
        "facts": gantt.facts(panel.timeline, is_endless),
        "sumHeight": panel.sum_height,
        "hasArrows": panel.has_arrows,
        "step": _us(panel.timeline.step_s),
        "makespan": _us(panel.timeline.makespan_s),
        # per kind: median duration, digits of the largest micro-batch
        "typical": [[_us(typical[k][0]), typical[k][1]] if k in typical else [0, 1] for k in KINDS],
        "devices": [row.device for row in panel.rows],
        "stages": [row.stages for row in panel.rows],
        "branches": [row.branch for row in panel.rows],
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
            for m in messages
            if panel.has_arrows
        ],
        # start, end, 1 for activations or 0 for gradients
        "sends": _once(sends),
        # start, bytes from then on
        "memory": _once(
            [[_us(t), nbytes] for t, nbytes in panel.timeline.memory.get(row.device, ())]
            for row in panel.rows
        ),
        "peaks": [panel.timeline.peak_bytes.get(row.device, 0) for row in panel.rows],
        # row, start, end
        "path": [[row_of[p.device], _us(p.start), _us(p.end)] for p in reversed(panel.path)],
    }


def _once(rows: Iterable[list[list[Any]]]) -> list[list[list[Any]] | int]:
    """Return rows, with the index of an earlier row in place of an equal one, as of replicas."""
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
