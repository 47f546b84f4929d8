"""Search for the least load under which a chain of downsets exists: Piper's recurrence.

With every stage that a plan may have there are three passes over the nested pairs (``walk``):

    after(lo)     fewest devices from downset lo to the end, each load within a bound
    before(hi)    fewest devices up to downset hi, likewise
    stages(lo, k) fewest stages from lo to the end on exactly k devices, memory respected

The first two know only that a stage keeps one micro-batch in flight, two if another follows it. So
they give a lower bound on the load; and a stage is of use only if

    before(lo) + its devices + after(hi)  <=  all devices,

which near the least load leaves few stages and few values of k. The third is exact: what follows a
stage matters to its memory only through the number of stages, and fewer are always better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.nested_weights import Floats, Ints, Pairs
from anabranch.planner.piper.walk import NEVER, StageOptions, Walk

ROUNDING = 1 + 1e-9
"""Loads that are summed in another order may differ by so much."""

_AT_ONCE = 1 << 18
"""Entries of a table that are filled at once."""

_RISE = 0.05
"""Where memory forbids the lower bound on the load: first step upwards, relative; then doubled."""


@dataclass(frozen=True)
class BoundedPlans:
    """All plans within a bound on the load, and the fewest stages of each.

    Attributes:
        after: per downset, fewest devices from there to the end.
        stages: per downset and number of devices beyond ``after``, the fewest stages. The columns
            start with as many that are never reached.
    """

    options: StageOptions
    after: Ints
    stages: Ints

    @property
    def slack(self) -> int:
        """Devices beyond the fewest."""
        return int(self.stages.shape[1]) // 2

    @property
    def load_s(self) -> float:
        """The largest load of the plan with the fewest stages."""
        return float(self.options.load_s[self.chain(exact=False)].max())

    def reached(self, *, exact: bool) -> bool:
        """Whether there is a plan; one on exactly all devices."""
        last = self.stages[0, -1:] if exact else self.stages[0, self.slack :]
        return bool(last.min() < NEVER)

    def chain(self, *, exact: bool) -> list[int]:
        """The options of a plan with the fewest stages, first stage first.

        If ``exact`` it takes all devices; otherwise as few stages as any number of devices allows.
        """
        columns = self.stages[0, self.slack :]
        extra = self.slack
        if not exact:
            extra -= int(np.argmin(columns[::-1]))
        state, result = 0, []
        while state < len(self.after) - 1:
            a, b = np.searchsorted(self.options.lo, [state, state + 1]).tolist()
            chosen = a + self._best(slice(a, b), state, extra)
            hi = int(self.options.hi[chosen])
            extra -= int(self.options.devices[chosen] + self.after[hi] - self.after[state])
            state = hi
            result.append(chosen)
        return result

    def _best(self, among: slice, state: int, extra: int) -> int:
        """The least load among the options that lead to the fewest stages."""
        options, count = self.options, self.stages[state, self.slack + extra]
        hi = options.hi[among]
        rest = extra - (options.devices[among] + self.after[hi] - self.after[state])
        following = self.stages[hi, self.slack + np.maximum(rest, -self.slack)] + 1
        possible = (following == count) & (options.held[among] >= count)
        assert possible.any(), "the table was filled from these options"
        return int(np.argmin(np.where(possible, options.load_s[among], np.inf)))


@dataclass(frozen=True)
class LoadSearch:
    """Looks for the least load.

    Attributes:
        starts: index of the first downset of each size.
        tolerance: relative distance to the least load at which it stops; 0 for none.
        floor_s: every plan has a load of at least so much.
    """

    starts: NDArray[np.int64]
    states: int
    limit: int
    tolerance: float
    floor_s: float = 0.0

    def least(
        self, options: StageOptions, bound_s: float, *, exact: bool = False
    ) -> BoundedPlans | None:
        """The plans of the least load, up to a bound, on all devices if ``exact``; else None."""
        lower = self._lower_bound(options, bound_s)
        if lower is None:
            return None
        low, high, rise = lower, lower, _RISE * lower
        found = self._attempt(options, high, exact)
        while found is None:
            if high >= bound_s:
                return None
            low, high = high, min(high + rise, bound_s) if rise else bound_s
            rise *= 2
            found = self._attempt(options, high, exact)
        while high > lower and high > low * (1 + self.tolerance):
            middle = _between(found.load_s, low, high)
            if middle is None:
                break
            better = self._attempt(found, middle, exact)
            if better is None:
                low = middle
            else:
                high, found = middle, better
        # Of loads that are as good, or differ by rounding alone, the one with the fewest stages.
        as_good = self._within(options, max(high, low * (1 + self.tolerance)) * ROUNDING)
        assert as_good is not None, "a larger bound admits the same plans"
        return self._found(as_good)

    def useful(self, pairs: Pairs, devices: Ints) -> tuple[Pairs, Ints] | None:
        """Pairs whose stage a plan may have, and the most devices for it; None without a plan."""
        walk = Walk(pairs.lower, pairs.upper, self.starts, self.states)
        room = walk.room(devices, self.limit)
        return None if room is None else (pairs[room >= devices], room[room >= devices])

    def _lower_bound(self, options: StageOptions, bound_s: float) -> float | None:
        """The least load, but for what follows a stage making it keep more in flight."""
        # Just below the floor, which may itself be the least load, also where that is 0.
        low, high = self.floor_s / ROUNDING - float(np.finfo(float).tiny), bound_s
        kept = self._within(options, high)
        while kept is not None and high > low * (1 + self.tolerance):
            options = kept
            middle = _between(options.load_s, low, high)
            if middle is None:
                break
            less = self._within(options, middle)
            if less is None:
                low = middle
            else:
                high, kept = middle, less
        return None if kept is None else high

    def _within(self, options: StageOptions, bound_s: float) -> StageOptions | None:
        """The options of use under a bound."""
        near = np.flatnonzero(options.load_s <= bound_s)
        devices = options.devices[near]
        walk = Walk(options.lo[near], options.hi[near], self.starts, self.states)
        room = walk.room(devices, self.limit)
        return None if room is None else options.take(near[room >= devices])

    def _attempt(self, options: StageOptions, bound_s: float, exact: bool) -> StageOptions | None:
        """The options of use under a bound if it leaves a plan; None if not."""
        kept = self._within(options, bound_s)
        return kept if kept is not None and self._found(kept).reached(exact=exact) else None

    def _found(self, kept: StageOptions) -> BoundedPlans:
        walk = Walk(kept.lo, kept.hi, self.starts, self.states)
        after = walk.after(kept.devices)
        return BoundedPlans(
            kept, after, _fewest_stages(walk, kept, after, self.limit - int(after[0]))
        )


def _between(loads: Floats, low: float, high: float) -> float | None:
    """A load strictly between two, near the middle; None if there is none."""
    inside = loads[(loads > low) & (loads < high)]
    if not len(inside):
        return None
    below = inside[inside <= (low + high) / 2]
    return float(below.max() if len(below) else inside.min())


def _fewest_stages(walk: Walk, options: StageOptions, after: Ints, slack: int) -> Ints:
    """The table of ``BoundedPlans.stages``."""
    width = 2 * slack + 1
    table = np.full((walk.states, width), NEVER, dtype=np.int32)
    table[-1, slack] = 0
    flat = table.reshape(-1)
    # Devices beyond the fewest that each option uses up; never more than the slack, or it would
    # not be of use.
    wasted = options.devices + after[options.hi] - after[options.lo]
    place = options.hi.astype(np.int64) * width + slack - wasted
    for pairs, first, row in walk.backwards():
        there, held = place[pairs], options.held[pairs]
        step = max(1, _AT_ONCE // len(there))
        for start in range(0, slack + 1, step):
            extra = np.arange(start, min(start + step, slack + 1))[:, None]
            count = flat[there + extra] + 1
            count[count > held] = NEVER
            fewest = np.minimum.reduceat(count, first, axis=1)
            table[row, slack + start : slack + start + len(extra)] = fewest.T
    return table
