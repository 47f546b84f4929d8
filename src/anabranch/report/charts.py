"""The loss over training, a picture of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

from anabranch.report.theme import PIXELS, Drawing, num, significant, text, ticks


def loss_chart(
    values: Sequence[float],
    *,
    unit: str = "step",
    before: int = 0,
    other: Sequence[float] = (),
    held_out: Mapping[int, float] | None = None,
) -> Drawing:
    """Draw losses over the training steps with their running mean, interrupted where not finite.

    Args:
        before: steps of earlier runs; the first value belongs to the next step.
        other: values of another run, from its first step on, in the second colour.
        held_out: step -> loss of the evaluation behind it, in the third colour.
    """
    width, height = PIXELS.width, 260.0
    over = "training steps" if unit == "step" else f"{unit}es"
    drawing = Drawing(width, height, f"loss over the {over}")
    held_out = held_out or {}
    finite = [v for v in (*values, *other, *held_out.values()) if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (0.0 if 0 <= low < 0.4 * high else low - pad), high + pad
    left, right, top, bottom = PIXELS.margin + 50, width - PIXELS.margin, 16.0, height - 34
    longest = max(len(values), len(other))
    last = max(longest - 1, 1)

    def x(step: float) -> float:
        return left + (step - 1) / last * (right - left)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    for level in ticks(low, high, 5):
        drawing.add(f'<path class="rule" d="M{num(left)} {num(y(level))}H{num(right)}"/>')
        drawing.add(text("muted right", left - 8, y(level) + 4, 11, significant(level)))
    for step in _step_ticks(before, longest, round((right - left) / 90)):
        drawing.add(text("muted num", x(step - before), bottom + 18, 11, f"{step:,}"))
    beside = left - 5 - 3.5 * len(f"{before + 1:,}")  # of the first number, which is centred
    drawing.add(text("muted right", beside, bottom + 18, 11, unit))
    for css, series in (("line1", other), ("line0", values)):
        raw = [(x(i + 1), y(v) if math.isfinite(v) else math.nan) for i, v in enumerate(series)]
        many = sum(map(math.isfinite, series)) > 60
        if raw:
            drawing.add(_polyline(raw, f"{css} faint" if many else css, 1.0 if many else 1.8))
        if many:
            smooth = _running_mean(series, len(series) // 60)
            drawing.add(_polyline([(x(i + 1), y(v)) for i, v in enumerate(smooth)], css, 2.0))
    if evaluated := [(x(step - before), y(value)) for step, value in held_out.items()]:
        drawing.add(_polyline(evaluated, "line2", 2.0))
    return drawing


def _step_ticks(before: int, steps: int, about: int) -> list[int]:
    whole = [round(t) for t in ticks(before, before + steps, about) if t == round(t)]
    near = before + max(steps / max(about, 1) / 2, 1)  # no room beside the first
    return sorted({before + 1, *(t for t in whole if t > near)}) if steps else []


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return means over ``reach`` values on either side, fewer at the ends, ignoring NaN."""
    finite = [math.isfinite(value) for value in values]
    counts = list(accumulate(finite, initial=0))
    kept = (value if known else 0.0 for value, known in zip(values, finite, strict=True))
    sums = list(accumulate(kept, initial=0.0))
    result = []
    for i in range(len(values)):
        # The window is symmetric, or the ends of a falling curve would be bent.
        near = min(reach, i, len(values) - 1 - i)
        low, high = i - near, i + near + 1
        number = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / number if number else math.nan)
    return result


def _polyline(points: Sequence[tuple[float, float]], css: str, stroke: float) -> str:
    """Return a path interrupted where y is NaN; a lone point becomes a dot."""
    path = ""
    for is_gap, run in groupby(_extremes(points), key=lambda point: math.isnan(point[1])):
        if not is_gap:
            places = [f"{num(x)} {num(y)}" for x, y in run]
            path += f"M{'L'.join(places)}{'' if places[1:] else 'h.01'}"
    return (
        f'<path class="{css}" stroke-width="{num(stroke)}" stroke-linejoin="round" '
        f'stroke-linecap="round" d="{path}"/>'
    )


def _extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each pixel column, in order."""
    kept = []
    for _, points_of_column in groupby(points, key=lambda point: math.floor(point[0])):
        column = list(points_of_column)
        real = [p for p in column if not math.isnan(p[1])]
        if len(column) <= 2 or not real:
            kept += column
        else:
            both = {min(real, key=lambda p: p[1]), max(real, key=lambda p: p[1])}
            kept += sorted(both)
    return kept
