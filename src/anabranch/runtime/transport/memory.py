"""Memory that one rank writes and the other ranks of its host read, without a copy in between.

Each sender owns one segment, a file in memory. It grows by chunks, and a chunk has blocks of one
size, a power of two, each with a flag that both ends see::

    segment   | chunk              | chunk                        | ...
                flags | blk | blk    flags | block    | block
                1 0

The sender takes a block whose flag is 0, sets it to 1, writes, and says where. The receiver builds
tensors on top of it and may write to them. When the last of those is gone the flag goes back to 0:
torch holds a memoryview of the block while any storage is on it, and a weak reference to that
memoryview tells of its end.

Fresh pages cost several times as much to write as used ones, so memory is never given back, and the
lowest free block comes first.

A log has the messages of one rank to another, in order. Each message lies in a block of its own,
and its record says where. The log is a chain of blocks, which the reader frees behind it, so
writing never waits for the reader. A number that only the writer changes counts the records::

    written: 5      reader has read 2

    | record 0 | record 1 | record 2 | next -+     | record 4 | ...
                          ^                  +---->
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import threading
import weakref
from typing import NamedTuple

import torch

_FLAGS_BYTES = mmap.PAGESIZE
"""A page at the start of a chunk, of which each block's flag is one byte."""

_MOST_BLOCKS = 64
"""Most blocks of a chunk; where more are taken, further chunks follow."""

_IS_ORDERED = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Order earlier reads and writes of this process before later ones.

    Python has no barrier, but letting go of a lock and taking it again is one. A lock per call,
    because this may run in any thread, even inside itself during garbage collection.
    """
    if _IS_ORDERED:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class BlockAddress(NamedTuple):
    """Address of a block: the chunk's offset in the segment, the chunk's shape, its index."""

    offset: int
    block_bytes: int
    num_blocks: int
    block: int


class Chunk:
    """Blocks of one size, as one process sees them."""

    def __init__(self, file: int, offset: int, block_bytes: int, num_blocks: int) -> None:
        self.offset, self.block_bytes, self.num_blocks = offset, block_bytes, num_blocks
        self._map = mmap.mmap(file, chunk_bytes(block_bytes, num_blocks), offset=offset)
        self.memory = memoryview(self._map)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self._flags = self.memory[:_FLAGS_BYTES]
        self._holds: list[_Hold | None] = [None] * num_blocks

    def address_of(self, index: int) -> BlockAddress:
        """Return the address of a block, for the other end."""
        return BlockAddress(self.offset, self.block_bytes, self.num_blocks, index)

    def start(self, index: int) -> int:
        """Return the offset of a block in the memory of the chunk."""
        return _FLAGS_BYTES + index * self.block_bytes

    def take(self) -> int:
        """Take the lowest free block, and return its index; -1 if there is none."""
        index = self._map.find(b"\0", 0, self.num_blocks)
        if index >= 0:
            fence()
            self._flags[index] = 1
        return index

    def free(self, index: int) -> None:
        """Give a block back to the sender."""
        self._holds[index] = None
        fence()
        self._flags[index] = 0

    def lend(self, index: int, nbytes: int) -> memoryview:
        """Return the first bytes of a block, which is freed once nothing refers to the result."""
        start = self.start(index)
        view = self.memory[start : start + nbytes]
        hold = _Hold(view, _let_go)
        hold.chunk, hold.index = self, index
        self._holds[index] = hold
        return view

    def disown(self) -> None:
        """Change no flags from now on; called in a fork of the process that has the blocks."""
        self._flags = memoryview(bytearray(_FLAGS_BYTES))


class _Hold(weakref.ref[memoryview]):
    """Frees a block when the view of it is gone."""

    __slots__ = ("chunk", "index")
    chunk: Chunk
    index: int


def _let_go(hold: weakref.ref[memoryview]) -> None:
    assert isinstance(hold, _Hold)
    hold.chunk.free(hold.index)


def chunk_bytes(block_bytes: int, num_blocks: int) -> int:
    return _FLAGS_BYTES + num_blocks * block_bytes


class Segment:
    """The memory that this rank writes, as a file; OSError where there are no such files."""

    def __init__(self) -> None:
        self.file = os.memfd_create("anabranch", os.MFD_CLOEXEC)
        self._end = 0
        self._chunks: dict[int, list[Chunk]] = {}

    def take(self, nbytes: int) -> tuple[Chunk, int]:
        """Take a block of at least ``nbytes``; return its chunk and its index there."""
        block_bytes = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        chunks = self._chunks.setdefault(block_bytes, [])
        for chunk in chunks:
            index = chunk.take()
            if index >= 0:
                return chunk, index
        # As many as there are already, so that any number is found in few chunks.
        count = sum(chunk.num_blocks for chunk in chunks)
        num_blocks = min(max(count, 4), _MOST_BLOCKS)
        offset, self._end = self._end, self._end + chunk_bytes(block_bytes, num_blocks)
        os.ftruncate(self.file, self._end)
        chunks.append(chunk := Chunk(self.file, offset, block_bytes, num_blocks))
        return chunk, chunk.take()

    def close(self) -> None:
        """Close the file; memory that other processes have mapped stays."""
        os.close(self.file)
        self.file = -1


class Window:
    """The memory that another rank writes; closes the descriptor of its segment."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._chunks: dict[int, Chunk] = {}

    def chunk(self, address: BlockAddress) -> Chunk:
        chunk = self._chunks.get(address.offset)
        if chunk is None:
            chunk = Chunk(self._file, address.offset, address.block_bytes, address.num_blocks)
            self._chunks[address.offset] = chunk
        return chunk

    def disown(self) -> None:
        for chunk in self._chunks.values():
            chunk.disown()

    def close(self) -> None:
        """Close the file; tensors on its memory stay valid."""
        os.close(self._file)
        self._file = -1


