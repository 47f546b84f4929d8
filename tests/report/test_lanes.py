"""Rows, boxes and messages of a timeline."""

import pytest

from anabranch.report.lanes import medians, messages, rows, typical
from anabranch.schedule.schedule import Kind
from anabranch.timeline import Timeline
from tests.report.examples import STEP, TWO_TOWERS, timeline


def test_rows_know_their_stages_and_branches():
    """Every device of the two towers has one stage and is a branch of its own."""
    found = rows(timeline(STEP), TWO_TOWERS)
    assert [(r.device, r.stages, r.branch) for r in found] == [
        (0, (0,), 0),
        (1, (1,), 1),
        (2, (2,), 2),
    ]


def test_a_device_that_did_nothing_has_a_row_too():
    """Waiting all the time is worth seeing."""
    idle = Timeline((), (0, 1, 2, 7), "measured", 1e-3, {})
    assert [(r.device, r.stages) for r in rows(idle, TWO_TOWERS)] == [
        (0, (0,)),
        (1, (1,)),
        (2, (2,)),
        (7, ()),
    ]


def test_messages_are_matched_by_both_ends():
    """One of activations from 0 to 2, one of gradients back."""
    found = messages(timeline(STEP))
    assert [(m.sent.device, m.received.device, m.is_forward) for m in found] == [
        (0, 2, True),
        (2, 0, False),
    ]


def test_a_message_without_a_receive_is_none():
    """A recording may have been cut off."""
    assert messages(timeline("0: 0SF0>2@2[0:2] 1-1.1")) == []


def test_equal_messages_are_matched_in_order():
    """Several tensors may cross the same stage edge for the same samples."""
    text = "0: 0SF0>1@1[0:2] 1-2 | 0SF0>1@1[0:2] 2-3\n1: 1RF0<0@0[0:2] 1-2 | 1RF0<0@0[0:2] 2-3"
    assert [(m.start, m.end) for m in messages(timeline(text))] == [(1e-3, 2e-3), (2e-3, 3e-3)]


def test_a_message_never_arrives_before_it_left():
    """Clocks of two processes differ by a little."""
    text = "0: 0SF0>1@1[0:2] 1-2\n1: 1RF0<0@0[0:2] 0.5-0.9"
    (message,) = messages(timeline(text))
    assert message.start == message.end == 1e-3


def test_medians_are_per_stage_and_kind():
    """Of 1, 2 and 9 ms the second; the other stage has its own."""
    found = medians(timeline("0: 0F0 0-1 | 0F1 1-3 | 0F2 3-12\n1: 1B0 0-4"))
    assert found == {
        (0, Kind.FORWARD): pytest.approx(2e-3),
        (1, Kind.BACKWARD): pytest.approx(4e-3),
    }


def test_a_typical_box_has_the_median_width_and_the_longest_number():
    """This is what decides how large the numbers in the boxes are."""
    found = typical(timeline("0: 0F8 0-1 | 0F9 1-3 | 0F10 3-12"))
    assert found == {Kind.FORWARD: (pytest.approx(2e-3), 2)}
