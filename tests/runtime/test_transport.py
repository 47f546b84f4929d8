"""One contract for both transports: the process-group class between processes, its twin between
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch import launch
from anabranch.runtime.failure import PeerLostError
from anabranch.runtime.transport import Hub, LocalTransport, ProcessGroupTransport, Transport

CPU = torch.device("cpu")
Scenario = Callable[[Transport, int], Any]


def in_threads(scenario: Scenario, num_ranks: int) -> list[Any]:
    hub = Hub(timeout=20.0)
    results: list[Any] = [None] * num_ranks

    def work(rank: int) -> None:
        results[rank] = scenario(LocalTransport(hub, rank), rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def in_processes(scenario: Scenario, num_ranks: int) -> list[Any]:
    def work() -> Any:
        return scenario(ProcessGroupTransport(dist.new_group(), timeout=20.0), dist.get_rank())

    return launch.run(work, num_ranks, timeout=30.0)


RUNNERS = [
    pytest.param(in_threads, id="local"),
    pytest.param(in_processes, id="process-group", marks=pytest.mark.dist),
]
Runner = Callable[[Scenario, int], list[Any]]


def receive(transport: Transport, like: Tensor, rank: int, tag: int = 0) -> Tensor:
    return transport.receive([(like.shape, like.dtype)], CPU, rank, tag).wait()[0]


@pytest.mark.parametrize("run", RUNNERS)
def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(run: Runner) -> None:
    """Sent 0 1 2 with tag 0 and 10 11 12 with tag 1; the receiver asks for tag 1 first."""

    def scenario(transport: Transport, rank: int) -> list[float]:
        one = torch.zeros(1)
        if rank == 0:
            for i in range(3):
                transport.send([one + i], 1, 0)
                transport.send([one + 10 + i], 1, 1)
            transport.flush()
            return []
        return [receive(transport, one, 0, tag).item() for tag in (1, 1, 1, 0, 0, 0)]

    assert run(scenario, 2)[1] == [10, 11, 12, 0, 1, 2]


@pytest.mark.parametrize("run", RUNNERS)
def test_any_element_type_and_any_shape(run: Runner) -> None:
    """Bits arrive as they were: booleans, integers, scalars, nothing at all, transposed memory."""
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([[2**40, -1]]),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(6.0).view(2, 3).t(),
    ]

    def scenario(transport: Transport, rank: int) -> bool:
        if rank == 0:
            for tensor in tensors:
                transport.send([tensor], 1, 0)
            transport.flush()
            return True
        arrived = [receive(transport, tensor, 0) for tensor in tensors]
        return all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if a.is_floating_point() else a.equal(b)
            for a, b in zip(arrived, tensors, strict=True)
        )

    assert run(scenario, 2) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_sending_never_waits(run: Runner) -> None:
    """Both send before either receives; with blocking sends neither would get to its receive."""

    def scenario(transport: Transport, rank: int) -> float:
        large = torch.full((200_000,), float(rank))
        for _ in range(4):
            transport.send([large], 1 - rank, 0)
        total = sum(receive(transport, large, 1 - rank)[0].item() for _ in range(4))
        transport.flush()
        return total

    assert run(scenario, 2) == [4.0, 0.0]


@pytest.mark.parametrize("run", RUNNERS)
def test_receives_posted_ahead_are_filled_in_order(run: Runner) -> None:
    def scenario(transport: Transport, rank: int) -> list[float]:
        if rank == 0:
            one = [(torch.Size([1]), torch.float32)]
            posted = [transport.receive(one, CPU, 1, 0) for _ in "123"]
            return [receipt.wait()[0].item() for receipt in posted]
        for i in range(3):
            transport.send([torch.tensor([float(i)])], 0, 0)
        transport.flush()
        return []

    assert run(scenario, 2)[0] == [0, 1, 2]


@pytest.mark.parametrize("run", RUNNERS)
def test_whoever_waits_for_a_rank_that_left_finds_out(run: Runner) -> None:
    """Rank 1 leaves without a word; its peer gets an error, not a wait."""

    def scenario(transport: Transport, rank: int) -> str:
        if rank == 1:
            transport.close()
            return ""
        with pytest.raises(PeerLostError) as caught:
            receive(transport, torch.zeros(3), 1)
        return str(caught.value)

    assert run(scenario, 2)[0] != ""


def test_the_twin_refuses_a_message_of_another_shape() -> None:
    """Where sockets would mix up bytes, the twin says what came."""

    def scenario(transport: Transport, rank: int) -> str:
        if rank == 0:
            transport.send([torch.zeros(2)], 1, 0)
            return ""
        with pytest.raises(ValueError, match=r"float32\[2\] came where torch.int64\[3\]"):
            receive(transport, torch.zeros(3, dtype=torch.int64), 0)
        return "refused"

    assert in_threads(scenario, 2)[1] == "refused"
