"""Operators of a training graph: which forward and backward nodes make one.

    x --> matmul --------> add --> loss            operators:  matmul --> add (with the loss)
           ^ |              |       |
      weight |              v       v
           v v             add' <- loss'           add': gradient of add, and so on
        matmul' <-----------+
           v
        update weight

- Nodes of one colour class have to be on one device (the format says so): one operator.
- A backward node whose class has no forward node belongs where its name points: ``node4grad`` to
  ``node4``, ``Add7_Grad/Identity_0`` to ``Add7``.
- The rest (sums of gradients; the loss, which this format counts as backward) goes, class by class,
  to the operator of a successor, among several the last in forward order; without successors to the
  last operator among its predecessors; else to that of a node beside it.

Every edge is then a dependence between operators; those between backward nodes run the other way
round, except where all of them are drawn along the forward edges (published layer graphs).
Operators that depend on each other in a circle become one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import Edge, topological_order
from anabranch.graph.digraph import strongly_connected


def neighbours(edges: Iterable[Edge], *, back: bool = False) -> dict[str, list[str]]:
    """Return node -> its successors, or with ``back`` its predecessors, if it has any."""
    result: dict[str, list[str]] = {}
    for edge in edges:
        a, b = (edge.consumer, edge.producer) if back else (edge.producer, edge.consumer)
        result.setdefault(a, []).append(b)
    return result


@dataclass(frozen=True, slots=True)
class TrainingNode:
    """A node, its place in the file and colour class; a ``weight`` is a free source."""

    key: str
    name: str
    where: str
    color: int | None
    backward: bool
    weight: bool

    @property
    def color_class(self) -> int | str:
        """Its colour, or itself alone."""
        return self.key if self.color is None else self.color


def group(
    file: str, pieces: Mapping[str, TrainingNode], edges: Sequence[Edge]
) -> tuple[dict[str, str], list[Edge]]:
    """Group the nodes, given by key, into operators.

    Returns:
        Per node except weights the operator that it is part of, named by the key of one of its
        forward nodes; and the edges between operators, with the key of the forward node that makes
        the value as ``output``.

    Raises:
        FileFormatError: if the graph has a cycle, an edge to nothing or from backward to forward,
            or a backward node that nothing connects with a forward node.
    """
    order = topological_order(file, pieces, edges)
    for edge in edges:
        if pieces[edge.producer].backward and not pieces[edge.consumer].backward:
            raise FileFormatError(
                f"{file}: {edge.where} leads from backward node {edge.producer} to forward node "
                f"{edge.consumer}"
            )
    after = neighbours(edges)
    owner = _by_class(pieces, order, after)
    _by_name(pieces, owner)
    _by_use(pieces, order, edges, owner)
    _by_neighbour(pieces, edges, owner)
    lost = [piece for key, piece in pieces.items() if piece.backward and key not in owner]
    if lost:
        raise FileFormatError(
            f"{file}: {lost[0].where}: nothing connects backward node {lost[0].key} "
            f"({lost[0].name[:60]}) with a forward node"
        )
    between = _between(pieces, edges, owner)
    beside = neighbours(between)
    circles = strongly_connected({op: beside.get(op, ()) for op in sorted(set(owner.values()))})
    merged = {op: circle[0] for circle in circles for op in circle}
    owner = {key: merged[op] for key, op in owner.items()}
    moved = [
        Edge(merged[e.producer], merged[e.consumer], e.nbytes, e.where, e.output) for e in between
    ]
    return owner, [edge for edge in moved if edge.producer != edge.consumer]


def _by_class(
    pieces: Mapping[str, TrainingNode], order: Sequence[str], after: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Forward nodes by class, and whatever shares a class with one."""
    owner: dict[str, str] = {}
    of_class: dict[int, str] = {}
    for key in order:
        piece = pieces[key]
        if not piece.backward and not piece.weight:
            owner[key] = key if piece.color is None else of_class.setdefault(piece.color, key)
    for piece in pieces.values():
        # A weight that has its class to itself (and its gradient) belongs to its first reader.
        readers = [owner[key] for key in after.get(piece.key, ()) if key in owner]
        if piece.weight and piece.color is not None and readers:
            of_class.setdefault(piece.color, readers[0])
    for key, piece in pieces.items():
        if piece.backward and piece.color in of_class:
            owner[key] = of_class[piece.color]
    return owner


