"""Conversion of a graph that was read from a file to a profile.

Nodes that are data (an ``Input``) become part of the batch, which every device has and which is
never sent. Other nodes become operators, in topological order, then in the order of their ids::

    node1 (Input) --> node2 --> node4            batch . . > node2 --> node4
                  \\-> node3 --/                  batch . . > node3 --/

Edges of one size that leave a node are one value, which is sent to a stage once. A value has a
gradient if anything before it is trained: has parameters, or a backward that takes time. Times stay
those of one mini-batch; bytes are divided by the samples and rounded up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.errors import FileFormatError, some
from anabranch.files.jsonfile import LIMITS
from anabranch.graph import digraph
from anabranch.graph.opgraph import BATCH, Granularity, Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """One node of the file; seconds and bytes are for the whole mini-batch.

    Attributes:
        where: place in the file, such as ``line 3``.
        label, kind: its description for people, and its kind in a report.
        kept_bytes, output_bytes: bytes kept for the backward, and of all outputs.
        parameters: (name, bytes); an empty name for the node's own, other names may be shared.
        data: whether it is part of the batch; no edge leads to it.
    """

    key: str
    label: str
    where: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    kept_bytes: float = 0.0
    output_bytes: float = 0.0
    parameters: tuple[tuple[str, float], ...] = ()
    data: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge of the file between keys of nodes.

    Attributes:
        nbytes: bytes for the whole mini-batch.
        where: place in the file.
        output: distinguishes several outputs of one size.
    """

    producer: str
    consumer: str
    nbytes: float
    where: str
    output: str = ""


@dataclass(frozen=True)
class ImportedGraph:
    """Content of a file; times and bytes are for ``samples``, an edge that occurs twice counts
    once, ``device`` has words on the device of the measurement and on decisions of the reader.
    """

    file: str
    name: str
    nodes: Sequence[ImportedNode]
    edges: Sequence[Edge]
    samples: int
    device: str
    granularity: Granularity = "layer"

    def profile(self) -> Profile:
        """Return the profile; FileFormatError unless this is a connected graph without cycles."""
        by_key = _by_key(self.file, self.nodes)
        _check_sizes(self.file, self.nodes)
        order = [by_key[key] for key in topological_order(self.file, by_key, self.edges)]
        _check_connected(self.file, by_key, self.edges)
        ops = [node for node in order if not node.data]
        return Profile(
            self._graph(order, ops),
            samples=(self.samples,),
            costs=tuple(
                OpCost((op.forward_s,), (op.backward_s,), self._per_sample(op.kept_bytes))
                for op in ops
            ),
            device=self.device,
            source="imported",
            proportional=True,
        )

    def _graph(self, order: Sequence[ImportedNode], ops: Sequence[ImportedNode]) -> OpGraph:
        names = unique_names({node.key: node.label for node in order})
        made, nbytes = [], dict[str, int]()
        for op in ops:
            own = {name or names[op.key]: math.ceil(size) for name, size in op.parameters}
            made.append(Op(names[op.key], tuple(own), op.kind))
            nbytes |= {name: size for name, size in own.items() if name not in nbytes}
        return OpGraph(
            tuple(made),
            self._values(order, names),
            tuple(Parameter(name, size) for name, size in nbytes.items()),
            name=self.name,
            granularity=self.granularity,
        )

    def _per_sample(self, nbytes: float) -> int:
        return math.ceil(nbytes / self.samples)

    def _values(self, order: Sequence[ImportedNode], names: Mapping[str, str]) -> tuple[Value, ...]:
        """Return one value per producer and size; values of the batch come first."""
        position = {op.key: i for i, op in enumerate(op for op in order if not op.data)}
        readers: dict[tuple[str, float, str], set[int]] = {}
        for edge in self.edges:
            value = edge.producer, edge.nbytes, edge.output
            readers.setdefault(value, set()).add(position[edge.consumer])
        rank = {node.key: i for i, node in enumerate(order)}
        trained = _trained(order, self.edges)
        values = [
            Value(
                producer=position.get(producer, BATCH),
                consumers=tuple(sorted(consumers)),
                nbytes=self._per_sample(nbytes),
                grad=producer in trained,
                name="" if producer in position else names[producer],
            )
            for (producer, nbytes, _), consumers in sorted(
                readers.items(), key=lambda item: (rank[item[0][0]], *item[0][1:])
            )
        ]
        return tuple(sorted(values, key=lambda value: value.producer))


def unique_names(labels: Mapping[str, str]) -> dict[str, str]:
    """Return key -> name: shortened labels, all behind their keys if they are not unique."""
    short = {key: _clean(label) for key, label in labels.items()}
    if all(short.values()) and len(set(short.values())) == len(short):
        return short
    return {key: f"{key}.{label}" if label else key for key, label in short.items()}


def _clean(label: str) -> str:
    # Conv2d(3, 64, kernel_size=(11, 11)) -> Conv2d, without characters that names must not have.
    text = re.sub(r"[^\w./+-]+", "_", label.partition("(")[0].strip())
    return re.sub(r"\.{2,}", ".", text).strip("./")[: LIMITS.name].rstrip("./")


