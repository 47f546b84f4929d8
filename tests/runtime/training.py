"""Pipelines that train on local ranks, and one process that does the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import Batch, Built, batch, num_ranks, plan, train_alone

LIMIT_S = 60.0


def sgd(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def run(
    model: Built,
    chosen: Plan,
    work: Callable[[Pipeline], Any],
    *,
    workload: Workload | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function with the pipeline of every rank."""
    options = {"check_gradients": False, "timeout": 20.0} | options

    def rank() -> Any:
        pipeline = Pipeline(workload or model.workload, chosen, captured=model.captured, **options)
        return work(pipeline)

    return launch.run(rank, num_ranks(chosen), timeout=LIMIT_S)


Trained = tuple[list[float], dict[str, Tensor]]


def trained(
    model: Built, chosen: Plan, workload: Workload, work: Callable[[Pipeline], Any], **options: Any
) -> Trained:
    """Losses, the same on every rank, and all parameters, of which copies are equal."""

    def rank(pipeline: Pipeline) -> Trained:
        losses = work(pipeline)
        return losses, {n: p.detach() for n, p in pipeline._state.parameters.items()}

    results = run(model, chosen, rank, workload=workload, **options)
    parameters: dict[str, Tensor] = {}
    for losses, held in results:
        assert losses == results[0][0]
        for name, value in held.items():
            assert torch.equal(parameters.setdefault(name, value), value)
    return results[0][0], parameters


def train(
    model: Built, chosen: Plan, workload: Workload, batches: Sequence[Batch], **options: Any
) -> Trained:
    """Likewise, step by step."""
    return trained(model, chosen, workload, lambda p: [p.step(b) for b in batches], **options)


def equal(ours: Trained, theirs: Trained) -> bool:
    """Losses and parameters, bit for bit."""
    same = all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())
    return same and ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys()


def alone(workload: Workload, batches: Sequence[Batch], microbatch_size: int = 4) -> Trained:
    """In a process of its own, so that the model here stays as it is."""
    return launch.run(train_alone, 1, workload, batches, microbatch_size, timeout=LIMIT_S)[0]


def on_one_device(
    module: nn.Module, make: Callable[[int], Batch], **options: Any
) -> tuple[Workload, Pipeline]:
    """A module in this process, in micro-batches of two samples of eight."""
    workload = Workload(module, make(4))
    model = Built(capture(module, make(4)), workload)
    cut = plan(model, 1, batch_size=8, microbatch_size=2)
    return workload, Pipeline(workload, cut, captured=model.captured, **options)


BATCHES = [batch(16, seed) for seed in range(4)]