def _by_name(pieces: Mapping[str, TrainingNode], owner: dict[str, str]) -> None:
    named = {pieces[key].name: op for key, op in owner.items() if not pieces[key].backward}
    classes = _homeless(pieces, owner)
    for key, piece in pieces.items():
        match = re.match(r"(.+?)(_Grad/.*|_?grad)$", piece.name)
        if piece.backward and key not in owner and match and match[1] in named:
            owner.update(dict.fromkeys(classes[piece.color_class], named[match[1]]))


def _homeless(
    pieces: Mapping[str, TrainingNode], owner: Mapping[str, str]
) -> dict[int | str, list[str]]:
    """Backward nodes without an operator, by class; those without a class each by itself."""
    classes: dict[int | str, list[str]] = {}
    for key, piece in pieces.items():
        if piece.backward and key not in owner:
            classes.setdefault(piece.color_class, []).append(key)
    return classes


def _by_use(
    pieces: Mapping[str, TrainingNode],
    order: Sequence[str],
    edges: Sequence[Edge],
    owner: dict[str, str],
) -> None:
    position = {key: i for i, key in enumerate(order)}
    classes = _homeless(pieces, owner)

    def place(keys: Iterable[str], beside: Mapping[str, Sequence[str]]) -> None:
        for key in keys:
            if key in owner or not any(other in owner for other in beside.get(key, ())):
                continue
            if pieces[key].backward:
                together = classes[pieces[key].color_class]
                near = [owner[n] for k in together for n in beside.get(k, ()) if n in owner]
                owner.update(dict.fromkeys(together, max(near, key=lambda op: position[op])))

    place(reversed(order), neighbours(edges))
    place(order, neighbours(edges, back=True))


def _by_neighbour(
    pieces: Mapping[str, TrainingNode], edges: Sequence[Edge], owner: dict[str, str]
) -> None:
    """Whatever is left: from node to node, in any direction, across weights too."""
    classes = _homeless(pieces, owner)
    after, before = neighbours(edges), neighbours(edges, back=True)
    homes = {
        key: owner[reader]
        for key, piece in pieces.items()
        if piece.weight
        for reader in after.get(key, ())
        if reader in owner
    }
    todo = list((owner | homes).items())
    while todo:
        key, op = todo.pop()
        for other in (*after.get(key, ()), *before.get(key, ())):
            if pieces[other].backward and other not in owner:
                together = classes[pieces[other].color_class]
                owner.update(dict.fromkeys(together, op))
                todo += [(key, op) for key in together]


def _between(
    pieces: Mapping[str, TrainingNode], edges: Sequence[Edge], owner: Mapping[str, str]
) -> list[Edge]:
    """The dependences between operators."""
    forward, backward = [], []
    for edge in edges:
        if edge.producer not in owner or edge.consumer not in owner:
            continue  # a weight: it is no operator
        a, b = owner[edge.producer], owner[edge.consumer]
        if a == b:
            continue
        if pieces[edge.producer].backward:
            backward.append(Edge(b, a, edge.nbytes, edge.where, edge.consumer))
        else:
            forward.append(Edge(a, b, edge.nbytes, edge.where, edge.producer))
    known = {(edge.producer, edge.consumer) for edge in forward}
    if all((edge.consumer, edge.producer) in known for edge in backward):
        return forward
    return forward + [edge for edge in backward if (edge.producer, edge.consumer) not in known]
