"""The changes of ``partitioner.polish`` in turn, from the best of them on, within a budget.

Two changes are of the whole plan: another micro-batch size, and two stages on each other's devices.
Of changes that do not fit memory there is no stage graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from anabranch.planner.partitioner.chain_cut import ChainCutter
from anabranch.planner.partitioner.limits import POLISH
from anabranch.planner.partitioner.polish import devices, operators
from anabranch.planner.partitioner.polish.modes import modes
from anabranch.planner.partitioner.polish.plan_view import Parts, PlanView
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.estimate import step_s
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Mode
from anabranch.planner.toolkit.problem import SHORT, Problem
from anabranch.plans.slices import profile_covers
from anabranch.plans.stages import StageGraph


class Polisher:
    """Proposes what lies near a stage graph.

    Args:
        problem: what is planned; if its stages wait for the one before them, stages side by side
            are no neighbours.
        simulated: neighbours to propose at a time, at most; by default the more the fewer stages
            there are.
    """

    def __init__(
        self, problem: Problem, microbatch_size: int | None, *, simulated: int | None = None
    ) -> None:
        self._problem = problem
        self._cost = problem.cost
        self._fixed_size = microbatch_size
        self._simulated = simulated
        self._effort = 0
        self._left = POLISH.whole
        self._proposed: set[StageGraph] = set()
        self._recut = ChainCutter(problem.cost, problem.batch_size, problem.order)
        self._known: dict[tuple[int, frozenset[Part]], Candidate | None] = {}

    def __call__(self, graph: StageGraph) -> list[StageGraph]:
        """Stage graphs near this one, the least estimated step first.

        None for a graph of mixed micro-batch sizes or k, or beyond the limits of ``POLISH``.
        """
        sizes = {stage.microbatch_size for stage in graph.stages}
        uneven = len(sizes) > 1 or any(stage.k > 1 for stage in graph.stages)
        large = len(graph) > POLISH.stages or self._cost.cluster.num_devices > POLISH.devices
        # Whoever comes back with one of these has found it better than where it came from.
        left = self._left + (POLISH.longer if graph in self._proposed else 0)
        if uneven or large or left <= 0:
            return []
        size = sizes.pop()
        parts = self._parts(graph)
        found = self._climb(size, parts, min(POLISH.effort, left))
        here = self._assembled(size, parts)
        limit = POLISH.close * (score(here) if here else min(map(score, found), default=0.0))
        found += self._swapped(graph, size, parts)
        ranked = sorted((candidate for candidate in found if score(candidate) <= limit), key=score)
        # Branches that are alike make many changes that are the same but for the branch.
        unique = {self._likeness(candidate): candidate.graph for candidate in reversed(ranked)}
        most = self._simulated or max(POLISH.least_simulated, POLISH.most_simulated // len(parts))
        chosen = list(reversed(unique.values()))[:most]
        self._proposed.update(chosen)
        return chosen

    def _likeness(self, candidate: Candidate) -> Hashable:
        """What candidates that differ only in the branch share; in short models also seconds."""
        graph, size = candidate.graph, candidate.graph.stages[0].microbatch_size
        shape = [(len(s.operators), len(s.devices), s.recompute) for s in graph.stages]
        if graph.depth < len(graph):
            shape.sort()
        seconds: list[float] = []
        if len(self._problem.order) <= SHORT:
            compute_s = self._problem.assembler(size).prices.compute_s
            seconds = sorted(round(sum(compute_s(part)), 12) for part in self._parts(graph))
        return round(candidate.step_s, 12), size, tuple(shape), tuple(seconds)

    def _parts(self, graph: StageGraph) -> Parts:
        mask = self._cost.graph.mask
        return tuple(
            Part(mask(stage.operators), stage.replicas, stage.recompute, stage.tensor)
            for stage in graph.stages
        )

    def _climb(self, size: int, parts: Parts, effort: int) -> list[Candidate]:
        """What is one change away, and from the best of it on as long as it gets better."""
        self._effort = effort
        start = self._assembled(size, parts)
        found = [start] if start is not None else []
        least = score(start) if start is not None else float("inf")
        improved = True
        while improved:
            improved = False
            best_s, enough = least * (1 - POLISH.gain), 0
            for other_size, changed in self._changes(size, parts):
                if self._effort <= enough:
                    break
                if self._least_step_s(other_size, changed) > POLISH.close * best_s:
                    continue
                candidate = self._assembled(other_size, changed)
                if candidate is None:
                    continue
                found.append(candidate)
                # Data parallelism is a proposal of its own; here it would end the climb.
                if score(candidate) < best_s and (len(changed) > 1 or len(parts) == 1):
                    if not improved:
                        enough = max(0, self._effort - POLISH.look_round)
                    improved = True
                    best_s, best = score(candidate), (other_size, changed)
            if improved:
                least, (size, parts) = best_s, best
        self._left -= effort - self._effort
        return found

    def _least_step_s(self, size: int, parts: Parts) -> float:
        """What the busiest stage computes in a step: no estimate is less."""
        prices = self._problem.assembler(size).prices
        return prices.microbatch.num_microbatches * max(sum(prices.compute_s(p)) for p in parts)

    def _assembled(self, size: int, parts: Parts) -> Candidate | None:
        key = size, frozenset(parts)
        if key not in self._known:
            self._effort -= len(parts)
            self._known[key] = self._problem.assembler(size).assemble(parts)
        return self._known[key]

    def _changes(self, size: int, parts: Parts) -> Iterator[tuple[int, Parts]]:
        spot = PlanView(self._problem.assembler(size), parts)
        ordered = self._recut.row_of(parts)
        row = PlanView(spot.assembler, tuple(ordered)) if ordered and spot.is_chain else None
        for kind in (
            self._recuts(size, row) if row else (),
            operators.slides(row) if row else (),
            operators.merges(spot),
            operators.gathers(spot),
            modes(spot, recompute=self._problem.recompute),
            devices.moved_devices(spot),
            operators.shifts(spot),
            operators.splits(spot),
            operators.split_off(spot),
        ):
            for changed in kind:
                if all(self._may(size, part) for part in changed if part not in parts):
                    yield size, changed
        for other in self._other_sizes(size, len(parts)):
            if all(self._may(other, part) for part in parts):
                yield other, parts
            if row:
                for cut in self._cut(other, devices.rescaled(row)):
                    yield other, cut

    def _other_sizes(self, size: int, stages: int) -> list[int]:
        """Twice and half the micro-batch size; all, where one stage may become several."""
        if self._fixed_size is not None:
            return []
        far = self._problem.batch_size.bit_length() if stages == 1 else 1
        sizes = [way for i in range(1, far + 1) for way in (size >> i, size << i)]
        return [other for other in sizes if 1 <= other <= self._problem.batch_size]

    def _recuts(self, size: int, row: PlanView) -> Iterator[Parts]:
        """Stages in a row with other devices, cut again as is best for these."""
        return self._cut(size, devices.other_modes(row))

    def _cut(self, size: int, ways: Iterator[list[Mode]]) -> Iterator[Parts]:
        for way in ways:
            if all(self._may(size, mode) for mode in way):
                self._effort -= len(way)
                yield from map(tuple, self._recut.cut(size, way))

    def _may(self, size: int, part: Part | Mode) -> bool:
        """Whether a stage may have its replicas: each has samples, the profile knows them."""
        node = self._cost.cluster.group_sizes[0]
        return (
            1 <= part.replicas <= min(size, self._problem.most_replicas)
            and node % part.tensor == 0
            and profile_covers(self._cost, self._problem.batch_size, size, part.replicas)
        )

    def _swapped(self, graph: StageGraph, size: int, parts: Parts) -> Iterator[Candidate]:
        """The same stages, two of them on each other's devices, in another node."""
        spot, node = (
            PlanView(self._problem.assembler(size), parts),
            self._cost.cluster.group_sizes[0],
        )
        where = [stage.devices for stage in graph.stages]
        for x in spot.focus:
            for y in range(len(parts)):
                if len(where[x]) == len(where[y]) and where[x][0] // node != where[y][0] // node:
                    swapped = list(where)
                    swapped[x], swapped[y] = where[y], where[x]
                    stages = tuple(
                        replace(stage, devices=devices, in_flight=0)
                        for stage, devices in zip(graph.stages, swapped, strict=True)
                    )
                    self._left -= len(parts)
                    step = step_s(spot.prices, parts, swapped, set(graph.edges))
                    yield Candidate(replace(graph, stages=stages), step, 0.0)


def score(candidate: Candidate) -> float:
    """The estimated step, with a penalty for edges whose replicas do not divide one another."""
    graph = candidate.graph
    counts = [stage.replicas for stage in graph.stages]
    apart = sum(counts[x] % counts[y] > 0 < counts[y] % counts[x] for x, y in graph.edges)
    return candidate.step_s * (1 + POLISH.apart * apart)
