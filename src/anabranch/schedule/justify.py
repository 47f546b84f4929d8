"""Forward-backward improvement of a list schedule (Li and Willis, 1992).

Passes are moved as late as possible, from the last to the first, and then as early as possible,
from the first to the last, each into the first gap of its devices that is long enough. The first
turn shows which passes are urgent; a list that is made from the first pass on cannot know that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anabranch.compiled import Floats, Ints, compiled, compiled_if_worth


class Links(NamedTuple):
    """Predecessors of each pass, or its successors.

    Attributes:
        first: start in ``other`` of the links of each pass, and the end of the last.
        other: numbers of predecessors or successors, one pass after the other.
        between: least seconds between the two passes of a link.
    """

    first: Ints
    other: Ints
    between: Floats


class Passes(NamedTuple):
    """Links and lanes of passes. A lane runs one pass at a time.

    Attributes:
        waits: predecessors of each pass.
        after: successors of each pass.
        first_lane: start in ``lane`` of the lanes of each pass, and the end of the last.
        lane: numbers of lanes, one pass after the other.
    """

    waits: Links
    after: Links
    first_lane: Ints
    lane: Ints

    @property
    def room(self) -> Ints:
        """Start of each lane in a list of the passes of all lanes, and the end."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.lane))])


def links(count: int, passes: Ints, others: Ints, between: Floats) -> Links:
    """Return links of ``count`` passes: ``passes[i]`` is linked with ``others[i]``."""
    order = np.argsort(passes, kind="stable")
    first = np.searchsorted(passes[order], np.arange(count + 1))
    return Links(first, others[order], between[order])


def timed(order: Ints, seconds: Floats, passes: Passes) -> Floats:
    """Return when passes start, if they run in this order."""
    return _placed(order, seconds, passes, passes.waits, is_last=True)


def justified(order: Ints, ends: Floats, seconds: Floats, passes: Passes) -> Floats:
    """Return when passes start after they have moved.

    Args:
        order: passes in an order in which predecessors come first; it also decides between passes
            that start or end together.
        ends: end of each pass before the move.
        seconds: length of each pass.
    """
    last_first = order[np.argsort(ends[order], kind="stable")][::-1].copy()
    starts = -_placed(last_first, seconds, passes, passes.after) - seconds
    first_first = order[np.argsort(starts[order], kind="stable")]
    return _placed(first_first, seconds, passes, passes.waits)


def _placed(
    order: Ints, seconds: Floats, passes: Passes, waits: Links, *, is_last: bool = False
) -> Floats:
    """Return when passes start, if one after the other gets the first gap that is long enough, or
    with ``is_last`` the time after everything that its lanes have.
    """
    room = passes.room
    starts, taken = np.zeros(len(seconds)), Taken(room, room[:-1].copy(), *np.zeros((2, room[-1])))
    place = compiled_if_worth(_place, len(seconds))
    place(order, seconds, waits, passes.first_lane, passes.lane, taken, is_last, starts)
    return starts


class Taken(NamedTuple):
    """Intervals in which lanes are busy, ascending for each lane.

    Attributes:
        first: index of the first interval of each lane, and the end of the last.
        stop: index behind the last interval of each lane so far.
        start: start of each interval.
        end: end of each interval.
    """

    first: Ints
    stop: Ints
    start: Floats
    end: Floats


@compiled
def _place(
    order: Ints,
    seconds: Floats,
    waits: Links,
    first_lane: Ints,
    lanes: Ints,
    taken: Taken,
    is_last: bool,
    starts: Floats,
) -> None:
    """Place one pass after the other."""
    for number in order:
        length, start = seconds[number], 0.0
        for i in range(waits.first[number], waits.first[number + 1]):
            other = waits.other[i]
            start = max(start, starts[other] + seconds[other] + waits.between[i])
        first, stop = first_lane[number], first_lane[number + 1]
        moved = True
        while moved:
            later = start
            for i in range(first, stop):
                later = max(later, _gap(lanes[i], start, length, is_last, taken))
            moved = later > start and stop - first > 1
            start = later
        starts[number] = start
        for i in range(first, stop):
            _take(lanes[i], start, start + length, taken)


def _gap(lane: int, start: float, length: float, is_last: bool, taken: Taken) -> float:
    """Return when the first gap of this length begins in a lane, not before ``start``."""
    first, stop = taken.first[lane], taken.stop[lane]
    if is_last:
        return max(start, taken.end[stop - 1]) if stop > first else start
    low, high = first, stop
    while low < high:
        middle = (low + high) // 2
        if taken.start[middle] <= start:
            low = middle + 1
        else:
            high = middle
    if low > first:
        start = max(start, taken.end[low - 1])
    while low < stop and taken.start[low] < start + length:
        start = max(start, taken.end[low])
        low += 1
    return start


def _take(lane: int, start: float, end: float, taken: Taken) -> None:
    """Insert an interval among those of a lane."""
    at = taken.stop[lane]
    taken.stop[lane] = at + 1
    while at > taken.first[lane] and _is_behind(at - 1, start, end, taken):
        taken.start[at], taken.end[at] = taken.start[at - 1], taken.end[at - 1]
        at -= 1
    taken.start[at], taken.end[at] = start, end


def _is_behind(at: int, start: float, end: float, taken: Taken) -> bool:
    """Return True if an interval of the list is behind another one."""
    other = taken.start[at]
    return bool(other > start or (other == start and taken.end[at] > end))
