"""Profile files: operators, the values between them, and what each operator costs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from anabranch.files.fields import (
    FilePath,
    Name,
    Samples,
    Seconds,
    Size,
    Text,
    build,
    save,
)
from anabranch.files.graphs import (
    OperatorEntry,
    ParameterEntry,
    ValueEntry,
    graph_to_dict,
    to_graph,
)
from anabranch.files.jsonfile import Strict, core_fields, document_fields, read_document
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.opgraph import Granularity
from anabranch.profile.profile import OpCost, Profile, UpdateCost

PROFILE = "anabranch.profile/1"


def save_profile(profile: Profile, path: FilePath) -> None:
    """Write a profile file; raises FileFormatError if that fails or it could not be read again."""
    save(path, _ProfileFile, profile_to_dict(profile))


def load_profile(path: FilePath) -> Profile:
    """Read a profile file; raises FileFormatError, which names file, key and value."""
    return build(path, _to_profile, read_document(path, PROFILE, _ProfileFile))


_IF_KNOWN = ("loss_kind", "normalised", "rewrites", "rewritable")
"""Keys of a graph that stand in a profile where there is something to say."""


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """The document that ``save_profile`` writes."""
    graph = profile.graph
    fields = graph_to_dict(graph)
    operators = zip(fields.pop("operators"), profile.costs, strict=True)
    document: dict[str, Any] = {
        "schema": PROFILE,
        "name": fields.pop("name"),
        "granularity": fields.pop("granularity"),
        **{
            key: fields.pop(key) for key in ("loss_kind", "normalised", "rewrites") if key in fields
        },
        "device": profile.device,
        "source": profile.source,
        "proportional": profile.proportional,
        "samples": list(profile.samples),
        "parameters": fields.pop("parameters"),
        "operators": [op | _cost(cost) for op, cost in operators],
        **fields,
    }
    if profile.update is not None:
        document["update"] = document_fields(profile.update, _Update)
    if profile.read_sample_s:
        document["read_sample_s"] = profile.read_sample_s
    return document


def _cost(cost: OpCost) -> dict[str, Any]:
    entry = {
        "forward_s": list(cost.forward_s),
        "backward_s": list(cost.backward_s),
        "kept_bytes_per_sample": cost.kept_bytes,
    }
    if cost.working_bytes:  # published profiles do not say
        entry["working_bytes_per_sample"] = cost.working_bytes
    return entry


class _Cost(Strict):
    name: Name
    forward_s: list[Seconds]
    backward_s: list[Seconds]
    kept_bytes_per_sample: Size
    working_bytes_per_sample: Size = 0


class _Operator(OperatorEntry, _Cost):
    pass


class _Update(Strict):
    fixed_s: Seconds
    tensor_s: Seconds
    byte_s: Seconds


class _ProfileFile(Strict):
    schema_: Literal["anabranch.profile/1"] = Field(alias="schema")
    name: Text
    granularity: Granularity
    loss_kind: LossKind | None = None
    normalised: list[Text] = Field(default_factory=list)
    rewrites: list[Text] = Field(default_factory=list)
    rewritable: list[Text] = Field(default_factory=list)
    device: Text
    source: Literal["measured", "estimated", "imported"]
    proportional: bool
    samples: list[Samples]
    parameters: list[ParameterEntry]
    operators: list[_Operator]
    values: list[ValueEntry]
    sharded: list[Any] = Field(default_factory=list)  # costs of tensor parallelism, unread
    update: _Update | None = None
    read_sample_s: Seconds = 0.0


def _to_profile(file: _ProfileFile) -> Profile:
    graph = to_graph(file)
    return Profile(
        graph,
        tuple(file.samples),
        tuple(_to_cost(op) for op in file.operators),
        file.device,
        file.source,
        proportional=file.proportional,
        update=None if file.update is None else UpdateCost(**core_fields(file.update)),
        read_sample_s=file.read_sample_s,
    )


def _to_cost(op: _Cost) -> OpCost:
    return OpCost(
        tuple(op.forward_s),
        tuple(op.backward_s),
        op.kept_bytes_per_sample,
        op.working_bytes_per_sample,
    )
