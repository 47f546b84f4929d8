"""The order in which two ranks give their devices the two halves of a message.

A send is a kernel that spins until the other device has the receive, and the other way round. Any
call of a host may wait for all that its device has: a kernel that is loaded, memory that is
allocated or freed. Two hosts that wait in this way, each for a half that the other has not given to
its device yet, wait for ever. So a device never waits for a host of a lower rank:

- The lower rank gives its half first, and only after the higher one has told it that the other half
  can follow at any time: a receive has its buffer, a send its tensors.
- The higher rank gives its half as soon as it reads the notice, in any call, or while it waits.
- The lower rank gives no half behind another one that may still wait for a host: a notice tells it
  when a half is *closed*, which means that it needs no host any more.

::

    lower     receive posted ------ hears "available": receive, "begun" ---- hears "closed"
    higher    tensors made: "available" ------------ hears "begun": send, "closed"

Thus the device of the highest rank always comes to an end, then that of the rank below it, and so
on. Notices travel on the host. Halves of one pair of ranks and direction begin in one order on
both.

On its own device a half waits for all that the compute stream had been given up to some position. A
position is the number of halves that the compute stream has waited for.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Channel
from anabranch.runtime.transport.notices import HostNotices, Notice, Word


@dataclass(slots=True, eq=False)
class Half:
    """This rank's half of a message.

    Attributes:
        position: position of the compute stream, behind which it begins.
        is_given: whether the device has it.
        is_closed: whether it comes to an end without any action of a host.
    """

    channel: Channel
    give: Callable[[], None]
    position: int
    is_given: bool = False
    is_closed: bool = False


@dataclass(slots=True)
class _Line:
    """Halves of a channel that are not on the device yet; the number that the higher rank has told
    to be available; and halves that were given first and are not closed.
    """

    halves: deque[Half] = field(default_factory=deque)
    available: int = 0
    begun: deque[Half] = field(default_factory=deque)


class Handshake:
    """One rank's part."""

    def __init__(self, rank: int, notices: HostNotices, timeout: float) -> None:
        self._rank, self._notices, self._timeout = rank, notices, timeout
        self._lines: defaultdict[Channel, _Line] = defaultdict(_Line)
        self._joined: deque[Half] = deque()  # from the first that is not closed on
        self._num_closed = 0  # joined halves before it
        self._open: list[Half] = []  # given second, behind a position that is not closed
        self._holds = False
        self._here: Counter[tuple[int, int]] = Counter()
        self._meetings: Counter[int] = Counter()

    @property
    def position(self) -> int:
        """The position that the compute stream has now."""
        return self._num_closed + len(self._joined)

    def joined(self, half: Half) -> None:
        """Note that the compute stream waits for a half."""
        self._joined.append(half)
        self._advance()

    def offer(self, channel: Channel, give: Callable[[], None], position: int) -> Half:
        """Give the device this rank's half of a channel's next message, now or later."""
        half = Half(channel, give, position)
        self._lines[channel].halves.append(half)
        if self._rank > self._peer(channel):
            self._tell(channel, Word.AVAILABLE)
        else:
            self._begin(channel)
        self.progress()
        return half

    def progress(self, wait_s: float = 0.0, ranks: Collection[int] = ()) -> None:
        """Act on the notices of other ranks; see ``HostNotices.heard``."""
        for notice in self._notices.heard(wait_s, ranks):
            if notice.word is Word.HERE:
                self._here[notice.rank, notice.number] += 1
                continue
            ends = (self._rank, notice.rank)
            sender, receiver = ends[::-1] if notice.from_sender else ends
            channel = Channel(sender, receiver, notice.number)
            line = self._lines[channel]
            if notice.word is Word.AVAILABLE:
                line.available += 1
                self._begin(channel)
            elif notice.word is Word.BEGUN:
                half = line.halves.popleft()
                self._give(half)
                self._open.append(half)
                self._advance()
            else:
                line.begun.popleft().is_closed = True
                self._advance()

    def _begin(self, channel: Channel) -> None:
        """Give the device the first halves of a channel, as far as they may begin."""
        line = self._lines[channel]
        while line.available and line.halves and not self._holds:
            half = line.halves[0]
            if half.position > self._num_closed:
                break
            line.halves.popleft()
            line.available -= 1
            line.begun.append(half)
            # Nothing that might wait for the device may come between these two.
            self._give(half)
            self._tell(channel, Word.BEGUN)

    def _give(self, half: Half) -> None:
        half.give()
        half.is_given = True

    def _advance(self) -> None:
        """Find the halves that are closed by now, and begin those that can follow."""
        before = self._num_closed
        while True:
            while self._joined and self._joined[0].is_closed:
                self._joined.popleft()
                self._num_closed += 1
            closed = [half for half in self._open if half.position <= self._num_closed]
            if not closed:
                break
            self._open = [half for half in self._open if half.position > self._num_closed]
            for half in closed:
                half.is_closed = True
                self._tell(half.channel, Word.CLOSED)
        if self._num_closed > before:
            self._begin_all()

    def _begin_all(self) -> None:
        for channel in list(self._lines):
            if self._rank < self._peer(channel):
                self._begin(channel)

    def wait_for(self, waited: Callable[[], Collection[int]]) -> None:
        """Wait until ``waited`` returns no ranks, and act on notices meanwhile."""
        self.progress()
        deadline = time.monotonic() + self._timeout
        with POSITION.waiting():
            while ranks := waited():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerLostError(f"rank {min(ranks)} did not go on for {self._timeout:g} s")
                self.progress(left, ranks)

    def wait_given(self, half: Half) -> None:
        """Wait until the device has a half."""
        peer = (self._peer(half.channel),)
        self.wait_for(lambda: () if half.is_given else peer)

    @contextmanager
    def meeting(self, ranks: tuple[int, ...], number: int) -> Iterator[None]:
        """Wait until all ranks of a set have come here and all halves on their devices are closed;
        inside, the device may be given collectives of the set.
        """
        self._gather(ranks, 2 * number)
        self._holds = True
        self.wait_for(lambda: self._peers(lambda _, line: line.begun))
        self._gather(ranks, 2 * number + 1)
        yield
        self._holds = False
        self._begin_all()

    def _gather(self, ranks: tuple[int, ...], number: int) -> None:
        others = [rank for rank in ranks if rank != self._rank]
        for rank in others:
            self._notices.tell(rank, Notice(self._rank, Word.HERE, number))
        self._meetings[number] += 1
        count = self._meetings[number]
        self.wait_for(lambda: [rank for rank in others if self._here[rank, number] < count])

    def settle(self) -> None:
        """Wait until no other rank waits for this host: the device has all sends, and others know
        which halves are closed.
        """
        own = self._rank
        self.wait_for(lambda: self._peers(lambda c, line: c.sender == own and line.halves))

    def _peers(self, waits: Callable[[Channel, _Line], object]) -> set[int]:
        """Return the other ends of channels that wait, and of halves that are not closed."""
        channels = [channel for channel, line in self._lines.items() if waits(channel, line)]
        return {self._peer(channel) for channel in (*channels, *(h.channel for h in self._open))}

    def _peer(self, channel: Channel) -> int:
        return channel.receiver if channel.sender == self._rank else channel.sender

    def _tell(self, channel: Channel, word: Word) -> None:
        notice = Notice(self._rank, word, channel.tag, channel.sender == self._rank)
        self._notices.tell(self._peer(channel), notice)
