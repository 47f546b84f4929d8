"""Messages between ranks of one host, through memory that both of them see.

Gloo takes 100 us and more for the smallest message. Here the sender copies its tensors once, into
shared memory (``memory``), and notes that in a ``log`` without end; the receiver builds tensors on
top of it. So a send never waits, and what was sent is the receiver's even if the sender ends.

An event (eventfd) of each receiver of a pair wakes it where it waits. A byte in a socket or a pipe
would do so too, but it tells Linux that its sender is about to sleep: the receiver then takes the
core of the sender, who has more to send, also where another core is idle. (Steps of four ranks on
two cores took 2 to 5 % longer.) A socket per pair carries nothing; the kernel closes it when a
process dies, so a receiver learns of it at once. There are no threads: they would contend for the
interpreter with the computation.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Receipt, Spec, Transport, listed
from anabranch.runtime.transport.meeting import Peer
from anabranch.runtime.transport.memory import Record, Segment
from anabranch.runtime.transport.packing import pack, packing_of, specs_of, unpack


class HostTransport:
    """Messages through shared memory to and from ranks of the same host.

    A received tensor may lie in the sender's segment, whose block is reused when the tensor is
    gone; the receiver may write to it.

    Attributes:
        otherwise: takes messages to and from ranks of other hosts; closed with this one.
    """

    def __init__(self, segment: Segment, peers: Mapping[int, Peer], timeout: float) -> None:
        self._segment = segment
        self.otherwise: Transport | None = None
        self._lines = {
            rank: _PeerConnection(rank, peer, timeout) for rank, peer in sorted(peers.items())
        }
        self._close = weakref.finalize(self, _close, os.getpid(), [*peers.values()], segment)
        self._any: select.poll | None = None
        self._ended: set[int] = set()
        _OPEN.add(self)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        if not self._close.alive:
            raise PeerLostError("this rank has broken its connections")
        if (line := self._lines.get(rank)) is None:
            assert self.otherwise is not None
            self.otherwise.send(tensors, rank, tag)
            return
        packing = packing_of(specs_of(tensors))
        chunk, index = self._segment.take(packing.nbytes)
        start = chunk.start(index)
        pack(tensors, packing, chunk.memory[start:], chunk.address + start)
        line.peer.writer.write(
            Record(tag, packing.nbytes, len(tensors), packing.signature, chunk.address_of(index))
        )
        line.peer.wakes_peer.set()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        if (line := self._lines.get(rank)) is None:
            assert self.otherwise is not None
            return self.otherwise.receive(specs, device, rank, tag)
        return line.post(tuple(specs), device, tag)

    def arrivals(
        self, tag: int, wait_s: float = 0.0, ranks: Collection[int] = ()
    ) -> list[tuple[int, memoryview]]:
        """Return rank and bytes of the messages with a tag that have come from any rank; wait for
        one up to ``wait_s``.

        Args:
            ranks: ranks whose end is an error if nothing has come.

        Raises:
            PeerLostError: if one of them has ended.
        """
        arrived = [pair for line in self._lines.values() for pair in line.arrivals(tag)]
        if arrived or not wait_s:
            return arrived
        if not self._close.alive:
            raise PeerLostError("this rank has broken its connections")
        if self._any is None:
            self._any = select.poll()
            for line in self._lines.values():
                self._any.register(line.peer.wakes, select.POLLIN)
                self._any.register(line.peer.socket, 0)
        # An end that is known already wakes nobody again.
        ready = [file for file, _ in self._any.poll(0 if self._ended & {*ranks} else 1e3 * wait_s)]
        for rank, line in self._lines.items():
            if line.peer.wakes.fileno() in ready:
                line.peer.wakes.clear()
            if line.peer.socket.fileno() in ready:
                self._any.unregister(line.peer.socket)
                self._ended.add(rank)
        arrived = [pair for line in self._lines.values() for pair in line.arrivals(tag)]
        if not arrived and (ended := self._ended & {*ranks}):
            raise self._lines[min(ended)].lost("it has ended")
        return arrived

    def settle(self) -> None:
        """See ``Transport``; what was sent is the receiver's already."""

    def flush(self) -> None:
        """See ``Transport``; what was sent within the host is the receiver's already."""
        if self.otherwise is not None:
            self.otherwise.flush()

    def close(self) -> None:
        _OPEN.discard(self)
        self._close()
        if self.otherwise is not None:
            self.otherwise.close()

    def _disown(self) -> None:
        for line in self._lines.values():
            line.peer.close()
            line.peer.window.disown()


