"""Clocks of devices, with a GPU whose time is told by the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from anabranch.runtime.measurement.clocks import Clock, clock_of
from anabranch.runtime.worker import Worker
from tests.runtime.small import batch, built, plan
from tests.runtime.threads import workers


@dataclass
class SlowGpu:
    """A GPU that takes 10 s for everything between two events, whatever the host does."""

    now_ms: float = 0.0
    waited: int = 0

    def event(self) -> GpuEvent:
        self.now_ms += 10_000
        return GpuEvent(self, self.now_ms)


@dataclass
class GpuEvent:
    gpu: SlowGpu
    ms: float

    def synchronize(self) -> None:
        self.gpu.waited += 1

    def elapsed_time(self, end_event: GpuEvent) -> float:
        return end_event.ms - self.ms


def test_while_it_records_a_clock_tells_when_the_device_was_there() -> None:
    """Not when the host gave it the work. Otherwise it marks nothing on the device."""
    gpu = SlowGpu()
    clock = Clock(gpu.event)
    before = clock.mark()
    assert gpu.now_ms == 0
    clock.begin()
    marks = [clock.mark(), clock.mark()]
    clock.end()
    after = clock.mark()
    first, *device, last = clock.seconds([before, *marks, after])
    assert device[1] - device[0] == pytest.approx(10.0)
    assert first <= device[0] - 10 <= last  # the device began when the recording did


def test_the_actions_of_a_worker_are_as_long_as_on_the_device() -> None:
    """A step of one device: between the marks of each action the GPU was busy for 10 s, of which
    the host saw nothing.
    """
    gpu = SlowGpu()
    model = built("Chain")
    worker: Worker = workers(model, plan(model, 1, batch_size=4, microbatch_size=2), 4)[0]
    worker.clock = Clock(gpu.event)
    worker.clock.begin()
    waited = gpu.waited
    outcome = worker.run(batch(4), 0)
    assert gpu.waited == waited  # to mark is not to wait
    seconds = worker.clock.seconds([mark for _, pair in outcome.times for mark in pair])
    lengths = [end - start for start, end in zip(seconds[::2], seconds[1::2], strict=True)]
    assert lengths == pytest.approx([10.0] * 4)


def test_a_cpu_has_the_clock_of_the_host() -> None:
    """It computes when it is told to."""
    clock = clock_of(torch.device("cpu"))
    clock.begin()
    mark = clock.mark()
    assert clock.seconds([mark]) == [mark]
