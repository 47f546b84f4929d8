"""Ranks with different batches, and copies of parameters that drift apart: refused, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.errors import DataError, TrainingError
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import batch, built, plan
from tests.runtime.training import run

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("samples", [16, 12])
def test_another_batch_in_the_first_step_is_refused(samples: int) -> None:
    """With other values it trained on silently, with another size it hung."""
    model = built("TwoBranch")

    def work(pipe: Pipeline) -> None:
        pipe.step(batch(samples, 1) if dist.get_rank() == 2 else batch(16))

    with pytest.raises(DataError, match=r"^rank 2 has another batch than the others"):
        run(model, plan(model, 3), work)


@pytest.mark.parametrize("barrier", [True, False])
def test_another_batch_in_any_step_is_refused(barrier: bool) -> None:
    """By the digests in the totals."""
    model = built("TwoBranch")

    def work(pipe: Pipeline) -> None:
        batches = [batch(16, i) for i in range(6)]
        if dist.get_rank() == 1:
            batches[3] = batch(16, 77)
        if barrier:
            for each in batches:
                pipe.step(each)
        else:
            list(pipe.steps(batches))

    with pytest.raises(DataError, match=r"^rank 1 has trained on another batch than the others"):
        run(model, plan(model, 3), work)


@pytest.mark.parametrize("check_copies", [2, 0])
def test_copies_that_drift_apart_are_noticed(check_copies: int) -> None:
    """One bit of one replica is another one, by a fault of memory; with the option off nobody
    would know.
    """
    model = built("Chain")

    def work(pipe: Pipeline) -> int:
        for i in range(6):
            if i == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    next(iter(pipe._state.parameters.values())).view(torch.int32)[0, 0] ^= 1
            pipe.step(batch(16, i))
        return pipe.step_number

    options: dict[str, Any] = {"check_copies": check_copies}
    chosen = plan(model, 1, replicas=[3])
    if not check_copies:
        assert run(model, chosen, work, **options) == [6, 6, 6]
        return
    with pytest.raises(TrainingError, match=r"^rank 1 has other values of parameters that ranks 0"):
        run(model, chosen, work, **options)
