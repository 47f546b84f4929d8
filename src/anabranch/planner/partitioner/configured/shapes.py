"""How much of the branches of a block a stage next to it may hold.

A stage behind a block may hold the last operators of its branches, one before it the first::

    [ a ][ b ][ c ]--+                    cut after b and before f: the stage is c, f, join
                     +--[ join ]
         [ e ][ f ]--+

Up to ``SHAPES`` ways to cut the branches are all looked at. If there are more: of one branch alone,
and of all branches at once, the same number of items; up to ``AMOUNTS`` numbers, all of a branch
among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from anabranch.planner.partitioner.chains import Block, Chain

SHAPES = 36
"""Ways to cut the branches of a block that are all tried."""

AMOUNTS = 8
"""Where there are more, numbers of items of a branch that are."""


@dataclass(frozen=True)
class Shape:
    """One cut per branch.

    Attributes:
        cuts: where what the stage does not hold ends (of a stage behind the block), or begins (of
            one before it).
        mask: the operators that it holds.
    """

    cuts: tuple[int, ...]
    mask: int

    @staticmethod
    def none(block: Block, *, behind: bool) -> Shape:
        """The stage holds nothing of the block."""
        return Shape(tuple(len(each.items) if behind else 0 for each in block.branches), 0)


def tails(chain: Chain, p: int, stop: int) -> list[Shape]:
    """Shapes for a stage behind the block at position p of a chain that ends at ``stop``."""
    block = chain.items[p]
    assert isinstance(block, Block)
    return [] if p + 1 >= stop else list(_shapes(block, behind=True))


def heads(chain: Chain, p: int) -> list[Shape]:
    """Shapes for a stage before the block at position p."""
    block = chain.items[p]
    assert isinstance(block, Block)
    return [] if p == 0 else list(_shapes(block, behind=False))


def _shapes(block: Block, *, behind: bool) -> Iterator[Shape]:
    sizes = [len(branch.items) for branch in block.branches]
    for taken in _amounts(block, sizes):
        cuts = tuple(size - t if behind else t for size, t in zip(sizes, taken, strict=True))
        mask = 0
        for branch, cut, size in zip(block.branches, cuts, sizes, strict=True):
            mask |= branch.row.mask(cut, size) if behind else branch.row.mask(0, cut)
        yield Shape(cuts, mask)


def _amounts(block: Block, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Items taken of each branch, at least one in all."""
    if prod(size + 1 for size in sizes) <= SHAPES + 1:
        yield from list(product(*(range(size + 1) for size in sizes)))[1:]
        return
    for b in sorted(set(block.classes)):
        for t in _spread(sizes[b]):
            yield tuple(t if i == b else 0 for i in range(len(sizes)))
    for t in _spread(max(sizes)):
        yield tuple(min(t, size) for size in sizes)


def _spread(most: int) -> list[int]:
    """Numbers from 1 to ``most``, evenly."""
    return sorted({-(-most * i // AMOUNTS) for i in range(1, AMOUNTS + 1)})
