"""Checkpoints of asynchronous training."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from anabranch.errors import (
    FileFormatError,
)
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.asynchronous.models import batches, cut, halving
from tests.runtime.asynchronous.reference import train
from tests.runtime.asynchronous.running import (
    assert_same,
    by_hand,
    fresh,
    held,
    on_ranks,
    pipeline,
    plan_of,
    start_of,
    whole,
)

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rmsprop"])
def test_resumed_training_is_as_if_it_had_drained(tmp_path: Path, optimizer: str) -> None:
    """Bit for bit, with a prediction by the momentum, by the moments, and by the last update."""
    model = cut("chain 3", optimizer, scheduler=halving)
    data, chosen = batches(9), plan_of(model)

    def work() -> tuple[list[float], dict[str, Tensor]]:
        pipe = pipeline(model, chosen, "pipeoptim")
        losses = []
        for loss in pipe.steps(data[:4]):
            losses.append(loss)
            if len(losses) == 1:  # in the middle of the loop
                pipe.save(tmp_path / "four")
        assert pipe.step_number == 4
        return losses, held(pipe)

    def again() -> tuple[list[float], dict[str, Tensor], int]:
        pipe = AsyncPipeline.resume(
            tmp_path / "four",
            model.workload,
            chosen,
            captured=model.captured,
            policy="pipeoptim",
            timeout=20.0,
        )
        number = pipe.step_number
        return list(pipe.steps(data[4:])), held(pipe), number

    before, after = on_ranks(chosen, work), on_ranks(chosen, again)
    twin = cut("chain 3", optimizer, scheduler=halving)
    losses = train(twin.by_hand, "pipeoptim", data, fills=(0, 4))
    assert before[0][0] + after[0][0] == losses
    assert after[0][2] == 4
    assert_same(whole([rank[1] for rank in after]), by_hand(twin))


def test_checkpoints_pass_between_the_modes(tmp_path: Path) -> None:
    """Synchronous to asynchronous and back, under other stages; one leaves what the other needs."""
    model = cut("chain 3", "nadam")
    data, start, chosen = batches(4), start_of(model), plan_of(model)
    options = {"captured": model.captured, "check_gradients": False, "timeout": 20.0}

    def work() -> tuple[list[float], int]:
        flushed = Pipeline(model.workload, chosen, **options)
        flushed.step(data[0])
        flushed.save(tmp_path / "sync")
        fresh(model, start)
        pipe = AsyncPipeline.resume(
            tmp_path / "sync", model.workload, chosen, policy="pipeoptim", **options
        )
        losses = list(pipe.steps(data[1:3]))
        pipe.save(tmp_path / "async")
        fresh(model, start)
        flushed = Pipeline.resume(tmp_path / "async", model.workload, chosen, **options)
        number = flushed.step_number
        return [*losses, flushed.step(data[3])], number

    (losses, number), *_ = on_ranks(chosen, work)
    assert number == 3
    twin = cut("chain 3", "nadam")
    # One flushed step, then a fill without a prediction: nothing was known of the last update.
    first = train(twin.by_hand, "stash", data[:1])
    assert len(first) == 1
    for stage in twin.by_hand:
        stage.last = None
    # The second of two mini-batches reads in its forward what was there at the fill.
    expected = train(twin.by_hand, "naive", data[1:3])
    assert losses[0] == expected[0]
    assert losses[1] == expected[1]
    assert losses[2] == train(twin.by_hand, "stash", data[3:])[0]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    model = cut("chain 2")

    def work() -> None:
        AsyncPipeline.resume(tmp_path / "none", model.workload, plan_of(model), timeout=20.0)

    with pytest.raises(FileFormatError, match="no such folder"):
        on_ranks(plan_of(model), work)
