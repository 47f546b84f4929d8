"""Memory over the step and curves over training."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.charts import curve_chart, memory_chart, thin
from tests.report.examples import STEP, of_class, parse, texts, timeline

PREDICTED = timeline(STEP)


def test_every_device_has_a_row_and_its_peak():
    """Three devices of 3 MiB each at most."""
    chart = memory_chart([("predicted", PREDICTED)])
    root = parse(chart.svg())
    written = texts(root)
    assert [w for w in written if w.startswith("device")] == ["device 0", "device 1", "device 2"]
    assert written.count("peak 3.0 MiB") == 3
    assert len(of_class(root, "path", "area")) == 3


def test_the_second_timeline_is_a_line_over_the_first():
    """Predicted and measured in one row."""
    measured = replace(PREDICTED, memory={0: ((0.0, 2**20),)})
    chart = memory_chart([("predicted", PREDICTED), ("measured", measured)])
    root = parse(chart.svg())
    assert len(of_class(root, "path", "line1")) == 1
    assert "peak 3.0 MiB \u00b7 1.0 MiB" in texts(root)


def test_without_memory_there_is_no_chart():
    """Measured runs on a CPU may not know it."""
    assert memory_chart([("measured", replace(PREDICTED, memory={}))]) is None


def test_a_staircase_of_the_memory():
    """1 MiB, 3 MiB from 1 ms, 1 MiB from 6 ms: up once, down once, closed at the bottom."""
    chart = memory_chart([("predicted", PREDICTED)])
    path = of_class(parse(chart.svg()), "path", "area")[0].get("d", "")
    assert re.fullmatch(r"M\S+ \S+H\S+V\S+H\S+V\S+H\S+V\S+H\S+Z", path)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 99)), max_size=60))
def test_thinning_keeps_peaks_and_ends(steps):
    """The highest level of every pixel and the one that lasts beyond it; at most two a pixel."""
    steps.sort(key=lambda step: step[0])
    kept = thin(steps)
    assert len(kept) <= 2 * len({math.floor(x) for x, _ in steps})
    for pixel in {math.floor(x) for x, _ in steps}:
        before = [level for x, level in steps if math.floor(x) == pixel]
        after = [level for x, level in kept if math.floor(x) == pixel]
        assert max(after) == max(before)
        assert after[-1] == before[-1]


def points(path):
    """Coordinates in a path of M and L."""
    return [tuple(map(float, p.split())) for p in re.findall(r"[ML](\S+ [^MLh]+)", path)]


def test_a_falling_loss_falls_on_the_chart():
    """Left to right, top to bottom."""
    root = parse(curve_chart("loss", [3.0, 2.0, 1.0]).svg())
    (path,) = of_class(root, "path", "line0")
    (x0, y0), (x1, y1), (x2, y2) = points(path.get("d", ""))
    assert x0 < x1 < x2
    assert y0 < y1 < y2
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.02)


def test_a_loss_that_is_not_finite_leaves_a_gap():
    """Two pieces: before and after."""
    root = parse(curve_chart("loss", [3.0, 2.0, math.nan, 1.0, 0.5]).svg())
    (path,) = of_class(root, "path", "line0")
    assert path.get("d", "").count("M") == 2
    assert "nan" not in path.get("d", "")


def test_many_steps_get_a_running_mean():
    """Of a constant, the constant; the values themselves stay in the background."""
    root = parse(curve_chart("loss", [1.0] * 100).svg())
    raw, mean = of_class(root, "path", "line0")
    assert "faint" in raw.get("class", "")
    assert {y for _, y in points(mean.get("d", ""))} == {y for _, y in points(raw.get("d", ""))}


def test_the_curve_of_a_resumed_run_begins_behind_the_steps_before():
    """The axis has the numbers of the steps; the curve itself lies where it would."""
    root = parse(curve_chart("loss", [3.0, 2.0, 1.0] * 20, before=60).svg())
    numbers = [int(t.text or "") for t in of_class(root, "text", "num")]
    assert numbers == [61, 65, 70, 75, 80, 85, 90, 95, 100, 105, 110, 115, 120]
    (path,) = of_class(root, "path", "line0")
    (other,) = of_class(parse(curve_chart("loss", [3.0, 2.0, 1.0] * 20).svg()), "path", "line0")
    assert path.get("d") == other.get("d")


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=80))
def test_any_values_give_a_chart(values):
    """Also none, one, and nothing finite."""
    svg = curve_chart("accuracy", values).svg()
    parse(svg)
    assert "nan" not in svg.replace("accuracy", "")
    assert "inf" not in svg
