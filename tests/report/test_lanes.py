"""Rows, boxes and messages of a timeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.lanes import medians, messages, rows, runs, shares, typical
from anabranch.report.theme import PIXELS
from anabranch.schedule.schedule import Kind
from anabranch.timeline import Timeline
from tests.report.examples import STEP, TWO_TOWERS, timeline
from tests.strategies import stage_graphs, timelines


def boxes_of(text, pixel_ms):
    """Boxes of device 0, each as the actions in it."""
    spans = rows(timeline(text), TWO_TOWERS)[0].computes
    return [" ".join(str(s.action) for s in run) for run in runs(spans, pixel_ms / 1e3)]


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


def test_narrow_neighbours_share_a_box():
    """Less than a pixel wide each, less than a pixel apart; the wide one in between parts them."""
    text = "0: 0F0 0-0.2 | 0B0 0.2-0.4 | 0F1 0.9-2.9 | 0F2 3-3.2 | 0F3 3.4-3.5 | 0F4 5-5.1"
    assert boxes_of(text, 1) == ["0F0 0B0", "0F1", "0F2 0F3", "0F4"]


def test_a_shared_box_stays_small():
    """Else a bubble of some pixels could hide in it."""
    text = "0: " + " | ".join(f"0F{i} {i * 0.5}-{i * 0.5 + 0.4}" for i in range(12))
    assert boxes_of(text, 1) == ["0F0 0F1 0F2 0F3 0F4 0F5", "0F6 0F7 0F8 0F9 0F10 0F11"]


def test_shares_of_a_box_are_shares_of_its_compute():
    """Forward for 0.1 ms, backward for 0.3 ms: a quarter and three quarters, forward on top."""
    spans = rows(timeline("0: 0B0 0-0.3 | 0F0 0.3-0.4"), TWO_TOWERS)[0].computes
    (run,) = runs(spans, 1e-3)
    assert list(shares(run).items()) == [
        (Kind.FORWARD, pytest.approx(0.25)),
        (Kind.BACKWARD, pytest.approx(0.75)),
    ]


@given(st.data(), stage_graphs())
def test_every_action_is_in_exactly_one_box(data, graph):
    """In order, whatever a pixel is; and no box with several is wider than allowed."""
    step = data.draw(timelines(graph))
    pixel = data.draw(st.sampled_from([1e-7, 1e-3, 0.1, 10.0]))
    for row in rows(step, graph):
        found = list(runs(row.computes, pixel))
        assert [span for run in found for span in run] == row.computes
        widths = [max(span.end for span in run) - run[0].start for run in found if len(run) > 1]
        assert all(width < PIXELS.merged * pixel for width in widths)
        assert all(sum(shares(run).values()) == pytest.approx(1) for run in found)


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
