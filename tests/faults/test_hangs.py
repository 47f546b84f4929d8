"""Ranks that do not go on, found by their launcher: soon, with what they were at."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.errors import StageFailedError
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import Batch, batch, built, plan, with_options, with_programs
from tests.runtime.training import sgd

pytestmark = pytest.mark.dist

TIMEOUT_S = 0.6


def hangs(work: Callable[[Pipeline], Any], patience: float | None = None, **options: Any) -> str:
    """What is told of two ranks that train, of which one does not go on."""
    model = built("TwoBranch")
    workload = with_options(model, **{"optimizer": sgd, **options})

    def rank() -> None:
        pipe = Pipeline(workload, plan(model, 2), captured=model.captured, check_gradients=False)
        work(pipe)

    began = time.monotonic()
    with pytest.raises(StageFailedError) as caught:
        launch.run(rank, 2, stall_timeout=TIMEOUT_S, patience=patience, timeout=30.0)
    assert "the ranks did not finish" not in str(caught.value)
    assert time.monotonic() - began < 30.0
    return str(caught.value)


def on_rank(number: int) -> bool:
    return dist.get_rank() == number


def test_a_stopped_rank_is_named_with_its_place() -> None:
    """SIGSTOP in a forward of the second stage."""

    def work(pipe: Pipeline) -> None:
        pipe.step(batch(16))
        compute = pipe._session.workers.worker(16).compute
        forward = compute.forward

        def stop(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return forward(*arguments)

        if on_rank(1):
            compute.forward = stop
        pipe.step(batch(16))

    told = hangs(work)
    assert told.startswith("rank 1 has not gone on for")
    assert "its process is stopped or does not answer, in the forward of stage 1" in told
    assert "micro-batch 0, step 1; waiting: rank 0" in told


def test_an_optimizer_that_sleeps_is_named() -> None:
    """The other rank waits in the next step."""

    class Sleepy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if on_rank(0) and self.state:
                time.sleep(3600)
            return super().step(closure)

    def work(pipe: Pipeline) -> None:
        for _ in pipe.steps(batch(16, i) for i in range(6)):
            pass

    told = hangs(work, optimizer=lambda named: Sleepy(named, lr=0.1, momentum=0.9))
    assert told.startswith("rank 0 has not gone on for")
    assert "in the update, step" in told
    assert "waiting: rank 1" in told


def test_a_loader_that_blocks_is_named() -> None:
    """It was 'outside of the steps'."""

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        for i in range(4):
            if i == 2 and on_rank(1):
                time.sleep(3600)
            yield batch(batch_size, i)

    def work(pipe: Pipeline) -> None:
        for each in pipe.batches():
            pipe.step(each)

    told = hangs(work, data=data)
    assert told.startswith("rank 1 has not gone on for")
    assert "reading data; waiting: rank 0" in told


PATIENCE_S = 3.0
"""More than a first step or an evaluation takes on a busy machine."""


def test_a_rank_that_sleeps_in_the_first_step_is_named() -> None:
    """Within the user's patience; it was 600 s."""

    def work(pipe: Pipeline) -> None:
        if on_rank(0):
            compute = pipe._session.workers.worker(16).compute
            compute.forward = lambda *arguments: time.sleep(3600)
        pipe.step(batch(16))

    told = hangs(work, PATIENCE_S)
    assert told.startswith("rank 0 has not gone on for")
    assert "in the forward of stage 0, micro-batch 0, step 0" in told
    assert "waiting: rank 1" in told


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_sleeps_before_an_all_reduce_is_named(number: int) -> None:
    """The other one waits for its sums."""

    def work(pipe: Pipeline) -> None:
        pipe.step(batch(16))
        if on_rank(number):
            pipe._mesh.start_all_reduce = lambda *arguments: time.sleep(3600)
        pipe.step(batch(16))

    told = hangs(work)
    assert told.startswith(f"rank {number} has not gone on for")
    assert f"waiting: rank {1 - number}" in told


def test_a_rank_that_sleeps_over_held_out_data_or_a_save_is_named(tmp_path: Path) -> None:
    """Not as one that reads the data of training, and not the rank that waits for it."""
    with_programs(built("TwoBranch"), 16, evaluation=True)

    def held_out(batch_size: int) -> list[Batch]:
        if on_rank(0):
            time.sleep(3600)
        return [batch(batch_size)]

    def evaluates(pipe: Pipeline) -> None:
        pipe.step(batch(16))
        pipe.evaluate()

    def saves(pipe: Pipeline) -> None:
        pipe.step(batch(16))
        if on_rank(1):
            pipe._state.part = lambda *arguments, **options: time.sleep(3600)
        pipe.save(tmp_path / "checkpoint")

    cases = (evaluates, 0, "reading held-out data"), (saves, 1, "saving a checkpoint")
    for work, number, doing in cases:
        told = hangs(work, PATIENCE_S, eval_data=held_out)
        assert told.startswith(f"rank {number} has not gone on for")
        assert f"{doing}; waiting: rank {1 - number}" in told


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_what_is_slow_but_alive_is_let_be(slow_rank: int) -> None:
    """A first step, and an evaluation, that take several times as long on one rank as a rank may be
    silent; the other waits for it where the held-out data has ended.
    """
    model = with_programs(built("TwoBranch"), 16, evaluation=True)
    slow = TIMEOUT_S * 2.5

    def held_out(batch_size: int) -> list[Batch]:
        if on_rank(slow_rank):
            time.sleep(slow)
        return [batch(batch_size)]

    workload = with_options(model, optimizer=sgd, eval_data=held_out)

    def rank() -> float:
        pipe = Pipeline(workload, plan(model, 2), captured=model.captured, check_gradients=False)
        if on_rank(slow_rank):
            time.sleep(slow)
        pipe.step(batch(16))
        return pipe.evaluate()["loss"]

    assert len(launch.run(rank, 2, stall_timeout=TIMEOUT_S, timeout=30.0)) == 2
