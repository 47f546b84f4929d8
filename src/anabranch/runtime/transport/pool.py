"""Memory of this process for messages, used again once no tensor is on it (see ``memory``).

Pages that nobody has used cost several times as much to write as others.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict


class Pool:
    """Buffers of power-of-two sizes. They live as long as the pool or any tensor on them."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._lent: dict[int, _Loan] = {}

    def take(self, nbytes: int) -> memoryview:
        """A buffer of at least one byte, taken until nothing refers to the result."""
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else mmap.mmap(-1, size)
        view = memoryview(buffer)[:nbytes]
        loan = _Loan(view, _give_back)
        loan.pool, loan.buffer, loan.size = self, buffer, size
        self._lent[id(loan)] = loan
        return view

    @property
    def num_free(self) -> int:
        """Buffers that wait to be used again."""
        return sum(map(len, self._free.values()))


class _Loan(weakref.ref[memoryview]):
    __slots__ = ("buffer", "pool", "size")
    pool: Pool
    buffer: mmap.mmap
    size: int


def _give_back(loan: weakref.ref[memoryview]) -> None:
    assert isinstance(loan, _Loan)
    # This may run in any thread, between any two instructions; each of these is one.
    loan.pool._free[loan.size].append(loan.buffer)
    del loan.pool._lent[id(loan)]