def sources(nodes: Iterable[str], edges: Iterable[Edge]) -> set[str]:
    """Return the keys of nodes to which no edge leads."""
    return set(nodes) - {edge.consumer for edge in edges}


def _by_key(file: str, nodes: Sequence[ImportedNode]) -> dict[str, ImportedNode]:
    by_key: dict[str, ImportedNode] = {}
    for node in nodes:
        twin = by_key.setdefault(node.key, node)
        if twin is not node:
            raise FileFormatError(
                f"{file}: {node.where} describes node {node.key}, and so does {twin.where}"
            )
    if all(node.data for node in nodes):
        raise FileFormatError(f"{file} has no operators, only {len(nodes)} inputs")
    return by_key


def check_edges(file: str, keys: Container[str], edges: Iterable[Edge]) -> None:
    """Raise FileFormatError for an edge from or to a node that does not exist."""
    for edge in edges:
        for key in (edge.producer, edge.consumer):
            if key not in keys:
                raise FileFormatError(
                    f"{file}: {edge.where} is an edge {edge.producer} -> {edge.consumer}, "
                    f"but there is no node {key}"
                )


def _check_sizes(file: str, nodes: Sequence[ImportedNode]) -> None:
    for node in nodes:
        seconds = node.forward_s, node.backward_s
        nbytes = [node.kept_bytes, *(size for _, size in node.parameters)]
        if max(seconds) > LIMITS.seconds or max(nbytes) > LIMITS.size:
            raise FileFormatError(
                f"{file}: {node.where} makes an operator of {max(seconds):g} s and {max(nbytes):g} "
                f"bytes; more than {LIMITS.seconds:g} s or {LIMITS.size} bytes is a mistake"
            )


def topological_order(file: str, nodes: Collection[str], edges: Sequence[Edge]) -> list[str]:
    """Return the keys in topological order; among keys that may come next the least comes first.
    FileFormatError names a cycle, or an edge without its node.
    """
    check_edges(file, nodes, edges)
    after: dict[str, set[str]] = {key: set() for key in nodes}
    for edge in edges:
        after[edge.producer].add(edge.consumer)
    order = digraph.topological_order(after, lambda key: (_natural(key), key))
    if len(order) < len(nodes):
        raise FileFormatError(f"{file}: {_cycle(set(nodes) - set(order), edges)}")
    return order


def _natural(key: str) -> list[int | str]:
    # node2 before node10: PipeDream numbers modules in the order in which they first ran.
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", key)]


def _cycle(left: set[str], edges: Sequence[Edge]) -> str:
    """Describe a cycle among nodes that each have a predecessor among these nodes."""
    before = {e.consumer: e for e in edges if e.producer in left and e.consumer in left}
    closing = before[min(left)]
    path = {closing.consumer: None}  # a dictionary for its order
    while closing.producer not in path:
        closing = before[closing.producer]
        path[closing.consumer] = None
    keys = list(path)
    keys = keys[keys.index(closing.producer) :]
    ring = [closing.producer, *reversed(keys)]
    if len(ring) > 9:
        ring = [*ring[:4], "...", *ring[-4:]]
    return f"the edge in {closing.where} is part of a cycle of {len(keys)}: {' -> '.join(ring)}"


def _check_connected(file: str, nodes: Mapping[str, ImportedNode], edges: Sequence[Edge]) -> None:
    """Refuse a graph whose parts share nothing, or only the batch: it is several models."""
    beside: dict[str, list[str]] = {key: [] for key in nodes}
    for edge in edges:
        beside[edge.producer].append(edge.consumer)
        beside[edge.consumer].append(edge.producer)
    for key, others in beside.items():
        if not others and len(nodes) > 1:
            raise FileFormatError(
                f"{file}: {nodes[key].where}: node {key} ({nodes[key].label[:60]}) is connected to "
                "nothing; a profile is one connected graph"
            )
    ops = [key for key in nodes if not nodes[key].data]
    parts = digraph.strongly_connected(
        {key: [other for other in beside[key] if not nodes[other].data] for key in ops}
    )
    if len(parts) > 1:
        first = next(set(part) for part in parts if ops[0] in part)
        halves = (sorted(keys, key=_natural) for keys in (first, set(ops) - first))
        one, other = (some(keys, 4) for keys in halves)
        raise FileFormatError(
            f"{file} falls apart: nothing but the batch connects {one} with "
            f"{other}; a profile is one connected graph"
        )


def _trained(order: Sequence[ImportedNode], edges: Sequence[Edge]) -> set[str]:
    """Return the keys of nodes whose outputs have a gradient."""
    rank = {node.key: i for i, node in enumerate(order)}
    trained = {n.key for n in order if not n.data and (n.parameters or n.backward_s > 0)}
    for edge in sorted(edges, key=lambda edge: rank[edge.producer]):
        if edge.producer in trained:
            trained.add(edge.consumer)
    return trained
