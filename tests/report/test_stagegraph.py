"""The picture of a stage graph."""

import pytest
from hypothesis import given

from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.stagegraph import draw
from tests.report.examples import TWO_TOWERS, chain, of_class, parse, plan, texts
from tests.strategies import plans


def test_a_box_says_everything_about_its_stage():
    """Number, devices, operators, micro-batch, in flight."""
    written = texts(parse(draw(plan().stage_graph).svg()))
    assert written[:5] == [
        "stage 0",
        "device 0",
        "text.0",
        "text.1",
        "2 operators \u00b7 micro-batch 2",
    ]
    assert written[5] == "2 in flight"
    assert "1 operator \u00b7 micro-batch 2" in written


def test_rare_settings_are_shown_where_they_are_set():
    """Recomputation and groups of micro-batches."""
    stage = Stage(("a",), (0, 1), 4, k=2, in_flight=3, recompute=True)
    written = texts(parse(draw(StageGraph((stage,), (), 8)).svg()))
    assert "3 in flight \u00b7 k 2 \u00b7 recompute" in written
    assert "devices 0-1" in written


def test_every_stage_has_a_box_and_every_edge_an_arrow():
    """Also where one edge passes three layers."""
    graph = StageGraph(chain(5).stages, ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4)), 4)
    root = parse(draw(graph).svg())
    assert len(of_class(root, "rect", "card")) == 5
    assert len(of_class(root, "path", "edge")) == len(of_class(root, "path", "tip")) == 5


def test_towers_stand_side_by_side_and_the_join_to_their_right():
    """Same column, different rows; the join in the next column."""
    root = parse(draw(TWO_TOWERS).svg())
    places = [
        (float(r.get("x", "")), float(r.get("y", ""))) for r in of_class(root, "rect", "card")
    ]
    (x0, y0), (x1, y1), (x2, _) = places
    assert x0 == x1 < x2
    assert abs(y0 - y1) > 98


@pytest.mark.parametrize("stages", [1, 16, 64])
def test_long_pipelines_can_be_drawn(stages):
    """One box per stage up to 64 and beyond."""
    root = parse(draw(chain(stages)).svg())
    assert len(of_class(root, "rect", "card")) == stages


@given(plans())
def test_any_plan_gives_a_picture(any_plan):
    """Well-formed, and the same each time."""
    svg = draw(any_plan.stage_graph).svg()
    assert len(of_class(parse(svg), "rect", "card")) == len(any_plan.stage_graph)
    assert svg == draw(any_plan.stage_graph).svg()


def test_names_are_escaped():
    """Operators are named by the user's model."""
    stage = Stage(("a<b>&\"'", "]]>"), (0,), 1)
    written = texts(parse(draw(StageGraph((stage,), (), 1)).svg()))
    assert "a<b>&\"'" in written
