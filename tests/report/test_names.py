"""Short names of stages."""

import pytest

from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.names import branches, devices, operators, shared_prefix
from tests.report.examples import TWO_TOWERS, chain


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["model.text.0", "model.text.1", "model.head"], "model."),
        (["model.text.0", "model.text.1"], "model.text."),
        (["text", "text.0"], ""),  # something of every name must be left
        (["a.b"], "a."),
        (["modelling.x", "model.y"], ""),  # whole components only
    ],
)
def test_the_shared_prefix_is_what_tells_nothing(names, prefix):
    """Whole dotted components that all names begin with, never a whole name."""
    assert shared_prefix(names) == prefix


def test_a_stage_is_named_by_its_ends():
    """First and last operator, with dots where there are more; a lone one stands alone."""
    assert operators(Stage(("m.a", "m.b", "m.c"), (0,), 1), "m.") == "a .. c"
    assert operators(Stage(("m.a",), (0,), 1), "m.") == "a"
    assert operators(Stage(("m.a", "m.b"), (0,), 1), "m.") == "a, b"


def test_devices_are_named_in_runs():
    """0, 1, 2 and 5 are 0-2 and 5."""
    assert devices(Stage(("a",), (2, 0, 1, 5), 1)) == "devices 0-2,5"
    assert devices(Stage(("a",), (3,), 1)) == "device 3"


def test_a_branch_ends_where_branches_meet():
    """A chain is one branch; two towers and what joins them are three."""
    assert branches(chain(4)) == (0, 0, 0, 0)
    assert branches(TWO_TOWERS) == (0, 1, 2)


def test_towers_stay_together_though_their_stages_alternate():
    """0 -> 2 -> 4 is one tower, 1 -> 3 the other, 5 joins them."""
    stages = tuple(Stage((f"op{s}",), (s,), 1) for s in range(6))
    graph = StageGraph(stages, ((0, 2), (1, 3), (2, 4), (3, 5), (4, 5)), 1)
    assert branches(graph) == (0, 1, 0, 1, 0, 2)
