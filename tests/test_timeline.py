"""Figures of a timeline."""

from dataclasses import replace

import pytest

from anabranch.schedule.schedule import Action
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline


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


def test_sums_that_nothing_hides_are_a_part_of_the_bubble():
    """Device 0 sums from 7 to 9, half a second of it beside its backward and half beside an update;
    the second piece of device 1 begins in its first one. That is 1 + 3 of 30 s.
    """
    pieces = [(0, 7.0, 9.0), (1, 5.0, 7.0), (1, 6.0, 8.0)]
    sums = tuple(SumSpan(d, start, end, (0,), 8) for d, start, end in pieces)
    step = replace(TIMELINE, sums=sums, overheads=(OverheadSpan(0, 8.5, 9.5, "update"),))
    assert step.exposed_sums == pytest.approx(4 / 30)
    assert step.bubble == TIMELINE.bubble
    assert TIMELINE.exposed_sums == 0


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
