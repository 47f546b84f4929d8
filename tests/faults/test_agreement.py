"""Ranks with different batches, and copies of parameters that drift apart: refused, and named."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.errors import DataError, TrainingError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import batch, built, plan, with_programs
from tests.runtime.training import LIMIT_S, run

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("samples", [16, 12])
def test_another_batch_in_the_first_step_is_refused(samples: int) -> None:
    """With other values it trained on silently, with another size it hung."""
    model = built("TwoBranch")

    def work(pipe: Pipeline) -> None:
        pipe.step(batch(samples, 1) if dist.get_rank() == 2 else batch(16))

    with pytest.raises(DataError, match=r"^rank 2 has another batch than the others"):
        run(model, plan(model, 3), work)


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_one_value_that_differs_is_refused_where_all_are_compared(check: str) -> None:
    """Of 32 values of a tensor it is none, and the losses are those of other data, silently."""
    model = built("TwoBranch")
    same, other = batch(64), batch(64)
    name = max(same, key=lambda key: same[key].numel())
    assert same[name].is_floating_point()
    assert same[name].numel() > 64
    other[name].view(-1)[1] += 0.5

    def work(pipe: Pipeline) -> float:
        return pipe.step(other if dist.get_rank() == 1 else same)

    chosen = plan(model, 2)
    if check == "full":
        with pytest.raises(DataError, match=r"^rank 1 has another batch than the others"):
            run(model, chosen, work, check_batches=check)
    else:
        run(model, chosen, work, check_batches=check)


@pytest.mark.parametrize(
    ("samples", "seed", "barrier"), [(16, 77, True), (16, 77, False), (12, 3, False), (14, 3, True)]
)
def test_another_batch_in_any_step_is_refused(samples: int, seed: int, barrier: bool) -> None:
    """Of other values, by the digests in the totals. With a micro-batch less, or a shorter one,
    ranks wait for messages that never come, or get others than they expect, and never come to the
    totals: they are refused at once.
    """
    model = built("TwoBranch")

    def work(pipe: Pipeline) -> None:
        batches = [batch(16, i) for i in range(6)]
        if dist.get_rank() == 1:
            batches[3] = batch(samples, seed)
        if barrier:
            for each in batches:
                pipe.step(each)
        else:
            list(pipe.steps(batches))

    with pytest.raises(DataError, match=r"^rank 1 has another batch than the others"):
        run(model, plan(model, 3), work)


def test_another_batch_in_the_evaluation_is_refused_at_once() -> None:
    """As in a step."""
    model = with_programs(built("TwoBranch"), 4, evaluation=True)

    def work(pipe: Pipeline) -> None:
        pipe.evaluate([batch(16), batch(12 if dist.get_rank() == 2 else 16)])

    with pytest.raises(DataError, match=r"^rank 2 has another batch than the others"):
        run(model, plan(model, 3), work)


@pytest.mark.parametrize("samples", [4, 3])
def test_another_mini_batch_without_a_flush_is_refused(samples: int) -> None:
    """Of other values, by the digests in its totals; of another size, by who watches."""
    model = built("Chain")
    chosen = plan(model, 3, batch_size=4)

    def rank() -> None:
        pipe = AsyncPipeline(
            model.workload, chosen, captured=model.captured, policy="stash", check_gradients=False
        )
        batches = [batch(4, i) for i in range(12)]
        if dist.get_rank() == 1:
            batches[7] = batch(samples, 77)
        list(pipe.steps(batches))

    with pytest.raises(DataError, match=r"^rank 1 has another batch than the others"):
        launch.run(rank, 3, timeout=LIMIT_S)


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
