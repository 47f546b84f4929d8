"""Profile files: operators, the values between them, and what each operator costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.files.fields import (
    MOST_DEVICES,
    FilePath,
    Name,
    NameOrNone,
    Samples,
    Seconds,
    Size,
    Text,
    build,
    save,
)
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.jsonfile import Strict, core_fields, document_fields, read_document
from anabranch.profile.profile import OpCost, Profile, Sharded, UpdateCost

PROFILE = "anabranch.profile/1"


def save_profile(profile: Profile, path: FilePath) -> None:
    """Write a profile file; raises FileFormatError if that fails or it could not be read again."""
    save(path, _ProfileFile, profile_to_dict(profile))


def load_profile(path: FilePath) -> Profile:
    """Read a profile file; raises FileFormatError, which names file, key and value."""
    return build(path, _to_profile, read_document(path, PROFILE, _ProfileFile))


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """The document that ``save_profile`` writes."""
    graph = profile.graph
    document = {
        "schema": PROFILE,
        "name": graph.name,
        "granularity": graph.granularity,
        "device": profile.device,
        "source": profile.source,
        "proportional": profile.proportional,
        "samples": list(profile.samples),
        "parameters": [document_fields(parameter, _Parameter) for parameter in graph.parameters],
        "operators": [
            {"name": op.name, "kind": op.kind, "parameters": list(op.parameters)} | _cost(cost)
            for op, cost in zip(graph.ops, profile.costs, strict=True)
        ],
        "values": [
            document_fields(
                value,
                _Value,
                producer=None if value.producer == BATCH else graph.ops[value.producer].name,
                consumers=[graph.ops[consumer].name for consumer in value.consumers],
            )
            for value in graph.values
        ],
    }
    if profile.sharded:  # left out where there is none, which is nearly everywhere
        document["sharded"] = [_sharded_to_dict(graph, sharded) for sharded in profile.sharded]
    if profile.update is not None:
        document["update"] = document_fields(profile.update, _Update)
    return document


def _sharded_to_dict(graph: OpGraph, sharded: Sharded) -> dict[str, Any]:
    rows = zip(graph.ops, sharded.costs, sharded.parameter_bytes, strict=True)
    return {
        "degree": sharded.degree,
        "operators": [
            {"name": op.name} | _cost(cost) | {"parameter_bytes": nbytes}
            for op, cost, nbytes in rows
        ],
    }


def _cost(cost: OpCost) -> dict[str, Any]:
    return {
        "forward_s": list(cost.forward_s),
        "backward_s": list(cost.backward_s),
        "kept_bytes_per_sample": cost.kept_bytes,
    }


class _Parameter(Strict):
    name: Name
    nbytes: Size
    trainable: bool


class _Cost(Strict):
    name: Name
    forward_s: list[Seconds]
    backward_s: list[Seconds]
    kept_bytes_per_sample: Size


class _Operator(_Cost):
    kind: Text
    parameters: list[Name]


class _Value(Strict):
    name: NameOrNone
    producer: Name | None
    consumers: list[Name]
    nbytes: Size
    batched: bool
    grad: bool


class _ShardedOperator(_Cost):
    parameter_bytes: Size


class _Sharded(Strict):
    degree: Annotated[int, Field(ge=2, le=MOST_DEVICES)]
    operators: list[_ShardedOperator]


class _Update(Strict):
    fixed_s: Seconds
    tensor_s: Seconds
    byte_s: Seconds


class _ProfileFile(Strict):
    schema_: Literal["anabranch.profile/1"] = Field(alias="schema")
    name: Text
    granularity: Text
    device: Text
    source: Literal["measured", "estimated", "imported"]
    proportional: bool
    samples: list[Samples]
    parameters: list[_Parameter]
    operators: list[_Operator]
    values: list[_Value]
    sharded: list[_Sharded] = Field(default_factory=list)
    update: _Update | None = None


def _to_profile(file: _ProfileFile) -> Profile:
    index = _index([op.name for op in file.operators], "operators")

    def find(name: str, where: str) -> int:
        if name not in index:
            raise ValueError(f'{where} is "{name}"; no operator has this name')
        return index[name]

    values = tuple(
        Value(
            producer=BATCH if v.producer is None else find(v.producer, f"values[{i}].producer"),
            consumers=tuple(
                find(c, f"values[{i}].consumers[{j}]") for j, c in enumerate(v.consumers)
            ),
            nbytes=v.nbytes,
            batched=v.batched,
            grad=v.grad,
            name=v.name,
        )
        for i, v in enumerate(file.values)
    )
    graph = OpGraph(
        ops=tuple(Op(op.name, tuple(op.parameters), op.kind) for op in file.operators),
        values=values,
        parameters=tuple(Parameter(**core_fields(parameter)) for parameter in file.parameters),
        name=file.name,
        granularity=file.granularity,
    )
    return Profile(
        graph,
        tuple(file.samples),
        tuple(_to_cost(op) for op in file.operators),
        file.device,
        file.source,
        proportional=file.proportional,
        sharded=tuple(_to_sharded(i, sharded, graph) for i, sharded in enumerate(file.sharded)),
        update=None if file.update is None else UpdateCost(**core_fields(file.update)),
    )


def _to_sharded(i: int, file: _Sharded, graph: OpGraph) -> Sharded:
    where = f"sharded[{i}].operators"
    index = _index([op.name for op in file.operators], where)
    for name, j in index.items():
        if name not in graph.index:
            raise ValueError(f'{where}[{j}].name is "{name}"; no operator has this name')
    missing = [op.name for op in graph.ops if op.name not in index]
    if missing:
        raise ValueError(f"{where} lacks {missing[0]}")
    ordered = [file.operators[index[op.name]] for op in graph.ops]
    return Sharded(
        file.degree,
        tuple(_to_cost(op) for op in ordered),
        tuple(op.parameter_bytes for op in ordered),
    )


def _to_cost(op: _Cost) -> OpCost:
    return OpCost(tuple(op.forward_s), tuple(op.backward_s), op.kept_bytes_per_sample)


def _index(names: Sequence[str], where: str) -> dict[str, int]:
    index: dict[str, int] = {}
    for i, name in enumerate(names):
        if index.setdefault(name, i) != i:
            raise ValueError(
                f'{where}[{i}].name is "{name}", and so is {where}[{index[name]}].name'
            )
    return index
