"""What GPUs would be given, on real ranks: the transport and the sums of GPUs, over Gloo.

Everything is as between GPUs but what NCCL and streams do: notices, who begins, buffers, sums that
wait for all hosts, waits of hosts in which they do what others wait for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch import launch
from anabranch.errors import StageFailedError
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks import mesh as meshes
from anabranch.runtime.transport import NcclTransport
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.small import Built, batch, built, num_ranks, plan, with_programs
from tests.runtime.training import LIMIT_S, begin_again

pytestmark = pytest.mark.dist


class GlooWire:
    """A ``GpuWire`` whose communicators are groups of Gloo."""

    def __init__(self, groups: Any, rank: int, device: torch.device) -> None:
        self._groups, self._rank = groups, rank

    def connect(self) -> None: ...

    def start(self, pair: Any, tensors: Sequence[Tensor], after: Any) -> list[Any]:
        sends, group = pair[0] == self._rank, self._groups[pair]
        operation: Any = dist.isend if sends else dist.irecv
        return [operation(tensor, pair[sends], group=group) for tensor in tensors]

    def join(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()

    def fence(self) -> Any:
        return None


class NoStreams:
    """``DeviceStreams`` of the CPU."""

    def __init__(self, device: torch.device) -> None: ...

    def fence(self) -> None: ...

    def start(self, ranks: tuple[int, ...], after: Any, call: Callable[[], Any]) -> Any:
        return call()


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Every rank takes its CPU for a GPU of its own."""
    new_group = dist.new_group

    def on_gloo(members: Sequence[int], **options: Any) -> Any:
        return new_group(members, **{**options, "backend": "gloo"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "choose_backend", lambda seen: "nccl")
        patch.setattr(meshes, "GpuWire", GlooWire)
        patch.setattr(meshes, "DeviceStreams", NoStreams)
        patch.setattr(dist, "new_group", on_gloo)
        gpu = SimpleNamespace(
            is_on_accelerator=lambda device: True, has_collectives=lambda device: True
        )
        patch.setattr(meshes, "accelerator", gpu)
        yield


def numbers(pipeline: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps of all kinds, and the parameters that this rank then has."""
    losses = list(pipeline.steps(batch(8, seed) for seed in range(4)))
    losses += [pipeline.step(batch(6, 5)), pipeline.evaluate([batch(8), batch(7)])["loss"]]
    losses += list(pipeline.steps(batch(8, seed) for seed in range(3)))
    return losses, {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}


Run = tuple[Callable[[], Any], int, Built]
"""A function that makes a pipeline, the number of its ranks, and its model."""


def synchronous(model: Built, chosen: Plan, **options: Any) -> Run:
    options = {"captured": model.captured, "timeout": 20.0} | options
    return partial(Pipeline, model.workload, chosen, **options), num_ranks(chosen), model


def asynchronous(model: Built, chosen: Plan, **options: Any) -> Run:
    return partial(built_pipeline, model, chosen, **options), num_ranks(chosen), model


@pytest.mark.parametrize(
    "case",
    ["stages", "replicas", "shared state", "exact", "asynchronous", "in turn", "replicas, async"],
)
def test_training_is_bitwise_that_of_other_transports(case: str) -> None:
    """Whoever begins: losses and parameters of all ranks."""
    two, tied = (
        with_programs(built(name), 1, 2, 3, 4, 6, 7, 8, evaluation=True)
        for name in ("TwoBranch", "Tied")
    )
    replicated = plan(tied, 2, batch_size=8, microbatch_size=2, replicas=[2, 1])
    make, ranks, model = {
        "stages": lambda: synchronous(two, plan(two, 3, batch_size=8, microbatch_size=2)),
        "replicas": lambda: synchronous(tied, replicated),
        "shared state": lambda: synchronous(tied, replicated, shard_optimizer=True),
        "exact": lambda: synchronous(tied, plan(tied, 2, batch_size=8), exact=True),
        "asynchronous": lambda: asynchronous(two, async_plan(two, 3)),
        "in turn": lambda: asynchronous(two, async_plan(two, 2, replicas=[2, 1]), round_robin=True),
        "replicas, async": lambda: asynchronous(two, async_plan(two, 2, replicas=[1, 2])),
    }[case]()
    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def rank() -> Any:
        theirs = numbers(make())
        begin_again(model.module, start)
        with as_on_gpus():
            pipeline = make()
            assert isinstance(pipeline._session.transport, NcclTransport)
            return numbers(pipeline), theirs

    for mine, theirs in launch.run(rank, ranks, timeout=LIMIT_S):
        assert mine[0] == theirs[0]
        assert mine[1].keys() == theirs[1].keys()
        assert all(torch.equal(mine[1][name], theirs[1][name]) for name in mine[1])


def test_messages_take_the_memory_that_the_plan_counts() -> None:
    """Per channel as many buffers as micro-batches hold a message at once, and one that is posted:
    in flight and one forward, two backward. They are made in the first step.
    """
    model = built("TwoBranch")
    make, ranks, _ = synchronous(model, chosen := plan(model, 3, batch_size=12, microbatch_size=2))

    def rank() -> list[dict[Any, int]]:
        with as_on_gpus():
            pipeline = make()
            pools = pipeline._session.transport.buffers._pools
            counts = []
            for batches in ([batch(12)], [batch(12, 1), batch(5), batch(12, 2)]):
                for size in batches:
                    pipeline.step(size)
                counts.append({channel: len(pool) for (channel, _), pool in pools.items()})
                pipeline.evaluate([batch(12), batch(3)])
            return counts

    stages = chosen.stage_graph.stages
    counts = launch.run(rank, ranks, timeout=LIMIT_S)
    assert all(first for first, _ in counts)
    for number, (first, later) in enumerate(counts):
        assert first == later
        for channel, count in first.items():
            forward = channel.sender < channel.receiver
            assert count <= (stages[number].in_flight + 1 if forward else 2)


@pytest.mark.parametrize("error", ["a fault of the model", "CUDA out of memory. Tried 2.00 GiB"])
def test_a_rank_that_fails_ends_all(error: str) -> None:
    """Also by an allocation, at any place: the others hear of it, wherever they wait."""
    model = built("TwoBranch")
    make, ranks, _ = synchronous(model, plan(model, 3, batch_size=8, microbatch_size=2))

    def rank() -> None:
        with as_on_gpus():
            pipeline = make()
            pipeline.step(batch(8))
            if dist.get_rank() == 1:

                def fail(*_: Any) -> None:
                    raise torch.OutOfMemoryError(error)

                pipeline._session.workers.worker(8).compute.backward = fail
            for seed in range(3):
                pipeline.step(batch(8, seed))

    with pytest.raises(StageFailedError, match=rf"rank 1 failed .* stage 1, .*{error}"):
        launch.run(rank, ranks, timeout=LIMIT_S)
