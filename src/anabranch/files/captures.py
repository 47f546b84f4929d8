"""Files of captured models with the kernels that they launch, as ``capture_cache`` keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.files.fields import FilePath, Size, Text, build, save
from anabranch.files.graphs import (
    OperatorEntry,
    ParameterEntry,
    ValueEntry,
    graph_to_dict,
    to_graph,
)
from anabranch.files.jsonfile import LARGEST_SIZE, Strict, read_document
from anabranch.graph.loss_kinds import LossKind
from anabranch.profile.kernel_trace import Kernel, KernelTrace, TracedModel

CAPTURE = "anabranch.capture/2"

_Extent = Annotated[float, Field(ge=0, le=LARGEST_SIZE)]


@dataclass(frozen=True)
class KeptCapture:
    """A captured model, and what it depends on.

    Attributes:
        files: the user's own files -> hashes of their bytes.
    """

    traced: TracedModel
    files: Mapping[str, str]


def save_capture(kept: KeptCapture, key: str, path: FilePath) -> None:
    """Write a captured model; raises FileFormatError if that fails."""
    document = {
        "schema": CAPTURE,
        "key": key,
        "files": dict(kept.files),
        **graph_to_dict(kept.traced.graph),
        "few": _trace_to_dict(kept.traced.few),
        "many": _trace_to_dict(kept.traced.many),
    }
    save(path, _CaptureFile, {**document, "checksum": _checksum(document)})


def load_capture(path: FilePath, key: str) -> KeptCapture:
    """Read a captured model; raises FileFormatError if it is none, or has another key or other
    bytes than were written.
    """

    def construct(file: _CaptureFile) -> KeptCapture:
        if file.key != key:
            raise ValueError(f"key is {file.key}, not {key}")
        document = file.model_dump(by_alias=True, exclude_unset=True, exclude={"checksum"})
        if file.checksum != _checksum(document):
            raise ValueError("its checksum is another one than that of what it holds")
        traced = TracedModel(to_graph(file), _to_trace(file.few), _to_trace(file.many))
        return KeptCapture(traced, file.files)

    return build(path, construct, read_document(path, CAPTURE, _CaptureFile))


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class _TraceEntry(Strict):
    kernels: list[Text]
    dtypes: list[Text]
    nbytes: list[_Extent]
    products: list[list[Annotated[list[_Extent], Field(min_length=4, max_length=4)]]]
    launches: list[Annotated[int, Field(ge=0, le=10**6)]]
    passes: list[Annotated[int, Field(ge=0, le=1)]]
    operators: list[Annotated[int, Field(ge=0)]]
    kept_bytes: list[Size]
    working_bytes: list[Size]


class _CaptureFile(Strict):
    schema_: Literal["anabranch.capture/2"] = Field(alias="schema")
    checksum: Text
    key: Text
    files: dict[Text, Text]
    name: Text
    granularity: Text
    loss_kind: LossKind | None = None
    normalised: list[Text] = Field(default_factory=list)
    rewrites: list[Text] = Field(default_factory=list)
    rewritable: list[Text] = Field(default_factory=list)
    parameters: list[ParameterEntry]
    operators: list[OperatorEntry]
    values: list[ValueEntry]
    few: _TraceEntry
    many: _TraceEntry


def _trace_to_dict(trace: KernelTrace) -> dict[str, Any]:
    kernels = trace.kernels
    return {
        "kernels": [kernel.name for kernel in kernels],
        "dtypes": [kernel.dtype for kernel in kernels],
        "nbytes": [float(kernel.nbytes) for kernel in kernels],
        "products": [[[*map(float, p)] for p in kernel.products] for kernel in kernels],
        "launches": [kernel.launches for kernel in kernels],
        "passes": list(trace.passes),
        "operators": list(trace.ops),
        "kept_bytes": list(trace.kept),
        "working_bytes": list(trace.working),
    }


def _to_trace(file: _TraceEntry) -> KernelTrace:
    columns = file.kernels, file.nbytes, file.products, file.dtypes, file.launches
    kernels = tuple(
        Kernel(name, nbytes, tuple((m, n, k, b) for m, n, k, b in products), dtype, launches)
        for name, nbytes, products, dtype, launches in zip(*columns, strict=True)
    )
    return KernelTrace(
        kernels,
        tuple(file.passes),
        tuple(file.operators),
        tuple(file.kept_bytes),
        tuple(file.working_bytes),
    )
