"""The order in which ranks give their devices the halves of what they do together.

A send is a kernel that spins until the other device has the receive, and the other way round. Any
call of a host may wait for all that its device has: a kernel that is loaded, memory that is
allocated or freed. Two hosts that wait in this way for what the other one has not given its device
yet wait for ever. So what waits for another device is given in one direction only:

- The lower rank gives its half first, and only when the higher one has said that its own can follow
  whenever it looks: a receive has its buffer, a send its tensors.
- The higher rank gives its half where it looks next, in whatever call, or while it waits.

::

    lower     receive posted -------- "available" heard: receive to the device -- "begun"
    higher    tensors made ---------- "available"                       "begun" heard: send

Thus the device of the highest rank always comes to an end, then that of the one below it. Notices
travel on the host. Halves of one pair of ranks and direction begin in one order on both.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Channel


class Word(IntEnum):
    """What a notice says."""

    AVAILABLE = 0
    BEGUN = 1
    HERE = 2


class Notice(NamedTuple):
    """A few numbers of one rank for another: ``number`` is a tag, or that of a set of ranks."""

    rank: int
    word: Word
    number: int
    from_sender: bool = False


class Notices(Protocol):
    """Notices to and from other ranks; those of one rank come in the order of their telling."""

    def tell(self, rank: int, notice: Notice) -> None:
        """Tell another rank, without waiting; ``notice.rank`` is this one's."""
        ...

    def heard(self, wait_s: float = 0.0) -> list[Notice]:
        """Return what has come; wait for something if ``wait_s`` is not 0.

        Raises:
            PeerLostError: if a rank has ended and nothing has come.
        """
        ...


@dataclass(slots=True)
class _Line:
    """Halves of a channel that the device has not been given, and how many the higher rank has
    said to be available.
    """

    halves: deque[Callable[[], None]] = field(default_factory=deque)
    available: int = 0


class Handshake:
    """One rank's part."""

    def __init__(self, rank: int, notices: Notices, timeout: float) -> None:
        self._rank, self._notices, self._timeout = rank, notices, timeout
        self._lines: defaultdict[Channel, _Line] = defaultdict(_Line)
        self._here: Counter[tuple[int, int]] = Counter()
        self._meetings: Counter[int] = Counter()

    def offer(self, channel: Channel, half: Callable[[], None]) -> None:
        """Have this rank's half of a channel's next message given to the device, now or later."""
        self._lines[channel].halves.append(half)
        if self._rank > self._peer(channel):
            self._tell(channel, Word.AVAILABLE)
        else:
            self._begin(channel)
        self.progress()

    def progress(self, wait_s: float = 0.0) -> None:
        """Do what other ranks wait for."""
        for notice in self._notices.heard(wait_s):
            if notice.word is Word.HERE:
                self._here[notice.rank, notice.number] += 1
                continue
            ends = (self._rank, notice.rank)
            sender, receiver = ends[::-1] if notice.from_sender else ends
            channel = Channel(sender, receiver, notice.number)
            if notice.word is Word.BEGUN:
                self._lines[channel].halves.popleft()()
            else:
                self._lines[channel].available += 1
                self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        line = self._lines[channel]
        while line.halves and line.available:
            line.available -= 1
            # Nothing that might wait for the device may come between these two.
            line.halves.popleft()()
            self._tell(channel, Word.BEGUN)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for other ranks, doing what they wait for."""
        self.progress()
        deadline = time.monotonic() + self._timeout
        with POSITION.waiting():
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerLostError(f"no other rank went on within {self._timeout:g} s")
                self.progress(left)

    def meet(self, ranks: tuple[int, ...], number: int) -> None:
        """Wait until all ranks of a set have come here, doing what they wait for."""
        others = [rank for rank in ranks if rank != self._rank]
        for rank in others:
            self._notices.tell(rank, Notice(self._rank, Word.HERE, number))
        self._meetings[number] += 1
        count = self._meetings[number]
        self.wait_until(lambda: all(self._here[rank, number] >= count for rank in others))

    def settle(self) -> None:
        """Wait until the device has all sends, so that no other rank waits for this host."""
        sends = [line for channel, line in self._lines.items() if channel.sender == self._rank]
        self.wait_until(lambda: not any(line.halves for line in sends))

    def _peer(self, channel: Channel) -> int:
        return channel.receiver if channel.sender == self._rank else channel.sender

    def _tell(self, channel: Channel, word: Word) -> None:
        notice = Notice(self._rank, word, channel.tag, channel.sender == self._rank)
        self._notices.tell(self._peer(channel), notice)
