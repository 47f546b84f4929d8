"""Charts of the page: memory of every device over the step, and curves such as the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

from anabranch.plans.plan import memory_text
from anabranch.report.theme import PIXELS, Drawing, num, rect, significant, text, text_width, ticks
from anabranch.timeline import Timeline

_Y = TypeVar("_Y", int, float)


def memory_chart(
    timelines: Sequence[tuple[str, Timeline]], *, width: float = 1200
) -> Drawing | None:
    """Draw memory in use over the step, a row per device; None if none was recorded.

    The first timeline that has memory is an area, the second a line over it.
    """
    known = [(title, t) for title, t in timelines if any(t.memory.values())][:2]
    if not known:
        return None
    devices = sorted({device for _, t in known for device in t.memory})
    ends = [max(t.step_s, t.makespan_s) for _, t in known]
    peaks = [t.peak_bytes for _, t in known]
    most = max(peak for device_peaks in peaks for peak in device_peaks.values()) or 1
    row = 44.0 if len(devices) <= 8 else 30.0 if len(devices) <= 16 else 19.0
    label = min(12.0, row - 5)
    left, right = PIXELS.margin + 84, width - PIXELS.margin - 190
    scale = (right - left) / (max(ends) or 1e-9)
    bottom = PIXELS.legend + row * len(devices)
    drawing = Drawing(width, bottom + 30, "Memory of every device over the step")
    _legend(drawing, [title for title, _ in known], left)
    _time_axis(drawing, left, right, bottom, scale)
    for i, device in enumerate(devices):
        base = PIXELS.legend + row * (i + 1)
        middle = base - row / 2 + 2 + label * 0.36
        drawing.add(rect("lane", left, base - row + 4, right - left, row - 4, radius=2))
        drawing.add(text("right", left - 10, middle, label, f"device {device}"))
        for k, (_, timeline) in enumerate(known):
            steps = [(left + t * scale, b) for t, b in timeline.memory.get(device, ())]
            end = left + ends[k] * scale
            drawing.add(*_staircase(thin(steps), end, base, (row - 8) / most, filled=k == 0))
        texts = " \u00b7 ".join(memory_text(device_peaks.get(device, 0)) for device_peaks in peaks)
        drawing.add(text("muted", right + 10, middle, label, f"peak {texts}"))
    return drawing


def _time_axis(drawing: Drawing, left: float, right: float, bottom: float, scale: float) -> None:
    for time in ticks(0.0, (right - left) / scale * 1e3, round((right - left) / 100)):
        x = left + time / 1e3 * scale
        drawing.add(f'<path class="rule" d="M{num(x)} {num(PIXELS.legend)}V{num(bottom + 4)}"/>')
        drawing.add(text("muted num", x, bottom + 18, 11, significant(time)))
    drawing.add(text("muted right", left - 10, bottom + 18, 11, "time in ms"))


def _legend(drawing: Drawing, titles: Sequence[str], x: float) -> None:
    for k, title in enumerate(titles):
        drawing.add(rect("area" if k == 0 else "line1", x, 9, 16, 10, radius=2))
        drawing.add(text("", x + 22, 18, 12, title))
        x += 22 + text_width(title, 12) + 18


def thin(steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Keep the highest and the last step in each pixel column, so that no peak is lost."""
    kept = []
    for column in _columns(steps):
        highest = max(column, key=lambda step: step[1])
        kept.append(highest)
        if column[-1][1] != highest[1]:
            kept.append(column[-1])
    return kept


def _columns(points: Sequence[tuple[float, _Y]]) -> list[list[tuple[float, _Y]]]:
    """Group ascending points by pixel column."""
    return [list(column) for _, column in groupby(points, key=lambda point: math.floor(point[0]))]


def _staircase(
    steps: Sequence[tuple[float, int]], end: float, base: float, scale: float, *, filled: bool
) -> list[str]:
    if not steps:
        return []
    path = f"M{num(steps[0][0])} {num(base - steps[0][1] * scale)}"
    for x, level in steps[1:]:
        path += f"H{num(x)}V{num(base - level * scale)}"
    path += f"H{num(end)}"
    if filled:
        path += f"V{num(base)}H{num(steps[0][0])}Z"
        return [f'<path class="area" stroke-width="1" d="{path}"/>']
    return [f'<path class="line1" stroke-width="1.5" d="{path}"/>']


def curve_chart(
    name: str,
    values: Sequence[float],
    *,
    width: float = 1200,
    height: float = 260,
    unit: str = "step",
    before: int = 0,
    other: Sequence[float] = (),
) -> Drawing:
    """Draw values over the training steps with their running mean, interrupted where not finite.

    Args:
        before: steps of earlier runs; the first value belongs to the next step.
        other: values of another run, from its first step on, in the second colour.
    """
    over = "training steps" if unit == "step" else f"{unit}es"
    drawing = Drawing(width, height, f"{name} over the {over}")
    finite = [v for v in (*values, *other) if math.isfinite(v)]
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
    drawing.add(text("muted right", left - 8, bottom + 18, 11, unit))
    for css, series in (("line1", other), ("line0", values)):
        raw = [(x(i + 1), y(v) if math.isfinite(v) else math.nan) for i, v in enumerate(series)]
        many = sum(map(math.isfinite, series)) > 60
        if raw:
            drawing.add(_polyline(raw, f"{css} faint" if many else css, 1.0 if many else 1.8))
        if many:
            smooth = _running_mean(series, len(series) // 60)
            drawing.add(_polyline([(x(i + 1), y(v)) for i, v in enumerate(smooth)], css, 2.0))
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
    points = _extremes(points)
    path = ""
    pen_down = False
    for (x, y), (_, following) in pairwise([*points, (0.0, math.nan)]):
        if math.isnan(y):
            pen_down = False
            continue
        path += f"{'L' if pen_down else 'M'}{num(x)} {num(y)}"
        if not pen_down and math.isnan(following):
            path += "h.01"
        pen_down = True
    return (
        f'<path class="{css}" stroke-width="{num(stroke)}" stroke-linejoin="round" '
        f'stroke-linecap="round" d="{path}"/>'
    )


def _extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each pixel column, in order."""
    kept = []
    for column in _columns(points):
        real = [p for p in column if not math.isnan(p[1])]
        if len(column) <= 2 or not real:
            kept += column
        else:
            both = {min(real, key=lambda p: p[1]), max(real, key=lambda p: p[1])}
            kept += sorted(both)
    return kept
