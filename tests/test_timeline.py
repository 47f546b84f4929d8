"""Figures of a timeline."""

import pytest

from anabranch.schedule.schedule import Action
from anabranch.timeline import OverheadSpan, Span, Timeline


def span(device: int, start: float, end: float, action: str) -> Span:
    """One action."""
    return Span(device, start, end, Action.parse(action))


TIMELINE = Timeline(
    spans=(
        span(0, 0.0, 1.0, "0F0"),
        span(0, 1.0, 1.5, "0SF0>1@1[0:2]"),
        span(0, 5.5, 7.5, "0B0"),
        span(1, 1.0, 1.5, "1RF0<0@0[0:2]"),
        span(1, 1.5, 5.0, "1F0"),
    ),
    devices=(0, 1, 2),
    source="predicted",
    step_s=10.0,
    memory={0: ((0.0, 100), (0.5, 300), (7.5, 100)), 1: ((0.0, 50),)},
)
"""Device 0 computes 3 s of 10, device 1 3.5 s, device 2 nothing."""


def test_busy_time_is_compute_only():
    """Messages overlap compute."""
    assert TIMELINE.busy_s == {0: 3.0, 1: 3.5, 2: 0.0}


def test_the_bubble_counts_the_whole_step():
    """Also the all-reduce after the last action."""
    assert TIMELINE.makespan_s == 7.5
    assert TIMELINE.bubble == pytest.approx(1 - 6.5 / 30)
    assert TIMELINE.device_bubble == pytest.approx({0: 0.7, 1: 0.65, 2: 1.0})


def test_peak_memory():
    """A device without a curve uses nothing."""
    assert TIMELINE.peak_bytes == {0: 300, 1: 50, 2: 0}


def test_an_empty_timeline_has_no_bubble():
    """Nothing is divided by zero."""
    empty = Timeline((), (0,), "measured", 0.0, {})
    assert (empty.bubble, empty.makespan_s, empty.device_bubble) == (0.0, 0.0, {0: 0.0})


def test_summary():
    """The step, then a line per device."""
    lines = TIMELINE.summary().splitlines()
    assert lines[0] == (
        "predicted step 1e+04 ms on 3 devices, 7500 ms of it until the last action, bubble 78.3%"
    )
    assert lines[1] == "  device   0  computes     3000 ms  bubble  70.0%  peak 0.000 GiB"
    assert len(lines) == 4


def test_parts_add_up_to_the_step():
    """Of 10 s the mean of two devices computes 2, updates 1, and waits for the rest."""
    timeline = Timeline(
        spans=(Span(0, 0.0, 4.0, Action.parse("0F0")),),
        devices=(0, 1),
        source="predicted",
        step_s=10.0,
        memory={},
        overheads=(OverheadSpan(0, 4.0, 5.0, "update"), OverheadSpan(1, 4.0, 5.0, "update")),
    )
    assert timeline.parts == {"compute": 2.0, "update": 1.0, "wait": 7.0}