@dataclass(slots=True, eq=False)
class _Awaited:
    """A receive, with its message once that is there."""

    line: _PeerConnection
    specs: tuple[Spec, ...]
    device: torch.device
    record: Record = field(init=False)
    data: memoryview | None = None

    def wait(self) -> list[Tensor]:
        if self.data is None:
            self.line.wait_for(self)
        data, self.data = self.data, None
        assert data is not None
        packing = packing_of(self.specs)
        if (self.record.signature, self.record.nbytes) != (packing.signature, packing.nbytes):
            raise ValueError(
                f"a message of {self.record.num_tensors} tensors and {self.record.nbytes} bytes "
                f"came where {packing.nbytes} bytes of {listed(self.specs)} were expected"
            )
        tensors = unpack(packing, data)
        return [tensor.to(self.device) for tensor in tensors]


class _PeerConnection:
    """Messages to and from one other rank, by their tags: messages that came before their receive,
    and receives whose message has not come yet.
    """

    def __init__(self, rank: int, peer: Peer, timeout: float) -> None:
        self.peer = peer
        self._rank, self._timeout = rank, timeout
        self._poll = select.poll()
        self._poll.register(peer.wakes, select.POLLIN)
        self._poll.register(peer.socket, 0)  # poll reports its end in any case
        self._arrived: defaultdict[int, deque[tuple[Record, memoryview]]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[_Awaited]] = defaultdict(deque)

    def post(self, specs: tuple[Spec, ...], device: torch.device, tag: int) -> _Awaited:
        awaited = _Awaited(self, specs, device)
        if arrived := self._arrived[tag]:
            awaited.record, awaited.data = arrived.popleft()
        else:
            self._posted[tag].append(awaited)
        return awaited

    def wait_for(self, awaited: _Awaited) -> None:
        self._take_in()
        if awaited.data is not None:
            return
        deadline = time.monotonic() + self._timeout
        with POSITION.waiting():
            while awaited.data is None:
                reason = self._sleep()
                # What was sent before the end still counts.
                self._take_in()
                if awaited.data is None and (reason or time.monotonic() >= deadline):
                    raise self.lost(reason or f"no message within {self._timeout:g} s")

    def arrivals(self, tag: int) -> list[tuple[int, memoryview]]:
        """Return this rank and the bytes of each message with a tag that has come."""
        self._take_in()
        arrived = self._arrived[tag]
        taken = [(self._rank, data) for _, data in arrived]
        arrived.clear()
        return taken

    def _sleep(self) -> str:
        """Sleep until the peer has sent something; return why it will not any more, or nothing."""
        wakes = self.peer.wakes
        if wakes.closed:
            return "this rank has broken it"
        ready = self._poll.poll(1e3 * max(self._timeout, 1e-3))
        if not ready:
            return f"no message within {self._timeout:g} s"
        # A peer that has ended has woken this rank before, if it has sent anything.
        if all(events != select.POLLIN for _, events in ready) or wakes.closed:
            return "it has ended"
        wakes.clear()
        return ""

    def _take_in(self) -> None:
        for record, data in self.peer.reader.read():
            if posted := self._posted[record.tag]:
                awaited = posted.popleft()
                awaited.record, awaited.data = record, data
            else:
                self._arrived[record.tag].append((record, data))

    def lost(self, reason: str) -> PeerLostError:
        return PeerLostError(f"the connection to rank {self._rank} broke: {reason}")


_OPEN: weakref.WeakSet[HostTransport] = weakref.WeakSet()


def _after_fork() -> None:
    """Let a fork (of a data loader) keep no connection open, nor free its parent's memory."""
    for transport in list(_OPEN):
        transport._disown()


os.register_at_fork(after_in_child=_after_fork)


def _close(owner: int, peers: Iterable[Peer], segment: Segment) -> None:
    if os.getpid() != owner:
        return
    for peer in peers:
        # Also ends it for a fork of this process.
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)
        peer.close()
    segment.close()
