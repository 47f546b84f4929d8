"""The JSON of "Efficient Algorithms for Device Placement of DNN Graph Operators" (2020).

Nodes are forward and backward parts; ``training_graph`` groups them into our operators. Two kinds
of graphs come in this format:

- layer graphs, made from PipeDream's profiles and recognised by their names, ``node4`` and
  ``node4grad``: a node's ``size`` is its parameters and its output. First nodes without parameters
  and backward are ``Input``, part of the batch. A last node's output is taken from its backward
  node if that tells it; else all of the size counts as parameters;
- operator graphs, exported from ONNX: nodes without latency that nothing leads to are weights,
  parameters of what reads them; ``size`` of the others is their output.

What the format leaves open is decided so:

- ``fpgaLatency`` is the time on an accelerator, in milliseconds. (For operator graphs no unit is
  stated; the cost of their edges is their size at 2 GiB/s if in milliseconds.)
- A graph for inference has no backward: taken as twice the forward, and the profile says so.
- Kept for the backward are the outputs that backward nodes read; where no edge runs from forward to
  backward nodes (layer graphs, inference), every output.
- A gradient has the bytes of its value; sizes on backward edges are ignored.
- ``size`` on edges is bytes and is needed: ``cost``, a time on an unstated link, says nothing.
- The mini-batch is one sample, unless the caller says how many it has, or the ``Input`` of a layer
  graph is as large as whole images (see ``pipedream``).
- ``cpuLatency`` is ignored, and what belongs to the cluster (``maxSizePerFPGA``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import (
    Edge,
    ImportedGraph,
    ImportedNode,
    check_edges,
    sources,
    unique_names,
)
from anabranch.files.jsonfile import LIMITS, Strict, validate
from anabranch.files.pipedream import images
from anabranch.profile.profile import Profile
from benchmarks.planners.published.fields import Bytes, Id, NodeName, any_node_has
from benchmarks.planners.published.training_graph import TrainingNode, group, neighbours

_Milliseconds = Annotated[float, Field(ge=0, le=LIMITS.seconds * 1000)]
_Flag = bool | Annotated[int, Field(ge=0, le=1)]


class _Node(Strict):
    id: Id
    name: NodeName = ""
    supported: Annotated[_Flag, Field(alias="supportedOnFpga")] = True
    cpu_ms: Annotated[_Milliseconds, Field(alias="cpuLatency")] = 0.0
    ms: Annotated[_Milliseconds, Field(alias="fpgaLatency")]
    backward: Annotated[_Flag, Field(alias="isBackwardNode")]
    color: Annotated[int | None, Field(alias="colorClass")] = None
    layer: Annotated[int | None, Field(alias="layerId")] = None
    size: Bytes


class _Edge(Strict):
    source: Id = Field(alias="sourceId")
    target: Id = Field(alias="destId")
    cost: Annotated[float, Field(ge=0)] = 0.0
    size: Bytes


class _File(Strict):
    memory_bytes: Annotated[float | None, Field(gt=0, alias="maxSizePerFPGA")] = None
    accelerators: Annotated[int | None, Field(ge=0, alias="maxFPGAs")] = None
    cpus: Annotated[int | None, Field(ge=0, alias="maxCPUs")] = None
    nodes: Annotated[list[_Node], Field(min_length=1)]
    edges: list[_Edge]


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether any node has a latency on an accelerator."""
    return any_node_has(document, "fpgaLatency", "cpuLatency", "isBackwardNode")


def read(document: Mapping[str, Any], path: Path, samples: int | None = None) -> Profile:
    """The profile in a document; ``samples`` of the profiled mini-batch. Raises FileFormatError."""
    file = validate(document, _File, str(path), "dnn-partitioning")
    graph = _Graph(file, str(path))
    nodes = graph.drafted()
    inputs = (images(graph.output_bytes(node.key)) for node in nodes if node.data)
    found = samples or next((count for count in inputs if count), 0)
    notes = ["times read as milliseconds"]
    if not graph.training:
        notes.append("the backward taken as twice the forward")
    if not found:
        notes.append("a sample is the whole mini-batch (the file does not tell how many it has)")
    return ImportedGraph(
        file=str(path),
        name=path.stem,
        nodes=nodes,
        edges=graph.between,
        samples=found or 1,
        device="a device that dnn-partitioning's format does not name, " + ", ".join(notes),
        granularity="layer" if graph.layers else "operator",
    ).profile()


