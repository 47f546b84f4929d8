"""The picture of timelines."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.gantt import timeline_svg
from anabranch.report.timeline_layout import ShownTimeline, arrange
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline
from tests.report.examples import STEP, TWO_TOWERS, chain, of_class, parse, texts, timeline
from tests.strategies import stage_graphs, timelines

PREDICTED = timeline(STEP)
SHOWN = [ShownTimeline("predicted", PREDICTED, TWO_TOWERS)]


def boxes(root, *css):
    """The boxes of such classes, the legend's left out."""
    panels = [g for g in root.iter() if g.get("class") == "panel"]
    return [box for panel in panels for box in of_class(panel, "rect", *css)]


def boxes_in(root, css):
    """(left, width) of the boxes of one class."""
    return [(float(b.get("x", "")), float(b.get("width", ""))) for b in boxes(root, css)]


def test_every_action_is_a_box_of_its_kind():
    """Six forwards and six backwards."""
    root = parse(timeline_svg(SHOWN))
    assert len(boxes_in(root, "f")) == 6
    assert len(boxes_in(root, "b")) == 6


def test_boxes_are_where_their_time_is():
    """0B0 lasts from 4 to 5 ms of the 8.5 ms that the picture is wide."""
    layout = arrange(SHOWN)
    root = parse(timeline_svg(SHOWN))
    left, width = boxes_in(root, "b")[0]
    assert left == pytest.approx(layout.left + (layout.right - layout.left) * 4 / 8.5, abs=0.01)
    assert width + 0.5 == pytest.approx((layout.right - layout.left) / 8.5, abs=0.01)


def test_rows_name_device_stage_and_operators():
    """A reader should see which tower runs where."""
    written = texts(parse(timeline_svg(SHOWN)))
    assert "device 0 \u00b7 stage 0" in written
    assert "text.0, text.1" in written
    assert "device 1 \u00b7 stage 1" in written
    assert "image.0" in written


def test_headings_give_step_and_bubble():
    """12.9 of 25.5 ms of device time are compute."""
    written = texts(parse(timeline_svg([ShownTimeline("both towers", PREDICTED, TWO_TOWERS)])))
    assert "both towersstep 8.50 ms \u00b7 bubble 49.4%" in written


def test_micro_batches_are_numbered():
    """0 and 1, forward and backward, on three devices."""
    root = parse(timeline_svg(SHOWN))
    numbers = ["".join(e.itertext()) for e in of_class(root, "text", "tf", "tb")]
    assert sorted(numbers) == ["0"] * 6 + ["1"] * 6


def test_numbers_are_left_out_where_they_do_not_fit():
    """A thousand micro-batches on 1,000 pixels: boxes, but no numbers."""
    spans = tuple(Span(0, i * 1e-3, (i + 1) * 1e-3, Action(0, Kind.FORWARD, i)) for i in range(900))
    step = Timeline(spans, (0,), "predicted", 0.9, {})
    root = parse(timeline_svg([ShownTimeline("predicted", step, chain(1))]))
    assert len(boxes(root, "f")) == 900
    assert of_class(root, "text", "tf") == []


def test_timelines_share_one_axis():
    """The same action of a step twice as long is twice as wide."""
    slow = replace(
        PREDICTED,
        step_s=17e-3,
        spans=tuple(replace(s, start=2 * s.start, end=2 * s.end) for s in PREDICTED.spans),
    )
    root = parse(timeline_svg([*SHOWN, ShownTimeline("slow", slow, TWO_TOWERS)]))
    found = boxes_in(root, "f")
    assert found[6][1] + 0.5 == pytest.approx(2 * (found[0][1] + 0.5), abs=0.02)


def test_messages_are_arrows_between_few_devices():
    """One forward and one backward, each a curve and a tip."""
    root = parse(timeline_svg(SHOWN))
    panel = next(g for g in root.iter() if g.get("class") == "panel")
    for css in ("wf", "wb", "hf", "hb"):
        assert len(of_class(panel, "path", css)) == 1


def test_messages_between_many_devices_are_left_out():
    """On 20 devices arrows would hide the boxes."""
    graph = chain(20)
    step = timeline("0: 0F0 0-1 | 0SF0>1@1[0:1] 1-2\n1: 1RF0<0@0[0:1] 1-2 | 1F0 2-3")
    step = replace(step, devices=graph.devices)
    root = parse(timeline_svg([ShownTimeline("predicted", step, graph)]))
    assert of_class(root, "path", "wf") == []
    assert "messages between devices" not in texts(root)


def test_what_follows_the_last_action_is_shown():
    """All-reduce and update take the last half millisecond, on all three devices."""
    root = parse(timeline_svg(SHOWN))
    assert len(of_class(root, "rect", "tail")) == 3 + 1  # and the legend
    whole = replace(PREDICTED, step_s=PREDICTED.makespan_s)
    root = parse(timeline_svg([ShownTimeline("predicted", whole, TWO_TOWERS)]))
    assert of_class(root, "rect", "tail") == []


SUMS = tuple(SumSpan(d, at / 1e3, (at + 0.5) / 1e3, (0,), 100) for d in (0, 1) for at in (7, 7.5))
"""Two pieces on devices 0 and 1, from 7 ms to the end of 7B1."""


