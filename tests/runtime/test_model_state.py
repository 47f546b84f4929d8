"""What a rank keeps of the model, and what it cannot train."""

from __future__ import annotations

import pytest
import torch

from anabranch.errors import (
    TrainingError,
)
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import (
    built,
    plan,
    with_options,
)
from tests.runtime.training import BATCHES, run, sgd

pytestmark = pytest.mark.dist


def test_a_rank_keeps_only_its_own_parameters() -> None:
    """The others have their shape and no memory; reading them gives NaN, not stale weights."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> tuple[int, int]:
        pipeline.step(BATCHES[0])
        module = pipeline._session.captured.module
        lost = [p for n, p in module.named_parameters() if n not in pipeline._state.parameters]
        assert all(bool(p.isnan().all()) and p.untyped_storage().size() == 4 for p in lost)
        return len(lost), len(pipeline._state.parameters)

    total = len(list(model.module.parameters()))
    assert [sum(counts) for counts in run(model, plan(model, 2), work)] == [total, total]


def test_a_module_without_its_weights_is_refused() -> None:
    """A second pipeline on a module of which the first has kept one stage per rank."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> str:
        pipeline.step(BATCHES[0])
        with pytest.raises(TrainingError, match="has no values: an earlier pipeline") as caught:
            Pipeline(pipeline.workload, pipeline.plan, captured=model.captured)
        return str(caught.value)

    assert len(set(run(model, plan(model, 2), work))) == 2


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    """Rather than failing in the first step."""
    model = built("Chain")
    recipe = torch.optim.lr_scheduler.ReduceLROnPlateau
    workload = with_options(model, optimizer=sgd, scheduler=recipe)
    with pytest.raises(TrainingError, match="needs a metric at every step"):
        Pipeline(workload, plan(model, 1), captured=model.captured)
