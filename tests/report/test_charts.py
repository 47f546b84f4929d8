"""Memory over the step and curves over training."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.charts import loss_chart
from tests.report.examples import of_class, parse


def points(path):
    """Coordinates in a path of M and L."""
    return [tuple(map(float, p.split())) for p in re.findall(r"[ML](\S+ [^MLh]+)", path)]


def test_a_falling_loss_falls_on_the_chart():
    """Left to right, top to bottom."""
    root = parse(loss_chart([3.0, 2.0, 1.0]).svg())
    (path,) = of_class(root, "path", "line0")
    (x0, y0), (x1, y1), (x2, y2) = points(path.get("d", ""))
    assert x0 < x1 < x2
    assert y0 < y1 < y2
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.02)


def test_a_loss_that_is_not_finite_leaves_a_gap():
    """Two pieces: before and after."""
    root = parse(loss_chart([3.0, 2.0, math.nan, 1.0, 0.5]).svg())
    (path,) = of_class(root, "path", "line0")
    assert path.get("d", "").count("M") == 2
    assert "nan" not in path.get("d", "")


def test_many_steps_get_a_running_mean():
    """Of a constant, the constant; the values themselves stay in the background."""
    root = parse(loss_chart([1.0] * 100).svg())
    raw, mean = of_class(root, "path", "line0")
    assert "faint" in raw.get("class", "")
    assert {y for _, y in points(mean.get("d", ""))} == {y for _, y in points(raw.get("d", ""))}


def test_the_curve_of_a_resumed_run_begins_behind_the_steps_before():
    """The axis has the numbers of the steps; the curve itself lies where it would."""
    root = parse(loss_chart([3.0, 2.0, 1.0] * 20, before=60).svg())
    numbers = [int(t.text or "") for t in of_class(root, "text", "num")]
    assert numbers == [61, 65, 70, 75, 80, 85, 90, 95, 100, 105, 110, 115, 120]
    unit = next(t for t in of_class(root, "text", "right") if t.text == "step")
    first = of_class(root, "text", "num")[0]
    # The unit ends before the first number, which is centred on its step.
    assert float(first.get("x", "")) - float(unit.get("x", "")) >= 12
    (path,) = of_class(root, "path", "line0")
    (other,) = of_class(parse(loss_chart([3.0, 2.0, 1.0] * 20).svg()), "path", "line0")
    assert path.get("d") == other.get("d")


def test_losses_of_held_out_data_lie_at_their_steps():
    """On the axes of the training losses, which make room for them; a lone one is a dot."""
    values, held_out = [3.0, 2.0, 1.0, 0.5], {62: 4.0, 64: 6.0}
    root = parse(loss_chart(values, before=60, held_out=held_out).svg())
    (path,) = of_class(root, "path", "line0")
    (evaluated,) = of_class(root, "path", "line2")
    steps, (first, last) = points(path.get("d", "")), points(evaluated.get("d", ""))
    assert [first[0], last[0]] == [steps[1][0], steps[3][0]]
    assert last[1] < first[1] < steps[0][1]
    (dot,) = of_class(parse(loss_chart(values, held_out={4: 1.0}).svg()), "path", "line2")
    assert dot.get("d", "").endswith("h.01")


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=80))
def test_any_values_give_a_chart(values):
    """Also none, one, and nothing finite."""
    svg = loss_chart(values).svg()
    parse(svg)
    assert "nan" not in svg.replace("accuracy", "")
    assert "inf" not in svg
