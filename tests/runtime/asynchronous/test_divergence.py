"""A loss that climbs."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from anabranch.errors import NonFiniteError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from tests.runtime.asynchronous.models import batches, cut
from tests.runtime.asynchronous.running import fresh, on_ranks, pipeline, plan_of, start_of

pytestmark = pytest.mark.dist


def test_a_loss_that_climbs_is_told_once() -> None:
    """With how stale the stages are and the rate; by one rank."""
    model = cut("chain 3", "momentum")
    wild = replace(model.workload, optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.99))

    def work() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(pipeline(model, plan_of(model), "naive", workload=wild).steps(batches(24)))
        return [str(w.message) for w in caught]

    first, *others = on_ranks(plan_of(model), work)
    assert others == [[], []]
    assert len(first) == 1
    assert "times the smallest such mean" in first[0]
    assert "stage 0: 2, stage 1: 1, stage 2: 0; the learning rate is 1:" in first[0]


def test_what_diverges_by_itself_gets_the_advice_for_that() -> None:
    """How stale the stages are, and what helps; the data is not to blame."""
    model = cut("chain 3")
    wild = replace(model.workload, optimizer=partial(torch.optim.SGD, lr=1e30))

    def work() -> str:
        fresh(model, start_of(model))
        pipe = AsyncPipeline(wild, plan_of(model), policy="stash", captured=model.captured)
        warnings.simplefilter("ignore")  # of this rank, which is a process of its own
        with pytest.raises(NonFiniteError) as caught:
            list(pipe.steps(batches(9)))
        return str(caught.value)

    text = on_ranks(plan_of(model), work)[0]
    assert "stage 0: 2, stage 1: 1, stage 2: 0" in text
    assert "the learning rate is 1e+30: lower it" in text
    assert "fix the data" not in text
