"""Stages that a graph can have, and the ways in which they can follow each other.

A stage is the difference of two nested downsets. All that is of height h (longest distance to a
sink) or more is a downset, so any partition into stages without a circle is a chain of downsets::

    {} ------------------> I1 ------------> I2 ------------> all
        layer, height 2       height 1         height 0

with layers cut into stages between which nothing flows: each is one or several of the connected
components of its layer::

    layer  a -> b    c    d -> e       stages  {a b c} {d e},  {a b} {c} {d e},  ...

A layer I..J with several components is the stage I..K of the first of them and a layer K..J with
fewer components. Both are pairs of downsets, so tables over pairs are all that a search needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import BudgetError
from anabranch.graph.opgraph import OpGraph, bits
from anabranch.planner.downsets import downsets

Indices = NDArray[np.int64]
Masks = NDArray[np.uint64]
"""Sets of operators in words of 64 bits: [..., word]."""

_WORD = 64
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number without pattern: 2 ** 64 over the golden ratio."""


@dataclass(frozen=True)
class Splits:
    """Layers with one number of components, and their first stages.

    Attributes:
        layers: pairs.
        first: per way to choose a first stage, the pair that it is; those of a layer in a row.
        rest: per way, the pair that remains.
        starts: per layer, its first way.
    """

    layers: Indices
    first: Indices
    rest: Indices
    starts: Indices


class Lattice:
    """Nested pairs of downsets of a graph.

    Args:
        ways: first stages of layers to list at most, over all layers.

    Attributes:
        downsets: as bit masks, ascending by size; also called by their places.
        below: per pair, the smaller downset; ascending.
        above: per pair, the larger one.

    Raises:
        BudgetError: if there are more downsets or ways.
    """

    def __init__(self, graph: OpGraph, *, budget: int, ways: int) -> None:
        self.graph = graph
        self.downsets = downsets(graph, budget)
        self._ways = ways
        self._words = -(-len(graph) // _WORD)
        masks = self._masks = self._as_words(self.downsets)
        outside = masks[:, None] & ~masks[None, :]
        nested = ~np.any(outside, axis=2) & ~np.eye(len(masks), dtype=bool)
        self.below, self.above = np.nonzero(nested)
        self._pair = np.full(nested.shape, -1, dtype=np.int64)
        self._pair[nested] = np.arange(len(self.below))

    def _as_words(self, masks: Sequence[int]) -> Masks:
        size = self._words * _WORD // 8
        raw = b"".join(mask.to_bytes(size, "little") for mask in masks)
        return np.frombuffer(raw, dtype="<u8").astype(np.uint64).reshape(len(masks), self._words)

    @cached_property
    def starts(self) -> Indices:
        """Per downset but the whole graph, its first pair as the smaller one."""
        return np.searchsorted(self.below, np.arange(len(self.downsets) - 1))

    def mask(self, pair: int) -> int:
        """Operators of a pair."""
        return self.downsets[int(self.above[pair])] & ~self.downsets[int(self.below[pair])]

    @cached_property
    def splits(self) -> tuple[Splits, ...]:
        """Layers with 2, 3, ... components."""
        rest = self._masks[self.above] & ~self._masks[self.below]
        parts = []
        while rest.any():
            parts.append(self._component(rest))
            rest = rest & ~parts[-1]
        table = np.stack(parts)
        counts = table.any(axis=2).sum(axis=0)
        total = int((1 << (counts - 1)).sum())
        if total > self._ways:
            raise BudgetError(
                f"the {len(self.below):,} layers of {self.graph.name or 'the model'} have "
                f"{total:,} ways to be cut, more than the budget of {self._ways:,}; capture it in "
                "coarser operators"
            )
        return tuple(
            self._split(np.flatnonzero(counts == count), table[:count])
            for count in range(2, len(table) + 1)
            if (counts == count).any()
        )

    def ways(self, pair: int) -> tuple[Indices, Indices]:
        """First stages of a layer with several components, and what remains after each."""
        for split in self.splits:
            at = int(np.searchsorted(split.layers, pair))
            if at < len(split.layers) and split.layers[at] == pair:
                count = len(split.first) // len(split.layers)
                these = slice(at * count, (at + 1) * count)
                return split.first[these], split.rest[these]
        raise ValueError(f"layer {pair} has one component")

    def _component(self, inside: Masks) -> Masks:
        """Per set, the connected component of its first operator; nothing if it is empty."""
        result = np.zeros_like(inside)
        found = np.zeros(len(inside), dtype=bool)
        for word in range(self._words):
            lowest = inside[:, word] & (~inside[:, word] + np.uint64(1))
            result[:, word] = np.where(found, np.uint64(0), lowest)
            found |= lowest > 0
        neighbours = self._as_words(
            [a | b for a, b in zip(self.graph.successors, self.graph.predecessors, strict=True)]
        )
        active = np.arange(len(inside))
        while len(active):
            before = result[active]
            now, around = before.copy(), inside[active]
            # In both directions of the topological order: most components need one sweep.
            for op in (*range(len(neighbours)), *reversed(range(len(neighbours)))):
                word, bit = divmod(op, _WORD)
                there = np.flatnonzero(now[:, word] >> np.uint64(bit) & np.uint64(1))
                now[there] |= neighbours[op] & around[there]
            result[active] = now
            active = active[(now != before).any(axis=1)]
        return result

    def _split(self, layers: Indices, parts: Masks) -> Splits:
        """Every first stage of layers whose components these are."""
        first, rest = [], []
        below = self._masks[self.below[layers]]
        for others in _subsets(parts[1:, layers]):
            end = below | parts[0, layers] | others
            place = self._place(end)
            first.append(self._pair[self.below[layers], place])
            rest.append(self._pair[place, self.above[layers]])
        # The last way takes everything and leaves nothing: that is one stage, not a split.
        ways = len(first) - 1
        return Splits(
            layers,
            np.stack(first[:-1], axis=1).ravel(),
            np.stack(rest[:-1], axis=1).ravel(),
            np.arange(0, len(layers) * ways, ways),
        )

    def _place(self, masks: Masks) -> Indices:
        order, keys = self._keyed
        return order[np.searchsorted(keys, self._key(masks))]

    @cached_property
    def _keyed(self) -> tuple[Indices, Masks]:
        """Places of the downsets in the order of their keys, and these."""
        keys = self._key(self._masks)
        order = np.argsort(keys)
        assert (np.diff(keys[order]) > 0).all(), "two downsets have the same key"
        return order, keys[order]

    def _key(self, masks: Masks) -> Masks:
        # One word is its own key; of several, a sum with odd factors, modulo 2 ** 64.
        factors = np.array([pow(_FACTOR, word, 1 << 64) for word in range(self._words)], np.uint64)
        return np.asarray((masks * factors).sum(axis=-1, dtype=np.uint64))


def _subsets(parts: Masks) -> Iterator[Masks]:
    """Unions of every choice of rows, the empty one first and that of all last."""
    for chosen in range(1 << len(parts)):
        yield np.bitwise_or.reduce(parts[list(bits(chosen))], axis=0, initial=np.uint64(0))
