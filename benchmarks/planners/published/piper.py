"""Piper's JSON: layers with their costs, of which those of one device are read.

    nodes[i].TMPCs["1"] = [{id: "vanilla", timePerSample, parameterSize, memoryUsageA, ...},
                           {id: "activation recomp", ...}]          costs on one device

Piper's sample is one micro-batch, as ours is unless the caller says how many samples it has. What
the file leaves open is decided so:

- ``timePerSample`` is forward and backward together. Recomputation adds the forward; where what it
  adds is not between nothing and the whole, the forward is a third.
- The unit of time differs between the published files. A micro-batch that takes more than
  ``LONGEST_MICROBATCH_S`` on one device is in milliseconds: BERT-32 has 0.97 (seconds), GNMT 520
  and ResNet-50 462 (PipeDream's milliseconds, added up).
- ``memoryUsageA`` is what a layer holds for each micro-batch in flight. In files whose variant with
  recomputation keeps exactly what enters the layer (BERT), it includes what enters and not what
  leaves; here a value counts where it is made. In the others it is the output: taken as it is.
- ``memoryUsageB`` (twice the parameters) is ignored; the cost model counts by itself.
- ``syncTimeFw`` and ``syncTimeBw``, traffic inside a group of devices, are ignored.
- First nodes without parameters that cost nothing (``tensor``) are part of the batch. So are those
  without a backward in files made from PipeDream's profiles (``node1``, which is ``Input``).
- What belongs to the cluster and the batch (``maxDevices``, ``bandwidth``, ...) is ignored.
- Costs on several devices (tensor parallelism, ``TMPCs["4"]``) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import Edge, ImportedGraph, ImportedNode, sources
from anabranch.files.jsonfile import LIMITS, Strict, validate
from anabranch.profile.profile import Profile
from benchmarks.planners.published.fields import Bytes, Id, NodeName, any_node_has

LONGEST_MICROBATCH_S = 10.0
"""Seconds of one micro-batch through the whole model on one device; more must be milliseconds."""

VANILLA = "vanilla"
RECOMPUTE = "activation recomp"

_Degree = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]


class _Variant(Strict):
    id: Literal["vanilla", "activation recomp"]
    time: Annotated[float, Field(ge=0, le=LIMITS.seconds, alias="timePerSample")]
    parameter_bytes: Bytes = Field(alias="parameterSize")
    held_bytes: Bytes = Field(alias="memoryUsageA")
    fixed_bytes: Bytes = Field(alias="memoryUsageB")
    sync_forward: dict[str, Bytes] = Field(alias="syncTimeFw")
    sync_backward: dict[str, Bytes] = Field(alias="syncTimeBw")


class _Node(Strict):
    id: Id
    name: NodeName = ""
    variants: Annotated[dict[_Degree, list[_Variant]], Field(alias="TMPCs")]

    def vanilla(self) -> _Variant:
        """The variant without recomputation."""
        return next(v for v in self.variants["1"] if v.id == VANILLA)

    def recompute(self) -> _Variant | None:
        """The variant with recomputation, if the node has it."""
        return next((v for v in self.variants["1"] if v.id == RECOMPUTE), None)


class _Edge(Strict):
    source: Id = Field(alias="sourceId")
    target: Id = Field(alias="destId")
    nbytes: Bytes = Field(alias="communicationCost")


class _File(Strict):
    devices: Annotated[int | None, Field(ge=1, alias="maxDevices")] = None
    memory_bytes: Annotated[float | None, Field(gt=0, alias="maxMemoryPerDevice")] = None
    bandwidth: Annotated[float | None, Field(gt=0)] = None
    batch: Annotated[int | None, Field(ge=1, alias="mbsInBatch")] = None
    batch_: Annotated[int | None, Field(ge=1, alias="maxBatchSize")] = None
    nodes: Annotated[list[_Node], Field(min_length=1)]
    edges: list[_Edge]


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether any node has Piper's table of costs."""
    return any_node_has(document, "TMPCs")


