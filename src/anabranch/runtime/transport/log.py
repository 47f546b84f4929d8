"""A log in shared memory: the messages of one rank to another, in order.

Each message lies in a block of its own, and its record in the log says where. The log is a chain of
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

_BLOCK_BYTES = 1 << 16
"""Bytes of the head of a block of the log."""

_RECORD = struct.Struct("<qqIIqqII")


class Record(NamedTuple):
    """One message as the log has it: ``place`` is its block, ``nbytes`` its size with gaps;
    ``num_tensors`` 0 marks the way to the next block of the log.
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
        self._end = self._position + _BLOCK_BYTES - _RECORD.size

    def write(self, record: Record) -> None:
        """Show a message, whose numbers are in place, to the reader."""
        if self._position + _RECORD.size > self._end:
            chunk, index = self._segment.take(_BLOCK_BYTES)
            self._put(Record(0, 0, 0, 0, chunk.place(index)))
            self._chunk = chunk
            self._enter(index)
        self._put(record)

    def _put(self, record: Record) -> None:
        tag, nbytes, num_tensors, signature, place = record
        _RECORD.pack_into(
            self._chunk.memory, self._position, tag, nbytes, num_tensors, signature, *place
        )
        self._position += _RECORD.size
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

    def read(self) -> list[tuple[Record, memoryview]]:
        """New records with the bytes of their messages; a block belongs to who has the bytes."""
        written = self._counter[0]
        fence()
        result: list[tuple[Record, memoryview]] = []
        while self._num_read < written:
            self._num_read += 1
            tag, nbytes, num_tensors, signature, *where = _RECORD.unpack_from(
                self._chunk.memory, self._position
            )
            self._position += _RECORD.size
            place = BlockAddress(*where)
            if num_tensors:
                record = Record(tag, nbytes, num_tensors, signature, place)
                result.append((record, self._window.chunk(place).lend(place.block, nbytes)))
            else:
                self._chunk.free(self._index)
                self._enter(place)
        return result
