"""Connections between ranks of one host, made without waiting for one that cannot.

Everybody says in a small collective which host it is on and where it listens (a socket in the
abstract namespace of Linux). Then, in steps that end with a collective each::

    connect to lower ranks of the host, say hello   | collective |
    take the connections of higher ranks, answer    | collective |
    read the answers                                | collective | compare

A hello has the descriptors of the segment and of an event that wakes who says it, and where the
messages to this peer begin. Two ranks are connected if both say so; otherwise (another host or
user, no descriptors left) they talk in some other way.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from anabranch.runtime.transport.log import Reader, Writer
from anabranch.runtime.transport.memory import BlockAddress, Segment, Window

Exchange = Callable[[bytes], list[bytes]]
"""A collective: everybody's bytes, of one length, by rank."""

_NAME_BYTES = 16
_HELLO = struct.Struct("<q8q")
_CREDENTIALS = struct.Struct("3i")


class Event(FileIO):
    """A counter of the kernel that one process adds to and another waits for (eventfd)."""

    def __init__(self, file: int | None = None) -> None:
        if file is None:
            file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(file, "r+")

    def set(self) -> None:
        """Wake who waits, now or next."""
        os.eventfd_write(self.fileno(), 1)

    def clear(self) -> None:
        """Reset the event."""
        self.read(8)


@dataclass
class Peer:
    """One rank of this host, and what leads to it.

    Attributes:
        socket: carries nothing; the kernel closes it when the peer ends.
        wakes: what it has written wakes this rank through this event.
        wakes_peer: likewise the peer.
    """

    socket: socket.socket
    writer: Writer
    reader: Reader
    window: Window
    wakes: Event
    wakes_peer: Event

    def close(self) -> None:
        """Close what the kernel would close at the end of this process."""
        for end in (self.socket, self.wakes, self.wakes_peer):
            end.close()


@dataclass(frozen=True)
class _Heard:
    """The hello of a peer."""

    rank: int
    segment: int
    wakes: Event
    begin: tuple[BlockAddress, BlockAddress]

    def close(self) -> None:
        self.wakes.close()
        os.close(self.segment)


@dataclass
class _Arrival:
    """A connection on its way."""

    socket: socket.socket
    writer: Writer
    wakes: Event
    heard: _Heard | None = None

    def close(self) -> None:
        self.socket.close()
        self.wakes.close()


@dataclass
class Meeting:
    """Connections to the ranks of one host; without a segment there are none."""

    segment: Segment | None
    peers: dict[int, Peer] = field(default_factory=dict)


def meet(rank: int, exchange: Exchange) -> Meeting:
    """Connect this rank to the others of its host; all ranks of the run call it."""
    listener, segment = _opened()
    name = secrets.token_bytes(_NAME_BYTES)
    try:
        if listener is not None:
            listener.bind(_address(name))
            listener.listen(1024)
        cards = exchange(_host() + name if listener is not None else bytes(32 + _NAME_BYTES))
        mine = cards[rank][:32]
        neighbours = [
            r for r, card in enumerate(cards) if r != rank and any(mine) and card[:32] == mine
        ]
        arrivals: dict[int, _Arrival] = {}
        if segment is not None:
            lower = {r: _address(cards[r][32:]) for r in neighbours if r < rank}
            arrivals = _connected(rank, lower, segment)
        exchange(b"-")
        if segment is not None and listener is not None:
            arrivals |= _accepted(rank, {r for r in neighbours if r > rank}, listener, segment)
    finally:
        if listener is not None:
            listener.close()
    exchange(b"-")
    arrivals = _answered(arrivals)
    said = exchange(bytes(r in arrivals for r in range(len(cards))))
    return _agreed(rank, arrivals, said, segment)


def _opened() -> tuple[socket.socket | None, Segment | None]:
    if sys.platform != "linux":
        return None, None
    try:
        segment = Segment()
    except OSError:
        return None, None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        segment.close()
        return None, None
    listener.setblocking(False)
    return listener, segment


def _host() -> bytes:
    """Boot, network namespace and user of ranks that can share memory; zeros if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return bytes(32)
    return hashlib.sha256(f"{boot} {namespace} {os.getuid()}".encode()).digest()


def _address(name: bytes) -> bytes:
    return b"\0anabranch-" + name.hex().encode()


def _connected(rank: int, addresses: dict[int, bytes], segment: Segment) -> dict[int, _Arrival]:
    """Connections to lower ranks. A listener that has been bound takes them at once, or never."""
    result = {}
    for peer, address in addresses.items():
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            end.connect(address)
            result[peer] = _say_hello(end, rank, segment)
        except OSError:
            end.close()
    return result


def _accepted(
    rank: int, expected: set[int], listener: socket.socket, segment: Segment
) -> dict[int, _Arrival]:
    """Connections of higher ranks, which have all been made by now."""
    result: dict[int, _Arrival] = {}
    while len(result) < len(expected):
        try:
            end, _ = listener.accept()
        except OSError:
            break
        end.setblocking(False)
        with suppress(OSError), ExitStack() as undo:
            undo.callback(end.close)
            heard = _hear_hello(end)
            undo.callback(heard.close)
            arrival = _say_hello(end, rank, segment)
            undo.callback(arrival.close)
            if heard.rank in expected:
                arrival.heard = heard
                result[heard.rank] = arrival
                undo.pop_all()
    return result


def _say_hello(end: socket.socket, rank: int, segment: Segment) -> _Arrival:
    """A connection whose peer has been told of this rank."""
    arrival = _Arrival(end, Writer(segment), Event())
    counter, first = arrival.writer.begin
    hello = _HELLO.pack(rank, *counter, *first)
    socket.send_fds(end, [hello], [segment.file, arrival.wakes.fileno()])
    return arrival


def _hear_hello(end: socket.socket) -> _Heard:
    """Receive the hello of a peer; OSError if it is of another user."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise PermissionError("a connection of another user")
    hello, files, _, _ = socket.recv_fds(end, _HELLO.size, 2)
    if len(hello) != _HELLO.size or len(files) != 2:
        for file in files:
            os.close(file)
        raise ConnectionError("a hello without a segment")
    rank, *numbers = _HELLO.unpack(hello)
    begin = BlockAddress(*numbers[:4]), BlockAddress(*numbers[4:])
    return _Heard(rank, files[0], Event(files[1]), begin)


def _answered(arrivals: dict[int, _Arrival]) -> dict[int, _Arrival]:
    """Receive the hellos of lower ranks; return connections whose hello was received."""
    result = {}
    for peer, arrival in arrivals.items():
        if arrival.heard is None:
            try:
                arrival.heard = _hear_hello(arrival.socket)
            except OSError:
                arrival.close()
                continue
        result[peer] = arrival
    return result


def _agreed(
    rank: int, arrivals: dict[int, _Arrival], said: list[bytes], segment: Segment | None
) -> Meeting:
    """Keep the connections that both ends have."""
    meeting = Meeting(segment)
    for peer, arrival in sorted(arrivals.items()):
        heard = arrival.heard
        assert heard is not None
        if not said[peer][rank]:
            arrival.close()
            heard.close()
            continue
        window = Window(heard.segment)
        reader = Reader(window, heard.begin)
        meeting.peers[peer] = Peer(
            arrival.socket, arrival.writer, reader, window, arrival.wakes, heard.wakes
        )
    if segment is not None and not meeting.peers:  # nobody would close it
        segment.close()
        meeting.segment = None
    return meeting
