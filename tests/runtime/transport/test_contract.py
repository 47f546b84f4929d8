"""One contract for all transports: shared memory and Gloo between processes, the twin between
threads.
"""

import os
import signal

import pytest
import torch

from anabranch import launch
from anabranch.errors import StageFailedError
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport import Transport
from tests.runtime.transport.runners import (
    CPU,
    Runner,
    gloo_transport,
    host_transport,
    in_processes,
    in_threads,
    on_one_host,
    receive,
)

PROCESSES = [
    pytest.param(in_processes, id="process-group", marks=pytest.mark.dist),
    pytest.param(on_one_host, id="host", marks=pytest.mark.dist),
]
RUNNERS = [pytest.param(in_threads, id="local"), *PROCESSES]


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
def test_large_and_small_messages_keep_their_order(run: Runner) -> None:
    """They may travel in different ways; message i has i in all places."""
    sizes = [1, 300_000, 2, 0, 5_000, 300_000, 3]

    def scenario(transport: Transport, rank: int) -> list[bool]:
        if rank == 0:
            for i, size in enumerate(sizes):
                transport.send([torch.full((size,), float(i))], 1, 0)
            transport.flush()
            return []
        arrived = [receive(transport, torch.empty(size), 0) for size in sizes]
        return [tensor.tolist() == [i] * len(tensor) for i, tensor in enumerate(arrived)]

    assert run(scenario, 2)[1] == [True] * len(sizes)


TENSORS = [
    torch.tensor([True, False, True]),
    torch.tensor([[2**40, -1]]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.arange(200_000).view(2, -1).t()[::3],
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1.0, 2.0], requires_grad=True),
    torch.arange(12, dtype=torch.int16).view(3, 4)[:, 1:2].expand(3, 5),
]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with their types and shapes, and NaN where NaN is."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(
        *(x.nan_to_num(7) if x.is_floating_point() else x for x in (a, b))
    )


@pytest.mark.parametrize("run", RUNNERS)
def test_all_tensors_of_a_message_arrive(run: Runner) -> None:
    """As they were: booleans, integers, scalars, nothing at all, memory in another order, lazy
    conjugates, tensors of an autograd graph. In their order, each alone and small and large
    together, none the view of another: to change one in place must not look to autograd like a
    change of its neighbour.
    """
    many = [*TENSORS, torch.full((400_000,), 5.0), *TENSORS]
    few = [torch.tensor(1.0), torch.tensor([2.0, 3.0])]
    messages = [*([tensor] for tensor in TENSORS), few, many]

    def scenario(transport: Transport, rank: int) -> bool:
        if rank == 0:
            for tensors in messages:
                transport.send(tensors, 1, 0)
            transport.flush()
            return True
        for tensors in messages:
            specs = [(tensor.shape, tensor.dtype) for tensor in tensors]
            arrived = transport.receive(specs, CPU, 0, 0).wait()
            if not all(same(a, b) for a, b in zip(arrived, tensors, strict=True)):
                return False
            arrived[0].zero_()
            if any(tensor._version for tensor in arrived[1:]):
                return False
        return True

    assert run(scenario, 2) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_tensors_are_aligned_as_torch_aligns_them(run: Runner) -> None:
    """Kernels may give other bits for memory that is aligned otherwise."""
    tensors = [torch.ones(3, dtype=torch.int8), torch.ones(5), torch.ones(70_001), torch.ones(3)]

    def scenario(transport: Transport, rank: int) -> list[int]:
        if rank == 0:
            for count in range(1, 5):
                transport.send(tensors[:count], 1, 0)
            transport.flush()
            return []
        offsets = []
        for count in range(1, 5):
            specs = [(tensor.shape, tensor.dtype) for tensor in tensors[:count]]
            offsets += [t.data_ptr() % 64 for t in transport.receive(specs, CPU, 0, 0).wait()]
        return offsets

    assert run(scenario, 2)[1] == [0] * 10


@pytest.mark.parametrize("run", RUNNERS)
def test_sending_never_waits(run: Runner) -> None:
    """Both send before either receives, 64 MiB at last; with blocking sends neither would get to
    its receive.
    """

    def scenario(transport: Transport, rank: int) -> list[bool]:
        sizes = [200_000] * 4 + [1 << 24]
        for size in sizes:
            transport.send([torch.arange(size, dtype=torch.int32) + rank], 1 - rank, 0)
        arrived = []
        for size in sizes:
            expected = torch.arange(size, dtype=torch.int32) + 1 - rank
            arrived.append(torch.equal(receive(transport, expected, 1 - rank), expected))
        transport.flush()
        return arrived

    assert run(scenario, 2) == [[True] * 5] * 2


@pytest.mark.parametrize("run", RUNNERS)
def test_many_messages_may_be_on_their_way(run: Runner) -> None:
    """Before the first receive is posted, more than sockets hold."""
    count, size = 300, 300

    def scenario(transport: Transport, rank: int) -> bool:
        if rank == 0:
            for i in range(count):
                transport.send([torch.full((size,), i)], 1, 0)
            transport.send([torch.ones(1)], 1, 1)
            receive(transport, torch.ones(1), 1, 2)
            transport.flush()
            return True
        receive(transport, torch.ones(1), 0, 1)
        like = torch.zeros(size, dtype=torch.int64)
        right = all(receive(transport, like, 0).tolist() == [i] * size for i in range(count))
        transport.send([torch.ones(1)], 0, 2)
        transport.flush()
        return right

    assert run(scenario, 2) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_receives_posted_ahead_are_filled_in_the_order_of_posting(run: Runner) -> None:
    """Whatever the order in which they are waited for: here the last one comes first."""
    # The twin moves a message only when somebody waits for it.
    order = [0, 1, 2] if run is in_threads else [2, 0, 1]

    def scenario(transport: Transport, rank: int) -> list[float]:
        arrived = []
        for size in (1, 300_000):
            if rank == 0:
                spec = [(torch.Size([size]), torch.float32)]
                posted = [transport.receive(spec, CPU, 1, 0) for _ in "123"]
                arrived += [posted[i].wait()[0][0].item() for i in order]
            else:
                for i in range(3):
                    transport.send([torch.full((size,), float(i))], 0, 0)
                transport.flush()
        return arrived

    assert run(scenario, 2)[0] == order * 2


