"""Schedule configurations, and the stages that a search with them may use under a bound.

A configuration is a micro-batch size b and the k of kFkB, both powers of two. A group of k
micro-batches is no larger than the largest micro-batch: in Table 2 a larger one never lets
anything hold less.

Periods depend on b, replicas and recomputation; memory also on the samples in flight, so every
stage has the most samples that it may hold. Of two ways to run the same operators at the same b,
the one with more devices is of use only if it may hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from anabranch.planner.partitioner.configured.prices import NEVER, Book, Floats, Ints, Priced
from anabranch.planner.partitioner.rows import Row
from anabranch.plans.in_flight import in_flight_samples


@dataclass(frozen=True)
class Configs:
    """The configurations of a search.

    Attributes:
        pairs: (b, k), small micro-batches first.
        batch_size: samples of one step.
    """

    pairs: tuple[tuple[int, int], ...]
    batch_size: int

    @staticmethod
    def of(sizes: Sequence[int], batch_size: int, *, kfkb: bool) -> Configs:
        """All configurations with these micro-batch sizes."""
        pairs = []
        for b in sorted(sizes):
            pairs.append((b, 1))
            while kfkb and 2 * pairs[-1][0] * pairs[-1][1] <= max(sizes):
                pairs.append((b, 2 * pairs[-1][1]))
        return Configs(tuple(pairs), batch_size)

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def microbatch(self) -> Ints:
        """Samples of a micro-batch."""
        return np.array([b for b, _ in self.pairs], dtype=np.int64)

    @cached_property
    def group(self) -> Ints:
        """Samples of k micro-batches."""
        return np.array([b * k for b, k in self.pairs], dtype=np.int64)

    @cached_property
    def more(self) -> Ints:
        """[x, y]: what a stage x holds more than a stage y that follows it, by Table 2."""
        return np.array(
            [[in_flight_samples(k, b, m, a, 0) for a, m in self.pairs] for b, k in self.pairs],
            dtype=np.int64,
        )

    def held(self, chosen: Ints, required: Ints) -> Ints:
        """Samples that stages hold if what follows requires so many, in whole micro-batches.

        Args:
            chosen: configuration of each stage.
            required: per stage along the first axis.
        """
        shape = (-1, *[1] * (required.ndim - 1))
        b = self.microbatch[chosen].reshape(shape)
        whole = -(-np.maximum(required, self.group[chosen].reshape(shape)) // b) * b
        most = -(-self.batch_size // b) * b
        return np.where(required < NEVER, np.minimum(whole, most), NEVER)


@dataclass(frozen=True)
class Offers:
    """Stages that keep within a bound, those of one configuration next to each other.

    Attributes:
        config: configuration of each.
        devices: of each.
        most: samples that it may hold.
        row: where the search finds what follows it.
        mode: how it uses its devices, by index in ``Menu.modes``.
        masks: operators of a set.
        which: its set.
    """

    config: Ints
    devices: Ints
    most: Ints
    row: Ints
    mode: Ints
    masks: Callable[[int], int]
    which: Ints

    def __len__(self) -> int:
        return len(self.config)

    def mask(self, index: int) -> int:
        """Operators of one of them."""
        return self.masks(int(self.which[index]))


class Menu:
    """The stages of some micro-batch sizes.

    Args:
        book: prices them.
        configs: configurations; their sizes are those of the menu.
    """

    def __init__(self, book: Book, configs: Configs) -> None:
        self.configs = configs
        self._book = book
        self._sizes = sorted({b for b, _ in configs.pairs})
        prices = [book.parts(b).prices for b in self._sizes]
        self.modes = sorted(
            {mode for each in prices for mode in each.modes},
            key=lambda mode: (mode.devices, mode.recompute, mode.tensor),
        )
        self._rows: dict[int, tuple[Row, Priced]] = {}
        self._sets: dict[tuple[int, ...], Priced] = {}

    @property
    def entries(self) -> int:
        """Prices of every set of operators."""
        return len(self._sizes) * len(self.modes)

    @property
    def bounds(self) -> Floats:
        """Seconds per sample of all stages that were priced and fit, ascending."""
        priced = [*(each for _, each in self._rows.values()), *self._sets.values()]
        found = [each.seconds[(each.most > 0) & np.isfinite(each.seconds)] for each in priced]
        return np.unique(np.concatenate(found)) if found else np.empty(0)

    def row(self, row: Row) -> Priced:
        """The ranges [i, j) of a row; the set of each is ``i * (size + 1) + j``."""
        if id(row) not in self._rows:

            def masks(index: int) -> int:
                return row.mask(*divmod(index, row.size + 1))

            columns = [[self._book.row(row, b, mode) for mode in self.modes] for b in self._sizes]
            self._rows[id(row)] = row, Priced.of(masks, columns)
        return self._rows[id(row)][1]

    def sets(self, masks: tuple[int, ...]) -> Priced:
        """Any sets of operators."""
        if masks not in self._sets:
            columns = [
                [self._book.sets(masks, b, mode) for mode in self.modes] for b in self._sizes
            ]
            self._sets[masks] = Priced.of(masks.__getitem__, columns)
        return self._sets[masks]

    def offers(self, priced: Priced, chosen: Ints, rows: Ints, bound_s: float) -> Offers | None:
        """What keeps within a bound.

        Args:
            priced: sets of operators.
            chosen: which of them.
            rows: for each of these, where the search finds what follows.
            bound_s: seconds per sample.
        """
        most = np.where(priced.seconds[..., chosen] <= bound_s, priced.most[..., chosen], 0)
        least = np.maximum.accumulate(most, axis=1)
        useful = most > 0
        useful[:, 1:] &= most[:, 1:] > least[:, :-1]
        size, way, at = np.nonzero(useful)
        if not len(size):
            return None
        held = most[size, way, at]
        found = []
        for c, (b, _) in enumerate(self.configs.pairs):
            b_at = self._sizes.index(b)
            mine = np.flatnonzero((size == b_at) & (held >= min(self.configs.group[c], NEVER)))
            found.append((np.full(len(mine), c, dtype=np.int64), mine))
        config = np.concatenate([each for each, _ in found])
        mine = np.concatenate([each for _, each in found])
        devices = np.array([mode.devices for mode in self.modes], dtype=np.int64)
        if not len(mine):
            return None
        return Offers(
            config,
            devices[way[mine]],
            held[mine],
            rows[at[mine]],
            way[mine],
            priced.masks,
            chosen[at[mine]],
        )
