"""Auto, the default planner: proposals of other planners, changed move by move.

1. Starts: the proposals of quick planners, ``STARTS``, and stages along the branches
   (``along_branches``). For a large problem also this planner's plans for a coarser model
   (``coarse``); then the search of the whole problem is short.
2. Simulated annealing over drafts (``annealing``) by the moves of ``moves.MOVES``, with the seconds
   of ``evaluator``.
3. All starts and the best drafts are proposed. ``solve`` simulates them, then the best neighbours
   of the best plan (``Search.near``), as long as one of them is better.
4. At last it simulates rows of stages that pass the devices several times, and branches whose join
   is on a device of one of them (``loops``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError, InvalidPlanError
from anabranch.graph.digraph import path_before
from anabranch.graph.series_parallel import Node, Parallel, Series, decompose, mask_of, operators
from anabranch.planner import PLANNERS
from anabranch.planner.auto.coarse import Coarse, coarsen
from anabranch.planner.auto.evaluator import Evaluator
from anabranch.planner.auto.search import Search, Start
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.planner.base import require_options
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.contraction import in_a_row
from anabranch.plans.stages import StageGraph

STARTS = ("data-parallel", "even", "sequential", "graphpipe")
"""Planners whose proposals are starts, as they take little time; on few devices DAPPLE, too. For
models that are nearly a row GraphPipe is left out: its plans are much the same as sequential ones.
"""

COARSER, BRANCHES = "a coarser model", "stages along the branches"
"""Sources of starts, beside planners."""

MICROBATCHES = 8
"""Most micro-batches of stages along branches: on large clusters assembling them takes some
hundredths of a second.
"""


@dataclass(frozen=True)
class Auto:
    """Simulated annealing from the proposals of other planners.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        recompute: stages may run their forward again in the backward.
        evaluations: most drafts to evaluate. None: as ``SETTINGS`` says.
        seed: seed of the random numbers; the same seed gives the same proposals.
        shape: ``graph``, or ``chain`` for stages in one row, see ``contraction.in_a_row``.
        several: devices may have several stages, see ``loops``. Local processes may only on a
            calibrated machine, as messages and passes take a good part of the time there.
    """

    max_replicas: int | None = None
    recompute: bool = True
    evaluations: int | None = None
    seed: int = 0
    shape: str = "graph"
    several: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __post_init__(self) -> None:
        name = "chain" if self.shape == "chain" else "auto"
        require_options(name, self, max_replicas=1, evaluations=0, seed=0)
        if self.shape not in ("graph", "chain"):
            raise ValueError(
                f"option shape of planner auto is {self.shape!r}; it is graph or chain"
            )

    def __call__(
        self,
        cost: CostModel,
        *,
        batch_size: int,
        microbatch_size: int | None = None,
        start: StageGraph | None = None,
    ) -> Search:
        """Propose stage graphs: the starts, then the best that the search finds; see
        ``planner.base``. An interrupted search proposes the best that it has found.

        Args:
            start: begin with this stage graph alone. One with several stages on a device is left
                to the caller to judge; the search then begins as without it.

        Raises:
            InfeasiblePlanError: if nothing fits.
            InvalidPlanError: if ``start`` leaves devices out, or is another shape than the one
                asked for, or has several stages on a device where that is not wanted.
        """
        if start is not None and self.shape == "chain" != start.shape:
            raise InvalidPlanError(
                "the stages to begin with are no chain; begin with a plan in one row, or leave out "
                "the shape"
            )
        if start is not None and start.shares_devices:
            if not self.several:
                raise InvalidPlanError(
                    "the stages to begin with are several on a device; begin with a plan with one "
                    "stage on each, or leave out several=false"
                )
            start = None
        cost = self._shaped(cost)
        problem = Problem(cost, batch_size, microbatch_size, self.max_replicas).checked()
        space = Space(
            cost,
            batch_size,
            problem.sizes,
            self.recompute,
            most_replicas=problem.most_replicas,
            several=self.several and not (cost.cluster.cores and cost.cluster.calibration is None),
        )
        evaluate = Evaluator(cost, batch_size, max_replicas=self.max_replicas)
        coarse = coarsen(cost, batch_size, microbatch_size)
        count = min(self._first, SETTINGS.neighbours) if coarse else self._first
        starts = [("the user", start)] if start else self._starts(problem, coarse)
        return Search(space, evaluate, starts, count, self.seed, self._rounds)

    def without_flush(
        self,
        cost: CostModel,
        sizes: Sequence[int],
        starts: Iterable[StageGraph],
        versions: tuple[float, float],
    ) -> Search:
        """Propose stage graphs with short periods, without a flush.

        Args:
            sizes: micro-batch sizes to choose from.
            starts: stage graphs for one mini-batch.
            versions: versions of the weights of a stage per micro-batch in flight, and besides.
        """
        graphs, cost = list(starts), self._shaped(cost)
        batch_size = graphs[0].batch_size
        return Search(
            Space(cost, batch_size, tuple(sorted(sizes)), self.recompute, flush=False),
            Evaluator(cost, batch_size, max_replicas=self.max_replicas, versions=versions),
            [("another planner", graph) for graph in graphs],
            SETTINGS.evaluations if self.evaluations is None else self.evaluations,
            self.seed,
        )

    def _shaped(self, cost: CostModel) -> CostModel:
        """Return the prices of the model, for a chain those of its operators in a row."""
        if self.shape == "graph":
            return cost
        row = cost.memo.get(in_a_row)
        if row is None:
            row = in_a_row(cost.profile, [*operators(decompose(cost.graph))])
            cost.memo[in_a_row] = row
        return replace(cost, profile=row)

    @property
    def _first(self) -> int:
        """Most drafts to evaluate from the starts, never more than by default."""
        default = SETTINGS.evaluations
        return default if self.evaluations is None else min(self.evaluations, default)

    @property
    def _rounds(self) -> list[int]:
        """Drafts to evaluate in each round from the best plan on. Those beyond the default make
        more rounds, so that a search with more evaluations does all that one with fewer does.
        """
        beyond = max((self.evaluations or 0) - SETTINGS.evaluations, 0)
        first = SETTINGS.further * self._first // SETTINGS.evaluations
        return [first] + [SETTINGS.further] * (beyond // SETTINGS.further)

    def _starts(self, problem: Problem, coarse: Coarse | None) -> Iterator[Start]:
        """Generate proposals of other planners, of this one for a coarser model, and along the
        branches. If there are none, raise the last planner's error.
        """
        few = coarse is None and problem.devices <= SETTINGS.few
        names = STARTS[:-1] if self.shape == "chain" else STARTS  # graphpipe proposes graphs
        names = (*names, "dapple") if few else names
        sources = {name: self._proposed(name, problem) for name in names}
        if coarse is not None:
            del sources["even"]  # it takes longer than all others
            if coarse.factor == 1:
                sources.pop("graphpipe", None)  # it joins as many operators itself
            quick = {"data-parallel": sources.pop("data-parallel")}
            sources = quick | {COARSER: self._expanded(coarse, problem)} | sources
        any_found, last = False, [name for name in sources if name in STARTS][-1]
        for name, graphs in sources.items():
            if name == "graphpipe" and any_found and _is_nearly_a_row(problem.cost):
                continue
            try:
                for graph in graphs:
                    if max(stage.replicas for stage in graph.stages) <= problem.most_replicas:
                        any_found = True
                        yield f"the {name} planner" if name in names else name, graph
            except (BudgetError, InfeasiblePlanError):
                if name == last and not any_found:
                    raise
        if self.shape == "graph" and (along := along_branches(problem)) is not None:
            yield BRANCHES, along

    def _expanded(self, coarse: Coarse, problem: Problem) -> Iterator[StageGraph]:
        part, size = coarse.factor, problem.microbatch_size
        planner = replace(self, shape="graph", max_replicas=max(problem.most_replicas // part, 1))
        coarse_graphs = planner(
            coarse.cost,
            batch_size=problem.batch_size // part,
            microbatch_size=size and size // part,
        )
        yield from map(coarse.expand, coarse_graphs)

    def _proposed(self, name: str, problem: Problem) -> Iterator[StageGraph]:
        """Generate the proposals of a planner, with the options that it shares with this one. Data
        parallelism may need replicas that share the optimizer's state.
        """
        planner: Any = PLANNERS[name]()
        own = {**vars(self), "fewer_stages": True}
        options = {option: own[option] for option in vars(planner) if option in own}
        shared = name == "data-parallel"
        cost = replace(problem.cost, shard_optimizer=True) if shared else problem.cost
        yield from replace(planner, **options)(
            cost, batch_size=problem.batch_size, microbatch_size=problem.microbatch_size
        )


def _is_nearly_a_row(cost: CostModel) -> bool:
    """Return True if little of the work lies beside the longest path through the model."""
    seconds = np.add(*cost.op_seconds(cost.profile.samples[-1]))
    longest_s = (path_before(seconds, cost.graph.edges) + seconds).max()
    return bool(longest_s >= SETTINGS.row * seconds.sum())


def along_branches(problem: Problem) -> StageGraph | None:
    """Return the stage graph with a stage for each branch, and for each run of operators before,
    between and behind branches, at the micro-batch size with the shortest outline; None if none
    fits::

        a1 a2 -+            {a1 a2} -+
        b1 b2 -+- c d                +- {c d}
                            {b1 b2} -+

    Planners that minimise the slowest stage cut branches where that helps, and a search by small
    changes seldom finds the way back to whole branches.
    """
    masks = _branches(decompose(problem.cost.graph))
    if not 2 < len(masks) <= problem.devices:
        return None
    assembled = (
        problem.assembler(prices).assemble([Part(mask, 1) for mask in masks])
        for prices in map(problem.prices, problem.sizes)
        if prices.covers_replicas(1) and prices.num_microbatches <= MICROBATCHES
    )
    fitting = [candidate for candidate in assembled if candidate is not None]
    return min(fitting, key=lambda candidate: candidate.outline_s).graph if fitting else None


def _branches(tree: Node) -> list[int]:
    """Return the mask of each branch, and of each run of operators without branches."""
    parts, run = [], 0
    for child in tree.children if isinstance(tree, Series) else (tree,):
        if isinstance(child, Parallel):
            parts += [run] * (run > 0) + [mask_of(branch) for branch in child.children]
            run = 0
        else:
            run |= mask_of(child)
    return [*parts, run] if run else parts