def read(document: Mapping[str, Any], path: Path, samples: int | None = None) -> Profile:
    """The profile in a text; ``samples`` of the profiled micro-batch. Raises FileFormatError."""
    file = validate(document, _File, str(path), "Piper")
    _check_variants(file, str(path))
    edges = [
        Edge(str(e.source), str(e.target), e.nbytes, f"edges[{i}]")
        for i, e in enumerate(file.edges)
    ]
    total = sum(node.vanilla().time for node in file.nodes)
    milliseconds = total > LONGEST_MICROBATCH_S
    unit = "milliseconds" if milliseconds else "seconds"
    batch = "" if samples else ", a sample is a micro-batch"

    return ImportedGraph(
        file=str(path),
        name=path.stem,
        nodes=_nodes(file, edges, 1e-3 if milliseconds else 1.0),
        edges=edges,
        samples=samples or 1,
        device=f"a device that Piper's format does not name, times read as {unit}{batch}",
    ).profile()


def _check_variants(file: _File, where: str) -> None:
    for i, node in enumerate(file.nodes):
        if "1" not in node.variants:
            raise FileFormatError(f"{where}: key nodes[{i}].TMPCs.1 is missing")
        for degree, variants in node.variants.items():
            found = [variant.id for variant in variants]
            if VANILLA not in found or len(set(found)) < len(found):
                raise FileFormatError(
                    f"{where}: nodes[{i}].TMPCs.{degree} has the variants "
                    f'{", ".join(found) or "-"}; "{VANILLA}" is needed once, and "{RECOMPUTE}" '
                    "may stand beside it once"
                )


def _nodes(file: _File, edges: list[Edge], second: float) -> list[ImportedNode]:
    """The layers; ``second`` of the file's unit of time."""
    entering: dict[str, float] = {}
    leaving: dict[str, set[float]] = {}
    for edge in edges:
        entering[edge.consumer] = entering.get(edge.consumer, 0.0) + edge.nbytes
        leaving.setdefault(edge.producer, set()).add(edge.nbytes)
    first = sources((str(node.id) for node in file.nodes), edges)
    from_pipedream = all(re.fullmatch(r"node[0-9]+", node.name) for node in file.nodes)
    inputs_held = _inputs_held(file, entering)
    nodes = []
    for i, node in enumerate(file.nodes):
        key = str(node.id)
        moved = 0.0
        if inputs_held and key in entering:
            moved = sum(leaving.get(key, ())) - entering[key]
        vanilla, recompute = node.vanilla(), node.recompute()
        forward = recompute.time - vanilla.time if recompute else 0.0
        if not 0 < forward < vanilla.time:
            forward = vanilla.time / 3
        nodes.append(
            ImportedNode(
                key=key,
                label=node.name,
                where=f"nodes[{i}]",
                forward_s=forward * second,
                backward_s=(vanilla.time - forward) * second,
                kept_bytes=max(0.0, vanilla.held_bytes + moved),
                parameters=(("", vanilla.parameter_bytes),) if vanilla.parameter_bytes else (),
                data=key in first and _is_data(node, from_pipedream),
            )
        )
    return nodes


def _inputs_held(file: _File, entering: Mapping[str, float]) -> bool:
    """Whether recomputation keeps exactly what enters, wherever the file tells."""
    kept = [(n.recompute(), entering.get(str(n.id), 0.0)) for n in file.nodes]
    told = [(v.held_bytes, enters) for v, enters in kept if v is not None and enters > 0]
    return bool(told) and all(abs(held - enters) <= 0.01 * enters for held, enters in told)


def _is_data(node: _Node, from_pipedream: bool) -> bool:
    vanilla, recompute = node.vanilla(), node.recompute()
    if vanilla.parameter_bytes:
        return False
    no_backward = recompute is not None and recompute.time >= 2 * vanilla.time * (1 - 1e-9)
    return vanilla.time == 0 or (from_pipedream and no_backward)