@pytest.mark.parametrize("run", RUNNERS)
def test_what_has_arrived_is_the_receivers(run: Runner) -> None:
    """It may write there, and keep it while more arrives; the sender may change its own tensor as
    soon as everything has been received.
    """

    def scenario(transport: Transport, rank: int) -> list[float]:
        if rank == 0:
            tensor = torch.zeros(100_000)
            for i in range(4):
                transport.send([tensor.fill_(i)], 1, 0)
                receive(transport, torch.zeros(1), 1, 1)
            transport.flush()
            return []
        kept = []
        for _ in range(4):
            kept.append(receive(transport, torch.zeros(100_000), 0).mul_(10))
            transport.send([torch.zeros(1)], 0, 1)
        transport.flush()
        return [tensor.mean().item() for tensor in kept]

    assert run(scenario, 2)[1] == [0, 10, 20, 30]


@pytest.mark.parametrize("run", RUNNERS)
def test_what_was_flushed_arrives_though_its_sender_is_gone(run: Runner) -> None:
    """A rank may end as soon as it has flushed."""
    sizes = [1, 100_000, 10]

    def scenario(transport: Transport, rank: int) -> list[int]:
        posted = [
            transport.receive([(torch.Size([size]), torch.float32)], CPU, 1 - rank, 0)
            for size in sizes
        ]
        if rank == 0:
            for size in sizes:
                transport.send([torch.ones(size)], 1, 0)
            transport.flush()
            return []
        return [int(receipt.wait()[0].sum()) for receipt in posted]

    assert run(scenario, 2)[1] == sizes


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


@pytest.mark.parametrize("run", [RUNNERS[2]])
def test_whoever_has_left_cannot_send(run: Runner) -> None:
    """Its descriptors may be those of other files by now."""

    def scenario(transport: Transport, rank: int) -> bool:
        transport.close()
        with pytest.raises(PeerLostError):
            transport.send([torch.zeros(100_000)], 1 - rank, 0)
        with pytest.raises(PeerLostError):
            receive(transport, torch.zeros(1), 1 - rank)
        return True

    assert run(scenario, 2) == [True, True]


@pytest.mark.parametrize("run", PROCESSES)
@pytest.mark.parametrize("waiting", [False, True])
def test_whoever_needs_a_rank_that_was_killed_finds_out(run: Runner, waiting: bool) -> None:
    """In a receive, and in a send or what follows it; the run names the rank that was killed."""

    def need(transport: Transport) -> None:
        while not waiting:
            transport.send([torch.zeros(1000)], 1, 0)
            transport.flush()
        receive(transport, torch.zeros(3), 1)

    def scenario(transport: Transport, rank: int) -> None:
        if rank == 1:
            receive(transport, torch.zeros(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        transport.send([torch.zeros(1)], 1, 0)
        with pytest.raises(PeerLostError) as caught:
            need(transport)
        raise caught.value

    with pytest.raises(StageFailedError, match="rank 1 was killed by signal 9"):
        run(scenario, 2)


@pytest.mark.parametrize("run", PROCESSES)
def test_silence_ends(run: Runner) -> None:
    """A rank that is alive but does not send counts as lost after the timeout."""

    def work() -> bool:
        transport = (host_transport if run is on_one_host else gloo_transport)(timeout=0.2)
        if torch.distributed.get_rank() == 0:
            with pytest.raises(PeerLostError):
                receive(transport, torch.zeros(3), 1)
        torch.distributed.barrier()
        return True

    assert launch.run(work, 2, timeout=30.0) == [True, True]


@pytest.mark.parametrize("run", [RUNNERS[0], RUNNERS[2]])
def test_a_message_of_another_shape_is_refused(run: Runner) -> None:
    """Same bytes or not: what was sent and what was expected is told."""

    def scenario(transport: Transport, rank: int) -> list[str]:
        if rank == 0:
            for shape in ([2], [2, 3], [100_000]):
                transport.send([torch.zeros(shape)], 1, 0)
            return []
        refused = []
        for shape in ([3], [3, 2], [99_999]):
            with pytest.raises(ValueError, match="came where") as caught:
                receive(transport, torch.zeros(shape), 0)
            refused.append(str(caught.value).partition("came where ")[2])
        return refused

    texts = run(scenario, 2)[1]
    for text, expected in zip(texts, ("[3]", "[3, 2]", "[99999]"), strict=True):
        assert f"torch.float32{expected}" in text


@pytest.mark.parametrize("run", RUNNERS)
def test_four_ranks_talk_to_each_other(run: Runner) -> None:
    """Each sends its rank to all the others, small and large, and receives in another order."""

    def scenario(transport: Transport, rank: int) -> list[int]:
        others = [r for r in range(4) if r != rank]
        for size in (1, 100_000):
            for other in others:
                transport.send([torch.full((size,), float(rank))], other, size)
        heard = [
            int(receive(transport, torch.zeros(size), other, size)[-1].item())
            for size in (100_000, 1)
            for other in reversed(others)
        ]
        transport.flush()
        return heard

    assert run(scenario, 4)[2] == [3, 1, 0, 3, 1, 0]
