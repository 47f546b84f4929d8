"""The contract of every planner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph


class Planner(Protocol):
    """Proposes stage graphs for a model on a cluster, best first by its own objective.

    A proposal uses every device of ``cost.cluster`` and leaves ``in_flight`` to the schedule. It
    passes ``plans.check``, with operators across samples as soon as ``plans.whole_batch.fitted``
    has made stages for them; one of planner ``auto`` may need replicas that share the optimizer's
    state for that. ``anabranch.solve.plan`` does both, schedules and simulates the proposals and
    keeps the best. Being a function of its arguments alone, a planner proposes the same list each
    time.

    A planner that searches for long yields what it has as it goes, so that whoever interrupts the
    search still has a plan; it may propose a stage graph twice.

    Attributes:
        schedules: keys of ``schedule.SCHEDULES`` that its paper runs such plans with.
    """

    schedules: ClassVar[tuple[str, ...]]

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterable[StageGraph]:
        """Propose stage graphs.

        Args:
            cost: prices the operators of ``cost.graph`` on ``cost.cluster``.
            batch_size: samples of one step.
            microbatch_size: only this size; by default every power of two that the profile covers.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if the search would take more than it was given.
        """
        ...


class Runs(NamedTuple):
    """Way to run a stage graph, beside its schedule.

    Attributes:
        shared: whether replicas share the optimizer's state.
        split: whether backwards are split.
    """

    shared: bool = False
    split: bool = False


WHOLE = Runs()
"""Every replica holds its optimizer's state, and backwards are whole."""


@runtime_checkable
class Improving(Protocol):
    """Proposals that can be improved once the best of them is known."""

    def __iter__(self) -> Iterator[StageGraph]: ...

    def likely(self) -> Iterable[StageGraph]:
        """Return the proposals that are taken for the best, promising ones first."""
        ...

    def near(self, graph: StageGraph, runs: Runs = WHOLE) -> Iterable[StageGraph]:
        """Return stage graphs that differ little from a proposal, promising ones first."""
        ...

    def promising(
        self, graphs: Iterable[StageGraph], runs: Runs, limit: float = ...
    ) -> Iterable[StageGraph]:
        """Return the stage graphs among some that may take less than so many seconds if they run
        so, promising ones first.
        """
        ...

    def is_misled(self, graph: StageGraph, runs: Runs, seconds: float) -> bool:
        """Return True if a proposal takes far longer than the search thinks, which may have missed
        what is quicker then.
        """
        ...

    def again(
        self, best: StageGraph, runs: Runs, choice: Runs
    ) -> Iterable[tuple[StageGraph, Runs]]:
        """Return more proposals with how they run, found from the best plan on; none where the
        search has done what it was given.

        Args:
            runs: how the best plan runs.
            choice: what of it may be chosen.
        """
        ...

    def origin(self, graph: StageGraph) -> str:
        """Say for people how a proposal was found; empty if unknown."""
        ...


@runtime_checkable
class Looping(Protocol):
    """Proposals of stages in a row that pass the devices several times."""

    def loops(self, limit: float, *, recompute: bool) -> Iterable[StageGraph]:
        """Return stages in a row, several on each device, that may take less than so many seconds,
        promising ones first.

        Args:
            recompute: whether they recompute.
        """
        ...

    def near_loops(self, graph: StageGraph) -> Iterable[StageGraph]:
        """Return stage graphs that differ little from one whose devices have several stages."""
        ...


@runtime_checkable
class AsynchronousPlanner(Protocol):
    """A planner that can search for the shortest time between mini-batches without a flush."""

    def without_flush(
        self,
        cost: CostModel,
        sizes: Sequence[int],
        starts: Iterable[StageGraph],
        versions: tuple[float, float],
    ) -> Improving:
        """Proposals from some starts.

        Args:
            sizes: of micro-batches to choose from.
            starts: stage graphs for one mini-batch.
            versions: of the weights that a stage holds, for each micro-batch in flight and besides.
        """
        ...


def require_options(planner: str, found: object, **least: int | float) -> None:
    """Refuse options out of range, as early as they are set.

    None passes: whether an option may be None is a matter of its type.

    Args:
        planner: key of ``planner.PLANNERS``.
        found: has the options as attributes.
        least: per option the least value it takes; no option takes infinity or NaN.

    Raises:
        ValueError: names the first option that is out of range, its value and the range.
    """
    for option, bound in least.items():
        value = getattr(found, option)
        # Written so that NaN, which compares with nothing, is refused as well.
        if value is not None and not bound <= value < math.inf:
            raise ValueError(
                f"option {option} of planner {planner} is {value}; it must be a finite number of "
                f"at least {bound}"
            )
