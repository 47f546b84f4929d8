"""Options of planners as the user writes them."""

from __future__ import annotations

import pytest
import typer

from anabranch.cli.parsing import options_by_planner

KNOWN = {
    "graphpipe": {"kfkb": "bool", "recompute": "bool"},
    "data-parallel": {"recompute": "bool"},
    "even": {},
}


def test_planner_options_by_planner():
    """For all that have it, or for one, whose value then counts there."""
    chosen = list(KNOWN)
    assert options_by_planner(["kfkb=true"], chosen, KNOWN) == {"graphpipe": {"kfkb": True}}
    assert options_by_planner(
        ["data-parallel.recompute=true", "recompute=false"], chosen, KNOWN
    ) == {"graphpipe": {"recompute": False}, "data-parallel": {"recompute": True}}
    assert options_by_planner(None, chosen, KNOWN) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("speed=2", "speed: no planner compared has that option; graphpipe has kfkb, recompute; "),
        ("even.kfkb=true", r"even\.kfkb: no planner compared has that option; even has none"),
        ("piper.pairs=2", r"piper\.pairs: .* data-parallel has recompute; even has none"),
        ("kfkb", "write NAME=VALUE"),
    ],
)
def test_wrong_planner_options(value, message):
    """The message lists what there is."""
    with pytest.raises(typer.BadParameter, match=message):
        options_by_planner([value], list(KNOWN), KNOWN)
    with pytest.raises(typer.BadParameter, match="kfkb is given twice"):
        options_by_planner(["kfkb=true", "kfkb=false"], list(KNOWN), KNOWN)
