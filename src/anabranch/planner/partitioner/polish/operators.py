"""Changes of the operators of stages: to a neighbour, two stages as one, one as two.

A part of a stage goes over with all that follows it there, or all that leads to it, so that both
stages stay convex. Stages that hold a parameter together become one, or what reads it goes to one
of them. No change makes stages wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations

from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.limits import POLISH
from anabranch.planner.partitioner.polish.plan_view import Parts, PlanView, some_of, union
from anabranch.planner.toolkit.parts import Part


def shifts(spot: PlanView) -> Iterator[Parts]:
    """Operators cross the border between two neighbours."""
    graph, parts = spot.cost.graph, spot.parts
    for x, y in spot.borders:
        for chunk in _chunks(spot, parts[x].mask, parts[y].mask, graph.descendants):
            yield from _shift(spot, x, y, chunk)
        for chunk in _chunks(spot, parts[y].mask, parts[x].mask, graph.ancestors):
            yield from _shift(spot, y, x, chunk)


def _chunks(spot: PlanView, inside: int, outside: int, closure: Sequence[int]) -> list[int]:
    """Parts of ``inside`` that can go over: an operator with its closure, smallest first."""
    graph = spot.cost.graph
    found = {closure[op] & inside | 1 << op for op in bits(inside)} - {inside}
    ranked = sorted(found, key=lambda mask: (mask.bit_count(), mask))
    beside = 0
    for op in bits(outside):
        beside |= graph.successors[op] | graph.predecessors[op]
    touching = [mask for mask in ranked if mask & beside]
    if len(touching) <= POLISH.chunks:
        return touching
    # The smallest ones, and some in between up to all.
    step = (len(touching) - 1) / (POLISH.chunks - 1)
    return list(
        dict.fromkeys(touching[:2] + [touching[round(i * step)] for i in range(POLISH.chunks)])
    )


def _shift(spot: PlanView, source: int, target: int, chunk: int) -> Iterator[Parts]:
    parts = spot.parts
    given = replace(parts[source], mask=parts[source].mask & ~chunk)
    taken = replace(parts[target], mask=parts[target].mask | chunk)
    yield from spot.valid(spot.changed({source: given, target: taken}))


def slides(row: PlanView) -> Iterator[Parts]:
    """One cut of a row or several neighbouring ones, all a little earlier or later, or much."""
    parts = row.parts
    most = max(part.mask.bit_count() for part in parts)
    steps = [way * step for step in POLISH.slides if step < most for way in (-1, 1)]
    first = list(accumulate((1 << op for op in row.assembler.order), initial=0))
    cuts = list(accumulate((part.mask.bit_count() for part in parts), initial=0))
    last = len(parts) - 1
    for i in range(1, last + 1):
        # Of a long row only runs of cuts that reach one of its ends.
        for j in range(i, last + 1):
            if len(parts) > POLISH.focus and i > 1 and j < last and i != j:
                continue
            for step in steps:
                moved = [cut + step * (i <= s <= j) for s, cut in enumerate(cuts)]
                if all(a < b for a, b in pairwise(moved)):
                    yield tuple(
                        replace(part, mask=first[b] ^ first[a])
                        for part, (a, b) in zip(parts, pairwise(moved), strict=True)
                    )


def merges(spot: PlanView) -> Iterator[Parts]:
    """Two neighbours become one stage."""
    for pair in spot.borders:
        yield from _merged(spot, pair)


def _merged(spot: PlanView, chosen: Sequence[int]) -> Iterator[Parts]:
    """Some parts made one, on the devices of all."""
    some = [spot.parts[s] for s in chosen]
    if len({part.tensor for part in some}) == 1:
        mask = union([part.mask for part in some])
        both = replace(some[0], mask=mask, replicas=sum(part.replicas for part in some))
        yield from spot.valid(spot.changed({**dict.fromkeys(chosen), chosen[0]: both}))


def gathers(spot: PlanView) -> Iterator[Parts]:
    """What is tied to one parameter comes together: an all-reduce less, or a smaller one."""
    graph, parts = spot.cost.graph, spot.parts
    spread = []
    for mask, nbytes in spot.prices.sets.tied:
        holders = tuple(s for s, part in enumerate(parts) if part.mask & mask)
        if len(holders) > 1:
            spread.append((-nbytes, holders, mask))
    for _, holders, mask in sorted(spread)[: POLISH.focus]:
        yield from _merged(spot, holders)
        between = union([graph.descendants[i] for i in bits(mask)])
        between &= union([graph.ancestors[i] for i in bits(mask)])
        around = tuple(s for s, part in enumerate(parts) if part.mask & (mask | between))
        if around != holders:
            yield from _merged(spot, around)
        for x, y in permutations(holders[: POLISH.focus], 2):
            yield from _merged(spot, (x, y))
            inside = parts[x].mask
            tied = list(bits(inside & mask))
            for closure in (graph.descendants, graph.ancestors):
                chunk = union([closure[i] & inside | 1 << i for i in tied])
                yield from _shift(spot, x, y, chunk)


def splits(spot: PlanView) -> Iterator[Parts]:
    """A stage becomes two, one after the other or side by side."""
    for s in spot.focus:
        part = spot.parts[s]
        for count in some_of(part.replicas):
            for first in _heads(spot, part, count / part.replicas):
                head = replace(part, mask=first, replicas=count)
                rest = part.mask & ~first
                tail = replace(part, mask=rest, replicas=part.replicas - count)
                yield from spot.valid((*spot.changed({s: None}), head, tail))


def split_off(spot: PlanView) -> Iterator[Parts]:
    """A stage of a small plan gives operators to a new one, another stage some devices."""
    if len(spot.parts) > POLISH.focus:
        return
    for s, x in permutations(spot.focus, 2):
        part, donor = spot.parts[s], spot.parts[x]
        if part.tensor != donor.tensor:
            continue
        for count in some_of(donor.replicas):
            given = replace(donor, replicas=donor.replicas - count)
            for own in {part.replicas, count}:
                other = part.replicas + count - own
                for first in _heads(spot, part, own / (own + other)):
                    head = replace(part, mask=first, replicas=own)
                    tail = replace(part, mask=part.mask & ~first, replicas=other)
                    yield from spot.valid((*spot.changed({s: None, x: given}), head, tail))


def _heads(spot: PlanView, part: Part, share: float) -> list[int]:
    """The first operators of a part with about this share of its work: two cuts, no more."""
    ops = sorted(bits(part.mask), key=spot.assembler.position.__getitem__)
    seconds = spot.prices.seconds(replace(part, recompute=False))
    total = float(seconds[ops].sum()) * share
    mask, done = 0, 0.0
    for i, op in enumerate(ops[:-1]):
        mask |= 1 << op
        done += float(seconds[op])
        if done >= total or i == len(ops) - 2:
            before = mask & ~(1 << op)
            return [head for head in (before, mask) if head]
    return []
