"""Tuned numbers of the partitioner: how much is looked at. More is slower and rarely better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchLimits:
    """The search under bounds on the period.

    Attributes:
        items: models of more operators are made coarser, to about so many items.
        first_bounds: bounds that are tried first, as multiples of all work shared out evenly.
        steps: bounds that are tried next, between the last that failed and the first that did not;
        near: unless these are within this factor of each other;
        near_in_large: in large models, within this one.
        close_bounds: bounds that are tried closely, as multiples of the period of a candidate.
        promising: where it is looked closely, sizes and plans must be within this factor.
        alone: candidates of one stage that are kept: other micro-batch sizes differ in little.
        reduce_factor: all-reduces may take so many times the longest of the first plan,
        reduce_share: or this share of a step.
        dearer: recomputation is tried where heights cost more than this factor in the period.
        top: where no bound is known to suffice but none at all, so many times one that failed.
        most_heights: greater heights are taken for the greatest where memory depends on them.
        heads: cuts per branch that a stage before a block may take, besides none and all of it;
        heads_in_large: in models of more than ``items`` items.
        heights_apart: up to so many heights are told apart where the memory of a stage beside a
            block depends on them.
        most_cuts: cuts that are considered in a row, evenly spread.
        slack: longest periods for which a row is cut, as multiples of the least.
        sizes_together: micro-batch sizes that are looked at together, to spare NumPy calls.
        entries_at_once: entries of the largest tables that are made at once, for memory.
        entries_of_large: entries per bound, item and branch from which on a model is large.
        ranges_at_once: entries of a table of ranges that are looked at together, for memory.
        small_table: larger tables of a state are filled one after the other, for the cache.
    """

    items: int = 256
    first_bounds: tuple[float, ...] = (
        *(1.03, 1.07, 1.12, 1.19, 1.28, 1.42, 1.7, 2.5, 6.0),
        float("inf"),
    )
    steps: int = 6
    near: float = 1.05
    near_in_large: float = 1.3
    close_bounds: tuple[float, ...] = (
        *(0.86, 0.88, 0.9, 0.92, 0.94, 0.955, 0.97, 0.98, 0.99, 1.0, 1.03, 1.1),
    )
    promising: float = 1.05
    alone: int = 3
    reduce_factor: float = 1.25
    reduce_share: float = 0.03
    dearer: float = 1.02
    top: float = 1e4
    most_heights: int = 64
    heads: int = 8
    heads_in_large: int = 3
    heights_apart: int = 8
    most_cuts: int = 128
    slack: tuple[float, ...] = (1.0, 1.05, 1.2)
    sizes_together: int = 4
    entries_at_once: int = 1 << 22
    entries_of_large: int = 200
    ranges_at_once: int = 1 << 21
    small_table: int = 1 << 11


@dataclass(frozen=True)
class Effort:
    """How closely one problem is searched.

    Attributes:
        hopeless: a size gets no candidate if its step cannot be within this factor of the best.
        likely: coarse plans are left out that are longer than the best by this factor, messages
            aside.
        refined: sizes that are looked at closely: those with the best coarse candidates.
        looser: multiples of the least period that are tried for smaller depths.
        caps: depths that are tried at most.
    """

    hopeless: float
    likely: float
    refined: int
    looser: tuple[float, ...]
    caps: int


@dataclass(frozen=True)
class ExactLimits:
    """The search over all partitions.

    Attributes:
        operators, downsets: series-parallel graphs with no more of one of them are searched so;
            for others it would cost more than the search under bounds.
        most_downsets: downsets of a graph that is not series-parallel or has few operators,
        ways: and first stages of all layers together, for memory.
        per_device: downsets per device, and
        merged: in all, that are left where operators are put together.
        contracted: operators of a graph in which those that cost nothing are looked for.
        refined: micro-batch sizes that get more than one candidate: those whose first are best;
        thorough: up to so many pairs of downsets, all do.
        hopeless: no candidate whose step cannot be within this factor of the best.
        path_states: pairs of downsets times devices squared up to which the shortest ways are
            looked for,
        periods: and the most periods at which they are.
        bisections: halvings of the bound on a step.
    """

    operators: int = 12
    downsets: int = 64
    most_downsets: int = 300
    ways: int = 20_000
    per_device: int = 8
    merged: int = 64
    contracted: int = 256
    refined: int = 3
    thorough: int = 4000
    hopeless: float = 1.2
    path_states: int = 1 << 13
    periods: int = 16
    bisections: int = 12


@dataclass(frozen=True)
class PolishLimits:
    """The changes of a plan that are tried, and how many are simulated.

    Attributes:
        stages, devices: of a plan that is improved at most: pricing one takes a millisecond.
        close: changes whose estimate is within this factor of the plan's own are simulated:
        most_simulated: so many over the number of stages,
        least_simulated: but at least a few.
        apart: what an edge between unequal slices may cost, as a share of the step.
        gain: a change is an improvement if it shortens the estimated step by this share.
        effort: stages that may be priced for the neighbours of one stage graph,
        look_round: and after an improvement, to see whether another change is a better one.
        whole: stages that may be priced for all stage graphs, one after the other,
        longer: and how many more where one change led to the next.
        focus: stages that are changed in a plan with more.
        chunks: parts of one stage that are tried at each neighbour.
        slides: operators by which cuts of a row are moved.
        tapered: stages that one becomes at most.
    """

    stages: int = 48
    devices: int = 128
    close: float = 1.06
    most_simulated: int = 200
    least_simulated: int = 6
    apart: float = 0.02
    gain: float = 1e-3
    effort: int = 2_500
    look_round: int = 400
    whole: int = 6_000
    longer: int = 18_000
    focus: int = 6
    chunks: int = 6
    slides: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tapered: int = 4


SEARCH = SearchLimits()
EXACT = ExactLimits()
POLISH = PolishLimits()

QUICK = Effort(1.2, 1.12, 3, (1.0, 1.02, 1.04, 1.08, 1.13, 1.2, 1.3, 1.42), 6)
BRIEF = Effort(1.1, 1.05, 2, (1.0, 1.04, 1.13, 1.3), 3)
"""For models of more than ``SEARCH.items`` operators."""

THOROUGH = Effort(1.4, 1.4, 99, tuple(1.02**i for i in range(20)), 12)
"""For small models and for sequential pipelines."""
