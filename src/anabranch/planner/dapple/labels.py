"""Suffixes of a pipeline as arrays with an entry per suffix, and the choice of those to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.nested_weights import Floats
from anabranch.planner.dapple.objective import NOTHING, Suffix

Index = NDArray[np.intp]


@dataclass(frozen=True)
class Labels:
    """Suffixes that share a state's devices or lead to one.

    Attributes:
        entering: bytes of one micro-batch that they read from before.
        gradients: bytes that they send back.
        peak_s: F + B of the slowest stage or transfer.
        place: number of the first stage's place.
        closed_s: T_PL, L with all that comes before as one stage on all other devices.
        hoped_s: an estimate of the best L that they can be part of.
        least_s: a lower bound on it.
        source: number of the state before the first stage was added, -1 if there is none.
        parent: which suffix of that state it was added to.
        move: which move led from there.
    """

    start: Index
    stages: Index
    entering: Floats
    gradients: Floats
    peak_s: Floats
    place: Index
    closed_s: Floats
    hoped_s: Floats
    least_s: Floats
    source: Index
    parent: Index
    move: Index
    suffix: Suffix

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: Index | NDArray[np.bool_]) -> Labels:
        """Some of them."""
        arrays = {name: getattr(self, name)[chosen] for name in ARRAYS}
        return Labels(**arrays, suffix=pick(self.suffix, chosen))

    @staticmethod
    def join(parts: Sequence[Labels]) -> Labels:
        """All of them, in this order."""
        arrays = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ARRAYS}
        columns = (
            np.concatenate([getattr(part.suffix, column.name) for part in parts])
            for column in fields(Suffix)
        )
        return Labels(**arrays, suffix=Suffix(*columns))

    @staticmethod
    def no_stages(size: int) -> Labels:
        """The one suffix of no stages, behind ``size`` operators."""
        arrays = {name: np.zeros(1, dtype=kind) for name, kind in ARRAYS.items()}
        arrays["start"] += size
        arrays["source"] -= 1
        nothing = (np.full(1, getattr(NOTHING, column.name)) for column in fields(Suffix))
        return Labels(**arrays, suffix=Suffix(*nothing))


ARRAYS: dict[str, Any] = {
    column.name: np.intp if column.type == "Index" else np.float64
    for column in fields(Labels)
    if column.name != "suffix"
}
"""The arrays of labels and what they hold."""


def pick(suffix: Suffix, chosen: Index | NDArray[np.bool_]) -> Suffix:
    """Some entries of a suffix of arrays."""
    return Suffix(*(getattr(suffix, column.name)[chosen] for column in fields(suffix)))


def best_of_groups(labels: Labels, group: Index, width: int) -> Index:
    """Per group the ``width`` least T_PL, the ``width`` least hopes, and one of fewest stages.

    Of equals the first; positions ascend.
    """
    rankings = (
        (width, (labels.hoped_s, labels.closed_s)),
        (width, (labels.closed_s, labels.hoped_s)),
        (1, (labels.hoped_s, labels.stages)),
    )
    kept = np.zeros(len(group), dtype=bool)
    for count, keys in rankings:
        order = np.lexsort((*keys, group))
        ranked = group[order]
        first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
        rank = np.arange(len(ranked)) - np.repeat(first, np.diff([*first, len(ranked)]))
        kept[order[rank < count]] = True
    return np.flatnonzero(kept)
