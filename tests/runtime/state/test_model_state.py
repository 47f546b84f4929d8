"""What a rank keeps of the model, and what it cannot train."""

import warnings

import pytest
import torch

from anabranch import launch
from anabranch.errors import TrainingError
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.small import Built, batch, built, plan, with_options
from tests.runtime.training import BATCHES, LIMIT_S, begin_again, run, sgd

pytestmark = pytest.mark.dist


def pipeline(model: Built, chosen: Plan) -> Pipeline:
    return Pipeline(
        model.workload, chosen, captured=model.captured, check_gradients=False, timeout=20.0
    )


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


@pytest.mark.parametrize("is_async", [False, True])
def test_gradients_that_a_module_comes_with_are_of_no_batch(is_async: bool) -> None:
    """Whoever has used it before may have left some, even some that are not finite."""
    model = built("Chain")
    chosen = async_plan(model, 2) if is_async else plan(model, 2)

    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def rank() -> list[list[float]]:
        losses = []
        for left in (None, float("nan")):
            begin_again(model.module, start)
            for parameter in model.module.parameters():
                parameter.grad = None if left is None else torch.full_like(parameter, left)
            make = built_pipeline if is_async else pipeline
            pipe = make(model, chosen)
            losses.append([pipe.step(batch(8, seed)) for seed in range(3)])
        return losses

    expected, found = launch.run(rank, 2, timeout=LIMIT_S)[0]
    assert found == expected


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    """Rather than failing in the first step."""
    model = built("Chain")
    recipe = torch.optim.lr_scheduler.ReduceLROnPlateau
    workload = with_options(model, optimizer=sgd, scheduler=recipe)
    with pytest.raises(TrainingError, match="needs a metric at every step"):
        Pipeline(workload, plan(model, 1), captured=model.captured)


def test_a_rank_warns_at_the_users_line() -> None:
    """Not at one of ours, wherever in the library a parameter is found to be without gradient."""
    model = built("Unused")

    def work(pipeline: Pipeline) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(pipeline.steps(BATCHES[:2]))
        return [warning.filename for warning in caught]

    assert run(model, plan(model, 2), work) == [[__file__], []]
