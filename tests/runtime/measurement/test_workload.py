"""A workload is measured as it is trained; reading is the median without the loader's start."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from anabranch import measure_workload
from anabranch.runtime.measurement.workload import ReadingSizes, measure_reading, reading_s
from anabranch.workload import Batch, Workload
from tests.runtime.small import batch, built, with_options

READING = "anabranch.runtime.measurement.workload.READING"


def test_all_that_a_step_takes_is_measured() -> None:
    """Operators, its own optimizer's updates, and batches where it has data."""
    model = built("TwoBranch")
    workload = with_options(model, data=lambda size, epoch: [dict(batch(size, 0))] * 2)
    profile = measure_workload(workload, (2, 4), captured=model.captured, repeats=0)
    assert profile.samples == (2, 4)
    assert profile.update is not None
    assert profile.update.seconds(4, 1000) > 0
    assert profile.read_sample_s > 0
    without = with_options(model, data=None)
    assert measure_workload(without, (2, 4), repeats=0).read_sample_s == 0


def test_the_median_of_what_follows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that takes 8 s to start, then 2 s, 1 s and 3 s a batch: 2 s."""
    clock = [0.0]
    monkeypatch.setattr(READING, ReadingSizes(budget_s=100.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def batches() -> Iterator[Batch]:
        for seconds in (8.0, 2.0, 1.0, 3.0):
            clock[0] += seconds
            yield torch.zeros(1)

    assert reading_s(batches()) == 2.0
    assert reading_s(()) == 0.0


def test_random_numbers_stay_and_broken_data_is_for_training_to_report() -> None:
    """A profile must not change what is trained, nor fail where only training would."""
    linear = nn.Linear(1, 1)

    def shuffled(batch_size: int, epoch: int) -> Iterator[Batch]:
        while True:
            yield torch.rand(batch_size, 1)

    def broken(batch_size: int, epoch: int) -> Iterator[Batch]:
        raise OSError("no such file")

    plain = Workload(linear, torch.zeros(2, 1))
    state = torch.random.get_rng_state()
    assert measure_reading(replace(plain, data=shuffled), 4) > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert measure_reading(replace(plain, data=broken), 4) == 0.0
    assert measure_reading(plain, 4) == 0.0


def test_a_loader_that_blocks_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held ``plan`` up for ever."""
    monkeypatch.setattr(READING, ReadingSizes(patience_s=0.05))
    over = threading.Event()

    def blocked(batch_size: int, epoch: int) -> Iterator[Batch]:
        yield torch.zeros(batch_size, 1)
        over.wait()

    workload = Workload(nn.Linear(1, 1), torch.zeros(2, 1), data=blocked)
    try:
        with pytest.warns(UserWarning, match=r"has not yielded 8 batches within 0\.05 s"):
            assert measure_reading(workload, 4) == 0.0
    finally:
        over.set()
