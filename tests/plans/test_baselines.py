"""Baselines and the words of a comparison."""

import pytest

from anabranch.planner import PLANNERS
from anabranch.plans.baselines import BASELINES, gain_text


def test_baselines_are_searched_by_planners_that_exist():
    searches = [baseline.search for baseline in BASELINES.values() if baseline.search is not None]
    assert {search["planner"] for search in searches} <= PLANNERS.keys()
    assert {name for name in BASELINES if BASELINES[name].search is None} == {"from"}


@pytest.mark.parametrize(
    ("step_s", "mode", "text"),
    [
        (2.0, "sync", "1.50x as fast as data parallelism"),
        (2.0, "async", "1.50x as fast as data parallelism without a flush"),
        (3.01, "sync", "as fast as data parallelism"),
        (0.0, "sync", "in no time, unlike data parallelism"),
    ],
)
def test_a_gain_in_words(step_s, mode, text):
    """Of data parallelism with a step of 3 s."""
    assert gain_text("data-parallel", 3.0, step_s, mode) == text
