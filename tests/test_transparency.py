"""Under every schedule, on chains and on graphs of stages, a step of the pipeline is the step of
one process, bit for bit.

The one process accumulates the same micro-batches in the same order, on one thread, with the user's
own module.
"""

from copy import deepcopy

import pytest
import torch

from anabranch import launch
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule import SCHEDULES
from anabranch.verification import VerifyResult, verify
from anabranch.workload import Workload
from tests.captured_models import BUILT_IN, captured_model
from tests.runtime.small import MODELS, Built, batch, built, plan, slices

pytestmark = pytest.mark.dist

LIMIT_S = 60.0


SMALL = sorted(set(MODELS) - {"Dropout"})
"""What draws random numbers draws others in a pipeline."""


def schedules_for(name: str) -> list[str]:
    """Every schedule for a graph; for other models one without split backwards and one with them,
    which is the other one of two for tied weights.
    """
    few = ["1f1b-deep", "zb-h1" if name == "Tied" else "zb-h2"]
    return sorted(SCHEDULES) if name == "TwoBranch" else few


def shared(name: str, dtype: torch.dtype) -> Built:
    captured, example = captured_model(name, dtype)
    return Built(captured, Workload(captured.module, example))


def check(result: VerifyResult) -> None:
    assert result.exact
    assert result.bitwise, result.summary()
    assert result.max_gradient_error == 0
    assert result.loss == result.reference_loss


@pytest.mark.parametrize("name", SMALL)
def test_schedules_on_small_models(name: str) -> None:
    """Four micro-batches, the last one short; chains, branches, ties, batch normalisation. One
    process has the same slices under every schedule.
    """
    model, leaves = built(name), batch(11, 5)
    count = min(4 if name == "TwoBranch" else 3, len(model.captured.graph))
    plans = [
        plan(model, count, batch_size=11, microbatch_size=3, schedule=schedule)
        for schedule in schedules_for(name)
    ]

    def pipelined() -> list[tuple[float, dict[str, torch.Tensor]]]:
        results, kept = [], [(p, p.data) for p in model.module.parameters()]
        for chosen in plans:
            pipe = Pipeline(
                model.workload, chosen, captured=model.captured, exact=True, check_gradients=False
            )
            results.append(pipe.gradients(leaves))
            pipe.close()
            for parameter, data in kept:  # of which this rank has given up what others hold
                parameter.data, parameter.grad = data, None
        return results

    alone = deepcopy(model.module)
    expected = reference(alone, leaves, slices(11, 3), model.captured.weights)
    ranks = launch.run(pipelined, count, timeout=LIMIT_S)
    for i, schedule in enumerate(schedules_for(name)):
        assert all(rank[i][0] == expected.loss for rank in ranks), schedule
        pairs = [(key, gradient) for rank in ranks for key, gradient in rank[i][1].items()]
        assert dict(pairs).keys() == expected.gradients.keys()
        assert all(torch.equal(gradient, expected.gradients[key]) for key, gradient in pairs)


@pytest.mark.parametrize("name", [*BUILT_IN, "EmbeddingBags"])
def test_models_of_others_and_built_in_ones(name: str) -> None:
    """Two micro-batches; the built-in models on real data differ in their data only. GPT2 and Bert
    are chains as the transformer is, T5 is cut in ``tests/graph/cutting/test_split.py``;
    ``tests/test_losses.py`` has losses that no micro-batch has by itself, and labels that are
    ignored.
    """
    model = shared(name, torch.float64 if name == "two-branch" else torch.float32)
    samples = 2 if name in BUILT_IN else 4
    chosen = plan(model, 4, batch_size=samples, microbatch_size=samples // 2)
    check(verify(model.workload, chosen, captured=model.captured, timeout=LIMIT_S))
