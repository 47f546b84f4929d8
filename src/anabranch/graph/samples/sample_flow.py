"""Dependence of the values of a forward pass on the samples of a batch, and kinds of losses.

A batch is computed in slices. Read in program order, each value of the program is one of::

    constant    without samples: parameters, buffers, numbers
    samples     one part per sample, which depends on that sample alone
    sum, mean   one for the batch: a sum or a mean over samples
    statistic   known of the batch's own tensors, and not of their slices: a count, x.softmax(0)
    coupled     anything else that several samples decide: right for the whole batch only

A statistic is known before the forward begins, so it is put in as that of the whole batch
(``batch_statistics``), and so is a number that follows from the number of samples. A sum that is
divided by a statistic is a *weighted mean*, and a mean as well.

Operators that other libraries register (``torch.library.custom_op``, fused kernels) are unknown:
sizes do not tell whether a scalar of theirs is a mean, a sum or something else. An ``Assumption``
says so, and ``halves_agree`` compares numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from anabranch.graph import operations
from anabranch.graph.call_traits import (
    SampleAxis,
    arguments,
    base_name,
    has_classes,
    is_integer,
    is_size,
    tensor,
    value_inputs,
    with_tensor,
)
from anabranch.graph.flat_program import (
    FlatProgram,
    frame,
    is_random,
    requires_grad,
    trains_norm,
    upstream,
    written,
)
from anabranch.graph.samples.flows import Assumption, Flow, SampleFlow, Statistic, constants
from anabranch.graph.samples.sample_axis import (
    MIXED,
    PAIRS,
    RAGGED,
    is_across,
    is_index,
    is_over_one_index,
    pairs_others,
    sample_axes,
)

_TOTALS = ("sum", "mean")
"""Kinds of values that slices have instead of samples, and that add up."""


def sample_flow(
    program: FlatProgram, other: FlatProgram, module: nn.Module, assumption: Assumption
) -> SampleFlow:
    """Follow the samples through a program of a module; ``other`` has twice its samples."""
    return _Follower(program, other, module, assumption).result()


class _Follower:
    def __init__(
        self, program: FlatProgram, other: FlatProgram, module: nn.Module, assumption: Assumption
    ) -> None:
        self.program, self.other = program, other
        self.module = module
        self.assumption = assumption
        self.twins = dict(zip(program.graph.nodes, other.graph.nodes, strict=True))
        self.axes = sample_axes(program, other, assumption.reordering)
        self.flows: dict[fx.Node, Flow] = {}
        self.coupling: list[fx.Node] = []
        self.normalised: list[fx.Node] = []
        self.position = {node: i for i, node in enumerate(program.graph.nodes)}
        self.uses: list[tuple[fx.Node, Statistic]] = []
        self.assumed: list[str] = []
        self.rearranged: set[fx.Node] = set()
        self.before_loss = set(upstream(program.outputs[:1]))
        self.read = set[fx.Node]()
        for node in reversed(program.graph.nodes):
            if node.op == "output":
                self.read.update(node.all_input_nodes)
            elif node in self.read or written(node):
                self.read.update(self.value_inputs(node))
        # Buffers that the forward changes differ between micro-batches.
        self.changing = program.changed("buffer")

    def result(self) -> SampleFlow:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                source = self.program.sources[node]
                known = source.kind != "parameter" and source.name not in self.changing
                flow = Flow("samples" if source.kind == "batch" else "constant", known)
                is_number = source.kind == "constant" and not self.is_same(node)
                self.flows[node] = Flow("statistic") if is_number else flow
            elif node.op == "get_attr":
                self.flows[node] = Flow("constant")
            elif node.op == "call_function":
                self.flows[node] = self.with_counts(node, self.followed(node))
                self.write(node)
            else:
                self.put_in(node)  # the loss and the metrics
        return SampleFlow(
            self.flows,
            tuple(dict.fromkeys(self.coupling)),
            tuple(self.normalised),
            tuple(dict.fromkeys(self.uses)),
            tuple(dict.fromkeys(self.assumed)),
        )

    def axis(self, node: fx.Node) -> SampleAxis:
        """Return the samples of a value; an axis without samples for anything but a tensor."""
        return self.axes.get(node, SampleAxis(-1))

    def value_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return inputs that a value depends on, also if their data tells only its size."""
        is_ragged = self.axis(node).trouble == RAGGED
        return node.all_input_nodes if is_ragged else value_inputs(node)

    def mixes(self, node: fx.Node) -> bool:
        """Return True for an operation across samples whose result has samples."""
        known = [n for n in node.all_input_nodes if self.flows[n].known]
        return is_across(node, self.axes, self.program.samples, known)

    def is_same(self, node: fx.Node) -> bool:
        """True if a tensor made of Python's numbers is the same for any number of samples."""
        pair = ((self.program, node), (self.other, self.twins[node]))
        here, there = (p.constants[p.sources[n].name] for p, n in pair)
        if here is there or here.is_meta or here.shape != there.shape:
            return here.shape == there.shape
        return torch.equal(here.to_dense(), there.to_dense())

    def write(self, node: fx.Node) -> None:
        """Mark every value that shares the memory of what a call writes in place."""
        flow = self.flows[node]
        for target in written(node):
            for other in self.flows if not flow.known else ():
                if other.meta.get("storage", 0) == target.meta.get("storage", 1):
                    self.flows[other] = replace(self.flows[other], known=False)

    def with_counts(self, node: fx.Node, flow: Flow) -> Flow:
        """Return the flow of a call that may read a count: a count that weighs learned values, as
        in the balance of experts, has to be that of the whole batch.
        """
        inputs = [self.flows[source] for source in node.all_input_nodes]
        value = tensor(node)
        if not any(f.counts for f in inputs) or value is None:
            return flow
        is_weight = base_name(node).rstrip("_") in operations.ARITHMETIC and value.requires_grad
        if is_weight and any(f.kind in ("samples", *_TOTALS) for f in inputs):
            return self.together(node, self.axis(node), known=False)
        return replace(flow, counts=flow.kind == "constant")

    def followed(self, node: fx.Node) -> Flow:
        if not (node in self.read or written(node)):
            return Flow("constant")  # of which a type or a size is read, as of x in ones_like(x[0])
        read = self.value_inputs(node)
        # Random numbers are drawn in the forward, so nothing made of them is known before it.
        known = all(self.flows[source].known for source in read) and not is_random(node.target)
        axis = self.axis(node)
        # Rows of the whole batch that are put in are like a tensor of the batch.
        inputs = [Flow("samples") if self.has_rows(n) else self.flows[n] for n in read]
        is_hidden = axis.dim < 0 or axis.trouble == PAIRS
        assumed = self.by_assumption(node, inputs, known) if is_hidden else None
        if arguments(node).get("scale_grad_by_freq") and requires_grad(node):
            self.coupling.append(node)  # gradients of rows count the lookups of the whole batch
        return assumed or self.sliced(node, axis, inputs, known) or self.together(node, axis, known)

    def sliced(
        self, node: fx.Node, axis: SampleAxis, inputs: list[Flow], known: bool
    ) -> Flow | None:
        """Return the flow of a value that slices can compute, given statistics, or None."""
        kinds = {flow.kind for flow in inputs}
        if (
            axis.trouble in (PAIRS, MIXED)
            or "coupled" in kinds
            or pairs_others(node, self.axes, self.program.samples)
        ):
            return None
        if kinds <= {"constant"}:
            return self.without_samples(node, axis, known)
        # Known values are those of the whole batch until something learned reads them.
        rows = filter(self.has_rows, value_inputs(node))
        is_part = base_name(node) == "getitem" and inputs[0].kind == "statistic" and axis.dim >= 0
        if (
            known
            and axis.trouble != RAGGED
            and (is_part or not all(is_index(node, n, self.axes) for n in rows))
        ):
            return None
        if tensor(node) is None:
            return self.several(node, inputs, known)
        if axis.dim >= 0 or axis.trouble == RAGGED:
            return self.per_sample(node, inputs, known)
        if self.counts_reordered(node):
            return Flow("constant", known, counts=True)
        flow = self.for_batch(node, inputs, known)
        return Flow("statistic") if known and flow is not None and flow.kind in _TOTALS else flow

    def together(self, node: fx.Node, axis: SampleAxis, known: bool) -> Flow:
        """Return the flow of a value that only the whole batch tells: put in if it is known."""
        self.uses = [use for use in self.uses if use[0] is not node]
        if known:  # readers of what is coupled have the whole batch
            return Flow("coupled" if axis.trouble else "statistic")
        self.coupling.append(node)
        has_axis = (axis.dim >= 0 or axis.trouble == RAGGED) and axis.trouble != PAIRS
        return Flow("samples" if has_axis else "coupled", False)

    def has_rows(self, node: fx.Node) -> bool:
        """Return True for a value with samples that is known of the whole batch alone."""
        is_statistic = self.flows[node].kind == "statistic"
        return is_statistic and self.axis(node).dim >= 0

    def by_assumption(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow | None:
        """Return the flow of a value of an unknown operator that hides the samples, or None.

        A scalar is a mean or a sum over samples. Anything larger has the samples in an order of the
        operator's own, as tokens by expert are, and so has what is made of it.
        """
        value, kinds = tensor(node), {flow.kind for flow in inputs}
        if value is None or "coupled" in kinds or not kinds & {"samples", *_TOTALS}:
            return None
        operator = self.assumption.unknown_operator(node)
        # A size that depends on the data is not compared.
        is_scalar = all(isinstance(n, int) and n == 1 for n in value.shape)
        if not operator and (is_scalar or self.rearranged.isdisjoint(node.all_input_nodes)):
            return None
        if operator:
            self.assumed.append(operator)
        if not is_scalar:
            self.rearranged.add(node)
            return Flow("samples", known)
        is_sum = operator not in self.assumption.per_sample and self.assumption.unknown == "sum"
        return Flow("statistic") if known else Flow("sum" if is_sum else "mean", known)

    def counts_reordered(self, node: fx.Node) -> bool:
        """Test for a value without gradient that counts what was put into another order, as the
        tokens of each expert are: the graph does not tell whether that brings them back.
        """
        axes = [self.axis(n) for n in node.all_input_nodes]
        value = tensor(node)
        return (
            value is not None
            and not value.requires_grad
            and node in self.before_loss  # a metric's count is a sum
            and any(axis.trouble not in ("", PAIRS, RAGGED) for axis in axes)
            and (not value.is_floating_point() or base_name(node).rstrip("_") in operations.COUNTS)
        )

    def without_samples(self, node: fx.Node, axis: SampleAxis, known: bool) -> Flow | None:
        """Return the flow of a value made of constants alone, such as torch.zeros(n)."""
        if axis.dim >= 0:
            is_place = bool(axis.trouble) and is_integer(node)
            is_alike = base_name(node) in operations.ALIKE or is_random(node.target)
            is_sliced = is_place or (is_alike and self.put_in(node))
            return Flow("samples", known) if is_sliced else None
        if known and self.changed(node):
            return Flow("statistic")  # made of the number of samples, such as torch.tensor(len(x))
        return Flow("constant", known) if self.put_in(node) else None

    def several(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow | None:
        """Return the flow of several tensors, which ``getitem`` takes out, or of a number."""
        name = base_name(node)
        if name in operations.BATCH_NORMS:
            self.normalise(node)
        if {flow.kind for flow in inputs} <= {"constant", "statistic"}:
            return Flow("statistic", known)
        # The order of what is sorted may be undone later.
        is_mixed = self.mixes(node) and (known or requires_grad(node))
        return Flow("samples", known) if self.put_in(node) and not is_mixed else None

    def normalise(self, node: fx.Node) -> None:
        """Note a normalisation over a micro-batch, or the whole batch, as ``SyncBatchNorm`` is."""
        is_whole = isinstance(self.module.get_submodule(frame(node)), nn.SyncBatchNorm)
        (self.coupling if is_whole else self.normalised).append(node)

    def per_sample(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow | None:
        """Return the flow of a value with samples."""
        name = base_name(node).rstrip("_")
        is_coupled = any(flow.kind in _TOTALS for flow in inputs) or self.mixes(node)
        if is_coupled or not self.put_in(node):
            return None
        if name in operations.BATCH_NORMS and trains_norm(node):
            self.normalise(node)
        return Flow("samples", known)

    def put_in(self, node: fx.Node, *, share: bool = False) -> bool:
        """Note the statistics and the numbers that a call reads of the whole batch; False if it
        takes no tensor in place of such a number, as for an index or a size.
        """
        for source in value_inputs(node):
            if self.flows[source].kind != "statistic" or tensor(source) is None:
                continue
            axis = self.axes[source] if self.has_rows(source) else None
            is_place = is_integer(node) and is_integer(source)
            if axis is None or not (is_place or is_index(node, source, self.axes)):
                self.uses.append((node, Statistic(self.position[source], "", share, axis)))
        numbers = self.changed(node)
        for name, value in arguments(node).items():
            is_read = isinstance(value, fx.Node) and self.flows[value].kind == "statistic"
            if is_read and tensor(value) is None:
                if is_size(node, name):
                    return False
                numbers[name] = value, value
        self.uses += [(node, Statistic(self.position[node], name, share)) for name in numbers]
        return all(with_tensor(node, name) for name in numbers)

    def changed(self, node: fx.Node) -> dict[str, tuple[Any, Any]]:
        """Return numbers among the arguments that differ for twice the samples; sizes, which have
        to fit the tensors, only if the result has no samples.
        """
        axis = self.axes.get(node, SampleAxis(-1, trouble=RAGGED))
        has_samples = axis.dim >= 0 or axis.trouble == RAGGED
        pairs = zip(arguments(node).items(), arguments(self.twins[node]).values(), strict=True)
        return {
            name: (a, b)
            for (name, a), b in pairs
            if not (has_samples and is_size(node, name))
            and any(map(_differ, tree_leaves(a), tree_leaves(b)))
        }

    def for_batch(self, node: fx.Node, inputs: list[Flow], known: bool) -> Flow | None:
        """Return the flow of a value without samples that is made from the batch."""
        name = base_name(node).rstrip("_")
        sources = node.all_input_nodes
        kinds = {flow.kind for flow in inputs}
        if kinds <= {"constant", "statistic"}:
            if known:
                return Flow("statistic")
            return Flow("constant", False) if self.put_in(node) else None
        moving = [flow for flow in inputs if flow.kind in ("samples", *_TOTALS)]
        if "samples" in kinds:
            is_sliced = kinds.isdisjoint(_TOTALS) and self.put_in(node)
            return self.reduced(node, name, moving, known) if is_sliced else None
        # Now all inputs are values without samples.
        if kinds.issuperset(_TOTALS):
            return None
        is_mean, all_move = "mean" in kinds, len(moving) == len(inputs)
        is_first = self.flows[sources[0]].kind in _TOTALS and len(moving) == 1
        is_divided = name == "div" and is_first
        share = is_divided and not is_mean and ("statistic" in kinds or bool(self.changed(node)))
        if name in operations.LINEAR or name in ("stack", "cat"):
            is_linear = all_move
        elif name in operations.SCATTERS:
            # What is left of a constant is its own mean, and a sum where it is zero.
            is_linear = all_move or is_mean or _is_zero(sources[0])
        elif name in ("add", "sub", "rsub", "where"):
            # A constant is its own mean, and beside a sum weighed by the samples of a slice.
            terms = node.args[-2:] if name == "where" else node.args[:2]
            fixed = [] if is_mean else constants(node, self.flows)
            weighed = [argument for argument in fixed if argument != "condition"]
            self.uses += [(node, Statistic(0, name, weighs=True)) for name in weighed]
            is_linear = is_mean or len(terms) == len(moving) + len(weighed) or 0 in terms
        elif name == "linear":
            is_linear = is_first and is_mean
        else:
            is_linear = is_divided or (name == "mul" and len(moving) == 1)
        is_linear = is_linear and self.put_in(node, share=share)
        return Flow("mean" if is_mean or share else "sum", known) if is_linear else None

    def reduced(self, node: fx.Node, name: str, moving: list[Flow], known: bool) -> Flow | None:
        """Return the flow of a reduction over the samples."""
        ragged = any(self.axis(n).trouble == RAGGED for n in node.all_input_nodes)
        how = arguments(node).get("reduction")  # of a loss: 1 is the mean, 2 the sum
        if how is not None and "::" not in name:
            is_mean = how == 1 and not (
                ragged or (name in operations.BY_CLASS and has_classes(node))
            )
            return Flow("mean" if is_mean else "sum", known) if is_mean or how == 2 else None
        if name == "mean":
            return None if ragged else Flow("mean", known)
        from_zero = not name.endswith("_add") or _is_zero(node.args[0])
        is_count = name in operations.COUNTS and not ragged and from_zero
        is_product = name in operations.PRODUCTS and len(moving) == 2 and name != "addmm"
        is_product = is_product and (name != "einsum" or is_over_one_index(node, self.twins))
        return Flow("sum", known) if is_count or name == "sum" or is_product else None


def _is_zero(value: Any) -> bool:
    return isinstance(value, fx.Node) and base_name(value) in ("zeros", "zeros_like", "new_zeros")


def _differ(a: Any, b: Any) -> bool:
    are_numbers = all(type(value) in (int, float) for value in (a, b))
    return are_numbers and a != b and not math.isnan(a)
