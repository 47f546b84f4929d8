"""A timeline in Google's "Trace Event Format", for chrome://tracing and ui.perfetto.dev.

A process per device, with threads for compute, for all-reduces and for messages (as many as
overlap), an arrow per message, a counter for memory. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from anabranch.plans.stages import StageGraph
from anabranch.report import lanes, names
from anabranch.schedule.schedule import Action
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline

TraceEvent = dict[str, Any]


COMPUTE, ALL_REDUCE, MESSAGES = 1, 2, 3
"""Number of the first thread of each kind of event in the process of a device; computes and
all-reduces that overlap get further threads, 1000 apart.
"""
_THREADS = {COMPUTE: "compute", ALL_REDUCE: "all-reduce"}

_Timed = TypeVar("_Timed", Span, SumSpan)


def trace(timeline: Timeline, graph: StageGraph) -> dict[str, Any]:
    """Convert a timeline to a trace for ``json.dump``; the stage graph gives the names."""
    events: list[TraceEvent] = []
    placed: list[tuple[Span, int]] = []
    for order, row in enumerate(lanes.rows(timeline, graph)):
        here = [(span, COMPUTE + 1000 * n) for span, n in _without_overlap(row.computes)]
        here += [(span, MESSAGES + n) for span, n in _without_overlap(row.messages)]
        summing = [(span, ALL_REDUCE + 1000 * n) for span, n in _without_overlap(row.sums)]
        threads = {COMPUTE, *(t for _, t in here), *(t for _, t in summing)}
        events += _metadata(row, order, sorted(threads))
        for span, thread in summing:
            facts = {"stages": list(span.stages), "bytes": span.nbytes}
            events.append(_complete(span, thread, "all-reduce", "all-reduce", facts))
        for update in row.updates:
            name = lanes.UPDATES[update.what]
            events.append(_complete(update, COMPUTE, name, "update", {}))
        placed += here
    events += [_slice(span, thread, graph) for span, thread in placed]
    events += _flows(timeline, dict(placed))
    events += [
        {"ph": "C", "pid": device, "name": "memory", "ts": t * 1e6, "args": {"bytes": nbytes}}
        for device, samples in sorted(timeline.memory.items())
        for t, nbytes in samples
    ]
    about = {"source": timeline.source, "step_s": timeline.step_s, "bubble": timeline.bubble}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _without_overlap(spans: Iterable[_Timed]) -> list[tuple[_Timed, int]]:
    """Pair each span with the first lane that is free at its start."""
    free_at: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lane = next((i for i, t in enumerate(free_at) if t <= span.start), len(free_at))
        free_at[lane : lane + 1] = [span.end]
        placed.append((span, lane))
    return placed


def _metadata(row: lanes.DeviceRow, order: int, threads: Iterable[int]) -> list[TraceEvent]:
    events = [
        _about(row.device, 0, "process_name", name=row.label),
        _about(row.device, 0, "process_sort_index", sort_index=order),
    ]
    for thread in threads:
        kind = _THREADS.get(thread % 1000, "messages")
        events.append(_about(row.device, thread, "thread_name", name=kind))
        events.append(_about(row.device, thread, "thread_sort_index", sort_index=thread))
    return events


def _about(device: int, thread: int, what: str, **args: object) -> TraceEvent:
    return {"ph": "M", "pid": device, "tid": thread, "name": what, "args": args}


def _slice(span: Span, thread: int, graph: StageGraph) -> TraceEvent:
    action = span.action
    # Viewers colour by the name without its numbers, so that all forwards look alike.
    name = f"{names.KINDS[action.kind]} {action.microbatch}"
    category = "compute" if action.kind.is_compute else "message"
    return _complete(span, thread, name, category, _details(action, graph))


def _complete(
    span: Span | SumSpan | OverheadSpan,
    thread: int,
    name: str,
    category: str,
    details: Mapping[str, Any],
) -> TraceEvent:
    return {
        "ph": "X",
        "pid": span.device,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": span.start * 1e6,
        "dur": max(span.end - span.start, 0.0) * 1e6,
        "args": details,
    }


def _details(action: Action, graph: StageGraph) -> dict[str, Any]:
    details: dict[str, Any] = {"action": str(action)}
    details |= {"stage": action.stage, "microbatch": action.microbatch}
    if not action.kind.is_compute:
        peer = {"peer_stage": action.peer_stage, "peer_device": action.peer}
        return details | peer | {"samples": [action.start, action.stop]}
    if action.stage < len(graph):
        details["samples"] = list(graph.interval(action.stage, action.microbatch))
        details["operators"] = names.operators(graph.stages[action.stage], "")
    return details


def _flows(timeline: Timeline, threads: Mapping[Span, int]) -> list[TraceEvent]:
    events = []
    for number, message in enumerate(lanes.messages(timeline)):
        sent, received = message.sent, message.received
        name = "activations" if message.is_forward else "gradients"
        common = {"cat": "message", "name": name, "id": number}
        # A receive may have been posted before the send began; an arrow must not run backwards.
        arrival = max(sent.start, received.start)
        start = {"ph": "s", "pid": sent.device, "tid": threads[sent], "ts": sent.start * 1e6}
        end = {"ph": "f", "bp": "e", "pid": received.device, "tid": threads[received]}
        events += [common | start, common | end | {"ts": arrival * 1e6}]
    return events
