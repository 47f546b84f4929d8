"""Sites of rewrites, calls that they insert, and slices of the parameters that these read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from anabranch.errors import some
from anabranch.graph import flat_program
from anabranch.graph.flat_program import APART, FlatProgram, PlaceholderSource, set_value
from anabranch.graph.slices import Slice


class NotSliceableError(Exception):
    """A call whose result has no slice that slices of its arguments make."""


class Sites:
    """Sites that one rewrite meets in one program.

    Attributes:
        rewritten: names of the parameters at which the program was rewritten.
        refused: names of others -> the reason.

    Args:
        wanted: names of parameters; None for all.
    """

    def __init__(self, wanted: Collection[str] | None) -> None:
        self._wanted = wanted
        self.rewritten: list[str] = []
        self.refused: dict[str, str] = {}

    def wants(self, name: str) -> bool:
        """Return True if a site is to be rewritten if it can be."""
        return self._wanted is None or name in self._wanted

    def reasons(self) -> str:
        """Return a sentence on the sites that were not rewritten."""
        by_reason: dict[str, list[str]] = {}
        for site, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(site)
        texts = (f"{some(names)}: {reason}" for reason, names in by_reason.items())
        return "; ".join(texts) or "no operator is of that kind"


ARITY = 4
"""Terms that one operator of a tree of sums adds up. Fewer operators are placed better: three
searches for dlrm with 2,048 samples find 46.9 to 50.7 ms with 4, 49.4 to 54.1 with 2; candle-uno
and 256 samples gain nothing. In another order of the terms plans differ as two searches do."""


def insert(like: fx.Node, path: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before another one; calls of one path can be an operator of that name."""
    node = flat_program.insert(like, target, *args, **kwargs)
    node.meta |= {"nn_module_stack": {path: (f"module.{path}", "")}, APART: True}
    return node


def slice_of(program: FlatProgram, parameter: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Return a placeholder for a slice of a parameter; the same one if asked for again."""
    source = program.sources[parameter]
    like: Tensor = parameter.meta["val"]
    if (start, stop) == (0, like.shape[dim]):
        return parameter
    wanted = PlaceholderSource(source.kind, Slice(source.name, dim, start, stop).name)
    for known, other in program.sources.items():
        if other == wanted:
            return known
    with program.graph.inserting_before(parameter):
        node = program.graph.placeholder(f"{parameter.name}_{start}_{stop}")
    shape = list(like.shape)
    shape[dim] = stop - start
    set_value(node, like.new_empty(shape).requires_grad_(like.requires_grad))
    program.sources[node] = wanted
    return node


def sum_tree(like: fx.Node, path: str, terms: Sequence[fx.Node]) -> fx.Node:
    """Insert a sum of terms before a call, as a tree of operators of ``ARITY`` neighbours each."""
    level, count = list(terms), 0
    while len(level) > 1:
        neighbours = [level[i : i + ARITY] for i in range(0, len(level), ARITY)]
        level = []
        for total, *others in neighbours:
            for term in others:
                total = insert(like, f"{path}[sum {count}]", torch.ops.aten.add.Tensor, total, term)
            level.append(total)
            count += bool(others)
    return level[0]
