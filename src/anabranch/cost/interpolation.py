"""Seconds between the sample counts that were measured: on a line. Planners also compile this."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.compiled import Ints
from anabranch.cost.stage_weights import Number


def row_below(samples: float, measured: Sequence[int] | Ints) -> tuple[int, float]:
    """Index of the measured count below so many samples, and their share of the way to the next
    one.
    """
    row = 0
    while row < len(measured) - 2 and measured[row + 1] < samples:
        row += 1
    low, high = measured[row], measured[row + 1]
    return row, (samples - low) / (high - low)


def between(low: Number, high: Number, share: float) -> Number:
    """Seconds at this share of the way from low to high; exactly those at either end."""
    return low * (1 - share) + high * share