_BLOCK_BYTES = 1 << 16
"""Bytes of a block of the log."""

_RECORD = struct.Struct("<qqIIqqII")


class Record(NamedTuple):
    """Record of one message in the log: ``address`` is its block, ``nbytes`` its size with gaps;
    ``num_tensors`` 0 marks the link to the next block of the log.
    """

    tag: int
    nbytes: int
    num_tensors: int
    signature: int
    address: BlockAddress


class Writer:
    """The writer of a log; ``begin`` has the first blocks of counter and log, for the reader."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        chunk, index = segment.take(8)
        counter = chunk.address_of(index)
        start = chunk.start(index)
        self._counter = chunk.memory[start : start + 8].cast("Q")
        self._chunk, index = segment.take(_BLOCK_BYTES)
        self.begin = counter, self._chunk.address_of(index)
        self._enter(index)

    def _enter(self, index: int) -> None:
        self._position = self._chunk.start(index)
        # The link to the next block must always fit.
        self._end = self._position + _BLOCK_BYTES - _RECORD.size

    def write(self, record: Record) -> None:
        """Show the reader a message, which lies in its block already."""
        if self._position + _RECORD.size > self._end:
            chunk, index = self._segment.take(_BLOCK_BYTES)
            self._put(Record(0, 0, 0, 0, chunk.address_of(index)))
            self._chunk = chunk
            self._enter(index)
        self._put(record)

    def _put(self, record: Record) -> None:
        _RECORD.pack_into(self._chunk.memory, self._position, *record[:4], *record.address)
        self._position += _RECORD.size
        fence()
        self._counter[0] += 1


class Reader:
    """The reader of a log."""

    def __init__(self, window: Window, begin: tuple[BlockAddress, BlockAddress]) -> None:
        self._window = window
        counter, first = begin
        chunk = window.chunk(counter)
        start = chunk.start(counter.block)
        self._counter = chunk.memory[start : start + 8].cast("Q")
        self._num_read = 0
        self._enter(first)

    def _enter(self, address: BlockAddress) -> None:
        self._chunk, self._index = self._window.chunk(address), address.block
        self._position = self._chunk.start(address.block)

    def read(self) -> list[tuple[Record, memoryview]]:
        """Return new records with the bytes of their messages, each a block in use while held."""
        written = self._counter[0]
        fence()
        result: list[tuple[Record, memoryview]] = []
        while self._num_read < written:
            self._num_read += 1
            numbers = _RECORD.unpack_from(self._chunk.memory, self._position)
            self._position += _RECORD.size
            address = BlockAddress(*numbers[4:])
            record = Record._make((*numbers[:4], address))
            if record.num_tensors:
                data = self._window.chunk(address).lend(address.block, record.nbytes)
                result.append((record, data))
            else:
                self._chunk.free(self._index)
                self._enter(address)
        return result
