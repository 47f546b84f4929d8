"""The series-parallel tree in the form in which planners search it: chains of items.

A chain is a row of items, each an operator or a block; a block is a set of chains side by side::

    chain   [ stem ][ block ............. ][ head ][ loss ]
                    | chain [ a ][ b ][ c ]|
                    | chain [ d ][ e ]     |

``partitioner.rows`` weighs contiguous ranges of items. Branches of a block that ``cuts.signature``
calls the same are of one class, and only its first is searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from anabranch.cost import CostModel
from anabranch.graph.cuts import Leaf, Node, Parallel, Series, operators, signature
from anabranch.planner.partitioner.rows import Row


@dataclass(frozen=True)
class Block:
    """Chains side by side.

    Attributes:
        branches: those of one class next to each other.
        classes: per branch, the first branch that is the same.
        row: the branches as a row: ranges are groups of whole branches.
    """

    branches: tuple[Chain, ...]
    classes: tuple[int, ...]
    row: Row


@dataclass(frozen=True)
class Chain:
    """Items in series.

    Attributes:
        items: operators, by index, and blocks. row: the items as a row. below: for every cut j,
            the most operators on a path through what comes after it in the whole model: no
            stage that ends at the cut has a greater height.
    """

    items: tuple[int | Block, ...]
    row: Row
    below: tuple[int, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks among the items."""
        return tuple(item for item in self.items if isinstance(item, Block))


def build(cost: CostModel, tree: Node) -> Chain:
    """The chain that stands for a whole decomposition."""
    kept = [(c.forward_s, c.backward_s, c.kept_bytes) for c in cost.profile.costs]
    keys: list[Hashable] = [
        (
            kept[i],
            tuple(
                (parameter.nbytes, parameter.trainable)
                for parameter in (cost.parameters[name] for name in op.parameters)
            ),
        )
        for i, op in enumerate(cost.graph.ops)
    ]
    return _chain(cost, tree, 0, keys)


def line(cost: CostModel, order: Iterable[int]) -> Chain:
    """The chain of all operators in one topological order."""
    ops = tuple(order)
    return Chain(ops, Row(cost, [1 << op for op in ops]), tuple(range(len(ops), -1, -1)))


def span(chain: Chain) -> int:
    """Operators on the longest path: no plan is deeper."""
    return chain.below[0]


def _chain(cost: CostModel, node: Node, below: int, keys: Sequence[Hashable]) -> Chain:
    children = _flat(node)
    cuts = [below]
    items: list[int | Block] = []
    for child in reversed(children):
        items.append(child.op if isinstance(child, Leaf) else _block(cost, child, cuts[-1], keys))
        cuts.append(cuts[-1] + _span(child))
    masks = [_mask(child) for child in children]
    return Chain(tuple(reversed(items)), Row(cost, masks), tuple(reversed(cuts)))


def _flat(node: Node) -> list[Node]:
    """Children in series, those of a nested series in its place."""
    if not isinstance(node, Series):
        return [node]
    return [each for child in node.children for each in _flat(child)]


def _block(cost: CostModel, node: Node, below: int, keys: Sequence[Hashable]) -> Block:
    assert isinstance(node, Parallel)
    alike: dict[Hashable, list[Node]] = {}
    for child in node.children:
        alike.setdefault(signature(cost.graph, child, keys), []).append(child)
    classes: list[int] = []
    for group in alike.values():
        classes += [len(classes)] * len(group)
    ordered = [child for group in alike.values() for child in group]
    return Block(
        tuple(_chain(cost, child, below, keys) for child in ordered),
        tuple(classes),
        Row(cost, [_mask(child) for child in ordered]),
    )


def _mask(node: Node) -> int:
    return sum(1 << op for op in operators(node))


def _span(node: Node) -> int:
    if isinstance(node, Leaf):
        return 1
    spans = [_span(child) for child in node.children]
    return sum(spans) if isinstance(node, Series) else max(spans)
