"""The choice among rewrites, what is tried for tables, and the words for both."""

from dataclasses import replace

import pytest

from anabranch.graph.opgraph import LookupTable
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage
from anabranch.profile.profile import Profile, UpdateCost
from anabranch.solve.rewriting import choose_rewrite, gain_note, rewrite_notes, splits_of_tables
from tests.cli.examples import a_plan
from tests.simulator.helpers import cluster, cost_model


def plan_of(step_s: float, devices: int = 8) -> Plan:
    return replace(a_plan(Stage(("op0",), (0,), 8), step_s=step_s), machines=cluster(devices))


def two_tables() -> Profile:
    """Two tables of 100 and 10 bytes before a product; an update takes 10 ms for each byte."""
    profile = cost_model(((0, 2), (1, 2)), [1e-6] * 3, [1e-6] * 3, cluster(8)).profile
    large, small, product = profile.graph.parameters
    parameters = (
        replace(large, nbytes=100, table=LookupTable(1, 4)),
        replace(small, nbytes=10, table=LookupTable(1, 4)),
        replace(product, nbytes=100),
    )
    graph = replace(profile.graph, parameters=parameters)
    return replace(profile, graph=graph, update=UpdateCost(0.0, 0.0, 0.01))


@pytest.mark.parametrize(
    ("steps", "chosen"), [((0.99, 1.5), 1.0), ((1.5, 0.97), 0.97), ((0.9, 0.8), 0.8), ((), 1.0)]
)
def test_the_shortest_step_is_taken_if_it_gains_two_per_cent(
    steps: tuple[float, ...], chosen: float
) -> None:
    """Less is within the error of measured operators."""
    best = choose_rewrite(plan_of(1.0), [plan_of(step_s) for step_s in steps])
    assert best is not None
    assert best.figures.step_s == chosen


def test_without_a_plan_of_the_model_as_written_any_is_better() -> None:
    """A table that fits no device fits in parts."""
    best = plan_of(2.0)
    assert choose_rewrite(None, [best]) is best
    assert choose_rewrite(None, []) is None


@pytest.mark.parametrize(
    ("step_s", "devices", "splits"),
    [
        (1.5, 8, ["table-split=8@p0"]),
        (1.5, 3, ["table-split=2@p0"]),
        (1.5, 1, []),
        (0.15, 8, ["table-split=4"]),
        (2.5, 8, []),
    ],
)
def test_tables_are_cut_that_take_half_of_the_step(
    step_s: float, devices: int, splits: list[str]
) -> None:
    """The large one takes 1 s, the small one 0.1 s; the product is none."""
    assert splits_of_tables(plan_of(step_s, devices), two_tables()) == splits


def test_many_sites_are_counted() -> None:
    """A model of many layers would have a page of them."""
    assert rewrite_notes(["join-split@top.weight", "tensor-split=4@a+b+c+d"]) == [
        "rewritten by join-split at top.weight",
        "rewritten by tensor-split=4 at 4 parameters",
    ]


def test_a_gain_is_a_ratio_of_steps() -> None:
    """Beside the step as written, from which a reader can tell the rest."""
    text = gain_note(plan_of(0.3), plan_of(0.1))
    assert text == "3.00x against 300.00 ms as the model is written"


def test_a_gain_is_told_until_the_step_is_predicted_otherwise() -> None:
    """In another precision, say."""
    gain = gain_note(plan_of(0.3), plan_of(0.1))
    plan = replace(plan_of(0.1), notes=("rewritten", gain))
    for step_s, notes in ((0.1, plan.notes), (0.2, ("rewritten",))):
        figures = replace(plan.figures, step_s=step_s)
        assert plan.predicting(figures, cluster(8)).notes == notes
