"""Profile files: operators, the values between them, and what each operator costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.files.jsonfile import (
    FilePath,
    Name,
    NameOrNone,
    Samples,
    Seconds,
    Size,
    Strict,
    Text,
    build,
    document_fields,
    from_document,
    read_document,
    save,
)
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.opgraph import BATCH, Granularity, Op, OpGraph, Precision, Value
from anabranch.profile.profile import ADAM_STATE, OpCost, Profile

PROFILE = "anabranch.profile/1"


def save_profile(profile: Profile, path: FilePath) -> None:
    """Write a profile file; raises FileFormatError if that fails or it could not be read again."""
    save(path, _ProfileFile, profile_to_dict(profile))


def load_profile(path: FilePath) -> Profile:
    """Read a profile file; raises FileFormatError, which names file, key and value."""
    return build(path, _to_profile, read_document(path, PROFILE, _ProfileFile))


class _TableEntry(Strict):
    lookups: Size
    row_bytes: Size
    sparse: bool = False


class _ParameterEntry(Strict):
    brief = ("table",)
    name: Name
    nbytes: Size
    trainable: bool
    table: _TableEntry | None = None


class _OperatorEntry(Strict):
    brief = True
    name: Name
    kind: Text
    parameters: list[Name]
    whole_batch: bool = False
    forward_s: list[Seconds]
    backward_s: list[Seconds]
    weight_s: list[Seconds] = Field(default_factory=list)
    kept_bytes: Annotated[Size, Field(alias="kept_bytes_per_sample")]
    working_bytes: Annotated[Size, Field(alias="working_bytes_per_sample")] = 0
    kept_fixed_bytes: Size = 0
    waiting_bytes: Annotated[Size, Field(alias="waiting_bytes_per_sample")] = 0


class _ValueEntry(Strict):
    """A value, with names of the operators that make and read it."""

    name: NameOrNone
    producer: Name | None
    consumers: list[Name]
    nbytes: Size
    batched: bool
    grad: bool


class _UpdateEntry(Strict):
    brief = True
    fixed_s: Seconds
    tensor_s: Seconds
    byte_s: Seconds
    all_temporary: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    largest_temporary: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    state: Annotated[float, Field(ge=0, le=1e6)] = ADAM_STATE


class _ProfileFile(Strict):
    brief = True
    schema_: Literal["anabranch.profile/1"] = Field(alias="schema")
    name: Text
    granularity: Granularity
    loss_kind: LossKind | None = None
    normalised: list[Text] = Field(default_factory=list)
    stateful: list[Text] = Field(default_factory=list)
    rewrites: list[Text] = Field(default_factory=list)
    precision: Precision = "fp32"
    device: Text
    source: Literal["measured", "estimated", "imported"]
    proportional: bool
    samples: list[Samples]
    parameters: list[_ParameterEntry]
    operators: list[_OperatorEntry]
    values: list[_ValueEntry]
    rewritable: list[Text] = Field(default_factory=list)
    update: _UpdateEntry | None = None
    read_sample_s: Seconds = 0.0


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Return the document that ``save_profile`` writes, without rare keys at their defaults."""
    graph = profile.graph
    names = [op.name for op in graph.ops]
    values = [
        document_fields(
            value,
            _ValueEntry,
            producer=None if value.producer == BATCH else names[value.producer],
            consumers=[names[consumer] for consumer in value.consumers],
        )
        for value in graph.values
    ]
    costs = zip(graph.ops, profile.costs, strict=True)
    return document_fields(
        graph,
        _ProfileFile,
        schema_=PROFILE,
        device=profile.device,
        source=profile.source,
        proportional=profile.proportional,
        samples=profile.samples,
        operators=[document_fields(cost, _OperatorEntry, **asdict(op)) for op, cost in costs],
        values=values,
        update=profile.update,
        read_sample_s=profile.read_sample_s,
    )


def _to_profile(file: _ProfileFile) -> Profile:
    """Return the profile of a document; ValueError, which names the key, if it is none."""
    costs = tuple(from_document(OpCost, op) for op in file.operators)
    return from_document(Profile, file, graph=_to_graph(file), costs=costs)


def _to_graph(file: _ProfileFile) -> OpGraph:
    index = _unique_index([op.name for op in file.operators])

    def find(name: str, where: str) -> int:
        if name not in index:
            raise ValueError(f'{where} is "{name}"; no operator has this name')
        return index[name]

    def to_value(i: int, v: _ValueEntry) -> Value:
        producer = BATCH if v.producer is None else find(v.producer, f"values[{i}].producer")
        readers = [find(c, f"values[{i}].consumers[{j}]") for j, c in enumerate(v.consumers)]
        return from_document(Value, v, producer=producer, consumers=readers)

    return from_document(
        OpGraph,
        file,
        ops=tuple(from_document(Op, op) for op in file.operators),
        values=tuple(to_value(i, value) for i, value in enumerate(file.values)),
    )


def _unique_index(names: Sequence[str]) -> dict[str, int]:
    """Return name -> position; ValueError for a name that occurs twice."""
    index: dict[str, int] = {}
    for i, name in enumerate(names):
        if index.setdefault(name, i) != i:
            raise ValueError(
                f'operators[{i}].name is "{name}", and so is operators[{index[name]}].name'
            )
    return index
