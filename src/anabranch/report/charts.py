"""Two charts of the page: memory of every device over the step, and a curve such as the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.report.theme import (
    Drawing,
    milliseconds,
    num,
    rect,
    significant,
    size,
    text,
    text_width,
    ticks,
)
from anabranch.timeline import Timeline

Points = Sequence[tuple[float, float]]

MARGIN = 22.0


def memory_svg(timelines: Sequence[tuple[str, Timeline]], *, width: float = 1200) -> Drawing | None:
    """Memory in use over the step, a row per device on one scale; None if nobody recorded any.

    The first timeline is an area, the others are lines over it.
    """
    known = [(title, t) for title, t in timelines if any(t.memory.values())]
    if not known:
        return None
    devices = sorted({device for _, t in known for device in t.memory})
    horizon = max(max(t.step_s, t.makespan_s) for _, t in known) or 1e-9
    most = max(peak for _, t in known for peak in t.peak_bytes.values()) or 1
    row = 46.0 if len(devices) <= 8 else 30.0 if len(devices) <= 32 else 16.0
    left, right = MARGIN + 76, width - MARGIN - 140
    drawing = Drawing(width, 30 + row * len(devices) + 36, "Memory of every device over the step")
    _series_legend(drawing, [title for title, _ in known], left)
    for i, device in enumerate(devices):
        base = 30 + row * (i + 1)
        label = min(12.0, row - 4)
        drawing.add(rect("lane", left, base - row + 4, right - left, row - 4, radius=2))
        drawing.add(text("right", left - 10, base - row / 2 + 6, label, f"device {device}"))
        for k, (_, timeline) in enumerate(known):
            points = _steps(timeline.memory.get(device, ()), horizon, right - left)
            tall = (row - 8) / most
            drawing.add(*_memory_line(points, left, right, base, tall, filled=k == 0, css=k))
        peaks = " / ".join(size(t.peak_bytes.get(device, 0)) for _, t in known)
        drawing.add(text("muted", right + 10, base - row / 2 + 6, label, f"peak {peaks}"))
    _time_axis(drawing, left, right, 30 + row * len(devices), horizon)
    return drawing


def _series_legend(drawing: Drawing, titles: Sequence[str], x: float) -> None:
    for k, title in enumerate(titles):
        css = "area" if k == 0 else f"line{min(k, 1)}"
        drawing.add(rect(css, x, 8, 16, 10, radius=2), text("", x + 22, 17, 12, title))
        x += 22 + text_width(title, 12) + 18


def _steps(samples: Sequence[tuple[float, int]], horizon: float, pixels: float) -> list[tuple[float, int]]:
    """At most one change per pixel: the largest in it, so that no peak is lost."""
    kept: list[tuple[float, int]] = []
    pixel = horizon / pixels
    column = -1
    for time, nbytes in samples:
        here = int(time / pixel)
        if here == column and nbytes <= kept[-1][1]:
            continue
        if here == column:
            kept[-1] = (kept[-1][0], nbytes)
        else:
            kept.append((time, nbytes))
            column = here
    # What was skipped in a column may be the level that lasts; it then starts one pixel later.
    return _with_lasting_levels(kept, samples, pixel)


def _with_lasting_levels(
    kept: list[tuple[float, int]], samples: Sequence[tuple[float, int]], pixel: float
) -> list[tuple[float, int]]:
    last_in = {int(time / pixel): nbytes for time, nbytes in samples}
    result = []
    for i, (time, nbytes) in enumerate(kept):
        result.append((time, nbytes))
        column = int(time / pixel)
        following = kept[i + 1][0] if i + 1 < len(kept) else math.inf
        after = (column + 1) * pixel
        if last_in[column] != nbytes and after < following:
            result.append((after, last_in[column]))
    return result


def _memory_line(
    points: Points, left: float, right: float, base: float, tall: float, *, filled: bool, css: int
) -> list[str]:
    if not points:
        return []
    horizon = right - left
    raise NotImplementedError(horizon)
