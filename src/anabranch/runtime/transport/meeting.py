"""Connections between ranks of one host, made without waiting for one that cannot.

In a small collective each rank tells its host and where it listens (a socket in the abstract
namespace of Linux). Then, in steps that end with a collective each::

    connect to lower ranks of the host             | collective |
    accept those of higher ranks, say hello to all | collective |
    read their hellos                              | collective | compare

A hello has the descriptors of the sender's segment and of an event that wakes the sender, and the
block where its messages to this peer begin. Two ranks are connected if both say so; otherwise
(another host or user, no descriptors left) they use another transport.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO

from anabranch.device.host import host
from anabranch.runtime.transport.memory import BlockAddress, Reader, Segment, Window, Writer

Exchange = Callable[[bytes], list[bytes]]
"""Collective that returns the bytes of every rank, of one length, by rank."""

_HOST_BYTES, _NAME_BYTES = 32, 16
"""Sizes of the first message of a rank: a digest of its host, and a random name to listen under."""

_HELLO = struct.Struct("<q8q")
_CREDENTIALS = struct.Struct("3i")


class Event(FileIO):
    """A counter of the kernel that one process adds to and another waits for (eventfd)."""

    def __init__(self, file: int | None = None) -> None:
        if file is None:
            file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(file, "r+")

    def set(self) -> None:
        """Wake the process that waits for it, now or later."""
        os.eventfd_write(self.fileno(), 1)

    def clear(self) -> None:
        self.read(8)


@dataclass
class Peer:
    """One rank of this host, and the connection to it.

    Attributes:
        socket: carries nothing; the kernel closes it when the peer ends.
        wakes: event through which the peer wakes this rank when it has written.
        wakes_peer: event through which this rank wakes the peer.
    """

    socket: socket.socket
    writer: Writer
    reader: Reader
    window: Window
    wakes: Event
    wakes_peer: Event

    def close(self) -> None:
        """Close what the kernel would close at the end of this process."""
        for end in (self.socket, self.wakes, self.wakes_peer, self.window):
            end.close()


def meet(rank: int, exchange: Exchange) -> tuple[Segment | None, dict[int, Peer]]:
    """Connect this rank to the others of its host, and return them with the memory that this rank
    writes; None where there are no others. All ranks of the run call it.
    """
    name = secrets.token_bytes(_NAME_BYTES)
    segment, listener = _opened(name)
    own = bytes(_HOST_BYTES) if segment is None else _host_digest()
    cards = exchange(own + name)
    lower = [card[_HOST_BYTES:] for card in cards[:rank] if card[:_HOST_BYTES] == own]
    ends = _connected(lower) if any(own) else []
    exchange(b"-")
    if listener is not None:
        ends += _accepted(listener)
        listener.close()
    hellos = []
    for end in ends:
        assert segment is not None
        try:
            hellos.append((end, *_say_hello(end, rank, segment)))
        except OSError:
            end.close()
    exchange(b"-")
    peers: dict[int, Peer] = {}
    for end, writer, wakes in hellos:
        try:
            other, window, reader, wakes_peer = _hear_hello(end)
            peers[other] = Peer(end, writer, reader, window, wakes, wakes_peer)
        except OSError:
            end.close()
            wakes.close()
    met = exchange(bytes(other in peers for other in range(len(cards))))
    for other in [other for other in peers if not met[other][rank]]:
        peers.pop(other).close()
    if segment is not None and not peers:  # nobody would close it
        segment.close()
        segment = None
    return segment, peers


def _opened(name: bytes) -> tuple[Segment | None, socket.socket | None]:
    """Open this rank's memory, and listen under a name; None for both if either fails."""
    if sys.platform != "linux":
        return None, None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None, None
    try:
        segment = Segment()
    except OSError:
        listener.close()
        return None, None
    listener.setblocking(False)
    listener.bind(_address(name))
    listener.listen(1024)
    return segment, listener


def _host_digest() -> bytes:
    """Digest host, network namespace and user, which ranks that share memory have in common; zeros
    if they are not known.
    """
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return bytes(_HOST_BYTES)
    return hashlib.sha256(f"{host()} {namespace} {os.getuid()}".encode()).digest()


def _address(name: bytes) -> bytes:
    return b"\0anabranch-" + name.hex().encode()


def _connected(names: Iterable[bytes]) -> list[socket.socket]:
    """Connect to listeners, which have been bound: they take a connection at once, or never."""
    ends: list[socket.socket] = []
    for name in names:
        with suppress(OSError):
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.setblocking(False)
            ends.append(end)  # one that is refused gets no hello
            end.connect(_address(name))
    return ends


def _accepted(listener: socket.socket) -> list[socket.socket]:
    """Accept the connections to this rank, which have all been made by now."""
    ends: list[socket.socket] = []
    while True:
        try:
            end, _ = listener.accept()
        except OSError:
            return ends
        end.setblocking(False)
        ends.append(end)


def _say_hello(end: socket.socket, rank: int, segment: Segment) -> tuple[Writer, Event]:
    """Send a peer this rank's hello; raise OSError if it is of another user, or gone."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise PermissionError("a connection of another user")
    writer, wakes = Writer(segment), Event()
    counter, first = writer.begin
    hello = _HELLO.pack(rank, *counter, *first)
    socket.send_fds(end, [hello], [segment.file, wakes.fileno()])
    return writer, wakes


def _hear_hello(end: socket.socket) -> tuple[int, Window, Reader, Event]:
    """Receive the hello of a peer; raise OSError if there is none."""
    hello, files, _, _ = socket.recv_fds(end, _HELLO.size, 2)
    if len(hello) != _HELLO.size or len(files) != 2:
        for file in files:
            os.close(file)
        raise ConnectionError("a hello without a segment")
    rank, *numbers = _HELLO.unpack(hello)
    window = Window(files[0])
    begin = BlockAddress(*numbers[:4]), BlockAddress(*numbers[4:])
    return rank, window, Reader(window, begin), Event(files[1])
