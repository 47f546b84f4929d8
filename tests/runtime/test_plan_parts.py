"""Plans that do not fit a model, and programs that are made before ranks start."""

from dataclasses import replace

import pytest

from anabranch.errors import InvalidPlanError
from anabranch.graph.tracing.exporter import Exporter
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import batch, built, plan

pytestmark = pytest.mark.dist


def test_a_plan_for_another_model_is_refused() -> None:
    """With the operators that are too many and too few."""
    chain, branches = built("Chain"), built("TwoBranch")
    with pytest.raises(InvalidPlanError, match=r"lacks operators of the model.*left"):
        Pipeline(branches.workload, plan(chain, 1), captured=branches.captured)
    made = replace(plan(chain, 1), options=(("preset", "published"), ("layers", "8")))
    with pytest.raises(InvalidPlanError, match="was made with --preset published -o layers=8: "):
        Pipeline(branches.workload, made, captured=branches.captured)
    own = replace(made, model="mine:workload")  # which has no presets
    with pytest.raises(InvalidPlanError, match="was made with -o layers=8: "):
        Pipeline(branches.workload, own, captured=branches.captured)


def test_a_plan_without_an_edge_that_the_model_needs_is_refused() -> None:
    model = built("Chain")
    whole = plan(model, 3)
    cut = replace(whole, stage_graph=replace(whole.stage_graph, edges=((0, 1),)))
    with pytest.raises(InvalidPlanError, match="no edge 1 -> 2"):
        Pipeline(model.workload, cut, captured=model.captured)


def test_exact_gradients_need_one_replica() -> None:
    model = built("Chain")
    with pytest.raises(ValueError, match="one replica"):
        Pipeline(
            model.workload, plan(model, 2, replicas=[2, 1]), captured=model.captured, exact=True
        )


def test_statistics_of_the_whole_batch_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, rather than by every rank that makes a loss; cross entropy has a count of labels."""
    model = built("Chain")
    plan(model, 2, batch_size=13)
    monkeypatch.delattr(Exporter, "program")
    leaves = batch(13)
    assert model.captured.programs.with_statistics(leaves).keys() > leaves.keys()
