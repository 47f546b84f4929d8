"""Operator graphs as profile files and kept captures write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from anabranch.files.fields import Name, NameOrNone, Size, Text
from anabranch.files.jsonfile import Strict, core_fields, document_fields
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Table, Value


class TableEntry(Strict):
    """A table of embeddings."""

    lookups: Size
    row_bytes: Size
    sparse: bool = False


class ParameterEntry(Strict):
    """A parameter."""

    name: Name
    nbytes: Size
    trainable: bool
    table: TableEntry | None = None


class OperatorEntry(Strict):
    """An operator with the names of its parameters."""

    name: Name
    kind: Text
    parameters: list[Name]
    whole_batch: bool = False


class ValueEntry(Strict):
    """A value by the names of the operators that make and read it."""

    name: NameOrNone
    producer: Name | None
    consumers: list[Name]
    nbytes: Size
    batched: bool
    grad: bool


class GraphFile(Protocol):
    """A document that holds an operator graph, perhaps with more about every operator."""

    @property
    def name(self) -> str:
        """Class of the module."""

    @property
    def granularity(self) -> str:
        """Granularity of the operators."""

    @property
    def loss_kind(self) -> LossKind | None:
        """Kind of the loss, if known."""

    @property
    def normalised(self) -> Sequence[str]:
        """Modules with batch normalisation."""

    @property
    def rewrites(self) -> Sequence[str]:
        """Rewrites of the program."""

    @property
    def rewritable(self) -> Sequence[str]:
        """Rewrites that the program has sites for."""

    @property
    def parameters(self) -> Sequence[ParameterEntry]:
        """In the model's order."""

    @property
    def operators(self) -> Sequence[OperatorEntry]:
        """In topological order."""

    @property
    def values(self) -> Sequence[ValueEntry]:
        """Values between operators."""


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """The keys of a ``GraphFile``."""
    return {
        "name": graph.name,
        "granularity": graph.granularity,
        **({} if graph.loss_kind is None else {"loss_kind": graph.loss_kind}),
        **({"normalised": list(graph.normalised)} if graph.normalised else {}),
        **({"rewrites": list(graph.rewrites)} if graph.rewrites else {}),
        **({"rewritable": list(graph.rewritable)} if graph.rewritable else {}),
        "parameters": [_parameter_to_dict(parameter) for parameter in graph.parameters],
        "operators": [_operator_to_dict(op) for op in graph.ops],
        "values": [
            document_fields(
                value,
                ValueEntry,
                producer=None if value.producer == BATCH else graph.ops[value.producer].name,
                consumers=[graph.ops[consumer].name for consumer in value.consumers],
            )
            for value in graph.values
        ],
    }


def to_graph(file: GraphFile) -> OpGraph:
    """The graph of a document; raises ValueError, which names the key, if it is none."""
    index = unique_index([op.name for op in file.operators], "operators")

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
    return OpGraph(
        ops=tuple(
            Op(op.name, tuple(op.parameters), op.kind, op.whole_batch) for op in file.operators
        ),
        values=values,
        parameters=tuple(_to_parameter(parameter) for parameter in file.parameters),
        name=file.name,
        granularity=file.granularity,
        loss_kind=file.loss_kind,
        normalised=tuple(file.normalised),
        rewrites=tuple(file.rewrites),
        rewritable=tuple(file.rewritable),
    )


def _operator_to_dict(op: Op) -> dict[str, Any]:
    """Few compute across samples, and files say nothing of that for the others."""
    entry = document_fields(op, OperatorEntry)
    if not op.whole_batch:
        del entry["whole_batch"]
    return entry


def _parameter_to_dict(parameter: Parameter) -> dict[str, Any]:
    """Most are no tables, and files say nothing of that."""
    table = parameter.table
    entry = document_fields(parameter, ParameterEntry)
    if table is None:
        del entry["table"]
        return entry
    return {**entry, "table": document_fields(table, TableEntry)}


def _to_parameter(entry: ParameterEntry) -> Parameter:
    table = Table(**core_fields(entry.table)) if entry.table else None
    return Parameter(**core_fields(entry, ("table",)), table=table)


def unique_index(names: Sequence[str], where: str) -> dict[str, int]:
    """Name -> position; raises ValueError for a name that occurs twice."""
    index: dict[str, int] = {}
    for i, name in enumerate(names):
        if index.setdefault(name, i) != i:
            raise ValueError(
                f'{where}[{i}].name is "{name}", and so is {where}[{index[name]}].name'
            )
    return index
