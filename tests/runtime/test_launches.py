"""How many operations a step dispatches besides its passes: a few, however many parameters."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anabranch import launch
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import asynchronous_stages
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.worker import BatchRun, Worker
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import WIDTH, Built, batch, num_ranks, plan, tower
from tests.runtime.training import LIMIT_S

pytestmark = pytest.mark.dist


class Launches(TorchDispatchMode):
    """Counts operations; views of tensors launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.name() != "aten::detach":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def passes_left_out() -> Iterator[None]:
    """Forwards and backwards, whose operations are those of the model."""

    def uncounted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "run", uncounted(Worker.run))
        patch.setattr(BatchRun, "do", uncounted(BatchRun.do))
        yield


class Tower(nn.Module):
    """As many layers as asked for."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body, self.head = tower(depth), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), label)


@cache
def of_depth(depth: int) -> Built:
    torch.manual_seed(0)
    module, example = Tower(depth), batch(4)
    return Built(capture(module, example), Workload(module, example))


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, foreach=True, capturable=False)


def momentum(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)


def fused(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def shallow_and_deep(
    counts: Callable[[Built, Plan], Counter[str]], num_stages: int, **options: Any
) -> None:
    """Both launch as much, on every rank. Their programs are made here, once for all ranks."""
    models = [of_depth(depth) for depth in (2, 12)]
    plans = [plan(model, num_stages, **options) for model in models]
    ranks = num_ranks(plans[0])
    for shallow, deep in launch.run(lambda: [*map(counts, models, plans)], ranks, timeout=LIMIT_S):
        assert shallow == deep


CASES: dict[str, tuple[Any, float | None, list[int], dict[str, Any], bool]] = {
    "clipped": (momentum, 0.5, [1], {}, False),
    "fp16": (momentum, 0.5, [1], {"compute": ComputeOptions(precision="fp16")}, False),
    "accumulated": (momentum, None, [1], {"accumulate": 2}, True),
    "steps": (fused, None, [1], {}, True),
    "replicas": (momentum, None, [2], {}, True),
    "sharded": (momentum, None, [2], {"shard_optimizer": True}, True),
}
"""Name -> optimizer, norm, replicas, options, whether by ``steps``."""


@pytest.mark.parametrize("case", CASES)
def test_what_follows_the_passes_does_not_grow_with_the_parameters(case: str) -> None:
    """Nor with their number does what is summed, checked, scaled, clipped, updated and shared."""
    optimizer, clip_norm, replicas, options, steps = CASES[case]
    leaves = [batch(16, seed) for seed in range(6)]

    def counts(model: Built, chosen: Plan) -> Counter[str]:
        workload = replace(model.workload, optimizer=optimizer, clip_norm=clip_norm)
        pipeline = Pipeline(
            workload, chosen, captured=model.captured, check_gradients=False, **options
        )
        for leaf in leaves[:2]:
            pipeline.step(leaf)
        with passes_left_out(), Launches() as launches:
            if steps:
                list(pipeline.steps(leaves[2:]))
            else:
                for leaf in leaves[2:]:
                    pipeline.step(leaf)
        return launches.counts

    shallow_and_deep(counts, 1, replicas=replicas)


@pytest.mark.parametrize("policy", ["stash", "pipeoptim"])
def test_nor_without_a_flush(policy: str) -> None:
    """With copies of weights, and with their prediction."""

    def counts(model: Built, chosen: Plan) -> Counter[str]:
        chosen = replace(chosen, stage_graph=asynchronous_stages(chosen), mode="async")
        workload = replace(model.workload, optimizer=momentum)
        options = {"captured": model.captured, "policy": policy, "check_gradients": False}
        pipe = AsyncPipeline(workload, chosen, **options)
        leaves = [batch(16, seed) for seed in range(9)]
        list(pipe.steps(leaves[:3]))
        with passes_left_out(), Launches() as launches:
            list(pipe.steps(leaves[3:]))
        return launches.counts

    shallow_and_deep(counts, 2, microbatch_size=16)
