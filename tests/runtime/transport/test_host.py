"""What only messages through shared memory have: memory that two processes share."""

import contextlib
import gc
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport import HostTransport, ProcessGroupTransport, meet, meeting
from tests.runtime.transport.runners import (
    CPU,
    exchange,
    host_transport,
    mesh_of_all,
    on_one_host,
    receive,
    used_bytes,
)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's"),
]
MIB = 1 << 20


def test_memory_stays_at_what_is_on_its_way() -> None:
    """200 messages of 1 MiB, four of them at a time, take a little more than 4 MiB; pages for
    flags and log are less than another.
    """

    def scenario(transport: HostTransport, rank: int) -> int:
        large = torch.ones(MIB // 4)
        for i in range(50):
            if rank == 0:
                for _ in range(4):
                    transport.send([large], 1, 0)
                receive(transport, torch.zeros(1), 1, 1)
            else:
                kept = [receive(transport, large, 0) for _ in range(4)]
                assert sum(tensor[i].item() for tensor in kept) == 4
                del kept
                transport.send([torch.zeros(1)], 0, 1)
        return used_bytes(transport._segment)

    used, used_by_other = on_one_host(scenario, 2)
    assert 4 * MIB < used < 5 * MIB
    assert used_by_other < MIB


def test_small_messages_do_not_pile_up() -> None:
    """2,000 of 4 KiB are 8 MiB; the log goes round in a few blocks."""

    def scenario(transport: HostTransport, rank: int) -> int:
        small = torch.ones(1024)
        for _ in range(100):
            if rank == 0:
                for _ in range(20):
                    transport.send([small], 1, 0)
                receive(transport, torch.zeros(1), 1, 1)
            else:
                for _ in range(20):
                    receive(transport, small, 0)
                transport.send([torch.zeros(1)], 0, 1)
        return used_bytes(transport._segment)

    assert max(on_one_host(scenario, 2)) < MIB


def test_memory_is_held_for_as_long_as_any_view_of_it() -> None:
    """Rank 1 keeps one row of every message; none of the blocks may be reused. When the rows are
    gone, all are.
    """

    def scenario(transport: HostTransport, rank: int) -> list[float]:
        if rank == 0:
            for i in range(20):
                transport.send([torch.full((1000, 64), float(i))], 1, 0)
                receive(transport, torch.zeros(1), 1, 1)
            return [float(used_bytes(transport._segment))]
        rows = []
        for i in range(20):
            rows.append(receive(transport, torch.zeros(1000, 64), 0)[i].detach())
            if i == 9:
                kept = [row.mean().item() for row in rows]
                rows.clear()
            transport.send([torch.zeros(1)], 0, 1)
        return kept + [row.mean().item() for row in rows]

    (used,), kept = on_one_host(scenario, 2)
    assert kept == list(range(20))
    # Ten of 256,000 bytes are held at a time, in whole pages.
    assert 10 * 256_000 < used < 11 * 262_144 + 300_000


def test_autograd_holds_memory_too() -> None:
    """A tensor that only the graph knows is still there when the gradient is computed."""

    def scenario(transport: HostTransport, rank: int) -> float:
        if rank == 0:
            for i in range(3):
                transport.send([torch.full((100_000,), float(i))], 1, 0)
                receive(transport, torch.zeros(1), 1, 1)
            return 0.0
        weight = torch.ones(100_000, requires_grad=True)
        total = torch.zeros(())
        for _ in range(3):
            total = total + (weight * receive(transport, weight, 0)).sum()
            gc.collect()
            transport.send([torch.zeros(1)], 0, 1)
        total.backward()
        assert weight.grad is not None
        return weight.grad.mean().item()

    assert on_one_host(scenario, 2)[1] == 0 + 1 + 2


def test_tensors_outlive_the_transport() -> None:
    """What has arrived stays when both ends have closed, and rank 0 is gone."""

    def scenario(transport: HostTransport, rank: int) -> float:
        if rank == 0:
            transport.send([torch.full((100_000,), 3.0)], 1, 0)
            transport.close()
            return 0.0
        arrived = receive(transport, torch.zeros(100_000), 0)
        with pytest.raises(PeerLostError):
            receive(transport, torch.zeros(1), 0)
        transport.close()
        del transport
        gc.collect()
        return arrived.mul_(2).mean().item()

    assert on_one_host(scenario, 2)[1] == 6.0


def test_a_receiver_that_is_done_and_gone_is_no_failure_of_the_sender() -> None:
    """It may leave between the message, which it read, and the event that was to wake it."""

    def scenario(transport: HostTransport, rank: int) -> bool:
        if rank == 1:
            transport.close()
            dist.barrier()
            return True
        dist.barrier()
        transport.send([torch.zeros(1)], 1, 0)
        with pytest.raises(PeerLostError):
            receive(transport, torch.zeros(1), 1)
        return True

    assert on_one_host(scenario, 2) == [True, True]


def test_a_fork_of_a_rank_disturbs_nothing() -> None:
    """As a data loader makes them. The child drops what its parent has received, and it holds the
    connection; neither reaches rank 0: the memory stays taken, and the parent's end is noticed.
    """

    def scenario(transport: HostTransport, rank: int) -> list[float]:
        if rank == 0:
            transport.send([torch.full((100_000,), 1.0)], 1, 0)
            receive(transport, torch.zeros(1), 1, 1)
            transport.send([torch.full((100_000,), 2.0)], 1, 0)
            with pytest.raises(PeerLostError):
                receive(transport, torch.zeros(1), 1, 1)
            return []
        first = receive(transport, torch.zeros(100_000), 0)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            del first
            gc.collect()
            os.read(ours, 1)  # until the parent has gone on
            os._exit(0)
        transport.send([torch.zeros(1)], 0, 1)
        second = receive(transport, torch.zeros(100_000), 0)
        means = [first.mean().item(), second.mean().item()]
        for line in transport._lines.values():
            line.peer.socket.close()  # as the kernel does when this process dies
        dist.barrier()
        os.write(theirs, b"-")
        os.waitpid(child, 0)
        return means

    def synchronised(transport: HostTransport, rank: int) -> list[float]:
        result = scenario(transport, rank)
        if rank == 0:
            dist.barrier()
        return result

    assert on_one_host(synchronised, 2)[1] == [1.0, 2.0]


def test_two_transports_of_one_process_are_apart() -> None:
    """Equal tags do not meet."""

    def work() -> list[float]:
        first, second = host_transport(), host_transport()
        if dist.get_rank() == 0:
            first.send([torch.tensor([1.0])], 1, 0)
            second.send([torch.tensor([2.0])], 1, 0)
            return []
        return [receive(t, torch.zeros(1), 0).item() for t in (second, first)]

    assert launch.run(work, 2, timeout=30.0)[1] == [2.0, 1.0]


def test_a_mesh_of_one_host_has_no_sockets_for_data() -> None:
    """All pairs share memory, so nothing else is connected."""

    def work() -> str:
        return type(mesh_of_all().transport()).__name__

    assert launch.run(work, 3, timeout=30.0) == ["HostTransport"] * 3


def test_ranks_of_other_hosts_are_reached_through_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 say they are on one host, rank 2 on another; all pairs deliver."""
    monkeypatch.setattr(meeting, "_host_digest", lambda: bytes([1 + dist.get_rank() // 2]) * 32)
    assert launch.run(_all_to_all, 3, timeout=30.0) == [
        (["HostTransport", "ProcessGroupTransport"], [10, 20]),
        (["HostTransport", "ProcessGroupTransport"], [1, 21]),
        (["ProcessGroupTransport"], [2, 12]),
    ]


def test_a_rank_without_shared_memory_is_reached_through_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 may not make such files; rank 0 and rank 2 still share memory."""
    real = os.memfd_create

    def refused(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise PermissionError("memfd_create")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", refused)
    names = [names for names, _ in launch.run(_all_to_all, 3, timeout=30.0)]
    assert names == [
        ["ProcessGroupTransport", "HostTransport"],
        ["ProcessGroupTransport"],
        ["HostTransport", "ProcessGroupTransport"],
    ]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("function", ["_hear_hello", "_say_hello"])
def test_a_connection_that_one_end_lacks_is_used_by_neither(
    monkeypatch: pytest.MonkeyPatch, function: str, failing: int
) -> None:
    """A rank runs out of descriptors at the lower or at the upper end of its connections; the
    others stay connected. Nobody keeps what is not used: of each peer there are two events, a
    socket and a segment, and whoever has a peer has a segment.
    """

    def fail(*_: object) -> None:
        raise OSError("no descriptors")

    def work() -> tuple[list[int], Counter[str]]:
        if dist.get_rank() == failing:
            monkeypatch.setattr(meeting, function, fail)
        exchange(b"-")
        before = _descriptors()
        _segment, peers = meet(dist.get_rank(), exchange)
        return sorted(peers), _descriptors() - before

    lists = [[r for r in range(3) if r != rank and failing not in (r, rank)] for rank in range(3)]
    expected = [
        (
            peers,
            Counter(events=2 * len(peers), sockets=len(peers), segments=bool(peers) + len(peers)),
        )
        for peers in lists
    ]
    assert launch.run(work, 3, timeout=30.0) == expected


def _descriptors() -> Counter[str]:
    """What this process has open: a segment counts once, however often it is mapped, and of sockets
    those within this host, since Gloo opens its own when it likes.
    """
    found: Counter[str] = Counter()
    segments = set()
    within = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            leads_to = os.readlink(f"/proc/self/fd/{file}")
            found["events"] += "eventfd" in leads_to
            found["sockets"] += leads_to.removeprefix("socket:[").removesuffix("]") in within
            if "memfd" in leads_to:
                segments.add(os.stat(int(file)).st_ino)
    found["segments"] = len(segments)
    return found


def _all_to_all() -> tuple[list[str], list[int]]:
    """How each rank in order is reached from this one, and what it sent: 10 r + s from r to s."""
    transport = mesh_of_all().transport()
    assert transport is not None
    rank = dist.get_rank()
    others = [other for other in range(3) if other != rank]
    for other in others:
        for size in (1, 100_000):
            transport.send([torch.full((size,), 10 * rank + other)], other, 0)
    heard = []
    for other in others:
        for size in (1, 100_000):
            spec = [(torch.Size([size]), torch.int64)]
            number = int(transport.receive(spec, CPU, other, 0).wait()[0][-1])
        heard.append(number)
    transport.flush()
    if isinstance(transport, ProcessGroupTransport) or transport.otherwise is None:
        assert isinstance(transport, HostTransport | ProcessGroupTransport)
        return [type(transport).__name__], heard
    routes = [transport if other in transport._lines else transport.otherwise for other in others]
    return [type(route).__name__ for route in routes], heard
