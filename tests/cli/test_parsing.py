"""Options of planners as the user writes them."""

import pytest
import typer

from anabranch.cli.parsing import interval, options_by_planner

KNOWN = {
    "graphpipe": {"candidates": "int", "recompute": "bool"},
    "data-parallel": {"recompute": "bool"},
    "even": {},
}


def test_planner_options_by_planner():
    """For all that have it, or for one, whose value then counts there."""
    chosen = list(KNOWN)
    assert options_by_planner(["candidates=9"], chosen, KNOWN) == {"graphpipe": {"candidates": 9}}
    assert options_by_planner(
        ["data-parallel.recompute=true", "recompute=false"], chosen, KNOWN
    ) == {"graphpipe": {"recompute": False}, "data-parallel": {"recompute": True}}
    assert options_by_planner(None, chosen, KNOWN) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("speed=2", "speed: no planner compared has that option; graphpipe has candidates, "),
        ("even.candidates=9", r"even\.candidates: .* has that option; even has none"),
        ("piper.pairs=2", r"piper\.pairs: .* data-parallel has recompute; even has none"),
        ("candidates", "write NAME=VALUE"),
    ],
)
def test_wrong_planner_options(value, message):
    """The message lists what there is."""
    with pytest.raises(typer.BadParameter, match=message):
        options_by_planner([value], list(KNOWN), KNOWN)
    with pytest.raises(typer.BadParameter, match="candidates is given twice"):
        options_by_planner(["candidates=8", "candidates=9"], list(KNOWN), KNOWN)


@pytest.mark.parametrize(
    ("text", "found"),
    [("200", (200, None)), ("90s", (None, 90.0)), ("1.5m", (None, 90.0)), ("2H", (None, 7200.0))],
)
def test_an_interval_is_steps_or_time(text, found):
    assert interval(text, "--save-every") == found


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "m", "0s", "infs", "nans", "10 days"])
def test_what_is_no_interval_is_refused_with_examples(text):
    with pytest.raises(typer.BadParameter, match="write steps, as 200, or time, as 90s, 10m or 2h"):
        interval(text, "--save-every")
