"""A log in shared memory: the messages of one rank to another, in order.

A small message stands in the log itself, a large one in a block of its own. The log is a chain of
blocks, which the reader frees behind it, so writing never waits for the reader. A number in shared
memory, which only the writer changes, counts the records::

    written: 5      reader has read 2

    | record 0 | record 1 | record 2 | next -+     | record 4 | ...
                          ^                  +---->
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from anabranch.runtime.transport.memory import BlockAddress, Segment, Window, fence
from anabranch.runtime.transport.packing import aligned

INLINE_BYTES = 4096
"""The largest message that stands in the log itself; a block costs as little time, but a page."""

_BLOCK_BYTES = 1 << 16
_HEADER = struct.Struct("<qqIIqqII")
_HEADER_BYTES = 64
_NOWHERE = BlockAddress(-1, 0, 0, 0)


class Record(NamedTuple):
    """One message as the log has it: its block (``place``), an offset of -1 if it stands in the
    log, its size with gaps; ``num_tensors`` 0 marks the way to the next block.
    """

    tag: int
    nbytes: int
    num_tensors: int
    signature: int
    place: BlockAddress


class Writer:
    """One rank's end; ``begin`` are the blocks of counter and log, for the reader."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        chunk, index = segment.take(8)
        counter = chunk.place(index)
        start = chunk.start(index)
        self._counter = chunk.memory[start : start + 8].cast("Q")
        self._chunk, index = segment.take(_BLOCK_BYTES)
        self.begin = counter, self._chunk.place(index)
        self._enter(index)

    def _enter(self, index: int) -> None:
        self._position = self._chunk.start(index)
        # The way to the next block must always fit.
        self._end = self._position + _BLOCK_BYTES - _HEADER_BYTES

    def reserve(self, nbytes: int) -> tuple[memoryview, int, int]:
        """Room for a message: the memory to write to, the offset in it, and its address here."""
        if self._position + _HEADER_BYTES + nbytes > self._end:
            chunk, index = self._segment.take(_BLOCK_BYTES)
            self._put(Record(0, 0, 0, 0, chunk.place(index)))
            self._chunk = chunk
            self._enter(index)
        offset = self._position + _HEADER_BYTES
        return self._chunk.memory, offset, self._chunk.address + offset

    def write(self, record: Record) -> None:
        """Show a message, whose numbers are in place, to the reader."""
        if record.place.offset >= 0:
            self.reserve(0)
        self._put(record)
        if record.place.offset < 0:
            self._position += aligned(record.nbytes)

    def _put(self, record: Record) -> None:
        tag, nbytes, num_tensors, signature, place = record
        _HEADER.pack_into(
            self._chunk.memory, self._position, tag, nbytes, num_tensors, signature, *place
        )
        self._position += _HEADER_BYTES
        fence()
        self._counter[0] += 1


class Reader:
    """The other end."""

    def __init__(self, window: Window, begin: tuple[BlockAddress, BlockAddress]) -> None:
        self._window = window
        counter, first = begin
        chunk = window.chunk(counter)
        start = chunk.start(counter.block)
        self._counter = chunk.memory[start : start + 8].cast("Q")
        self._num_read = 0
        self._enter(first)

    def _enter(self, place: BlockAddress) -> None:
        self._chunk, self._index = self._window.chunk(place), place.block
        self._position = self._chunk.start(place.block)

    def read(self) -> list[tuple[Record, memoryview | bytearray]]:
        """New records with the bytes of their messages; a block belongs to who has the bytes."""
        written = self._counter[0]
        fence()
        result: list[tuple[Record, memoryview | bytearray]] = []
        while self._num_read < written:
            self._num_read += 1
            tag, nbytes, num_tensors, signature, *where = _HEADER.unpack_from(
                self._chunk.memory, self._position
            )
            self._position += _HEADER_BYTES
            place = BlockAddress(*where)
            if not num_tensors:
                self._chunk.free(self._index)
                self._enter(place)
                continue
            record = Record(tag, nbytes, num_tensors, signature, place)
            if place.offset >= 0:
                result.append((record, self._window.chunk(place).lend(place.block, nbytes)))
            else:
                result.append((record, self._copied(nbytes)))
        return result

    def _copied(self, nbytes: int) -> bytearray:
        start = self._position
        self._position += aligned(nbytes)
        return bytearray(self._chunk.memory[start : start + nbytes])


def inline(nbytes: int) -> BlockAddress | None:
    """The place of a message that stands in the log, if this one does."""
    return _NOWHERE if nbytes <= INLINE_BYTES else None
