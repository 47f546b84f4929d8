"""Suffixes of a pipeline as records, and the choice of those to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.dapple.objective import Suffix

Index = NDArray[np.intp]

Labels = Any
"""A ``numpy.recarray`` of suffixes that share a state's devices or lead to one: fields of ``LABEL``
and of ``Suffix`` as attributes.
"""

# Where the first stage starts, and how many there are; number of its place, of the state before it
# was added (-1 if there is none), which suffix of that state it was added to, and by which move.
#
# Bytes of one micro-batch that they read from before, and of gradients that they send back; F + B
# of the slowest stage or transfer; T_PL, L with all that comes before as one stage on all other
# devices; an estimate of the best L that they can be part of, and a lower bound on it.
_NUMBERS = ("start", "stages", "place", "source", "parent", "move")
_FIGURES = ("entering", "gradients", "peak_s", "closed_s", "hoped_s", "least_s")
LABEL = np.dtype(
    [
        *((name, np.intp) for name in _NUMBERS),
        *((name, np.float64) for name in (*_FIGURES, *(column.name for column in fields(Suffix)))),
    ]
)


def labels(suffix: Suffix, count: int = 1, **columns: Any) -> Labels:
    """Records of so many suffixes; columns that are left out are 0."""
    records = np.zeros(count, LABEL).view(np.recarray)
    columns |= {column.name: getattr(suffix, column.name) for column in fields(Suffix)}
    for name, values in columns.items():
        records[name] = values
    return records


def suffix_of(records: Labels) -> Suffix:
    """What they mean for the latency."""
    return Suffix(*(records[column.name] for column in fields(Suffix)))


def joined(parts: Sequence[Labels]) -> Labels:
    """All of them, in this order."""
    return np.concatenate(parts).view(np.recarray)


def best_of_groups(records: Labels, group: Index, width: int) -> Index:
    """Per group the ``width`` least T_PL, the ``width`` least hopes, and one of fewest stages.

    Of equals the first; positions ascend.
    """
    rankings = (
        (width, (records.hoped_s, records.closed_s)),
        (width, (records.closed_s, records.hoped_s)),
        (1, (records.hoped_s, records.stages)),
    )
    kept = np.zeros(len(group), dtype=bool)
    for count, keys in rankings:
        order = np.lexsort((*keys, group))
        ranked = group[order]
        first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
        rank = np.arange(len(ranked)) - np.repeat(first, np.diff([*first, len(ranked)]))
        kept[order[rank < count]] = True
    return np.flatnonzero(kept)
