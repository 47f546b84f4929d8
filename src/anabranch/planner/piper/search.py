"""Search for the least load under which a chain of downsets exists: Piper's recurrence.

Over every stage that a plan may have, each from one downset lo to a larger one hi, go three passes:

    after(lo)     fewest devices from downset lo to the end, each load within a bound
    before(hi)    fewest devices from the beginning to downset hi, by the same bound
    stages(lo, k) fewest stages from lo to the end on exactly k devices, memory respected

The first two know only that a stage keeps one micro-batch in flight, two if another follows it. So
a stage is of use only if

    before(lo) + its devices + after(hi)  <=  all devices,

which near the least load leaves few stages and few values of k. The third is exact: what follows a
stage matters to its memory only through the number of stages, and fewer are always better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.compiled import compiled
from anabranch.cost.nested_sets import Floats, Ints
from anabranch.planner.toolkit.prices import ROUNDING

NEVER = 1 << 24
"""More devices or stages than there are."""

StageOptions = Any
"""A ``numpy.recarray`` of stages that a plan may have, ascending by ``lo``."""

# Indices of the downsets before and after it; devices; micro-batches that it can keep in flight;
# place of its mode: replicas and recomputation. Seconds per micro-batch.
OPTION = np.dtype(
    [*((name, np.int32) for name in ("lo", "hi", "devices", "held", "mode")), ("load_s", float)]
)


def joined(several: Sequence[StageOptions]) -> StageOptions:
    """Join tables of stages, at least one, ascending by ``lo``."""
    options = np.concatenate(several).view(np.recarray)
    return options[np.argsort(options.lo, kind="stable")]


@dataclass(frozen=True)
class BoundedPlans:
    """All plans within a bound on the load, and the fewest stages of each.

    Attributes:
        after: per downset, fewest devices from there to the end.
        stages: per downset and number of devices beyond ``after``, the fewest stages.
    """

    options: StageOptions
    after: Ints
    stages: Ints

    @property
    def load_s(self) -> float:
        """The largest load of the plan with the fewest stages."""
        return float(self.options.load_s[self.chain(exact=False)].max())

    def reached(self, *, exact: bool) -> bool:
        """Return True if there is a plan; if ``exact``, one on exactly all devices."""
        return bool(self.stages[0, -1 if exact else 0 :].min() < NEVER)

    def chain(self, *, exact: bool) -> list[int]:
        """Return the options of a plan with the fewest stages, first stage first.

        If ``exact`` it takes all devices; otherwise as few stages as any number of devices allows.
        """
        extra = self.stages.shape[1] - 1
        if not exact:
            extra -= int(np.argmin(self.stages[0, ::-1]))
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
        """Return the option of least load among those that lead to the fewest stages."""
        options, count = self.options[among], self.stages[state, extra]
        rest = extra - (options.devices + self.after[options.hi] - self.after[state])
        following = self.stages[options.hi, np.maximum(rest, 0)] + 1
        possible = (rest >= 0) & (following == count) & (options.held >= count)
        assert possible.any(), "the table was filled from these options"
        return int(np.argmin(np.where(possible, options.load_s, np.inf)))


@dataclass(frozen=True)
class LoadSearch:
    """Bisection for the least load.

    Attributes:
        states: number of downsets.
        limit: number of devices.
        tolerance: relative distance to the least load at which it stops; 0 for none.
        floor_s: lower bound of the load of every plan.
    """

    states: int
    limit: int
    tolerance: float
    floor_s: float = 0.0

    def least(
        self, options: StageOptions, bound_s: float, *, exact: bool = False
    ) -> BoundedPlans | None:
        """Return the plans of least load up to a bound, if any; on all devices if ``exact``."""
        best = self._plans(options, bound_s, exact)
        if best is None:
            return None
        # Just below the floor, which may itself be the least load, also where that is 0.
        low = self.floor_s / ROUNDING - float(np.finfo(float).tiny)
        high = float(best.options.load_s.max())
        while high > low * (1 + self.tolerance):
            middle = _between(best.options.load_s, low, high)
            if middle is None:
                break
            better = self._plans(best.options, middle, exact)
            if better is None:
                low = middle
            else:
                high, best = middle, better
        # Plans of equal loads, up to tolerance and rounding, so that the fewest stages win.
        return self._plans(options, max(high, low * (1 + self.tolerance)) * ROUNDING, exact)

    def room(self, lo: Ints, hi: Ints, devices: Ints) -> tuple[Ints, Ints]:
        """Return how many devices other stages leave to each stage, and the fewest devices from
        each downset to the end. A stage with more devices than they leave is in no plan.
        """
        before, after = np.full((2, self.states), NEVER, dtype=np.int32)
        before[0] = after[-1] = 0
        lo, hi, devices = map(np.ascontiguousarray, (lo, hi, devices))
        _pass_devices(lo, hi, devices, before, after)
        return np.asarray(self.limit - before[lo] - after[hi], dtype=np.int32), after

    def _plans(self, options: StageOptions, bound_s: float, exact: bool) -> BoundedPlans | None:
        """Return the plans of these stages under a bound on the load, if there are any."""
        near = options[np.flatnonzero(options.load_s <= bound_s)]
        room, after = self.room(near.lo, near.hi, near.devices)
        kept = near[room >= near.devices]
        if not len(kept):
            return None
        stages = np.full((self.states, self.limit - int(after[0]) + 1), NEVER, dtype=np.int32)
        stages[-1, 0] = 0
        lo, hi, held = map(np.ascontiguousarray, (kept.lo, kept.hi, kept.held))
        _pass_stages(lo, hi, kept.devices + after[hi] - after[lo], held, stages)
        plans = BoundedPlans(kept, after, stages)
        return plans if plans.reached(exact=exact) else None


def _between(loads: Floats, low: float, high: float) -> float | None:
    """Return a load strictly between two, near the middle; None if there is none."""
    inside = loads[(loads > low) & (loads < high)]
    if not len(inside):
        return None
    below = inside[inside <= (low + high) / 2]
    return float(below.max() if len(below) else inside.min())


@compiled
def _pass_devices(lo: Ints, hi: Ints, devices: Ints, before: Ints, after: Ints) -> None:
    """Run the first two passes; ``NEVER`` stays where no stages lead to a downset or on from it."""
    for i in range(len(lo)):
        before[hi[i]] = min(before[hi[i]], before[lo[i]] + devices[i])
    for i in range(len(lo) - 1, -1, -1):
        after[lo[i]] = min(after[lo[i]], after[hi[i]] + devices[i])


@compiled
def _pass_stages(lo: Ints, hi: Ints, wasted: Ints, held: Ints, stages: Ints) -> None:
    """Fill ``BoundedPlans.stages``; ``wasted``: devices of each option beyond the fewest."""
    for i in range(len(lo) - 1, -1, -1):
        for extra in range(wasted[i], stages.shape[1]):
            count = stages[hi[i], extra - wasted[i]] + 1
            if count <= held[i]:
                stages[lo[i], extra] = min(stages[lo[i], extra], count)
