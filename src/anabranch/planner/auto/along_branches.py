"""A stage graph along the branches of the model::

    a1 a2 -+            {a1 a2} -+
    b1 b2 -+- c d                +- {c d}
                        {b1 b2} -+

Planners that look for the shortest slowest stage cut branches where that helps, and a search by
small changes seldom comes back from there to whole ones.
"""

from __future__ import annotations

from anabranch.graph.series_parallel import Node, Parallel, Series, decompose, operators
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph

MICROBATCHES = 8
"""Micro-batches at most: of large clusters an assembly takes some hundredths of a second."""


def along_branches(problem: Problem) -> StageGraph | None:
    """The stage graph with the shortest outline, of all micro-batch sizes, that has a stage for
    each branch and for what is before, between and behind branches; None if none fits.
    """
    masks = _branches(decompose(problem.cost.graph))
    if not 2 < len(masks) <= problem.devices:
        return None
    assembled = (
        problem.assembler(prices).assemble([Part(mask, 1) for mask in masks])
        for prices in map(problem.prices, problem.sizes)
        if prices.may(1) and prices.num_microbatches <= MICROBATCHES
    )
    fitting = [candidate for candidate in assembled if candidate is not None]
    return min(fitting, key=lambda candidate: candidate.outline_s).graph if fitting else None


def _branches(tree: Node) -> list[int]:
    """Operators of each branch, and of each run without branches, as bit masks."""
    parts, run = [], 0
    for child in tree.children if isinstance(tree, Series) else (tree,):
        if isinstance(child, Parallel):
            parts += [run] * (run > 0) + [_mask(branch) for branch in child.children]
            run = 0
        else:
            run |= _mask(child)
    return [*parts, run] if run else parts


def _mask(node: Node) -> int:
    return sum(1 << op for op in operators(node))
