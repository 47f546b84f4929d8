"""Dependence of the values of a forward pass on the samples of a batch, and kinds of losses.

A batch is computed in slices. Read in program order, each value of the program is one of::

    constant    without samples: parameters, buffers, numbers
    samples     one part per sample, which depends on that sample alone
    additive    one for the batch: a sum over samples, times a power of their number (``degree``)
    statistic   one for the batch, of the batch's own tensors alone: a count of labels
    coupled     anything else that several samples decide: right for the whole batch only

What a sum or a mean of the batch is follows from those of its slices::

    value of the batch  =  sum over slices of  (n / n_slice) ** degree  *  value of the slice

    loss.sum()  degree 0        loss.mean()  degree -1        loss.mean() * n  degree 0

A statistic is known before the forward begins, so it is put in as that of the whole batch
(``whole_batch``); a sum that is divided by one is then a *weighted mean*, and just as additive.

Operators that other libraries register (``torch.library.custom_op``, fused kernels) are unknown:
sizes do not tell whether a scalar of theirs is a mean, a sum or something else. An ``Assumption``
says so, and ``halves_agree`` compares numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from anabranch.graph.call_traits import (
    arguments,
    base_name,
    dims_along,
    has_classes,
    tensor,
    value_inputs,
)
from anabranch.graph.flat_program import (
    BATCH_LEAF,
    PARAMETER,
    FlatProgram,
    frame,
    schema_name,
    trains_norm,
    written,
)
from anabranch.graph.flows import Assumption, Flow, SampleFlow, StatisticUse
from anabranch.graph.operations import (
    ALONG,
    ARITHMETIC,
    BATCH_NORMS,
    BY_CLASS,
    CONVOLUTIONS,
    COUNTS,
    FILLED,
    LINEAR,
    PICKS,
    PRODUCTS,
    REDUCED,
    SCATTERS,
)
from anabranch.graph.sample_axis import PAIRS, RAGGED, SampleAxis, is_in_order, sample_axes


def sample_flow(
    program: FlatProgram, other: FlatProgram, module: nn.Module, assumption: Assumption
) -> SampleFlow:
    """Follow the samples through a program of a module; ``other`` has twice its samples."""
    return _Follower(program, other, module, assumption).result()


class _Follower:
    def __init__(
        self, program: FlatProgram, other: FlatProgram, module: nn.Module, assumption: Assumption
    ) -> None:
        self.program = program
        self.module = module
        self.assumption = assumption
        self.twins = dict(zip(program.graph.nodes, other.graph.nodes, strict=True))
        self.axes = sample_axes(program, other, assumption.reordering)
        self.flows: dict[fx.Node, Flow] = {}
        self.coupling: list[fx.Node] = []
        self.normalised: list[fx.Node] = []
        self.uses: list[StatisticUse] = []
        self.assumed: list[str] = []
        self.rearranged: set[fx.Node] = set()

    def result(self) -> SampleFlow:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                source = self.program.sources[node]
                is_leaf = source.kind == BATCH_LEAF
                kind: Any = "samples" if is_leaf else "constant"
                self.flows[node] = Flow(kind, 0, source.kind != PARAMETER)
            elif node.op == "get_attr":
                self.flows[node] = Flow("constant")
            elif node.op == "call_function":
                self.flows[node] = self.with_counts(node, self.followed(node))
                self.write(node)
        return SampleFlow(
            self.flows,
            tuple(dict.fromkeys(self.coupling)),
            tuple(self.normalised),
            tuple(dict.fromkeys(self.uses)),
            tuple(dict.fromkeys(self.assumed)),
        )

    def write(self, node: fx.Node) -> None:
        """Mark every value that shares the memory of what a call writes in place."""
        flow = self.flows[node]
        for target in written(node):
            for other in self.flows if not flow.known else ():
                if other.meta.get("storage", 0) == target.meta.get("storage", 1):
                    self.flows[other] = replace(self.flows[other], known=False)

    def with_counts(self, node: fx.Node, flow: Flow) -> Flow:
        """The flow of a call, which may read a count: one that weighs what is learned, as in the
        balance of experts, has to be that of the whole batch.
        """
        inputs = [self.flows[source] for source in node.all_input_nodes]
        value = tensor(node)
        if not any(f.counts for f in inputs) or value is None:
            return flow
        is_weight = base_name(node).rstrip("_") in ARITHMETIC and value.requires_grad
        if is_weight and any(f.kind in ("samples", "additive") for f in inputs):
            self.coupling.append(node)
            has_axis = self.axes.get(node, SampleAxis(-1)).dim >= 0
            return Flow("samples" if has_axis else "coupled", 0, False)
        return replace(flow, counts=flow.kind == "constant")

    def followed(self, node: fx.Node) -> Flow:
        inputs = [self.flows[n] for n in value_inputs(node)]
        known = all(flow.known for flow in inputs)
        kinds = {flow.kind for flow in inputs}
        axis = self.axes.get(node, SampleAxis(-1))
        if axis.dim < 0 or axis.trouble == PAIRS:
            assumed = self.by_assumption(node, inputs, known)
            if assumed is not None:
                return assumed
        if axis.trouble == PAIRS or "coupled" in kinds:
            self.coupling.append(node)
            has_axis = axis.dim >= 0 and axis.trouble != PAIRS
            return Flow("samples" if has_axis else "coupled", 0, known)
        if kinds <= {"constant"}:
            return self.without_samples(node, axis, known)
        if tensor(node) is None:
            return self.several(node, inputs, known)
        if axis.dim >= 0 or axis.trouble == RAGGED:
            return self.per_sample(node, axis, inputs, known)
        if self.counts_reordered(node):
            return Flow("constant", 0, known, counts=True)
        flow = self.for_batch(node, inputs, known)
        if flow.kind == "additive" and known:
            return Flow("statistic", flow.degree)
        if flow.kind == "coupled":
            self.coupling.append(node)
        return flow

    def by_assumption(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow | None:
        """A value of an unknown operator in which the samples cannot be seen; None for others.

        A scalar is a mean or a sum over samples. Anything larger has the samples in an order of the
        operator's own, as tokens by expert are, and so has what is made of it.
        """
        value, kinds = tensor(node), {flow.kind for flow in inputs}
        if value is None or "coupled" in kinds or not kinds & {"samples", "additive"}:
            return None
        operator = self.unknown_operator(node)
        # A size that depends on the data is not compared.
        is_scalar = all(isinstance(n, int) and n == 1 for n in value.shape)
        if not operator and (is_scalar or self.rearranged.isdisjoint(node.all_input_nodes)):
            return None
        if operator:
            self.assumed.append(operator)
        if not is_scalar:
            self.rearranged.add(node)
            return Flow("samples", 0, known)
        is_sum = operator not in self.assumption.per_sample and self.assumption.unknown == "sum"
        return Flow("statistic" if known else "additive", 0 if is_sum else -1)

    def unknown_operator(self, node: fx.Node) -> str:
        """Name of the operator that makes a value, if the assumption is about it."""
        if base_name(node) == "getitem":
            node = node.all_input_nodes[0]
        name = schema_name(node)
        library, separator, _ = name.partition("::")
        is_other = bool(separator) and library not in ("aten", "prims")
        is_assumed = is_other and self.assumption.unknown != "coupled"
        return name if is_assumed or name in self.assumption.per_sample else ""

    def counts_reordered(self, node: fx.Node) -> bool:
        """Test for a value without gradient that counts what was put into another order, as the
        tokens of each expert are: the graph does not tell whether that brings them back.
        """
        axes = [self.axes.get(n, SampleAxis(-1)) for n in node.all_input_nodes]
        value = tensor(node)
        return (
            value is not None
            and not value.requires_grad
            and any(axis.trouble not in ("", PAIRS, RAGGED) for axis in axes)
            and (not value.is_floating_point() or base_name(node).rstrip("_") in COUNTS)
        )

    def without_samples(self, node: fx.Node, axis: SampleAxis, known: bool) -> Flow:
        """A value made of constants alone, such as torch.arange(n)."""
        if axis.dim >= 0:
            scale = (
                self.scale(node, name, sizes=False) if (name := base_name(node)) in FILLED else 0
            )
            if scale is None:
                self.coupling.append(node)
            return Flow("samples", scale or 0, known)
        changed = [(a, b) for a, b in self.numbers(node) if a != b]
        if not changed:
            return Flow("constant", 0, known)
        # Made of the number of samples, such as torch.tensor(len(x)).
        if known and all(b == 2 * a for a, b in changed):
            return Flow("statistic")
        self.coupling.append(node)
        return Flow("coupled", 0, known)

    def several(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow:
        """Several tensors, each of which ``getitem`` takes out."""
        name = base_name(node)
        if name in BATCH_NORMS:
            self.normalise(node)
        if {flow.kind for flow in inputs} <= {"constant", "statistic"}:
            return Flow("statistic", 0, known)
        degree = self.degree(node, name, inputs)
        if degree is None and not known:
            self.coupling.append(node)
        return Flow("samples", degree or 0, known)

    def normalise(self, node: fx.Node) -> None:
        """Note a normalisation over a micro-batch, or the whole batch, as ``SyncBatchNorm`` is."""
        is_whole = isinstance(self.module.get_submodule(frame(node)), nn.SyncBatchNorm)
        (self.coupling if is_whole else self.normalised).append(node)

    def per_sample(self, node: fx.Node, axis: SampleAxis, inputs: list[Flow], known: bool) -> Flow:
        """A value with samples."""
        self.note_uses(node)
        name = base_name(node).rstrip("_")
        degree = self.degree(node, name, inputs)
        is_coupled = any(flow.kind == "additive" for flow in inputs) or self.mixes(node, name)
        # What is made of the batch alone belongs to no operator: numbers tell.
        if is_coupled or (degree is None and not known):
            self.coupling.append(node)
            return Flow("samples", 0, known)
        if name in BATCH_NORMS and trains_norm(node):
            self.normalise(node)
        return Flow("samples", degree or 0, known)

    def degree(self, node: fx.Node, name: str, inputs: list[Flow]) -> int | None:
        """The power of the number of samples in a value with samples; None where it depends on
        that number otherwise, so that a slice has another value than the batch.
        """
        # One value may be several arguments, as in x * x.
        read = [self.flows[n] for n in tree_leaves([*node.args]) if isinstance(n, fx.Node)]
        degrees = [flow.degree for flow in read if flow.kind == "samples"]
        scale = self.scale(node, name, sizes=False)
        if scale is None or not (scale or any(degrees)):
            return scale
        if name == "mul" or name in PRODUCTS - {"addmm", "linear"}:
            return sum(degrees) + scale
        first = inputs[0]
        if name == "div" and first.kind == "samples":
            return first.degree + scale - sum(degrees[1:])
        start, stop = _TERMS.get(name, (0, 0))
        terms = tree_leaves(list(node.args[start:stop]))
        is_sum = bool(terms) and all(
            isinstance(term, fx.Node) and self.flows[term].kind == "samples" for term in terms
        )
        factors = {self.flows[term].degree for term in terms if is_sum} or set(degrees)
        is_linear = is_sum or name in LINEAR | PICKS
        return factors.pop() if is_linear and len(factors) == 1 else None

    def note_uses(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if self.flows[source].kind == "statistic" and tensor(source) is not None:
                self.uses.append(StatisticUse(node, source, share=False))

    def scale(self, node: fx.Node, name: str, *, sizes: bool = True) -> int | None:
        """The power of the number of samples that a product with a number has, None for others."""
        numbers = self.numbers(node, sizes=sizes)
        changed = [(a, b) for a, b in numbers if a != b and not math.isnan(a)]
        if not changed:
            return 0
        (small, large), *others = changed
        if others or name not in ("mul", "div", *FILLED) or small * large <= 0:
            return None
        power = math.log2(large / small)
        if not power.is_integer():
            return None
        return int(-power if name == "div" else power)

    def numbers(self, node: fx.Node, *, sizes: bool = True) -> list[tuple[float, float]]:
        """Numbers among the arguments, for the samples of each program; or those that are no
        ``sizes``, which have to fit the tensors.
        """
        schema = getattr(node.target, "_schema", None)
        kinds = {} if schema is None else {a.name: str(a.real_type) for a in schema.arguments}
        leaves = (
            tree_leaves([v for k, v in arguments(n).items() if sizes or "int" not in kinds[k]])
            for n in (node, self.twins[node])
        )
        pairs = zip(*leaves, strict=True)
        return [(a, b) for a, b in pairs if _is_number(a) and _is_number(b)]

    def mixes(self, node: fx.Node, name: str) -> bool:
        """True for an operation across samples whose result has samples."""
        source = node.all_input_nodes[0]
        axis, value = self.axes.get(source, SampleAxis(-1)), tensor(source)
        if value is None:
            return False
        dim, rank = axis.dim, value.dim()
        if axis.trouble == RAGGED:
            dim = next(d for d, n in enumerate(value.shape) if not isinstance(n, int))
            if name == "index":
                index = dict(enumerate(arguments(node)["indices"])).get(dim)
                return index is not None and not is_in_order(index)
            if name in ("gather", "index_select"):
                return dim in dims_along(node, rank)
        if dim < 0:
            return False
        if name in ALONG | SCATTERS:
            return dim in dims_along(node, rank)
        if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
            return dim >= rank - len(arguments(node)["normalized_shape"])
        if name in ("group_norm", "native_group_norm", "instance_norm") or name in CONVOLUTIONS:
            return dim > 0
        if "scaled_dot_product" in name:
            return dim >= rank - 2
        return False

    def for_batch(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow:
        """A value without samples that is made from some."""
        name = base_name(node).rstrip("_")
        sources = node.all_input_nodes
        kinds = {flow.kind for flow in inputs}
        nothing = Flow("coupled", 0, known)
        if kinds <= {"constant", "statistic"}:
            if known:
                return self.of_statistics(node, name, inputs)
            self.note_uses(node)
            return Flow("constant", 0, False)
        scale = self.scale(node, name)
        if scale is None:
            return nothing
        moving = [flow for flow in inputs if flow.kind in ("samples", "additive")]
        if kinds & {"samples"}:
            if "additive" in kinds:
                return nothing
            self.note_uses(node)
            return self.reduced(node, name, moving, known)
        # Of values without samples alone.
        degrees = {flow.degree for flow in moving}
        (degree, *others) = sorted(degrees)
        if others:
            return nothing
        first = self.flows[sources[0]]
        if name in LINEAR or name in ("stack", "cat"):
            is_whole = len(moving) == len(inputs)
            return Flow("additive", degree, known) if is_whole else nothing
        if name in SCATTERS:
            # What is left of a constant is its own mean, and a sum where it is zero.
            is_sum = len(moving) == len(inputs) or degree == -1 or _is_zero(sources[0])
            return Flow("additive", degree, known) if is_sum else nothing
        if name in ("add", "sub", "rsub"):
            # A constant is its own mean, and no sum.
            is_sum = self.all_add(node, moving, degree)
            return Flow("additive", degree, known) if is_sum else nothing
        if name == "div" and first.kind == "additive" and len(moving) == 1:
            share = degree == 0
            for source in sources[1:]:
                if self.flows[source].kind == "statistic":
                    if base_name(source) == "item":
                        (source,) = source.all_input_nodes
                    self.uses.append(StatisticUse(node, source, share))
                    return Flow("additive", degree - share, known)
            return Flow("additive", degree + scale, known)
        if name in ("mul", "where") and len(moving) == 1:
            self.note_uses(node)
            return Flow("additive", degree + scale, known)
        if name == "linear" and len(moving) == 1 and first.kind == "additive" and degree == -1:
            return Flow("additive", degree, known)
        return nothing

    def of_statistics(self, node: fx.Node, name: str, inputs: list[Flow]) -> Flow:
        """A statistic, which is a sum where it is linear in one, or adds several up."""
        terms = [flow for flow in inputs if flow.kind == "statistic"]
        degree = terms[0].degree
        is_sum = all(flow.is_sum and flow.degree == degree for flow in terms)
        if name in ("add", "sub", "rsub"):
            is_sum &= len(terms) == len(inputs) and self.all_add(node, terms, degree)
        else:
            first, *others = node.args or (None,)
            is_linear = name in LINEAR or (name in ("mul", "div") and isinstance(first, fx.Node))
            is_sum &= is_linear and not any(isinstance(other, fx.Node) for other in others)
        return Flow("statistic", degree, is_sum=is_sum and self.scale(node, name) == 0)

    def all_add(self, node: fx.Node, moving: list[Flow], degree: int) -> bool:
        """True if all terms of a sum have that degree; constants are means."""
        terms = node.args[:2]
        constant = len(terms) - len(moving)
        return constant == 0 or degree == -1 or any(_is_number(t) and t == 0 for t in terms)

    def reduced(self, node: fx.Node, name: str, moving: list[Flow], known: bool) -> Flow:
        """A reduction over the samples."""
        degrees = [flow.degree for flow in moving]
        nothing = Flow("coupled", 0, known)
        ragged = any(
            self.axes.get(n, SampleAxis(-1)).trouble == RAGGED for n in node.all_input_nodes
        )
        if name in REDUCED:
            how = arguments(node).get("reduction")
            if any(degrees) or how not in (1, 2):
                return nothing
            if how == 2:
                return Flow("additive", 0, known)
            if ragged or (name in BY_CLASS and has_classes(node)):
                return nothing
            return Flow("additive", -1, known)
        if len(set(degrees)) > 1 and name not in PRODUCTS:
            return nothing
        if name in COUNTS and not ragged and _adds_to_nothing(node, name):
            return Flow("additive", degrees[0], known)
        if name == "sum":
            return Flow("additive", degrees[0], known)
        if name == "mean":
            return nothing if ragged else Flow("additive", degrees[0] - 1, known)
        if name in PRODUCTS and len(moving) == 2:
            return Flow("additive", sum(degrees), known)
        return nothing


_TERMS = {
    **dict.fromkeys(("add", "sub", "rsub", *SCATTERS), (0, 2)),
    **dict.fromkeys(("cat", "stack"), (0, 1)),
    "where": (1, 3),
    "broadcast_tensors": (0, 1),
}
"""Sums, and what has entries of several values -> the interval of arguments that are these."""


def _adds_to_nothing(node: fx.Node, name: str) -> bool:
    """True if a sum by classes begins with zeros."""
    return not name.endswith("_add") or _is_zero(node.args[0])


def _is_zero(value: Any) -> bool:
    return isinstance(value, fx.Node) and base_name(value) in ("zeros", "zeros_like", "new_zeros")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
