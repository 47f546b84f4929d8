"""How plans are written for people."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.graph.opgraph import ModelSize, Op, OpGraph, Parameter, Value
from anabranch.plans.plan import Prediction, ranges
from anabranch.plans.stages import Stage
from tests.cli.examples import a_plan


@given(st.sets(st.integers(0, 40)))
def test_ranges_can_be_read_back(numbers):
    """Nothing is lost and nothing added."""
    read = set()
    for part in filter(None, ranges(sorted(numbers)).split(",")):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


@pytest.mark.parametrize(
    ("period_s", "end"),
    [
        (0.5, "peak 1.0 MiB"),
        (0.502, "peak 1.0 MiB"),
        (
            0.4,
            "; 400.00 ms per step when many follow one another, as devices begin the next before "
            "all have ended",
        ),
        (
            0.6,
            "; 600.00 ms per step when many follow one another, longer than one alone, as each "
            "reads its batch and shares cores and links with those before and after it",
        ),
    ],
)
def test_steps_in_a_row_are_told_where_they_differ(period_s, end):
    """From a step alone of 0.5 s, with the reason."""
    assert Prediction(0.5, 0.0, 0.25, (2**20,), period_s).text(8).endswith(end)


GRAPH = OpGraph(
    (Op("a", ("w",)), Op("b", ("w", "v"))),
    (Value(-1, (0,), 8), Value(0, (1,), 100)),
    (Parameter("w", 2**20), Parameter("v", 2**19)),
)


def test_parameters_that_are_shared_count_once():
    """1.5 MiB here, and 108 bytes of a sample."""
    assert ModelSize.of(GRAPH) == ModelSize(2**20 + 2**19, 108)


def test_the_same_names_with_other_bytes_are_another_model():
    """The sentence has both sizes; a plan made by hand knows none."""
    wide = replace(GRAPH, parameters=(Parameter("w", 2**22), Parameter("v", 2**19)))
    made = replace(by_hand := a_plan(Stage(("a", "b"), (0,), 1)), model_size=ModelSize.of(GRAPH))
    said = made.other_model(wide)
    assert "made for a model with parameters of 1.5 MiB and values of 0.1 KiB per sample" in said
    assert "this one has parameters of 4.5 MiB" in said
    assert made.other_model(GRAPH) == by_hand.other_model(wide) == ""
