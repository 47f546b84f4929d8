"""A plan knows another model by its bytes."""

from __future__ import annotations

from dataclasses import replace

from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.plans.model_size import ModelSize
from anabranch.plans.stages import Stage
from tests.cli.examples import a_plan

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
