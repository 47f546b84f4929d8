"""Notices between ranks: on one host through shared memory, between hosts through Gloo.

Gloo delivers a message only to a receive that waits for it, so a thread waits for notices of other
hosts, from any rank, and wakes the caller that waits here.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport.base import lost
from anabranch.runtime.transport.host import HostTransport
from anabranch.runtime.transport.process_group import ProcessGroupTransport

_TAG = 1 << 30
"""Tag of notices, beside other messages of a transport."""

_RECORD = struct.Struct("<qqq")


class Word(IntEnum):
    """Meaning of a notice."""

    AVAILABLE = 0
    BEGUN = 1
    CLOSED = 2
    HERE = 3


class Notice(NamedTuple):
    """A few numbers of one rank for another: ``number`` is a tag, or the number of a rank set."""

    rank: int
    word: Word
    number: int
    from_sender: bool = False


class HostNotices:
    """Notices through the transports of the host; those of one rank arrive in the order in which
    they were sent.

    Args:
        near: transport to ranks of this host, and through ``far`` to others; None without any.
        far: transport to ranks of other hosts, for notices alone; None without any.
    """

    def __init__(self, near: HostTransport | None, far: ProcessGroupTransport | None) -> None:
        self._near, self._far = near, far
        self._from_far: queue.SimpleQueue[Notice | BaseException] = queue.SimpleQueue()
        if far is not None:
            threading.Thread(target=self._listen, name="anabranch notices", daemon=True).start()

    def tell(self, rank: int, notice: Notice) -> None:
        """Send a notice to another rank, without waiting; ``notice.rank`` is this one's."""
        packed = _RECORD.pack(notice.word, notice.number, notice.from_sender)
        message = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        transport = self._near or self._far
        assert transport is not None
        transport.send([message], rank, _TAG)

    def heard(self, wait_s: float = 0.0, ranks: Collection[int] = ()) -> list[Notice]:
        """Return the notices that have come; wait up to ``wait_s`` for one.

        Raises:
            PeerLostError: if nothing has come and one of ``ranks`` has ended.
        """
        deadline = time.monotonic() + wait_s
        while True:
            notices = self._heard_far(0.0 if self._near is not None else wait_s)
            if self._near is not None:
                # Where notices come in both ways, each is looked at every millisecond.
                near_s = wait_s if self._far is None else min(wait_s, 1e-3)
                arrived = self._near.arrivals(_TAG, 0.0 if notices else near_s, ranks)
                notices += [_notice(rank, bytes(data)) for rank, data in arrived]
            if notices or time.monotonic() >= deadline:
                return notices

    def close(self) -> None:
        if (transport := self._near or self._far) is not None:
            transport.close()

    def _heard_far(self, wait_s: float) -> list[Notice]:
        notices: list[Notice] = []
        while self._far is not None:
            try:
                notice = self._from_far.get(wait_s > 0 and not notices, wait_s or None)
            except queue.Empty:
                break
            if isinstance(notice, BaseException):
                self._from_far.put(notice)  # for the next call
                if notices:
                    break
                raise notice
            notices.append(notice)
        return notices

    def _listen(self) -> None:
        assert self._far is not None
        group = self._far.group
        try:
            while True:
                data = torch.empty(_RECORD.size, dtype=torch.uint8)
                rank = dist.recv(data, None, group=group, tag=_TAG)
                self._from_far.put(_notice(rank, data.numpy().tobytes()))
        except RuntimeError as error:
            self._from_far.put(lost(error))
        except (ValueError, TypeError):
            self._from_far.put(PeerLostError("this rank has broken its connections"))


def _notice(rank: int, packed: bytes) -> Notice:
    word, number, from_sender = _RECORD.unpack(packed)
    return Notice(rank, Word(word), number, bool(from_sender))
