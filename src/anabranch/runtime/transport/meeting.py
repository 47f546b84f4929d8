"""Connections between ranks of one host, made without waiting for one that cannot.

Everybody says in a small collective which host it is on and where it listens (a socket in the
abstract namespace of Linux). Then, in steps that end with a collective each::

    connect to lower ranks of the host, say hello   | collective |
    take the connections of higher ranks, answer    | collective |
    read the answers                                | collective | compare

A hello has the descriptor of the segment, and where the messages to this peer begin. Two ranks are
connected if both say so; otherwise (another host or user, no descriptors left) they talk in some
other way.
"""

from __future__ import annotations

import array
import hashlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.runtime.transport.log import Reader, Writer
from anabranch.runtime.transport.memory import BlockAddress, Segment, Window

Exchange = Callable[[bytes], list[bytes]]
"""A collective: everybody's bytes, of one length, by rank."""

_NAME_BYTES = 16
_HELLO = struct.Struct("<q8q")
_CREDENTIALS = struct.Struct("3i")


@dataclass
class Peer:
    """One rank of this host, and what leads to it; the socket only wakes it and shows its end."""

    socket: socket.socket
    writer: Writer
    reader: Reader
    window: Window


@dataclass
class _Arrival:
    """A connection on its way."""

    socket: socket.socket
    writer: Writer
    heard: tuple[int, tuple[BlockAddress, BlockAddress]] | None = None


@dataclass
class Meeting:
    """Of the ranks of one host; without segments there are no peers."""

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
            writer = Writer(segment)
            _say_hello(end, rank, writer, segment)
        except OSError:
            end.close()
            continue
        result[peer] = _Arrival(end, writer)
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
        try:
            peer, file, begin = _hear_hello(end)
            writer = Writer(segment)
            _say_hello(end, rank, writer, segment)
        except OSError:
            end.close()
            continue
        if peer in expected:
            result[peer] = _Arrival(end, writer, (file, begin))
    return result


def _say_hello(end: socket.socket, rank: int, writer: Writer, segment: Segment) -> None:
    counter, first = writer.begin
    socket.send_fds(end, [_HELLO.pack(rank, *counter, *first)], [segment.file])


def _hear_hello(end: socket.socket) -> tuple[int, int, tuple[BlockAddress, BlockAddress]]:
    """Rank, descriptor of the segment, where messages begin; OSError if another user said it."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise PermissionError("a connection of another user")
    size = array.array("i").itemsize
    hello, ancillary, _, _ = end.recvmsg(_HELLO.size, socket.CMSG_LEN(size))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[:size])
    if len(hello) != _HELLO.size or not files:
        raise ConnectionError("a hello without a segment")
    rank, *numbers = _HELLO.unpack(hello)
    return rank, files[0], (BlockAddress(*numbers[:4]), BlockAddress(*numbers[4:]))


def _answered(arrivals: dict[int, _Arrival]) -> dict[int, _Arrival]:
    """Those whose hello has been heard, now also that of lower ranks."""
    result = {}
    for peer, arrival in arrivals.items():
        if arrival.heard is None:
            try:
                _, file, begin = _hear_hello(arrival.socket)
            except OSError:
                arrival.socket.close()
                continue
            arrival.heard = file, begin
        result[peer] = arrival
    return result


def _agreed(
    rank: int, arrivals: dict[int, _Arrival], said: list[bytes], segment: Segment | None
) -> Meeting:
    """Keep the connections that both ends have."""
    meeting = Meeting(segment)
    for peer, arrival in sorted(arrivals.items()):
        assert arrival.heard is not None
        file, begin = arrival.heard
        if not said[peer][rank]:
            arrival.socket.close()
            os.close(file)
            continue
        window = Window(file)
        reader = Reader(window, begin)
        meeting.peers[peer] = Peer(arrival.socket, arrival.writer, reader, window)
    return meeting
