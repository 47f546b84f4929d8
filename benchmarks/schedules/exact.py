"""The shortest list schedule with split backwards, by a mixed integer programme.

A stage takes its micro-batches in their order, one pass at a time. One that may hold n begins
forward i after the end of backward i - n. So all that is left to decide is which of its next passes
a device runs. With lengths in whole seconds, a variable says for each pass and second whether it
has begun by then::

    begun(p, t)  <=  begun(p, t + 1)
    begun(p, t)  <=  begun(q, t - length(q))                            where p waits for q
    sum over p of a device of  begun(p, t) - begun(p, t - length(p))  <=  1

(Pritsker et al., 1969.) Whether that is possible within so many seconds is asked for one second
more after the other, from a lower bound on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np

from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Action, Kind

Pass = tuple[int, Kind, int]
"""Stage, kind and micro-batch."""

Seconds = tuple[int, int, int]
"""Of a sample's forward, gradients of inputs and gradients of weights."""

FORWARD, INPUTS, WEIGHTS = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT


class UndecidedError(Exception):
    """The solver ran out of time."""


class _ImpossibleError(Exception):
    """A row of the programme that nothing satisfies."""


@dataclass(frozen=True)
class ListProblem:
    """Passes of one step, each stage on a device of its own; messages take no time.

    Attributes:
        in_flight: per stage, micro-batches between a forward and the end of its backward at most.
        seconds: per stage.
        limit_s: seconds that the solver has for each question.
    """

    graph: StageGraph
    in_flight: Sequence[int]
    seconds: Sequence[Seconds]
    limit_s: float = 60.0

    def kinds(self, stage: int) -> tuple[Kind, ...]:
        """Return the passes of each micro-batch."""
        return (
            (FORWARD, INPUTS, WEIGHTS)
            if self.graph.predecessors[stage]
            else (FORWARD, Kind.BACKWARD)
        )

    @cached_property
    def lengths(self) -> Mapping[Pass, int]:
        """Return the seconds of all passes."""
        lengths = {}
        for s in range(len(self.graph)):
            of_kind = dict(zip((FORWARD, INPUTS, WEIGHTS), self.seconds[s], strict=True))
            of_kind[Kind.BACKWARD] = of_kind[INPUTS] + of_kind[WEIGHTS]
            for i in range(self.graph.num_microbatches(s)):
                first, stop = self.graph.interval(s, i)
                lengths |= {(s, kind, i): (stop - first) * of_kind[kind] for kind in self.kinds(s)}
        return lengths

    @cached_property
    def waits(self) -> Mapping[Pass, Sequence[Pass]]:
        """Return the passes that each pass waits for."""
        return {key: tuple(self._earlier(*key)) for key in self.lengths}

    def _earlier(self, s: int, kind: Kind, i: int) -> Iterable[Pass]:
        graph, kinds = self.graph, self.kinds(s)
        if i:
            yield s, kind, i - 1
        if kind is not FORWARD:
            yield s, kinds[kinds.index(kind) - 1], i
        elif i >= self.in_flight[s]:
            yield s, kinds[-1], i - self.in_flight[s]
        if kind is WEIGHTS:
            return
        for t in graph.predecessors[s] if kind is FORWARD else graph.successors[s]:
            last = -(-graph.interval(s, i)[1] // graph.stages[t].microbatch_size) - 1
            yield t, FORWARD if kind is FORWARD else self.kinds(t)[1], last

    @cached_property
    def heads(self) -> Mapping[Pass, int]:
        """Return when passes can begin at the earliest."""
        return _earliest(self.waits, self.lengths)

    @cached_property
    def tails(self) -> Mapping[Pass, int]:
        """Return the seconds behind each pass at least."""
        after: dict[Pass, list[Pass]] = {key: [] for key in self.lengths}
        for key, earlier in self.waits.items():
            for other in earlier:
                after[other].append(key)
        return _earliest(after, self.lengths)

    @cached_property
    def bound_s(self) -> int:
        """Return seconds that no schedule is below."""
        paths = [self.heads[p] + n + self.tails[p] for p, n in self.lengths.items()]
        for s in range(len(self.graph)):
            own = [p for p in self.lengths if p[0] == s]
            first, last = min(self.heads[p] for p in own), min(self.tails[p] for p in own)
            paths.append(first + sum(self.lengths[p] for p in own) + last)
        return max(paths)

    def shortest(self, known_s: int) -> int:
        """Return the seconds of the shortest schedule, where one of so many seconds is known.

        Raises:
            UndecidedError: if the solver cannot tell in time.
        """
        return next((n for n in range(self.bound_s, known_s) if self.is_possible(n)), known_s)

    def is_possible(self, step_s: int) -> bool:
        """Return whether a schedule takes no longer; raises as ``shortest``."""
        programme = _Programme(self, step_s)
        try:
            programme.put_rows()
        except _ImpossibleError:
            return False
        return programme.has_solution(self.limit_s)

    def step_s(self, lists: Iterable[Sequence[Action]]) -> int:
        """Return the seconds of a schedule, given the passes of each device."""
        waits = {key: {*earlier} for key, earlier in self.waits.items()}
        for actions in lists:
            keys = [(action.stage, action.kind, action.microbatch) for action in actions]
            for before, key in pairwise(keys):
                waits[key].add(before)
        ends: dict[Pass, int] = {}
        for key in TopologicalSorter(waits).static_order():
            begin = max((ends[other] for other in waits[key]), default=0)
            ends[key] = begin + self.lengths[key]
        return max(ends.values())


class _Programme:
    """Rows and columns of the question whether a step of so many seconds is possible."""

    def __init__(self, problem: ListProblem, step_s: int) -> None:
        self.problem, self.step_s = problem, step_s
        self.last = {p: step_s - problem.tails[p] - n for p, n in problem.lengths.items()}
        self.column: dict[Pass, int] = {}
        self.count = 0
        for p, head in problem.heads.items():
            self.column[p] = self.count - head
            self.count += max(self.last[p] - head, 0)  # at the last second it has begun
        self.entries: list[tuple[int, int, float]] = []
        self.upper: list[float] = []

    def put_rows(self) -> None:
        """Write all rows; raises an ``_ImpossibleError`` where one alone says no."""
        problem, last = self.problem, self.last
        for p, head in problem.heads.items():
            if head > last[p]:
                raise _ImpossibleError
            for t in range(head, last[p]):
                self._put([(p, t, 1.0), (p, t + 1, -1.0)], 0.0)
            for q in problem.waits[p]:
                for t in range(head, last[p] + 1):
                    self._put([(p, t, 1.0), (q, t - problem.lengths[q], -1.0)], 0.0)
        for s in range(len(problem.graph)):
            own = [(p, n) for p, n in problem.lengths.items() if p[0] == s and n]
            for t in range(self.step_s):
                running = [((p, t, 1.0), (p, t - n, -1.0)) for p, n in own]
                self._put([term for pair in running for term in pair], 1.0)

    def _put(self, terms: Iterable[tuple[Pass, int, float]], most: float) -> None:
        """Write that a sum of factors times ``begun`` is at most this."""
        row, is_empty = len(self.upper), True
        for p, t, factor in terms:
            if t >= self.last[p]:
                most -= factor
            elif t >= self.problem.heads[p]:
                self.entries.append((row, self.column[p] + t, factor))
                is_empty = False
        if not is_empty:
            self.upper.append(most)
        elif most < 0:
            raise _ImpossibleError

    def has_solution(self, limit_s: float) -> bool:
        """Return whether all rows can hold."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        if not self.count:
            return True
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = csr_matrix((factors, (rows, columns)), shape=(len(self.upper), self.count))
        result = milp(
            np.zeros(self.count),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self.upper)),
            integrality=np.ones(self.count),
            bounds=Bounds(0, 1),
            options={"time_limit": limit_s},
        )
        if result.status not in (0, 2):
            raise UndecidedError(result.message)
        return bool(result.status == 0)


def _earliest(waits: Mapping[Pass, Sequence[Pass]], lengths: Mapping[Pass, int]) -> dict[Pass, int]:
    """Return when passes can begin: behind what they wait for, and behind all the work of their
    device that has to come first.
    """
    heads: dict[Pass, int] = {}
    before: dict[Pass, set[Pass]] = {}
    for p in TopologicalSorter(waits).static_order():
        before[p] = {*waits[p]}.union(*(before[q] for q in waits[p]))
        heads[p] = max((heads[q] + lengths[q] for q in waits[p]), default=0)
        work = 0
        for q in sorted((q for q in before[p] if q[0] == p[0]), key=lambda q: -heads[q]):
            work += lengths[q]
            heads[p] = max(heads[p], heads[q] + work)
    return heads
