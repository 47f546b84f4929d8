"""The log of one rank's messages to another, both ends in one process."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.transport.memory import Reader, Record, Segment, Window, Writer
from tests.runtime.transport.runners import used_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


def write(segment: Segment, writer: Writer, tag: int, content: bytes) -> None:
    """One message."""
    chunk, index = segment.take(len(content))
    start = chunk.start(index)
    chunk.memory[start : start + len(content)] = content
    writer.write(Record(tag, len(content), 1, 7, chunk.address_of(index)))


SIZES = st.sampled_from([0, 1, 63, 64, 65, 1000, 4095, 4096, 4097])


@given(st.lists(st.one_of(SIZES, st.none()), max_size=120))
def test_what_is_written_is_read_in_order(steps: list[int | None]) -> None:
    """Messages of these sizes, message i full of i; None is a look by the reader, who may be far
    behind or always up to date.
    """
    segment = Segment()
    writer = Writer(segment)
    window = Window(os.dup(segment.file))
    reader = Reader(window, writer.begin)
    expected, heard = [], []
    for number, size in enumerate([*steps, None]):
        if size is not None:
            content = bytes([number]) * size
            write(segment, writer, number, content)
            expected.append((number, content))
        else:
            heard += [(record.tag, bytes(data)) for record, data in reader.read()]
            assert heard == expected
    window.close()
    segment.close()


def test_a_reader_that_keeps_up_needs_little_memory() -> None:
    """1,000 messages of 4 KB are 4 MB; two blocks of 64 KiB of log and some pages do."""
    segment = Segment()
    writer = Writer(segment)
    window = Window(os.dup(segment.file))
    reader = Reader(window, writer.begin)
    for tag in range(1000):
        write(segment, writer, tag, b"x" * 4000)
        assert [record.tag for record, _ in reader.read()] == [tag]
    assert used_bytes(segment) <= 2 * (1 << 16) + 4 * os.sysconf("SC_PAGESIZE")
    window.close()
    segment.close()
