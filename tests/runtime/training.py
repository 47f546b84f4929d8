"""Pipelines that train on local ranks, and one process that does the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import Batch, Built, batch, num_ranks, plan

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
    return run_each(model, chosen, (work, options), workload=workload)[0]


Way = tuple[Callable[[Pipeline], Any], dict[str, Any]]
"""A function, and options of the pipeline that it is called with, its workload among them."""


def run_each(
    model: Built, chosen: Plan, *ways: Way, workload: Workload | None = None
) -> list[list[Any]]:
    """Call functions one after the other in the same ranks, each with a pipeline that begins with
    the same weights: results by function and rank.
    """
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    usual = {"workload": workload or model.workload, "check_gradients": False, "timeout": 20.0}

    def rank() -> list[Any]:
        results = []
        for work, options in ways:
            if results:
                begin_again(model.module, start)
            options = usual | options
            results.append(work(Pipeline(plan=chosen, captured=model.captured, **options)))
        return results

    return list(map(list, zip(*launch.run(rank, num_ranks(chosen), timeout=LIMIT_S), strict=True)))


def begin_again(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a rank a whole module in a state, also what an earlier pipeline has left to others."""
    for name, parameter in module.named_parameters():
        parameter.data, parameter.grad = torch.empty_like(state[name]), None
    module.load_state_dict(state)


Trained = tuple[list[float], dict[str, Tensor]]


def trained(
    model: Built, chosen: Plan, workload: Workload, work: Callable[[Pipeline], Any], **options: Any
) -> Trained:
    """Losses, the same on every rank, and all parameters, of which copies are equal."""
    return trained_each(model, chosen, workload, (work, options))[0]


def trained_each(
    model: Built, chosen: Plan, workload: Workload | None, *ways: Way
) -> list[Trained]:
    """Likewise for several functions in the same ranks."""

    def with_parameters(work: Callable[[Pipeline], Any]) -> Callable[[Pipeline], Trained]:
        def rank(pipeline: Pipeline) -> Trained:
            losses = work(pipeline)
            return losses, {n: p.detach() for n, p in pipeline._state.parameters.items()}

        return rank

    every = [(with_parameters(work), options) for work, options in ways]
    found = []
    for results in run_each(model, chosen, *every, workload=workload):
        parameters: dict[str, Tensor] = {}
        for losses, held in results:
            assert losses == results[0][0]
            for name, value in held.items():
                assert torch.equal(parameters.setdefault(name, value), value)
        found.append((results[0][0], parameters))
    return found


def train(
    model: Built, chosen: Plan, workload: Workload, batches: Sequence[Batch], **options: Any
) -> Trained:
    """Likewise, step by step."""
    return trained(model, chosen, workload, lambda p: [p.step(b) for b in batches], **options)


def equal(ours: Trained, theirs: Trained) -> bool:
    """Losses and parameters, bit for bit."""
    same = all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())
    return same and ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys()


def on_one_device(
    module: nn.Module, make: Callable[[int], Batch], **options: Any
) -> tuple[Workload, Pipeline]:
    """A module in this process, in micro-batches of two samples of eight."""
    workload = Workload(module, make(4))
    model = Built(capture(module, make(4)), workload)
    cut = plan(model, 1, batch_size=8, microbatch_size=2)
    return workload, Pipeline(workload, cut, captured=model.captured, **options)


BATCHES = [batch(16, seed) for seed in range(4)]
