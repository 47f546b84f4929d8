"""Means over seeds, and which differences are more than chance.

Runs of one seed begin with the same weights and see the same samples in the same order, so
contenders are compared seed by seed: a paired t-test, two-sided, uncorrected for their number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planners.common import Row, table

LOST = 0.5
"""Of the synchronous mean: a run with less has not learned."""

PAIRS = (
    ("pipeoptim", "stash"),
    ("pipeoptim", "synchronous"),
    ("predict-stash", "pipeoptim"),
    ("predict-stash, options", "pipeoptim"),
    ("predict-stash, options", "synchronous"),
    ("stash, NAdam", "stash"),
)


@dataclass(frozen=True)
class Difference:
    """Of two contenders over the same seeds.

    Attributes:
        mean: of the differences, in points.
        margin: half of its 95% confidence interval.
        p: how likely a mean as far from 0 is, if there is no difference.
    """

    mean: float
    margin: float
    p: float


def difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """How far one is above the other; nothing is known from fewer than two seeds."""
    if len(one) < 2:
        return Difference(one[0] - other[0], math.inf, 1.0)
    if len({a - b for a, b in zip(one, other, strict=True)}) == 1:
        return Difference(one[0] - other[0], 0.0, float(one[0] == other[0]))
    from scipy.stats import ttest_rel  # a second to load; most tables need none of it

    found = ttest_rel(one, other)
    low, high = found.confidence_interval(0.95)
    mean = statistics.fmean(a - b for a, b in zip(one, other, strict=True))
    return Difference(mean, (high - low) / 2, float(found.pvalue))


def compared(rows: Sequence[Row]) -> list[Row]:
    """The differences of ``PAIRS`` that a case has."""
    by_name = {row["contender"]: row["accuracy"] for row in rows}
    found: list[Row] = []
    for one, other in PAIRS:
        if one in by_name and other in by_name:
            d = difference(by_name[one], by_name[other])
            found.append({"one": one, "other": other, "mean": d.mean, "margin": d.margin, "p": d.p})
    return found


def show(rows: Sequence[Row]) -> str:
    """Two tables of one case: accuracies, then differences."""
    base = {row["contender"]: row["accuracy"] for row in rows}["synchronous"]
    floor = LOST * statistics.fmean(base)
    lines = []
    for row in rows:
        found = row["accuracy"]
        spread = f"{statistics.stdev(found):.2f}" if len(found) > 1 else "-"
        mean = statistics.fmean(found)
        lines.append(
            (
                row["contender"],
                f"{row['lr']:g}",
                f"{mean:.2f}",
                spread,
                f"{mean - statistics.fmean(base):+.2f}",
                f"{min(found):.1f}",
                str(sum(accuracy < floor for accuracy in found)),
            )
        )
    columns = ("policy", "lr", "mean", "sd", "to synchronous", "worst", "lost")
    pairs = [
        (d["one"], d["other"], f"{d['mean']:+.2f} +- {d['margin']:.2f}", _p(d["p"]))
        for d in compared(rows)
    ]
    return f"{table(columns, lines)}\n\n{table(('policy', 'over', 'points', 'p'), pairs)}"


def _p(p: float) -> str:
    return "< .0001" if p < 1e-4 else f"{p:.4f}".lstrip("0")
