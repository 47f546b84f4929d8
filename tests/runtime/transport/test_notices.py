"""Notices between ranks of one host and of several."""

import os
import signal

import pytest
import torch.distributed as dist

from anabranch import launch
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport.handshake import Handshake
from anabranch.runtime.transport.notices import HostNotices, Notice, Word
from tests.runtime.transport.runners import gloo_transport, host_transport

pytestmark = pytest.mark.dist


def notices(kind: str) -> HostNotices:
    """Of this rank: to all others through shared memory, through Gloo, or to rank 2 alone through
    Gloo.
    """
    near = host_transport() if kind != "far" else None
    far = gloo_transport() if kind != "near" else None
    if kind == "both":
        near.otherwise = far
        for other in range(3) if dist.get_rank() == 2 else [2]:
            near._lines.pop(other, None)
    return HostNotices(near, far)


@pytest.mark.parametrize("kind", ["near", "far", "both"])
def test_all_ranks_hear_each_other_in_order(kind: str) -> None:
    """Whether they wait for something or only look."""

    def work() -> list[list[int]]:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = notices(kind)
        for number in range(5):
            for other in range(size):
                if other != rank:
                    mine.tell(other, Notice(rank, Word.BEGUN, 10 * rank + number, True))
        heard: list[Notice] = []
        while len(heard) < 5 * (size - 1):
            heard += mine.heard(0.5)
        assert mine.heard() == []
        assert all(notice.word is Word.BEGUN and notice.from_sender for notice in heard)
        dist.barrier()
        return [[n.number for n in heard if n.rank == other] for other in range(size)]

    expected = [[10 * other + i for i in range(5)] for other in range(3)]
    for rank, heard in enumerate(launch.run(work, 3, timeout=60.0)):
        assert heard == [[] if other == rank else expected[other] for other in range(3)]


@pytest.mark.parametrize("kind", ["near", "far"])
def test_a_meeting_waits_for_all(kind: str) -> None:
    """Of two sets of ranks one after the other, in one order everywhere."""

    def work() -> None:
        rank = dist.get_rank()
        handshake = Handshake(rank, notices(kind), 20.0)
        handshake.progress()
        for number, ranks in enumerate([(0, 1), (0, 1, 2)]):
            if rank in ranks:
                with handshake.meeting(ranks, number):
                    pass
        dist.barrier()

    assert len(launch.run(work, 3, timeout=60.0)) == 3


def test_a_rank_that_ended_is_noticed() -> None:
    """Who waits for a notice on the same host hears of it at once."""

    def work() -> str:
        mine = notices("near")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                mine.heard(20.0, [1])
        except PeerLostError as error:
            raise ValueError(f"heard of it: {error}") from None

    with pytest.raises(Exception, match=r"heard of it: .* rank 1 broke|rank 1 .*killed"):
        launch.run(work, 2, timeout=60.0)
