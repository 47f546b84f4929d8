"""How the values of a forward pass depend on the samples of a batch, and of which kind a loss is.

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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx
from torch.utils._pytree import tree_leaves

from anabranch.graph.call_traits import arguments, base_name, tensor, words
from anabranch.graph.flat_program import BATCH_LEAF, PARAMETER, FlatProgram, written
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.sample_axis import PAIRS, RAGGED, SampleAxis, sample_axes

_LINEAR = words(
    """
    view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand expand_as transpose permute
    t neg clone contiguous detach alias to _to_copy type_as float double lift_fresh_copy select
    slice sum mean view_as movedim nan_to_num
    """
)
"""Operations that may be done before or after a sum over samples."""

_REDUCED = words(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss
    cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss
    multilabel_margin_loss nll_loss nll_loss_nd nll_loss2d cross_entropy_loss ctc_loss
    """
)
"""Losses with an argument ``reduction``: 1 is the mean, 2 the sum."""

_BY_CLASS = words("nll_loss nll_loss_nd nll_loss2d cross_entropy_loss")
"""Of these the mean is over the targets that are not ignored, by their weights."""

_PRODUCTS = words("matmul mm bmm mv dot linear einsum addmm")
_ALONG = words(
    """
    softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
    topk flip roll kthvalue
    """
)
_CONVOLUTIONS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_LOOKUPS = words("index index_select gather take_along_dim scatter scatter_add index_add index_put")
_FACTORIES = words("new_ones new_zeros new_full zeros_like ones_like full_like")
_COUNTS = words("histc bincount")
_BATCH_NORMS = words("batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm")


@dataclass(frozen=True, slots=True)
class Flow:
    """How one value depends on the samples; ``known``: on nothing but the batch and constants.
    ``is_sum`` is false for a statistic that is no sum over samples, such as a ratio of two.
    """

    kind: Literal["constant", "samples", "additive", "statistic", "coupled"]
    degree: int = 0
    known: bool = True
    is_sum: bool = True


@dataclass(frozen=True, slots=True)
class StatisticUse:
    """A call that reads a statistic: ``share`` is true where it divides a sum by it, which takes a
    slice's share of that of the batch.
    """

    call: fx.Node
    argument: fx.Node
    share: bool


@dataclass(frozen=True)
class SampleFlow:
    """How the values of one program depend on the samples.

    Attributes:
        flows: of every value.
        coupling: calls that are right for the whole batch only, in order.
        normalised: calls that take statistics of the batch as batch normalisation does.
        uses: calls that read statistics.
        unsure: calls of which the graph does not tell.
    """

    flows: dict[fx.Node, Flow]
    coupling: tuple[fx.Node, ...]
    normalised: tuple[fx.Node, ...]
    uses: tuple[StatisticUse, ...]
    unsure: tuple[fx.Node, ...]


def sample_flow(program: FlatProgram, other: FlatProgram) -> SampleFlow:
    """Follow the samples through a program; ``other`` has twice its samples."""
    return _Follower(program, other).result()


