"""Search: one run of the planner, from starts to proposals and to neighbours of the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from random import Random

from anabranch.planner.auto.annealing import AnnealedDraft, Annealing, Evaluate
from anabranch.planner.auto.draft import Draft, draft_of, stage_graph_of, variants
from anabranch.planner.auto.loops import branches, loops, near_loops
from anabranch.planner.auto.moves import draw
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.planner.base import PLAIN_RUN, RunOptions
from anabranch.plans.check import suits
from anabranch.plans.stages import StageGraph

Start = tuple[str, StageGraph]
"""Source of a stage graph, such as ``planner even``, and the stage graph."""


class Search:
    """Stage graphs to judge; iterating over it searches.

    Args:
        starts: stage graphs to begin with, read as they come.
        evaluations: drafts to evaluate.
        rounds: drafts to evaluate in each round from the best plan on, see ``again``. Up to
            ``SETTINGS.more_rounds`` rounds as large as the last follow, until two in a row fail.
    """

    def __init__(
        self,
        space: Space,
        evaluate: Evaluate,
        starts: Iterable[Start],
        evaluations: int,
        seed: int = 0,
        rounds: Sequence[int] = (),
    ) -> None:
        self._space, self._evaluate, self._starts = space, evaluate, starts
        self._evaluations, self._rng = evaluations, Random(seed)
        self._seed, self._rounds, self._more = seed, list(rounds), SETTINGS.more_rounds
        self._begun: tuple[StageGraph | None, int] = None, 0
        self._failed = 0  # rounds in a row that found no better plan
        self._origins: dict[StageGraph, tuple[str, int]] = {}  # the start, and changes since then
        self._likely: list[StageGraph] = []

    def __iter__(self) -> Iterator[StageGraph]:
        """Generate the starts, then the best drafts of annealing, also after an interrupt."""
        names: list[str] = []
        drafts: list[Draft] = []
        for name, graph in self._starts:
            if graph not in self._origins:
                names.append(name)
                drafts.append(draft_of(graph, self._space.cost))
                yield self._remember(graph, f"the plan of {name}")
        annealing = Annealing(self._space, self._evaluate, self._rng)
        try:
            if self._evaluations:
                annealing.search(drafts, self._evaluations)
        finally:
            quickest: dict[str, AnnealedDraft] = {}
            # A plan from each planner comes first.
            for annealed in annealing.promising:
                quickest.setdefault(names[annealed.start], annealed)
            for annealed in (*quickest.values(), *annealing.best(SETTINGS.proposed)):
                graph = self._stages(annealed.draft)
                if not self._space.flush or suits(graph, self._space.cost):
                    self._likely.append(graph)
                    if graph not in self._origins:
                        start = f"the plan of {names[annealed.start]}"
                        yield self._remember(graph, start, annealed.moves)

    def likely(self) -> list[StageGraph]:
        """Return results of annealing: a plan from each planner, then others, the fastest first."""
        return self._likely

    def again(
        self, best: StageGraph, runs: RunOptions, choice: RunOptions
    ) -> list[tuple[StageGraph, RunOptions]]:
        """Anneal once more, from the best plan on, with every move. Return proposals and how they
        run; none when no rounds are left. A round does not depend on how many follow.

        Args:
            runs: how the best plan runs.
            choice: which fields of ``RunOptions`` the search may change.
        """
        before, count = self._begun
        if self._rounds:
            count = self._rounds.pop(0)
        elif before is None or not self._more:
            return []
        else:
            self._failed = self._failed + 1 if before == best else 0
            if self._failed > SETTINGS.more_tries:
                return []
            self._more -= 1
        self._begun = best, count
        space = replace(self._space, shared=choice.shared, split=choice.split)
        start = draft_of(best, self._space.cost)._replace(sharded=runs.shared, split=runs.split)
        others = (draft_of(graph, self._space.cost) for graph in self._likely)
        self._seed += 1
        rng = Random(f"round {self._seed}")
        annealing = Annealing(space, self._evaluate, rng)
        annealing.search([start, *others], count)
        proposals: dict[tuple[StageGraph, RunOptions], int] = {}
        for annealed in annealing.best(SETTINGS.proposed):
            graph = self._stages(annealed.draft)
            way = RunOptions(annealed.draft.sharded, annealed.draft.split)
            if suits(graph, replace(self._space.cost, shard_optimizer=way.shared)):
                proposals.setdefault((graph, way), annealed.moves)
        return [
            (self._changed(graph, best, moves), way) for (graph, way), moves in proposals.items()
        ]

    def loops(self, limit: float, *, recompute: bool) -> list[StageGraph]:
        """Return loops that may take less than ``limit`` seconds.

        Args:
            recompute: whether their stages recompute, if stages may.
        """
        if not self._space.several:
            return []
        graphs = loops(self._space, limit, recompute=recompute and self._space.recompute)
        origin = "a row of stages that passes the devices several times"
        return [self._remember(graph, origin) for graph in graphs]

    def branches(self, limit: float) -> list[StageGraph]:
        """Return stage graphs with branches on all devices and their join on one of these."""
        if not self._space.several:
            return []
        origin = "branches side by side, with their join on one of their devices"
        return [self._remember(graph, origin) for graph in branches(self._space, limit)]

    def near_loops(self, graph: StageGraph) -> list[StageGraph]:
        """Return neighbours of a stage graph whose devices have several stages."""
        return [self._changed(near, graph) for near in near_loops(graph, self._space)]

    def is_misled(self, graph: StageGraph, runs: RunOptions, seconds: float) -> bool:
        """Return True if a stage graph takes far longer than its evaluation says."""
        return seconds > self._with_quicker_warm_up(graph, runs)[0] * (1 + SETTINGS.misled)

    def near(self, graph: StageGraph, runs: RunOptions = PLAIN_RUN) -> list[StageGraph]:
        """Return random neighbours of a stage graph, the fastest first; other ones at each call.
        The same stage graph without recomputation comes first: where stages wait it may be as fast.
        """
        seconds, centre = self._with_quicker_warm_up(graph, runs)
        limit = seconds * (1 + SETTINGS.error)
        neighbours: dict[float, tuple[Draft, int]] = {}
        for _ in range(SETTINGS.neighbours // self._space.effort(centre)):
            draft, moves = draw(centre, self._space, self._rng), 1
            if self._rng.random() >= 0.5:
                draft, moves = draw(draft, self._space, self._rng), 2
            neighbours.setdefault(self._evaluate(draft, limit), (draft, moves))
        neighbours.pop(math.inf, None)
        return [
            self._changed(graph.without_recompute(), graph, 0),
            *(
                self._changed(self._stages(draft), graph, moves)
                for draft, moves in (neighbours[s] for s in sorted(neighbours)[: SETTINGS.near])
            ),
        ]

    def promising(
        self, graphs: Iterable[StageGraph], runs: RunOptions, limit: float = math.inf
    ) -> list[StageGraph]:
        """Return stage graphs that may take less than a limit if they run so, the fastest first."""
        seconds = {graph: self._with_quicker_warm_up(graph, runs)[0] for graph in graphs}
        near = (graph for graph in seconds if seconds[graph] < limit * (1 + SETTINGS.error))
        return sorted(near, key=seconds.__getitem__)

    def origin(self, graph: StageGraph) -> str:
        """Say how a stage graph was found; empty if this search did not find it."""
        start, changes = self._origins.get(graph, ("", 0))
        if not changes:
            return start and f"started from {start}"
        times = f"{changes} change{'s' if changes > 1 else ''}"
        return f"found from {start} by {times} to stages or devices"

    def _with_quicker_warm_up(self, graph: StageGraph, runs: RunOptions) -> tuple[float, Draft]:
        draft = draft_of(graph, self._space.cost)
        draft = draft._replace(sharded=runs.shared or draft.sharded, split=runs.split)
        ways = ((self._evaluate(way, math.inf), way) for way in variants(draft))
        return min(ways, key=itemgetter(0))

    def _remember(self, graph: StageGraph, start: str, changes: int = 0) -> StageGraph:
        self._origins.setdefault(graph, (start, changes))
        return graph

    def _changed(self, graph: StageGraph, before: StageGraph, more: int = 1) -> StageGraph:
        start, changes = self._origins.get(before, ("the plan of the user", 0))
        return self._remember(graph, start, changes + more)

    def _stages(self, draft: Draft) -> StageGraph:
        return stage_graph_of(draft, self._space.cost, self._space.batch_size)
