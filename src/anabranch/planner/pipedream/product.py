"""Inner loop of both recurrences: two parts in series, the longer of them, the best cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.toolkit.budget import Budget

_SMALL = 1 << 15
"""Up to so many entries are handled in one go; more would not stay in a processor's cache."""


def least_longest(
    ends: NDArray[Any],
    begins: NDArray[Any],
    result: NDArray[Any],
    budget: Budget,
    most: float = np.finfo(np.float64).max,
) -> None:
    """Lower ``result[u, v]`` to the least over c and s of max(ends[c, s, u], begins[c, s, v]).

    Args:
        ends: what the part from u to s costs, for every choice c.
        begins: what the part from s to v costs with the same choice.
        result: is changed; may have only the first of the states u.
        most: what is above it is absent. A state takes as long as it has neighbours on both sides.
    """
    if not len(ends):
        return
    low, reached = _first(ends <= most)
    behind, going_on = _first((begins <= most)[:, :, ::-1])
    high = begins.shape[2] - behind
    for s in np.flatnonzero(reached & going_on):
        ending, beginning = ends[:, s, low[s] : s], begins[:, s, s + 1 : high[s]]
        part = result[low[s] : s, s + 1 : high[s]]
        budget.spend(len(ends) * part.size)
        if len(ends) * part.size <= _SMALL:
            longest = np.maximum(ending[:, :, None], beginning[:, None, :]).min(axis=0)
            np.minimum(part, longest, out=part)
            continue
        for one, other in zip(ending, beginning, strict=True):
            np.minimum(part, np.maximum(one[:, None], other[None, :]), out=part)


def _first(present: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Per state, the first entry of any choice, and whether there is one."""
    some: NDArray[np.bool_] = np.any(present, axis=0)
    return np.argmax(some, axis=1), np.any(some, axis=1)
