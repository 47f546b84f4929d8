"""What lies near a plan: the same stages with one thing changed.

A search under a bound knows the longest period, but a step is more: the way in and out, transfers
that meet at a card, all-reduces that nothing hides. So the best candidates are changed a little,
and what the estimate (``partitioner.estimate``) likes is simulated:

- a part of a stage goes to a neighbour: an operator with all that follows it in its stage, or with
  all that leads to it;
- devices go from one stage to another, and stages that lie in a row are cut again
  (``partitioner.recut``);
- two neighbours become one stage; one becomes two, one after the other or side by side, also with
  devices of a third;
- stages that hold a parameter together become one, or what reads it goes to one of them;
- another micro-batch size for all; another tensor-parallel degree for one or all; recomputation
  for those that have no memory for a deep warm-up without, and none for others;
- two stages trade places on the devices, or take each other's in turns, so that replicas that
  exchange values lie in one node.

A change that would make stages wait for each other in a circle, or that does not fit memory, is
none. In a large plan only the stages that matter most are changed: those with the longest periods
and all-reduces and those that work least.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise, permutations
from operator import or_

from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.assemble import Assembler, Candidate
from anabranch.planner.partitioner.elsewhere import elsewhere, in_turn
from anabranch.planner.partitioner.estimate import step_s
from anabranch.planner.partitioner.parts import Part, PartPrices, edges, heights
from anabranch.planner.partitioner.prices import Mode, Prices, degrees
from anabranch.planner.partitioner.problem import SHORT
from anabranch.planner.partitioner.recut import Recut
from anabranch.planner.slices import priced
from anabranch.planner.stages import StageGraph

MOST_STAGES = 48
MOST_DEVICES = 128
"""Stages and devices of a plan that is improved: pricing one takes a millisecond, not ten."""

FOCUS = 6
"""Stages that are changed in a plan with more."""

CHUNKS = 6
"""Parts of one stage that are tried at each neighbour."""

CLOSE = 1.06
"""Changes whose estimate is within this factor of the plan's own are worth a simulation."""

MOST_SIMULATED = 120
LEAST_SIMULATED = 6
"""Neighbours that are worth a simulation: so many over the number of stages, but at least a few."""

APART = 0.02
"""What an edge between unequal slices may cost, as a share of the step: a rule of thumb."""

GAIN = 1e-3
"""A change is an improvement if it shortens the estimated step by this share of it."""

EFFORT = 4_000
LOOK_ROUND = 1_000
"""Stages that may be priced for the neighbours of one stage graph, and after a change that is an
improvement, to see whether another is a better one."""

Parts = tuple[Part, ...]


