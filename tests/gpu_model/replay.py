"""Recorded programs of all ranks on the model."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.ranks.collectives import Pending
from tests.gpu_model.gpu import World
from tests.gpu_model.orders import CPU, SPECS, Post, Rank
from tests.gpu_model.recording import Event

Programs = Sequence[Sequence[Event]]
"""Of each rank."""


class _HostSums:
    """Sums between hosts, which end when all have begun them."""

    def __init__(self) -> None:
        self.begun: defaultdict[int, int] = defaultdict(int)


class _HostWork:
    """One of them, of a rank."""

    def __init__(self, sums: _HostSums, rank: Rank, number: int) -> None:
        self._sums, self._rank, self._number = sums, rank, number
        sums.begun[number] += 1

    def is_completed(self) -> bool:
        return self._sums.begun[self._number] == len(self._rank.world.hosts)

    def wait(self) -> None:
        self._rank.world.wait(self._rank.rank, self.is_completed, "a sum of the hosts")


def replay(
    programs: Programs, *, order: str = "", user_waits: bool = False, **options: Any
) -> None:
    """Run the programs of all ranks on GPUs of the model; see ``World``.

    Args:
        order: of posting; by default the runtime's.
        user_waits: hosts wait for each other, outside of the runtime, when they have settled.

    Raises:
        HangError: if no host and no device can go on.
        RaceError: if two accesses to memory have no order.
    """
    world, post, sums = World(len(programs), **options), Post, _HostSums()
    ranked = enumerate(programs)
    pairs = sorted({(rank, e[1]) for rank, events in ranked for e in events if e[0] == "send"})
    sets = sorted({e[2] for events in programs for e in events if e[0] == "start" and e[2]})
    letters = post(world)
    ranks = [Rank(world, rank, letters, pairs, sets, order) for rank in range(len(programs))]
    runs = zip(ranks, programs, strict=True)
    world.run([partial(_run, rank, events, sums, user_waits) for rank, events in runs])


def _run(rank: Rank, events: Sequence[Event], host_sums: _HostSums, user_waits: bool) -> None:
    transport, wire, world = rank.transport, rank.wire, rank.world
    posted: dict[int, tuple[Any, int]] = {}
    held: dict[int, tuple[Tensor, Hashable]] = {}
    pending: dict[int, Pending] = {}
    sent, received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    num_host_sums = 0

    def receive(number: int, peer: int, tag: int) -> None:
        world.call(rank.rank, "a receive")
        received[peer, tag] += 1
        receipt = transport.receive(SPECS, CPU, peer, tag)
        posted[number] = receipt, _identity(peer, tag, received[peer, tag])

    def take(number: int) -> None:
        receipt, identity = posted.pop(number)
        (tensor,) = receipt.wait()
        held[number] = tensor, identity

    def send(peer: int, tag: int) -> None:
        world.call(rank.rank, "a send")
        sent[peer, tag] += 1
        identity = _identity(rank.rank, tag, sent[peer, tag])
        transport.send([torch.tensor([float(identity)])], peer, tag)

    def start(number: int, ranks: tuple[int, ...] | None, name: str) -> None:
        nonlocal num_host_sums
        if ranks is not None:
            pending[number] = rank.sums.add(ranks, torch.zeros(1), lambda: None)
            return
        work: Any = _HostWork(host_sums, rank, num_host_sums)
        num_host_sums += 1

        def progress(wait_s: float) -> None:
            rank.handshake.progress()
            ready = lambda: work.is_completed() or rank.letters  # noqa: E731
            world.wait(rank.rank, ready, "a sum of the hosts")

        pending[number] = Pending(torch.zeros(1), work, progress=progress)

    def settle() -> None:
        nonlocal num_host_sums
        transport.settle()
        if user_waits:  # nobody looks for notices meanwhile
            work = _HostWork(host_sums, rank, num_host_sums)
            num_host_sums += 1
            world.wait(rank.rank, work.is_completed, "a barrier of the user's")

    def compute(name: str) -> None:
        wire.compute(name, list(held.values()))

    does: dict[str, Callable[..., object]] = {
        "receive": receive,
        "take": take,
        "drop": lambda number: held.pop(number, None),
        "send": send,
        "settle": settle,
        "flush": lambda: None,
        "compute": compute,
        "start": start,
        "finish": lambda number: pending.pop(number).wait() if number in pending else None,
        "begin sums": rank.sums.begin,
        "look": lambda: world.synchronize(rank.rank),
    }
    for name, *arguments in events:
        does[name](*arguments)


def _identity(sender: int, tag: int, number: int) -> int:
    """Number of a message among those of all channels, which a float can hold."""
    return (sender * 64 + tag) * 1000 + number
