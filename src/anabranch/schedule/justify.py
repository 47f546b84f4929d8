"""Forward-backward improvement of a list schedule (Li and Willis, 1992).

Passes are moved as late as they can be, the last ones first, and then as early as they can be, the
first ones first, each into the first gap of its devices that is long enough. The first turn finds
out which passes are urgent, which a list made from the first pass on cannot know.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

Waits = Sequence[Sequence[tuple[int, float]]]
"""Per pass, those that it waits for, or those that wait for it, with seconds in between."""


def those_after(waits: Waits) -> list[list[tuple[int, float]]]:
    """Return per pass those that wait for it."""
    after: list[list[tuple[int, float]]] = [[] for _ in waits]
    for number, earlier in enumerate(waits):
        for other, between in earlier:
            after[other].append((number, between))
    return after


def justified(
    order: Sequence[int],
    ends: Sequence[float],
    seconds: Sequence[float],
    waits: Waits,
    after: Waits,
    lanes: Sequence[Sequence[int]],
) -> list[float]:
    """Return when passes start after they have moved.

    Args:
        order: their numbers; each is behind those that it waits for, and of those that end or start
            together.
        ends: when they end before that.
        seconds: their lengths.
        waits: numbers of earlier passes, and seconds between them and this one.
        after: those that wait for it, likewise; see ``those_after``.
        lanes: per pass, what runs one pass at a time.
    """
    late = _placed(sorted(order, key=ends.__getitem__)[::-1], seconds, after, lanes)
    start = [-begun - taken for begun, taken in zip(late, seconds, strict=True)]
    return _placed(sorted(order, key=start.__getitem__), seconds, waits, lanes)


def _placed(
    order: Iterable[int], seconds: Sequence[float], waits: Waits, lanes: Sequence[Sequence[int]]
) -> list[float]:
    """Return when passes start, if one after the other gets the first gap that suits it."""
    starts, ends = [0.0] * len(seconds), [0.0] * len(seconds)
    taken: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number in order:
        length = seconds[number]
        start = max([ends[other] + between for other, between in waits[number]], default=0.0)
        used, moved = lanes[number], True
        while moved:
            later = max([_gap(taken[lane], start, length) for lane in used])
            moved, start = later > start and len(used) > 1, later
        starts[number], ends[number] = start, start + length
        for lane in used:
            insort(taken[lane], (start, start + length))
    return starts


def _gap(taken: Sequence[tuple[float, float]], start: float, length: float) -> float:
    """Return when a gap of a length begins, at this time or later."""
    at = bisect(taken, (start, float("inf")))
    if at:
        start = max(start, taken[at - 1][1])
    while at < len(taken) and taken[at][0] < start + length:
        start = max(start, taken[at][1])
        at += 1
    return start