def test_all_reduces_have_a_strip_of_their_row():
    """Below the boxes, as long as the sums; the row is that much higher, and nothing else is."""
    step = replace(PREDICTED, sums=SUMS)
    shown = [ShownTimeline("predicted", step, TWO_TOWERS)]
    layout, plain = arrange(shown), arrange(SHOWN)
    root = parse(timeline_svg(shown))
    strips = boxes(root, "sum")
    pixels = (layout.right - layout.left) * 0.5 / 8.5
    assert [float(b.get("width", "")) for b in strips] == [
        pytest.approx(pixels - 0.5, abs=0.01)
    ] * 4
    panel = layout.panels[0]
    assert panel.box_height == plain.panels[0].box_height
    for box, top in zip(strips, (panel.tops[0],) * 2 + (panel.tops[1],) * 2, strict=True):
        y, height = float(box.get("y", "")), float(box.get("height", ""))
        assert top + panel.box_height < y < y + height == top + panel.row_height


def test_the_legend_names_all_reduces_where_they_are_drawn():
    """What is left after the last action is then more than they."""
    for sums, said in ((SUMS, {"all-reduce", "after the last action"}), ((), set())):
        step = replace(PREDICTED, sums=sums)
        written = set(texts(parse(timeline_svg([ShownTimeline("predicted", step, TWO_TOWERS)]))))
        assert written & {"all-reduce", "after the last action"} == said
        assert ("all-reduce and update" in written) == (not sums)


UPDATES = tuple(OverheadSpan(d, 8e-3, 8.5e-3, "update") for d in (0, 1))


def test_updates_are_boxes_behind_the_actions():
    """As long as they take, in the row and the legend; bookkeeping is not drawn."""
    step = replace(PREDICTED, overheads=(*UPDATES, OverheadSpan(0, 0.0, 1e-3, "bookkeeping")))
    layout = arrange([ShownTimeline("predicted", step, TWO_TOWERS)])
    root = parse(timeline_svg([ShownTimeline("predicted", step, TWO_TOWERS)]))
    drawn = boxes(root, "update")
    pixels = (layout.right - layout.left) * 0.5 / 8.5
    assert [float(b.get("width", "")) for b in drawn] == [pytest.approx(pixels - 0.5, abs=0.01)] * 2
    assert [float(b.get("y", "")) for b in drawn] == list(layout.panels[0].tops[:2])
    assert "update" in texts(root)
    plain = parse(timeline_svg(SHOWN))
    assert not of_class(plain, "rect", "update")


def test_kinds_of_a_split_backward_are_told_apart():
    """The legend changes with them."""
    step = timeline("0: 0F0 0-1 | 0I0 1-2 | 0W0 2-3")
    root = parse(timeline_svg([ShownTimeline("zero bubble", step, chain(1))]))
    assert len(boxes_in(root, "w")) == 1
    assert "weight gradient" in texts(root)


def test_several_stages_on_one_device_share_its_row():
    """Interleaving."""
    step = timeline("0: 0F0 0-1 | 2F0 1-2\n1: 1F0 0-1")
    written = texts(parse(timeline_svg([ShownTimeline("interleaved", step, chain(3))])))
    assert "device 0 \u00b7 stages 0,2" in written


def test_stages_of_one_device_are_told_apart():
    """The second stage is paler, and the note says so."""
    step = timeline("0: 0F0 0-1 | 2F0 1-2\n1: 1F0 0-1")
    svg = timeline_svg([ShownTimeline("interleaved", step, chain(3))])
    assert [b.get("class") for b in boxes(parse(svg), "f")] == ["f", "f p1", "f"]
    assert "paler: later stages of a device" in svg
    assert "paler" not in timeline_svg(SHOWN)


def test_two_plans_can_be_compared():
    """Every timeline with its own stage graph."""
    step = timeline("0: 0F0 0-1 | 0B0 1-3", step_ms=3)
    written = texts(parse(timeline_svg([*SHOWN, ShownTimeline("one", step, chain(1))])))
    assert {"text.0, text.1", "op0"} <= set(written)


def test_a_step_in_which_nothing_happened():
    """A recording may be empty; the rows are still there."""
    nothing = Timeline((), (0, 1, 2), "measured", 0.0, {})
    root = parse(timeline_svg([ShownTimeline("measured", nothing, TWO_TOWERS)]))
    assert "device 2 \u00b7 stage 2" in texts(root)


@given(st.data(), stage_graphs())
def test_any_step_is_drawn_in_full_and_in_the_picture(data, graph):
    """No action is lost, nothing sticks out, and the picture is the same each time."""
    step = data.draw(timelines(graph))
    svg = timeline_svg([ShownTimeline("step", step, graph)])
    root = parse(svg)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert len(boxes(root, "f", "b", "w")) == len(step.spans)
    assert len(boxes(root, "sum")) == len(step.sums)
    for box in of_class(root, "rect", "f", "b", "w", "lane", "tail", "sum"):
        x, y = float(box.get("x", "")), float(box.get("y", ""))
        assert 0 <= x <= x + float(box.get("width", "")) <= width
        assert 0 <= y <= y + float(box.get("height", "")) <= height
    assert svg == timeline_svg([ShownTimeline("step", step, graph)])


def test_names_are_escaped():
    """Of operators and headings."""
    graph = StageGraph((Stage(("<script>&", "]]>"), (0,), 1),), (), 1)
    step = timeline("0: 0F0 0-1")
    written = texts(parse(timeline_svg([ShownTimeline('</text>"', step, graph)])))
    assert "<script>&, ]]>" in written
    assert any(line.startswith('</text>"') for line in written)


@pytest.mark.parametrize("devices", [1, 8, 16, 32, 64, 128, 256])
def test_rows_never_overlap(devices):
    """However many there are."""
    graph = chain(devices)
    sums = (SumSpan(0, 0.0, 1.0, (0,), 1),)
    for known in ((), sums):
        step = Timeline((), graph.devices, "predicted", 1.0, {}, known)
        panel = arrange([ShownTimeline("step", step, graph)]).panels[0]
        assert all(b - a >= panel.row_height + 1 for a, b in pairwise(panel.tops))
        assert panel.box_height >= 3
