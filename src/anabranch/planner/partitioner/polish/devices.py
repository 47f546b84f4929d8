"""Changes of the devices of stages; stages in a row are then cut again (``partitioner.chain_cut``).

In a row devices may go from any stage to any other, two neighbours become one, one become two, or
all be halved or doubled in number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anabranch.planner.partitioner.limits import POLISH
from anabranch.planner.partitioner.polish.plan_view import Parts, PlanView, some_of
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Mode


def moved_devices(spot: PlanView) -> Iterator[Parts]:
    """Devices go from one stage to another, first to those with the longest period."""
    parts, prices = spot.parts, spot.prices
    ranked = sorted(spot.focus, key=lambda s: -prices.period_s(parts[s]))
    for to in ranked:
        for source in reversed(ranked):
            x, y = parts[source], parts[to]
            if source == to or x.tensor != y.tensor:
                continue
            for count in some_of(x.replicas):
                given = replace(x, replicas=x.replicas - count)
                taken = replace(y, replicas=y.replicas + count)
                yield spot.changed({source: given, to: taken})


def other_modes(row: PlanView) -> Iterator[list[Mode]]:
    """How the stages of a row, its parts in order, may use the devices instead."""
    modes = [mode_of(part) for part in row.parts]
    yield from rescaled(row)
    for x in row.focus:
        for y in row.focus:
            if x == y or modes[x].tensor != modes[y].tensor:
                continue
            for count in some_of(modes[x].replicas):
                changed = list(modes)
                changed[x] = replace(modes[x], replicas=modes[x].replicas - count)
                changed[y] = replace(modes[y], replicas=modes[y].replicas + count)
                yield changed
    for s in range(len(modes) - 1):
        if modes[s].tensor == modes[s + 1].tensor:
            both = replace(modes[s], replicas=modes[s].replicas + modes[s + 1].replicas)
            yield [*modes[:s], both, *modes[s + 2 :]]
    for s in row.focus:
        for count in some_of(modes[s].replicas):
            first = replace(modes[s], replicas=modes[s].replicas - count)
            second = replace(modes[s], replicas=count)
            yield [*modes[:s], first, second, *modes[s + 1 :]]


def rescaled(row: PlanView) -> Iterator[list[Mode]]:
    """A row of stages as it is, halved and doubled in number; one stage also cut ever smaller: 8
    devices as 4 + 4, 4 + 2 + 2, 4 + 2 + 1 + 1.
    """
    modes = [mode_of(part) for part in row.parts]
    yield list(modes)
    if len(modes) > 1 and len({(mode.tensor, mode.recompute) for mode in modes}) == 1:
        pairs = [modes[i : i + 2] for i in range(0, len(modes), 2)]
        yield [replace(pair[0], replicas=sum(m.replicas for m in pair)) for pair in pairs]
    if all(mode.replicas > 1 for mode in modes):
        yield [half for mode in modes for half in _halves(mode)]
    if len(modes) == 1:
        while modes[-1].replicas > 1 and len(modes) < POLISH.tapered:
            modes = [*modes[:-1], *_halves(modes[-1])]
            if len(modes) > 2:
                yield list(modes)


def _halves(mode: Mode) -> tuple[Mode, Mode]:
    small = mode.replicas // 2
    return replace(mode, replicas=mode.replicas - small), replace(mode, replicas=small)


def mode_of(part: Part) -> Mode:
    """How a part uses its devices."""
    return Mode(part.replicas, part.recompute, part.tensor)