class _Graph:
    """The file's nodes, and the operators that they form."""

    def __init__(self, file: _File, where: str) -> None:
        self.where = where
        self.nodes = _by_key(file, where)
        self.edges = [
            Edge(str(e.source), str(e.target), e.size, f"edges[{i}]")
            for i, e in enumerate(file.edges)
        ]
        check_edges(where, self.nodes, self.edges)
        self.training = any(node.backward for node in file.nodes)
        self.layers = all(re.fullmatch(r"node[0-9]+(grad)?", node.name) for node in file.nodes)
        self.after = neighbours(self.edges)
        self.leaving: dict[str, list[Edge]] = {}
        self.entering: dict[str, list[Edge]] = {}
        for edge in self.edges:
            self.leaving.setdefault(edge.producer, []).append(edge)
            self.entering.setdefault(edge.consumer, []).append(edge)
        self.first = sources(self.nodes, self.edges)
        self.places = {key: f"nodes[{i}]" for i, key in enumerate(self.nodes)}
        pieces = {
            key: TrainingNode(
                key, node.name, self.places[key], node.color, bool(node.backward), self.weight(key)
            )
            for key, node in self.nodes.items()
        }
        self.owner, self.between = group(where, pieces, self.edges)
        self.members: dict[str, list[str]] = {}
        for key, op in self.owner.items():
            self.members.setdefault(op, []).append(key)

    def weight(self, key: str) -> bool:
        """Whether a node is a parameter."""
        node = self.nodes[key]
        free = node.ms == node.cpu_ms == 0
        return not self.layers and not node.backward and free and key in self.first

    def drafted(self) -> list[ImportedNode]:
        """One node per operator, and the data."""
        weights = self._weights()
        saved = {
            edge.producer
            for edge in self.edges
            if self.nodes[edge.consumer].backward and not self.nodes[edge.producer].backward
        } & self.owner.keys()
        return [self._node(op, keys, weights, saved) for op, keys in self.members.items()]

    def _node(
        self,
        op: str,
        keys: list[str],
        weights: Mapping[str, tuple[tuple[str, float], ...]],
        saved: set[str],
    ) -> ImportedNode:
        forward = [key for key in keys if not self.nodes[key].backward]
        backward = [key for key in keys if self.nodes[key].backward]
        parameters = weights.get(op, ())
        if self.layers:
            own = sum(max(0.0, self.nodes[key].size - self.output_bytes(key)) for key in forward)
            parameters = (("", own),) if own else ()
        forward_s = sum(self.nodes[key].ms for key in forward) / 1000
        backward_s = sum(self.nodes[key].ms for key in backward) / 1000
        heaviest = max(forward, key=lambda key: self.nodes[key].ms)
        name = self.nodes[heaviest].name
        return ImportedNode(
            key=op,
            label=name,
            where=self.places[heaviest],
            forward_s=forward_s,
            backward_s=backward_s if self.training else 2 * forward_s,
            kept_bytes=sum(self.output_bytes(key) for key in forward if key in saved or not saved),
            parameters=parameters,
            data=self.layers
            and not parameters
            and not backward_s
            and self.first.issuperset(forward),
            kind="" if self.layers else re.sub(r"[\W\d_]+", " ", name).strip()[:40],
        )

    def output_bytes(self, key: str) -> float:
        """Bytes of what a forward node makes, as far as the file tells."""
        sizes = [edge.nbytes for edge in self.leaving.get(key, ())]
        if not sizes and self.layers:
            # Nothing reads it, so its size is only with its gradient, on edges drawn the other way.
            twins = [twin for twin in self.members.get(key, ()) if self.nodes[twin].backward]
            sizes = [edge.nbytes for twin in twins for edge in self.entering.get(twin, ())]
        return max(sizes, default=0.0)

    def _weights(self) -> dict[str, tuple[tuple[str, float], ...]]:
        """Per operator, names and bytes of the weights that it reads."""
        keys = [key for key in self.nodes if self.weight(key)]
        names = unique_names({key: self.nodes[key].name for key in keys})
        result: dict[str, tuple[tuple[str, float], ...]] = {}
        for key in keys:
            readers = [other for other in self.after.get(key, ()) if other in self.owner]
            forward = [other for other in readers if not self.nodes[other].backward]
            if not readers:
                raise FileFormatError(
                    f"{self.where}: {self.places[key]}: weight {key} ({self.nodes[key].name[:60]}) "
                    "is read by nothing"
                )
            for op in dict.fromkeys(self.owner[other] for other in forward or readers):
                result[op] = (*result.get(op, ()), (names[key], self.nodes[key].size))
        return result


def _by_key(file: _File, where: str) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    places: dict[str, int] = {}
    for i, node in enumerate(file.nodes):
        key = str(node.id)
        if key in nodes:
            raise FileFormatError(
                f"{where}: nodes[{i}].id is {key}, and so is nodes[{places[key]}].id"
            )
        if not node.supported:
            raise FileFormatError(
                f"{where}: nodes[{i}].supportedOnFpga is false: node {key} can run on a CPU only, "
                "and stages run on one kind of device"
            )
        nodes[key], places[key] = node, i
    return nodes
