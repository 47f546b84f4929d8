"""Search: one run of the planner, from starts to proposals and to what lies near the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from operator import itemgetter
from random import Random

from anabranch.planner.auto.annealing import AnnealedDraft, Annealing, Evaluate
from anabranch.planner.auto.draft import Draft, both, draft_of, stage_graph_of
from anabranch.planner.auto.moves import draw
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.plans.check import suits
from anabranch.plans.stages import StageGraph

Start = tuple[str, StageGraph]
"""Source of a stage graph, such as ``planner even``, and the stage graph."""


class Search:
    """Stage graphs to judge; iterating over it searches.

    Args:
        starts: what the search begins with, as it comes.
        evaluations: drafts to evaluate.
    """

    def __init__(
        self,
        space: Space,
        evaluate: Evaluate,
        starts: Iterable[Start],
        evaluations: int,
        seed: int = 0,
    ) -> None:
        self._space, self._evaluate, self._starts = space, evaluate, starts
        self._evaluations, self._rng = evaluations, Random(seed)
        self._origins: dict[StageGraph, str] = {}
        self._likely: list[StageGraph] = []

    def __iter__(self) -> Iterator[StageGraph]:
        """The starts, then the best that annealing finds; that also after an interrupt."""
        names: list[str] = []
        drafts: list[Draft] = []
        for name, graph in self._starts:
            if graph not in self._origins:
                names.append(name)
                drafts.append(draft_of(graph, self._space.cost))
                yield self._remember(graph, f"started from the plan of {name}")
        annealing = Annealing(self._space, self._evaluate, self._rng)
        try:
            if self._evaluations:
                annealing.search(drafts, self._evaluations)
        finally:
            quickest: dict[str, AnnealedDraft] = {}
            # The judge is to have a plan of each planner first.
            for annealed in annealing.promising:
                quickest.setdefault(names[annealed.start], annealed)
            for annealed in (*quickest.values(), *annealing.best(SETTINGS.proposed)):
                graph = self._stages(annealed.draft)
                if not self._space.flush or suits(graph, self._space.cost):
                    self._likely.append(graph)
                    if graph not in self._origins:
                        moves = annealed.moves
                        changes = f"{moves} local change{'s' if moves != 1 else ''}"
                        yield self._remember(
                            graph,
                            f"improved by {changes}; started from the plan of "
                            f"{names[annealed.start]}",
                        )

    def likely(self) -> list[StageGraph]:
        """Results of annealing: of each planner a plan, then the quickest first."""
        return self._likely

    def near(self, graph: StageGraph, *, shared: bool = False) -> list[StageGraph]:
        """Random neighbours of a stage graph, the quickest first; others when asked again."""
        seconds, centre = self._with_quicker_warm_up(graph, shared)
        limit = seconds * (1 + SETTINGS.error)
        neighbours: dict[float, tuple[Draft, str]] = {}
        for _ in range(SETTINGS.neighbours):
            draft, moves = self._neighbour(centre)
            neighbours.setdefault(self._evaluate(draft, limit), (draft, moves))
        neighbours.pop(math.inf, None)
        return [
            self._remember(self._stages(draft), f"{self.origin(graph)}, then by {moves}")
            for draft, moves in (neighbours[s] for s in sorted(neighbours)[: SETTINGS.near])
        ]

    def sharing(self, graphs: Iterable[StageGraph], limit: float) -> list[StageGraph]:
        """Stage graphs that may take less where replicas share optimizer state, quickest first."""
        seconds = {graph: self._with_quicker_warm_up(graph, shared=True)[0] for graph in graphs}
        near = (graph for graph in seconds if seconds[graph] < limit * (1 + SETTINGS.error))
        return sorted(near, key=seconds.__getitem__)[: SETTINGS.near]

    def origin(self, graph: StageGraph) -> str:
        """Say how a stage graph was found."""
        return self._origins.get(graph, "")

    def _neighbour(self, centre: Draft) -> tuple[Draft, str]:
        """A draft one or two moves away, and by which."""
        name, draft = draw(centre, self._space, self._rng)
        if self._rng.random() < 0.5:
            return draft, name
        second, draft = draw(draft, self._space, self._rng)
        return draft, f"{name} and {second}"

    def _with_quicker_warm_up(self, graph: StageGraph, shared: bool) -> tuple[float, Draft]:
        draft = draft_of(graph, self._space.cost)
        variants = both(draft._replace(sharded=shared or draft.sharded))
        return min(((self._evaluate(each, math.inf), each) for each in variants), key=itemgetter(0))

    def _remember(self, graph: StageGraph, origin: str) -> StageGraph:
        self._origins.setdefault(graph, origin)
        return graph

    def _stages(self, draft: Draft) -> StageGraph:
        return stage_graph_of(draft, self._space.cost, self._space.batch_size)
