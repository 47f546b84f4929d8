"""Parameters that do not lie in memory row by row."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.data_parallel.test_updates import BATCHES
from tests.runtime.small import (
    WIDTH,
    Built,
    batch,
    num_ranks,
    plan,
    train_alone,
    with_options,
    with_programs,
)
from tests.runtime.training import run

pytestmark = pytest.mark.dist


class ChannelsLast(nn.Module):
    """Convolutions whose weights lie in memory by their channels, and a weight that does by
    columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, (1, 3))
        self.to(memory_format=torch.channels_last)
        self.by_columns = nn.Parameter(torch.randn(WIDTH, 16).t())

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        x = nn.functional.linear(nn.functional.linear(x, self.by_columns), self.by_columns.t())
        h = torch.tanh(self.first(x.view(-1, 1, 2, WIDTH // 2)))
        return nn.functional.cross_entropy(self.second(h).flatten(1), label)


@cache
def channels_last() -> Built:
    torch.manual_seed(0)
    module, example = ChannelsLast(), batch(4)
    assert not module.second.weight.is_contiguous()
    return with_programs(Built(capture(module, example), Workload(module, example)), 1, 10, 16)


def adam(parameters: NamedParameters, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, fused=fused)


Held = dict[str, Tensor]


@cache
def by_another() -> Held:
    """Weights that one process comes to."""
    workload = with_options(channels_last(), optimizer=partial(adam, fused=False))
    return train_alone(workload, BATCHES)[1]


def held(pipeline: Pipeline) -> Held:
    return {name: p.detach().clone() for name, p in pipeline._state.parameters.items()}


def resumed(folder: Path, shard_optimizer: bool) -> Held:
    model = channels_last()
    chosen = plan(model, 1, replicas=[2])
    workload = with_options(model, optimizer=partial(adam, fused=True))
    options = {"check_gradients": False, "shard_optimizer": shard_optimizer}

    def begin(pipeline: Pipeline) -> None:
        pipeline.step(BATCHES[0])
        pipeline.step(BATCHES[1])
        pipeline.save(folder / "saved")

    def go_on() -> Held:
        resume = partial(Pipeline.resume, captured=model.captured, **options)
        pipeline = resume(folder / "saved", workload, chosen)
        for each in BATCHES[2:]:
            pipeline.step(each)
        return held(pipeline)

    run(model, chosen, begin, workload=workload, **options)
    found: Held = launch.run(go_on, num_ranks(chosen), timeout=60.0)[0]
    return found


def changed(folder: Path, shard_optimizer: bool) -> Held:
    """Two replicas, after a step of two stages of which each rank has forgotten one."""
    model = channels_last()

    def work(pipeline: Pipeline) -> Held:
        pipeline.step(BATCHES[0])
        pipeline.change_plan(plan(model, 1, replicas=[2]))
        for each in BATCHES[1:]:
            pipeline.step(each)
        return held(pipeline)

    workload = with_options(model, optimizer=partial(adam, fused=True))
    options = {"workload": workload, "shard_optimizer": shard_optimizer}
    ranks = run(model, plan(model, 2), work, **options)
    for name, value in ranks[0].items():
        assert torch.equal(ranks[1][name], value)
    found: Held = ranks[0]
    return found


@pytest.mark.parametrize(("train", "shard_optimizer"), [(resumed, False), (changed, True)])
def test_a_fused_optimizer_updates_as_another_does(
    train: Callable[[Path, bool], Held], shard_optimizer: bool, tmp_path: Path
) -> None:
    """It passes over parameter, gradient and state as they lie in memory, so these have to lie
    alike: what was summed, and what comes from a checkpoint or from other ranks.
    """
    fused = train(tmp_path, shard_optimizer)
    for name, value in by_another().items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)
