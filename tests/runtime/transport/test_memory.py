"""Blocks of shared memory, seen from both ends in one process."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.transport.memory import Segment, Window
from tests.runtime.transport.runners import used_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment()
    yield segment
    segment.close()


@pytest.fixture
def window(segment: Segment) -> Iterator[Window]:
    window = Window(os.dup(segment.file))
    yield window
    window.close()


def test_both_ends_see_the_same_bytes(segment: Segment, window: Window) -> None:
    chunk, index = segment.take(5)
    start = chunk.start(index)
    chunk.memory[start : start + 5] = b"hello"
    address = chunk.address_of(index)
    assert bytes(window.chunk(address).lend(address.block, 5)) == b"hello"


def test_a_block_is_taken_until_the_last_tensor_on_it_is_gone(
    segment: Segment, window: Window
) -> None:
    """Also if that is a part, in another shape, without the tensor that it is a part of."""
    chunk, index = segment.take(4096)
    address = chunk.address_of(index)
    view = window.chunk(address).lend(address.block, 4096)
    tensors = [torch.frombuffer(view, dtype=torch.float32, count=8, offset=i) for i in (0, 64)]
    part = tensors[0].view(2, 4)[1]
    del view
    assert segment.take(4096)[1] == 1
    del tensors
    gc.collect()
    assert segment.take(4096)[1] == 2
    del part
    assert segment.take(4096) == (chunk, 0)


def test_a_fork_frees_nothing(segment: Segment, window: Window) -> None:
    """What a child of the receiver drops is still its parent's."""
    chunk, index = segment.take(4096)
    address = chunk.address_of(index)
    view = window.chunk(address).lend(address.block, 4096)
    window.disown()
    del view
    assert segment.take(4096)[1] == 1


def test_other_sizes_are_in_other_chunks(segment: Segment) -> None:
    """A block fits its size at most twice over."""
    chunks = [segment.take(nbytes)[0] for nbytes in (1, 4096, 4097, 8192, 1 << 20)]
    assert [chunk.block_bytes for chunk in chunks] == [4096, 4096, 8192, 8192, 1 << 20]
    assert chunks[0] is chunks[1]
    assert chunks[2] is chunks[3]


def test_only_pages_that_are_written_take_memory(segment: Segment) -> None:
    """A block of 64 MiB, one page of it written, is two pages: there are the flags too."""
    chunk, index = segment.take(1 << 26)
    chunk.memory[chunk.start(index)] = 1
    assert used_bytes(segment) == 2 * os.sysconf("SC_PAGESIZE")


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 9)), max_size=60))
def test_no_two_taken_blocks_overlap(steps: list[tuple[int, int]]) -> None:
    """Take a block of some size, then free one of those taken, or none; every block keeps what was
    written to its first and last byte.
    """
    segment = Segment()
    taken: list[tuple[memoryview, bytes]] = []
    for number, (nbytes, freed) in enumerate(steps):
        chunk, index = segment.take(nbytes)
        view = chunk.lend(index, nbytes)
        mark = bytes([number + 1])
        view[:1] = view[-1:] = mark
        taken.append((view, mark))
        del view
        if freed < len(taken):
            taken.pop(freed)
        assert all(bytes(v[:1]) == bytes(v[-1:]) == m for v, m in taken)
    segment.close()
