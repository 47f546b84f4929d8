"""How often the host waits for the device in a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.cost import buckets
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.guards import same_batch
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from tests.runtime.host_waits import host_waits
from tests.runtime.small import WIDTH, Built, batch, built, plan, with_programs
from tests.runtime.training import run


@pytest.fixture(autouse=True)
def _batches_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests leave out the values of such batches."""
    monkeypatch.setattr(same_batch, "_some_values", lambda leaf: b"")


MOST = 3
"""Flags of all buckets, whether all gradients are finite, and losses with metrics."""


class Everything(nn.Module):
    """Whatever has made the host wait once: buffers that change, dropout, metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        scores = self.head(self.drop(torch.tanh(self.second(h))))
        accuracy = (scores.argmax(1) == label).float().mean()
        return {"loss": F.cross_entropy(scores, label), "accuracy": accuracy}


def waits(model: Built, chosen: Any, *, steps: bool = False, **options: Any) -> list[int]:
    """Of the second and the third step, by rank; the first one sets things up."""

    def work(pipeline: Pipeline) -> int:
        pipeline.step(batch(16))
        leaves = [batch(16, seed) for seed in (1, 2)]
        state = pipeline._state
        on_device = [
            *state.parameters.values(),
            *state.buffers.values(),
            *(tensor for leaf in leaves for tensor in leaf.values()),
        ]
        with host_waits(on_device) as counting:
            if steps:
                list(pipeline.steps(leaves))
            else:
                for leaf in leaves:
                    pipeline.step(leaf)
        assert len(counting.found) <= 2 * MOST, counting.found
        return len(counting.found)

    return run(model, chosen, work, **options)


@cache
def everything() -> Built:
    torch.manual_seed(0)
    module, example = Everything(), batch(4)
    return Built(capture(module, example), Workload(module, example))


@contextmanager
def small_buckets() -> Iterator[None]:
    """One parameter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 1)
        yield


@pytest.mark.dist
@pytest.mark.parametrize("steps", [False, True])
def test_replicas_wait_three_times_a_step(steps: bool) -> None:
    """However many micro-batches, metrics, buckets, buffers and random operations there are."""
    model = everything()
    chosen = plan(model, 1, microbatch_size=4, replicas=[2], recompute=True)
    with small_buckets():
        options = ComputeOptions(dropout="sample")
        counts = waits(model, chosen, steps=steps, compute=options)
    assert max(counts) <= 2 * MOST


@pytest.mark.dist
def test_a_pipeline_waits_three_times_a_step() -> None:
    """Of stages that exchange messages, with a norm that is clipped over all of them, and in half
    precision, whose overflows count.
    """
    model = built("TwoBranch")
    workload = replace(model.workload, clip_norm=1.0)
    options = ComputeOptions(precision="fp16")
    counts = waits(model, plan(model, 2, microbatch_size=2), workload=workload, compute=options)
    assert max(counts) <= 2 * MOST


def test_steps_give_the_device_its_update_before_they_wait() -> None:
    """Whether numbers are finite is decided on the device, so that it has something to do while the
    host looks; ``step`` looks first, because other ranks have a say.
    """
    model = built("TwoBranch")
    workload = replace(model.workload, module=deepcopy(model.module))
    pipeline = Pipeline(workload, plan(model, 1), check_gradients=False)
    leaves = [batch(16, seed) for seed in range(3)]
    pipeline.step(leaves[0])
    state = pipeline._state
    seen: list[int] = []
    tensors = [*state.parameters.values(), *(t for leaf in leaves for t in leaf.values())]
    with host_waits(tensors) as counting:
        assert pipeline.optimizer is not None
        pipeline.optimizer.register_step_pre_hook(lambda *_: seen.append(len(counting.found)))
        list(pipeline.steps(leaves[1:]))
    assert seen[0] == 0
    assert len(seen) == 2
    assert seen[1] <= 2


@pytest.mark.dist
def test_evaluation_waits_once_a_batch() -> None:
    """For the loss and all metrics of its micro-batches."""
    model = with_programs(built("TwoBranch"), 4, evaluation=True)

    def work(pipeline: Pipeline) -> int:
        pipeline.evaluate([batch(16)])
        held_out = [batch(16, seed) for seed in range(3)]
        leaves = [tensor for leaf in held_out for tensor in leaf.values()]
        with host_waits([*pipeline._state.parameters.values(), *leaves]) as counting:
            pipeline.evaluate(held_out)
        return len(counting.found)

    assert run(model, plan(model, 2), work) == [0, 3]


def test_the_count_sees_what_waits() -> None:
    """And nothing else."""
    weight = torch.ones(3, requires_grad=True)
    with host_waits([weight]) as counting:
        loss = (weight * 2).sum()
        loss.backward()
        host = torch.tensor([1.0, 2.0])
        assert host.tolist() == [1.0, 2.0]
        assert not counting.found
        assert bool(loss > 0)
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3
        loss.item()
        torch.equal(weight, weight)
    assert len(counting.found) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("steps", [False, True])
def test_a_gpu_is_waited_for_three_times_a_step(steps: bool) -> None:
    """As PyTorch itself counts; batches are in memory of the host."""
    model = everything()
    workload = replace(model.workload, module=deepcopy(model.module))
    chosen = plan(model, 1, microbatch_size=4, recompute=True)
    options = ComputeOptions(dropout="sample")
    pipeline = Pipeline(workload, chosen, check_gradients=False, compute=options, device="cuda")
    pipeline.step(batch(16))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if steps:
                list(pipeline.steps([batch(16, 1), batch(16, 2)]))
            else:
                pipeline.step(batch(16, 1))
                pipeline.step(batch(16, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in found if "synchroniz" in str(warning.message)]
    assert len(waits) <= 2 * MOST, [str(warning) for warning in waits]