class _Follower:
    def __init__(self, program: FlatProgram, other: FlatProgram) -> None:
        self.program = program
        self.twins = dict(zip(program.graph.nodes, other.graph.nodes, strict=True))
        self.axes = sample_axes(program, other)
        self.flows: dict[fx.Node, Flow] = {}
        self.coupling: list[fx.Node] = []
        self.normalised: list[fx.Node] = []
        self.uses: list[StatisticUse] = []
        self.unsure: list[fx.Node] = []

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
                self.flows[node] = self.followed(node)
                self.write(node)
        return SampleFlow(
            self.flows,
            tuple(dict.fromkeys(self.coupling)),
            tuple(self.normalised),
            tuple(dict.fromkeys(self.uses)),
            tuple(self.unsure),
        )

    def write(self, node: fx.Node) -> None:
        """What is written in place changes whatever shares the memory."""
        flow = self.flows[node]
        for target in written(node):
            for other in self.flows if not flow.known else ():
                if other.meta.get("storage", 0) == target.meta.get("storage", 1):
                    self.flows[other] = replace(self.flows[other], known=False)

    def followed(self, node: fx.Node) -> Flow:
        inputs = [self.flows[n] for n in node.all_input_nodes]
        known = all(flow.known for flow in inputs)
        kinds = {flow.kind for flow in inputs}
        axis = self.axes.get(node, SampleAxis(-1))
        if base_name(node) in _FACTORIES and axis.dim < 0:
            return Flow("constant")  # of the type of a value, whatever is in that
        if axis.trouble == PAIRS or "coupled" in kinds:
            self.coupling.append(node)
            has_axis = axis.dim >= 0 and axis.trouble != PAIRS
            return Flow("samples" if has_axis else "coupled", 0, known)
        if kinds <= {"constant"}:
            return self.without_samples(node, axis, known)
        if tensor(node) is None:
            return self.several(node, kinds, known)
        if axis.dim >= 0 or axis.trouble == RAGGED:
            return self.per_sample(node, axis, inputs, known)
        if self.counts_reordered(node):
            self.unsure.append(node)
            return Flow("constant", 0, known)
        found = self.for_batch(node, inputs, known)
        if found.kind == "additive" and known:
            return Flow("statistic", found.degree)
        if found.kind == "coupled":
            self.coupling.append(node)
        return found

    def counts_reordered(self, node: fx.Node) -> bool:
        """Whether a value without gradient counts what was put into another order before, as the
        tokens of each expert are: the graph does not tell whether that brings them back.
        """
        axes = [self.axes.get(n, SampleAxis(-1)) for n in node.all_input_nodes]
        value = tensor(node)
        return (
            value is not None
            and not value.requires_grad
            and any(axis.trouble not in ("", PAIRS, RAGGED) for axis in axes)
            and (not value.is_floating_point() or base_name(node) in _COUNTS)
        )

    def without_samples(self, node: fx.Node, axis: SampleAxis, known: bool) -> Flow:
        """Of constants alone: of the size of the batch, such as torch.arange(n), or not."""
        if axis.dim >= 0:
            return Flow("samples", 0, known)
        changed = [(a, b) for a, b in self.numbers(node) if a != b]
        if not changed:
            return Flow("constant", 0, known)
        # Made of the number of samples, such as torch.tensor(len(x)).
        if known and all(b == 2 * a for a, b in changed):
            return Flow("statistic")
        self.coupling.append(node)
        return Flow("coupled", 0, known)

    def several(self, node: fx.Node, kinds: Collection[str], known: bool) -> Flow:
        """Several tensors, each of which ``getitem`` takes out."""
        if base_name(node) in _BATCH_NORMS:
            self.normalised.append(node)
        if set(kinds) <= {"constant", "statistic"}:
            return Flow("statistic", 0, known)
        return Flow("samples", 0, known)

    def per_sample(self, node: fx.Node, axis: SampleAxis, inputs: list[Flow], known: bool) -> Flow:
        """A value with samples."""
        self.note_uses(node)
        degrees = {flow.degree for flow in inputs if flow.kind == "samples"}
        name = base_name(node).rstrip("_")
        if any(flow.kind == "additive" for flow in inputs) or self.mixes(node, name):
            self.coupling.append(node)
            return Flow("samples", 0, known)
        if name in _BATCH_NORMS and _trains(node):
            self.normalised.append(node)
        if axis.trouble == RAGGED or self.looks_up(node, name):
            self.unsure.append(node)
        scale = self.scale(node, name)
        if len(degrees) > 1 or scale is None or (scale and name not in ("mul", "div")):
            return Flow("samples", 0, known)
        return Flow("samples", next(iter(degrees), 0) + scale, known)

    def note_uses(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if self.flows[source].kind == "statistic" and tensor(source) is not None:
                self.uses.append(StatisticUse(node, source, share=False))

    def scale(self, node: fx.Node, name: str) -> int | None:
        """The power of the number of samples that a product with a number has, None for others."""
        changed = [(a, b) for a, b in self.numbers(node) if a != b]
        if not changed:
            return 0
        if len(changed) > 1 or name not in ("mul", "div") or not changed[0][0]:
            return None
        small, large = changed[0]
        if large != 2 * small:
            return None
        return 1 if name == "mul" else -1

    def numbers(self, node: fx.Node) -> list[tuple[float, float]]:
        """Numbers among the arguments, for the samples of each program."""
        twin = self.twins[node]
        pairs = zip(_leaves(node), _leaves(twin), strict=True)
        return [(a, b) for a, b in pairs if _is_number(a) and _is_number(b)]

    def mixes(self, node: fx.Node, name: str) -> bool:
        """Whether an operation whose result has samples computes across them."""
        axis = self.axis_of_input(node)
        if axis is None:
            return False
        source = next(n for n in node.all_input_nodes if self.axes.get(n) is axis)
        value = tensor(source)
        assert value is not None
        rank = value.dim()
        if name in _ALONG:
            return axis.dim in _dims(node, rank)
        if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
            return axis.dim >= rank - len(arguments(node)["normalized_shape"])
        if name in ("group_norm", "native_group_norm", "instance_norm") or name in _CONVOLUTIONS:
            return axis.dim > 0
        if "scaled_dot_product" in name:
            return axis.dim >= rank - 2
        return False

    def looks_up(self, node: fx.Node, name: str) -> bool:
        """Whether rows are chosen by a place along the samples."""
        axis = self.axis_of_input(node)
        if name not in _LOOKUPS or axis is None or node.args[0] not in self.axes:
            return False
        if name == "index":
            places: Any = node.args[1]
            return axis.dim < len(places) and places[axis.dim] is not None
        return isinstance(node.args[1], int) and node.args[1] == axis.dim

    def axis_of_input(self, node: fx.Node) -> SampleAxis | None:
        first = next(iter(node.all_input_nodes), None)
        axis = None if first is None else self.axes.get(first)
        return axis if axis is not None and axis.dim >= 0 else None

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
        if name in _LINEAR or name in ("stack", "cat"):
            is_whole = len(moving) == len(inputs)
            return Flow("additive", degree, known) if is_whole else nothing
        if name in ("add", "sub", "rsub"):
            # A constant is its own mean, and no sum.
            is_sum = self.all_add(node, moving, degree)
            return Flow("additive", degree, known) if is_sum else nothing
        if name == "div" and first.kind == "additive" and len(moving) == 1:
            share = degree == 0
            for source in sources[1:]:
                if self.flows[source].kind == "statistic":
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
            is_linear = name in _LINEAR or (name in ("mul", "div") and isinstance(first, fx.Node))
            is_sum &= is_linear and not any(isinstance(other, fx.Node) for other in others)
        return Flow("statistic", degree, is_sum=is_sum and self.scale(node, name) == 0)

    def all_add(self, node: fx.Node, moving: list[Flow], degree: int) -> bool:
        """Whether a sum has none but terms of that degree; constants are means."""
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
        if name in _REDUCED:
            how = arguments(node).get("reduction")
            if any(degrees) or how not in (1, 2):
                return nothing
            if how == 2:
                return Flow("additive", 0, known)
            return (
                nothing
                if ragged or (name in _BY_CLASS and has_classes(node))
                else Flow("additive", -1, known)
            )
        if len(set(degrees)) > 1 and name not in _PRODUCTS:
            return nothing
        if name == "sum":
            return Flow("additive", degrees[0], known)
        if name == "mean":
            return nothing if ragged else Flow("additive", degrees[0] - 1, known)
        if name in _PRODUCTS and len(moving) == 2:
            return Flow("additive", sum(degrees), known)
        return nothing


def has_classes(node: fx.Node) -> bool:
    """Whether the targets of a loss are indices of classes."""
    target = node.args[1]
    value = tensor(target) if isinstance(target, fx.Node) else None
    return value is not None and not value.is_floating_point()


def loss_kind(flow: SampleFlow, loss: fx.Node) -> LossKind:
    """The kind of a loss, by its value and what it is divided by."""
    found = flow.flows[loss]
    if found.kind == "coupled" or above(flow.coupling, loss):
        return "coupled"
    if above([use.call for use in flow.uses if use.share], loss):
        return "weighted mean"
    return "sum" if found.kind == "additive" and found.degree == 0 else "mean"


def above(calls: Sequence[fx.Node], output: fx.Node) -> tuple[fx.Node, ...]:
    """Those of some calls that an output depends on."""
    reached = {output}
    for node in reversed(list(output.graph.nodes)):
        if node in reached:
            reached.update(node.all_input_nodes)
    return tuple(node for node in calls if node in reached)


def _trains(node: fx.Node) -> bool:
    return len(node.args) > 5 and bool(node.args[5])


def _dims(node: fx.Node, rank: int) -> list[int]:
    """The dimensions that an operation is along; all of them where it names none."""
    given = arguments(node)
    for name in ("dim", "dims"):
        found = given.get(name)
        if isinstance(found, int):
            return [found % rank]
        if isinstance(found, list | tuple) and found:
            return [d % rank for d in found]
    return list(range(rank))


def _leaves(node: fx.Node) -> list[Any]:
    return [*tree_leaves(list(node.args)), *tree_leaves(dict(node.kwargs))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
