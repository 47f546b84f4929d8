"""Dependence of values on the samples of a batch, as ``sample_flow`` follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from anabranch.graph.call_traits import SampleAxis, arguments, base_name
from anabranch.graph.flat_program import CallKey, schema_name, upstream, written
from anabranch.graph.loss_kinds import LossKind

Total = Literal["mean", "sum", "coupled"]
"""Rule for a scalar of a batch: its slices' mean, weighted by samples, their sum, or none."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption on operators whose results do not show the samples.

    Attributes:
        per_sample: operators that work on each sample by itself (``mylib::op``); scalars are means.
        unknown: scalars of other operators, not PyTorch's: a mean or sum over samples, or coupled.
        reordering: calls whose results have folded samples in another order, by ``sample_order``.
    """

    per_sample: frozenset[str] = frozenset()
    unknown: Literal["mean", "sum", "coupled"] = "mean"
    reordering: frozenset[CallKey] = frozenset()

    def unknown_operator(self, node: fx.Node) -> str:
        """Return the name of the operator that makes a value, if the assumption is about it."""
        if base_name(node) == "getitem":
            node = node.all_input_nodes[0]
        name = schema_name(node)
        library, separator, _ = name.partition("::")
        is_other = bool(separator) and library not in ("aten", "prims")
        is_assumed = is_other and self.unknown != "coupled"
        return name if is_assumed or name in self.per_sample else ""


@dataclass(frozen=True, slots=True)
class Flow:
    """Dependence of one value on the samples; ``known``: on nothing but the batch and constants.
    ``counts`` is true for a constant that counts samples, such as where the tokens of an expert
    begin, and for values made of it.
    """

    kind: Literal["constant", "samples", "sum", "mean", "statistic", "coupled"]
    known: bool = True
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Statistic:
    """A value for which slices of a batch read that of the whole batch.

    Attributes:
        position: position of a node in the program.
        argument: name of the node's argument that is the number; empty for the node's value.
        share: whether a sum is divided by it, so that a slice reads its share, a sum over rows.
        axis: samples of the value, if it has some.
        weighs: whether it is the number 1, whose share weighs a term without samples beside a sum,
            such as a penalty on weights; ``argument`` is the term, of any node that reads this.
    """

    position: int
    argument: str = ""
    share: bool = False
    axis: SampleAxis | None = None
    weighs: bool = False


@dataclass(frozen=True)
class SampleFlow:
    """Dependence of the values of one program on the samples.

    Attributes:
        flows: flow of every value.
        coupling: calls that are right for the whole batch only, in order.
        normalised: calls that take statistics of the batch as batch normalisation does.
        uses: calls that read statistics, each with one of them.
        assumed: names of unknown operators for which the assumption was needed.
    """

    flows: dict[fx.Node, Flow]
    coupling: tuple[fx.Node, ...]
    normalised: tuple[fx.Node, ...]
    uses: tuple[tuple[fx.Node, Statistic], ...]
    assumed: tuple[str, ...]


def constants(call: fx.Node, flows: Mapping[fx.Node, Flow]) -> list[str]:
    """Return the arguments that are tensors without samples, and are not written in place."""
    fixed = Flow("constant", known=True), Flow("constant", known=False)
    return [
        name
        for name, value in arguments(call).items()
        if isinstance(value, fx.Node) and flows[value] in fixed and value not in written(call)
    ]


def loss_kind(flow: SampleFlow, loss: fx.Node) -> LossKind:
    """Return the kind of a loss, from its flow and what it is divided by."""
    value = flow.flows[loss]
    if value.kind == "coupled" or above(flow.coupling, loss):
        return "coupled"
    # A number in Python is the number of samples, not a count of entries in them.
    counts = [
        call
        for call, statistic in flow.uses
        if statistic.share and not isinstance(arguments(call).get(statistic.argument), int | float)
    ]
    if above(counts, loss):
        return "weighted mean"
    return "sum" if value.kind == "sum" else "mean"


def above(calls: Sequence[fx.Node], output: fx.Node) -> tuple[fx.Node, ...]:
    """Return the calls of a sequence that an output depends on."""
    reached = set(upstream([output]))
    return tuple(node for node in calls if node in reached)
