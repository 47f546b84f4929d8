"""Operators that lie in one stage in some best plan: what ``partitioner.exact`` need not tell apart.

Profiles name operators that cost nothing: inputs, reshapes, one tensor out of a tuple. Each that may
lie in any stage between two others multiplies the downsets, 7,874 for a GNMT of 48 operators of
which 24 compute. A *free* operator (or group of such) has no seconds and no parameters. Moving it

    up     into the stage of its first reader, if it reads no more bytes than it makes
    down   into the stage of its one producer, if with all who read the same value it makes no more
           bytes than that value has

makes no stage slower, whatever the stages are, and closes no circle of stages::

    ids ---> embed          lstm ---> [0] ---> dropout          [ids embed]   [lstm [0] [1]] ...
                               +----> [1]

What a free operator keeps for its backward moves with it, so in memory (not in the period) this is
exact only up to those bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anabranch.cost import CostModel
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value, bits

_Bytes = tuple[float, float, float, float]
"""Of values: per sample and fixed, and of their gradients likewise."""


def atoms(cost: CostModel) -> list[int]:
    """Sets of operators that need not be told apart, as bit masks in topological order."""
    free = sum(1 << i for i in range(len(cost.graph)) if _is_free(cost, i))
    groups = [1 << i for i in range(len(cost.graph))]
    while True:
        quotient = Quotient(cost.graph, tuple(groups))
        merges = next(_merges(quotient, free), None)
        if merges is None:
            return groups
        groups = quotient.merged(merges)


@dataclass(frozen=True)
class Quotient:
    """A graph whose operators are groups of another's.

    Attributes:
        graph: the other one.
        groups: masks of its operators, in topological order.
    """

    graph: OpGraph
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        home = {op: g for g, mask in enumerate(self.groups) for op in bits(mask)}
        values = []
        for value in self.graph.values:
            made = home.get(value.producer, BATCH)
            read = tuple(sorted({home[c] for c in value.consumers} - {made}))
            if made != BATCH and read:
                values.append(
                    Value(made, read, value.nbytes, batched=value.batched, grad=value.grad)
                )
        ops = tuple(Op(f"group {g}") for g in range(len(self.groups)))
        object.__setattr__(self, "quotient", OpGraph(ops, tuple(values), name=self.graph.name))

    quotient: OpGraph = None  # type: ignore[assignment]

    def merged(self, merges: Sequence[tuple[int, int]]) -> list[int]:
        """The groups with each first one of these pairs put into its second."""
        raise NotImplementedError