class Polisher:
    """Proposes what lies near a stage graph.

    Args:
        cost: prices the operators on the cluster.
        batch_size: samples of one step.
        order: operators, branch after branch.
        max_replicas: replicas of a stage at most.
        microbatch_size: the only one allowed, or None.
        recompute: whether stages may recompute.
        chained: every stage waits for the one before it, also where no value flows; stages side by
            side are no neighbours then.
        simulated: neighbours to propose at a time, at most; by default the more the fewer stages
            there are.
    """

    def __init__(
        self,
        cost: CostModel,
        batch_size: int,
        order: tuple[int, ...],
        *,
        max_replicas: int,
        microbatch_size: int | None = None,
        recompute: bool = True,
        chained: bool = False,
        simulated: int | None = None,
    ) -> None:
        self._cost = cost
        self._batch_size = batch_size
        self._order = order
        self._max_replicas = max_replicas
        self._fixed_size = microbatch_size
        self._recompute = recompute
        self._chained = chained
        self._simulated = simulated
        self._effort = 0
        self._recut = Recut(cost, batch_size, order)
        self._assemblers: dict[int, Assembler] = {}
        self._known: dict[tuple[int, frozenset[Part]], Candidate | None] = {}

    def __call__(self, graph: StageGraph) -> list[StageGraph]:
        """Stage graphs near this one, the least estimated step first.

        None for a graph whose stages differ in micro-batch size or k, nor for one with more than
        ``MOST_STAGES`` or ``MOST_DEVICES``, where one change makes little difference.
        """
        sizes = {stage.microbatch_size for stage in graph.stages}
        uneven = len(sizes) > 1 or any(stage.k > 1 for stage in graph.stages)
        large = len(graph) > MOST_STAGES or self._cost.cluster.num_devices > MOST_DEVICES
        if uneven or large:
            return []
        size = sizes.pop()
        parts = self._parts(graph)
        self._effort = EFFORT
        found = list(self._climb(size, parts))
        here = self._assembled(size, parts)
        limit = CLOSE * (score(here) if here else min(map(score, found), default=0.0))
        found += self._elsewhere(graph, size, parts)
        ranked = sorted((each for each in found if score(each) <= limit), key=score)
        # Branches that are alike make many changes that are the same but for the branch.
        unique = {self._likeness(each): each.graph for each in reversed(ranked)}
        most = self._simulated or max(LEAST_SIMULATED, MOST_SIMULATED // len(parts))
        chosen = list(reversed(unique.values()))[:most]
        return [*chosen, *in_turn(self._cost, chosen)]

    def _likeness(self, candidate: Candidate) -> Hashable:
        """What two candidates have in common that are the same but for the branch they differ in.

        In a short model also the seconds of the stages, as few operators are alike.
        """
        graph, size = candidate.graph, candidate.graph.stages[0].microbatch_size
        shape = [(len(s.operators), len(s.devices), s.recompute) for s in graph.stages]
        seconds: list[float] = []
        if len(self._order) <= SHORT:
            compute_s = self._assembler(size).prices.compute_s
            seconds = sorted(round(sum(compute_s(part)), 12) for part in self._parts(graph))
        return round(candidate.step_s, 12), size, tuple(sorted(shape)), tuple(seconds)

    def _parts(self, graph: StageGraph) -> Parts:
        mask = self._cost.graph.mask
        return tuple(
            Part(mask(stage.operators), stage.replicas, stage.recompute, stage.tensor)
            for stage in graph.stages
        )

    def _climb(self, size: int, parts: Parts) -> Iterator[Candidate]:
        """What is one change away, and from the best of it on as long as it gets better."""
        start = self._assembled(size, parts)
        least = float("inf")
        if start is not None:
            least = score(start)
            yield start
        improved = True
        while improved:
            improved = False
            best_s, enough = least * (1 - GAIN), 0
            for other_size, changed in self._changes(size, parts):
                if self._effort <= enough:
                    break
                if self._least_step_s(other_size, changed) > CLOSE * best_s:
                    continue
                candidate = self._assembled(other_size, changed)
                if candidate is None:
                    continue
                yield candidate
                if score(candidate) < best_s:
                    if not improved:
                        enough = max(0, self._effort - LOOK_ROUND)
                    improved = True
                    best_s, best = score(candidate), (other_size, changed)
            if improved:
                least, (size, parts) = best_s, best

    def _least_step_s(self, size: int, parts: Parts) -> float:
        """What the busiest stage computes in a step: no estimate is less."""
        prices = self._assembler(size).prices
        return prices.prices.num_microbatches * max(sum(prices.compute_s(p)) for p in parts)

    def _assembled(self, size: int, parts: Parts) -> Candidate | None:
        key = size, frozenset(parts)
        if key not in self._known:
            self._effort -= len(parts)
            self._known[key] = self._assembler(size).assemble(parts)
        return self._known[key]

    def _assembler(self, size: int) -> Assembler:
        if size not in self._assemblers:
            cost = self._cost
            most = min(cost.cluster.num_devices, self._max_replicas)
            chosen = degrees(cost, size, most, batch_size=self._batch_size)
            prices = Prices(
                cost,
                self._batch_size,
                size,
                chosen,
                cost.cluster.memory_bytes,
                recompute=self._recompute,
            )
            self._assemblers[size] = Assembler(
                PartPrices(prices), self._order, self._max_replicas, self._chained
            )
        return self._assemblers[size]

    def _changes(self, size: int, parts: Parts) -> Iterator[tuple[int, Parts]]:
        focus = self._focus(size, parts)
        row = self._recut.row_of(parts) if self._is_chain(parts) else None
        others = [size // 2, size * 2] if self._fixed_size is None else []
        sizes = [other for other in others if 1 <= other <= self._batch_size]
        for kind in (
            self._recuts(size, row) if row else (),
            self._slides(row) if row else (),
            self._merges(parts, focus),
            self._gathers(parts),
            self._modes(size, parts, focus),
            self._moved_devices(size, parts, focus),
            self._shifts(parts, focus),
            self._splits(size, parts, focus),
            self._split_off(size, parts, focus),
        ):
            for changed in kind:
                if all(self._may(size, part) for part in changed if part not in parts):
                    yield size, changed
        for other in sizes:
            if all(self._may(other, part) for part in parts):
                yield other, parts
            for modes in _rescaled([mode_of(part) for part in row or ()]):
                if all(self._may(other, _of(mode)) for mode in modes):
                    for cut in self._recut.cut(other, modes):
                        yield other, tuple(cut)

    def _is_chain(self, parts: Parts) -> bool:
        """Whether every stage waits for the one before it: no two run side by side."""
        found = edges(self._any_part_prices(), parts)
        return self._chained or all((x, x + 1) in found for x in range(len(parts) - 1))

    def _recuts(self, size: int, row: Sequence[Part]) -> Iterator[Parts]:
        """Stages in a row with other devices, cut again as is best for these."""
        for modes in self._other_modes(size, row):
            if all(self._may(size, _of(mode)) for mode in modes):
                for cut in self._recut.cut(size, modes):
                    yield tuple(cut)

    def _slides(self, row: Sequence[Part]) -> Iterator[Parts]:
        """Several neighbouring cuts of a row, all of them a little earlier or later."""
        cuts = list(accumulate((part.mask.bit_count() for part in row), initial=0))
        last = len(row) - 1
        for i in range(1, last + 1):
            # Of a long row only runs of cuts that reach one of its ends.
            for j in range(i, last + 1):
                if len(row) > FOCUS and i > 1 and j < last and i != j:
                    continue
                for step in (-1, 1, -2, 2):
                    moved = [cut + step * (i <= s <= j) for s, cut in enumerate(cuts)]
                    if all(a < b for a, b in pairwise(moved)):
                        yield tuple(
                            replace(part, mask=self._first[b] ^ self._first[a])
                            for part, (a, b) in zip(row, pairwise(moved), strict=True)
                        )

    @cached_property
    def _first(self) -> list[int]:
        """Masks of the first n operators in order."""
        return list(accumulate((1 << op for op in self._order), or_, initial=0))

    def _other_modes(self, size: int, row: Sequence[Part]) -> Iterator[list[Mode]]:
        modes = [mode_of(part) for part in row]
        focus = self._focus(size, tuple(row))
        yield from _rescaled(modes)
        for x in focus:
            for y in focus:
                if x == y or modes[x].tensor != modes[y].tensor:
                    continue
                for count in _some_of(modes[x].replicas):
                    changed = list(modes)
                    changed[x] = replace(modes[x], replicas=modes[x].replicas - count)
                    changed[y] = replace(modes[y], replicas=modes[y].replicas + count)
                    yield changed
        for s in range(len(modes) - 1):
            if modes[s].tensor == modes[s + 1].tensor:
                both = replace(modes[s], replicas=modes[s].replicas + modes[s + 1].replicas)
                yield [*modes[:s], both, *modes[s + 2 :]]
        for s in focus:
            for count in _some_of(modes[s].replicas):
                first = replace(modes[s], replicas=modes[s].replicas - count)
                second = replace(modes[s], replicas=count)
                yield [*modes[:s], first, second, *modes[s + 1 :]]

    def _may(self, size: int, part: Part) -> bool:
        """Whether a part may have its replicas: every one has samples, the profile knows them."""
        node = self._cost.cluster.group_sizes[0]
        return (
            1 <= part.replicas <= min(size, self._max_replicas)
            and node % part.tensor == 0
            and priced(self._cost, self._batch_size, size, part.replicas)
        )

    def _focus(self, size: int, parts: Parts) -> list[int]:
        """The stages worth changing: longest periods, longest all-reduces, then least work."""
        if len(parts) <= FOCUS:
            return list(range(len(parts)))
        prices = self._assembler(size).prices
        period = sorted(range(len(parts)), key=lambda s: -prices.period_s(parts[s]))
        reduce_s = sorted(range(len(parts)), key=lambda s: -prices.reduce_s(parts[s]))
        chosen = [*period[: FOCUS // 2], *reduce_s[:1], *reversed(period)]
        return list(dict.fromkeys(chosen))[:FOCUS]

    def _shifts(self, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        """Operators cross the border between two neighbours."""
        graph = self._cost.graph
        for x, y in self._borders(parts, focus):
            for chunk in self._chunks(parts[x].mask, parts[y].mask, graph.descendants):
                yield from self._shift(parts, x, y, chunk)
            for chunk in self._chunks(parts[y].mask, parts[x].mask, graph.ancestors):
                yield from self._shift(parts, y, x, chunk)

    def _borders(self, parts: Parts, focus: Sequence[int]) -> list[tuple[int, int]]:
        pairs = edges(self._any_part_prices(), parts)
        return sorted((x, y) for x, y in pairs if x in focus or y in focus)

    def _any_part_prices(self) -> PartPrices:
        """Edges do not depend on the micro-batch size."""
        return next(iter(self._assemblers.values())).prices

    def _chunks(self, inside: int, outside: int, closure: Sequence[int]) -> list[int]:
        """Parts of ``inside`` that can go over: an operator with its closure, smallest first."""
        found = {closure[op] & inside | 1 << op for op in bits(inside)} - {inside}
        ranked = sorted(found, key=lambda mask: (mask.bit_count(), mask))
        touching = [mask for mask in ranked if self._touches(mask, outside)]
        if len(touching) <= CHUNKS:
            return touching
        # The smallest ones, and some in between up to half of it.
        step = (len(touching) - 1) / (CHUNKS - 1)
        return list(
            dict.fromkeys(touching[:2] + [touching[round(i * step)] for i in range(CHUNKS)])
        )

    def _touches(self, chunk: int, outside: int) -> bool:
        graph = self._cost.graph
        return any((graph.successors[i] | graph.predecessors[i]) & outside for i in bits(chunk))

    def _shift(self, parts: Parts, source: int, target: int, chunk: int) -> Iterator[Parts]:
        given = replace(parts[source], mask=parts[source].mask & ~chunk)
        taken = replace(parts[target], mask=parts[target].mask | chunk)
        yield from self._valid(_put(parts, {source: given, target: taken}))

    def _moved_devices(self, size: int, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        prices = self._assembler(size).prices
        ranked = sorted(focus, key=lambda s: -prices.period_s(parts[s]))
        for to in ranked:
            for source in reversed(ranked):
                x, y = parts[source], parts[to]
                if source == to or x.tensor != y.tensor:
                    continue
                for count in _some_of(x.replicas):
                    given = replace(x, replicas=x.replicas - count)
                    taken = replace(y, replicas=y.replicas + count)
                    yield _put(parts, {source: given, to: taken})

    def _merges(self, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        for pair in self._borders(parts, focus):
            yield from self._merged(parts, pair)

    def _gathers(self, parts: Parts) -> Iterator[Parts]:
        """What is tied to one parameter comes together: an all-reduce less, or a smaller one."""
        graph = self._cost.graph
        spread = []
        for mask, nbytes in self._any_part_prices().facts.tied:
            holders = tuple(s for s, part in enumerate(parts) if part.mask & mask)
            if len(holders) > 1:
                spread.append((-nbytes, holders, mask))
        for _, holders, mask in sorted(spread)[:FOCUS]:
            yield from self._merged(parts, holders)
            between = reduce(or_, (graph.descendants[i] for i in bits(mask)))
            between &= reduce(or_, (graph.ancestors[i] for i in bits(mask)))
            around = tuple(s for s, part in enumerate(parts) if part.mask & (mask | between))
            if around != holders:
                yield from self._merged(parts, around)
            for x, y in permutations(holders[:FOCUS], 2):
                yield from self._merged(parts, (x, y))
                inside = parts[x].mask
                tied = list(bits(inside & mask))
                for closure in (graph.descendants, graph.ancestors):
                    chunk = reduce(or_, (closure[i] & inside | 1 << i for i in tied))
                    yield from self._shift(parts, x, y, chunk)

    def _merged(self, parts: Parts, chosen: Sequence[int]) -> Iterator[Parts]:
        """Some parts made one, on the devices of all."""
        some = [parts[s] for s in chosen]
        if len({part.tensor for part in some}) == 1:
            mask = reduce(or_, (part.mask for part in some))
            both = replace(some[0], mask=mask, replicas=sum(part.replicas for part in some))
            yield from self._valid(_put(parts, {**dict.fromkeys(chosen), chosen[0]: both}))

    def _split_off(self, size: int, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        """A stage of a small plan gives operators to a new one, another stage some devices."""
        if len(parts) > FOCUS:
            return
        for s, x in permutations(focus, 2):
            part, donor = parts[s], parts[x]
            if part.tensor != donor.tensor:
                continue
            for count in _some_of(donor.replicas):
                given = replace(donor, replicas=donor.replicas - count)
                for own in {part.replicas, count}:
                    other = part.replicas + count - own
                    for first in self._heads(size, part, own / (own + other)):
                        head = replace(part, mask=first, replicas=own)
                        tail = replace(part, mask=part.mask & ~first, replicas=other)
                        rest = _put(parts, {s: None, x: given})
                        yield from self._valid((*rest, head, tail))

    def _splits(self, size: int, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        for s in focus:
            part = parts[s]
            for count in _some_of(part.replicas):
                for first in self._heads(size, part, count / part.replicas):
                    head = replace(part, mask=first, replicas=count)
                    rest = part.mask & ~first
                    tail = replace(part, mask=rest, replicas=part.replicas - count)
                    yield from self._valid((*_put(parts, {s: None}), head, tail))

    def _heads(self, size: int, part: Part, share: float) -> list[int]:
        """The first operators of a part with about this share of its work: two cuts, no more."""
        ops = sorted(bits(part.mask), key=self._order.index)
        forward, backward = self._cost.op_seconds(
            self._assembler(size).prices.prices.samples(part.replicas), part.tensor
        )
        total = float((forward + backward)[ops].sum()) * share
        mask, done = 0, 0.0
        for i, op in enumerate(ops[:-1]):
            mask |= 1 << op
            done += float(forward[op] + backward[op])
            if done >= total or i == len(ops) - 2:
                before = mask & ~(1 << op)
                return [each for each in (before, mask) if each]
        return []

    def _modes(self, size: int, parts: Parts, focus: Sequence[int]) -> Iterator[Parts]:
        yield tuple(replace(part, recompute=False) for part in parts)
        if self._recompute:
            short = self._short_of_memory(size, parts)
            yield tuple(replace(part, recompute=part in short) for part in parts)
            for s in (s for s in focus if parts[s] in short):
                yield _put(parts, {s: replace(parts[s], recompute=not parts[s].recompute)})
        for tensor in self._cost.tensor_degrees[: 8 * (len(self._cost.tensor_degrees) > 1)]:
            for chosen in (*([s] for s in focus), range(len(parts))):
                changed = {s: self._sharded(parts[s], tensor) for s in chosen}
                if all(part is not None for part in changed.values()):
                    yield _put(parts, changed)

    def _short_of_memory(self, size: int, parts: Parts) -> set[Part]:
        """Those that without recomputation have no memory for a deep warm-up."""
        assembler = self._assembler(size)
        arranged, pairs = assembler.arrange(parts)
        height = heights(len(arranged), pairs)
        return {
            part
            for part, h in zip(arranged, height, strict=True)
            if assembler.prices.headroom(replace(part, recompute=False)) < 2 * h
        }

    @staticmethod
    def _sharded(part: Part, tensor: int) -> Part | None:
        if part.devices % tensor:
            return None
        return replace(part, replicas=part.devices // tensor, tensor=tensor)

    def _valid(self, parts: Parts) -> Iterator[Parts]:
        """The parts if each is whole and none waits for itself."""
        if all(part.mask for part in parts) and _is_acyclic(self._cost, parts):
            yield parts

    def _elsewhere(self, graph: StageGraph, size: int, parts: Parts) -> Iterator[Candidate]:
        """The same stages on other devices."""
        cluster = self._cost.cluster
        node = cluster.group_sizes[0]
        if node == cluster.num_devices:
            return
        prices = self._assembler(size).prices
        pairs = edges(prices, parts)
        if self._chained:
            pairs |= set(pairwise(range(len(parts))))
        if len(pairs) != len(graph.edges):
            return
        where_now = [stage.devices for stage in graph.stages]
        focus = self._focus(size, parts)
        for where in elsewhere(cluster, parts, pairs, where_now, focus):
            stages = tuple(
                replace(stage, devices=tuple(devices), in_flight=0)
                for stage, devices in zip(graph.stages, where, strict=True)
            )
            moved = replace(graph, stages=stages)
            yield Candidate(moved, step_s(prices, parts, where, pairs), 0.0)


def score(candidate: Candidate) -> float:
    """The estimated step, with a penalty for edges whose replicas do not divide one another.

    There slices overlap in ever other ways, so that messages hold one another up at the ports.
    """
    graph = candidate.graph
    counts = [stage.replicas for stage in graph.stages]
    apart = sum(counts[x] % counts[y] > 0 < counts[y] % counts[x] for x, y in graph.edges)
    return candidate.step_s * (1 + APART * apart)


def mode_of(part: Part) -> Mode:
    """How a part uses its devices."""
    return Mode(part.replicas, part.recompute, part.tensor)


def _of(mode: Mode) -> Part:
    """A part without operators that uses its devices so."""
    return Part(0, mode.replicas, mode.recompute, mode.tensor)


def _rescaled(modes: Sequence[Mode]) -> Iterator[list[Mode]]:
    """A row of stages as it is, with every two made one, and with every one made two."""
    if modes:
        yield list(modes)
    if len(modes) > 1 and len({(mode.tensor, mode.recompute) for mode in modes}) == 1:
        pairs = [modes[i : i + 2] for i in range(0, len(modes), 2)]
        yield [replace(pair[0], replicas=sum(m.replicas for m in pair)) for pair in pairs]
    if all(mode.replicas > 1 for mode in modes):
        halves = [(mode.replicas - mode.replicas // 2, mode.replicas // 2) for mode in modes]
        yield [
            replace(mode, replicas=count)
            for mode, both in zip(modes, halves, strict=True)
            for count in both
        ]


def _some_of(count: int) -> list[int]:
    """Numbers of replicas that may leave a stage of so many: one, half, all but one."""
    return sorted({1, count // 2, count - 1} - {0, count})


def _put(parts: Parts, changed: dict[int, Part | None]) -> Parts:
    """The parts with some replaced, or left out for None."""
    replaced = (changed.get(s, part) for s, part in enumerate(parts))
    return tuple(part for part in replaced if part is not None)


def _is_acyclic(cost: CostModel, parts: Parts) -> bool:
    home = {op: s for s, part in enumerate(parts) for op in bits(part.mask)}
    after: list[set[int]] = [set() for _ in parts]
    waits = [0] * len(parts)
    for a, b in cost.graph.edges:
        x, y = home[a], home[b]
        if x != y and y not in after[x]:
            after[x].add(y)
            waits[y] += 1
    ready = [s for s, count in enumerate(waits) if not count]
    done = 0
    while ready:
        done += 1
        for y in after[ready.pop()]:
            waits[y] -= 1
            if not waits[y]:
                ready.append(y)
    return done == len(parts)
