"""Slices of values, computed from slices of the inputs.

A slice of the features of a value often needs but a slice of the parameters behind it. It is pushed
up through elementwise calls, reshapes and attention to the concatenation or the product that makes
the features::

    x -- linear(W) -- gelu -- [0:512]      =>      x -- linear(W[0:512]) -- gelu
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from anabranch.graph.call_traits import arguments, base_name, inputs_of
from anabranch.graph.flat_program import FlatProgram, written
from anabranch.graph.operations import words
from anabranch.graph.rewrites.calls import NotSliceableError, insert, slice_of

aten = torch.ops.aten

_ELEMENTWISE = words(
    """
    relu relu_ gelu silu silu_ tanh sigmoid leaky_relu leaky_relu_ elu celu selu mish softplus
    hardtanh hardswish relu6 add sub mul div neg exp log sqrt rsqrt pow abs square erf clamp
    clamp_min where masked_fill to _to_copy type_as float clone contiguous alias
    """
)
_SPLITS = words("split split_with_sizes chunk unsafe_split unsafe_chunk")


class SlicedValues:
    """Slices of values of a program, each made once.

    Attributes:
        path: path of the operator that inserted calls belong to.
        visited: calls whose slices were made.
    """

    def __init__(self, program: FlatProgram, path: str) -> None:
        self._program, self.path = program, path
        self._known: dict[tuple[fx.Node, int, int, int], fx.Node] = {}
        self.visited: set[fx.Node] = set()
        changes = [(node, target) for node in program.calls for target in written(node)]
        self._changes = [(node, target.meta.get("storage")) for node, target in changes]

    def at(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Return a node with entries ``start`` to ``stop`` of a dimension of a value.

        Raises:
            NotSliceableError: naming the call that does not allow it.
        """
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise NotSliceableError(f"{node.target} makes several values")
        dim %= value.dim()
        if (start, stop) == (0, value.shape[dim]):
            return node
        key = (node, dim, start, stop)
        if key not in self._known:
            self._known[key] = self._made(node, dim, start, stop)
        return self._known[key]

    def _made(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        source = self._program.sources.get(node)
        if source is not None and source.kind == "parameter":
            return slice_of(self._program, node, dim, start, stop)
        if source is not None:
            first = self._program.calls[0]
            return insert(first, self.path, aten.slice.Tensor, node, dim, start, stop)
        changes = [n for n, storage in self._changes if storage == node.meta["storage"]]
        is_chain = len(node.users) == 1 and self.visited.issuperset(node.users)
        for change in changes:
            if change is not node and not (is_chain and change in self.visited):
                raise NotSliceableError(f"{node.name} is changed in place by {change.name}")
        name = base_name(node)
        rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name)
        if rule is None or node.op != "call_function":
            raise NotSliceableError(f"{name} is neither elementwise nor a product")
        self.visited.add(node)
        return rule(self, node, dim, start, stop)

    def call(self, node: fx.Node, changed: Mapping[str, Any], target: Any = None) -> fx.Node:
        """Insert a call like this one, with other arguments by their names."""
        in_order, by_name = inputs_of(node.target, arguments(node) | dict(changed))
        return insert(node, self.path, target or node.target, *in_order, **by_name)


Rule = Callable[[SlicedValues, fx.Node, int, int, int], fx.Node]
"""Makes entries ``start`` to ``stop`` of dimension ``dim`` of what a call returns."""


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _broadcast(values: SlicedValues, node: Any, like: fx.Node, dim: int, *where: int) -> Any:
    """Return the slice of an argument that is broadcast to the shape of a call's result."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], Tensor):
        return node
    own = dim - (len(_shape(like)) - len(_shape(node)))
    return node if own < 0 or _shape(node)[own] == 1 else values.at(node, own, *where)


def _elementwise(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    changed = {
        name: _broadcast(values, value, node, dim, start, stop)
        for name, value in arguments(node).items()
    }
    name = base_name(node)
    target = getattr(aten, name[:-1]).default if name.endswith("_") else None
    return values.call(node, changed, target)


def _dropout(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    options = arguments(node)
    if options["train"] and options["p"]:
        raise NotSliceableError("dropout draws its random numbers for whole values")
    return values.at(options["input"], dim, start, stop)


def _cat(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    options = arguments(node)
    joined = options["dim"] % len(_shape(node))
    if dim != joined:
        return values.call(
            node, {"tensors": [values.at(n, dim, start, stop) for n in options["tensors"]]}
        )
    parts, begin = [], 0
    for part in options["tensors"]:
        end = begin + _shape(part)[dim]
        if start < end and begin < stop:
            parts.append(values.at(part, dim, max(start, begin) - begin, min(stop, end) - begin))
        begin = end
    return parts[0] if len(parts) == 1 else values.call(node, {"tensors": parts})


def _product(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice a linear layer or a convolution by rows of its weight."""
    options, is_linear = arguments(node), base_name(node) == "linear"
    if dim != (len(_shape(node)) - 1 if is_linear else 1) or options.get("groups", 1) != 1:
        raise NotSliceableError(f"{base_name(node)} makes that dimension of several others")
    changed = {"weight": values.at(options["weight"], 0, start, stop)}
    if options["bias"] is not None:
        changed["bias"] = values.at(options["bias"], 0, start, stop)
    return values.call(node, changed)


def _addmm(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    options = arguments(node)
    if dim != 1:
        raise NotSliceableError("addmm is cut along its features alone")
    bias = _broadcast(values, options["self"], node, dim, start, stop)
    return values.call(node, {"self": bias, "mat2": values.at(options["mat2"], 1, start, stop)})


def _matmul(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice a matrix product by its last dimension, its rows, or by a batch of products."""
    (first, a), (second, b) = list(arguments(node).items())[:2]
    dims = len(_shape(node))
    if min(len(_shape(a)), len(_shape(b))) < 2:
        raise NotSliceableError("a product with a vector has other dimensions than both")
    if dim == dims - 1:
        return values.call(node, {second: values.at(b, -1, start, stop)})
    if dim == dims - 2:
        return values.call(node, {first: values.at(a, -2, start, stop)})
    changed = {
        name: _broadcast(values, value, node, dim, start, stop)
        for name, value in ((first, a), (second, b))
    }
    return values.call(node, changed)


def _embedding(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    if dim != len(_shape(node)) - 1:
        raise NotSliceableError("a table is cut along its width alone")
    return values.call(node, {"weight": values.at(arguments(node)["weight"], 1, start, stop)})


def _reshaped(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice a view with other dimensions, if the range is a range of one dimension before."""
    before, after = arguments(node)["self"], _shape(node)
    old, outer = _shape(before), math.prod(after[:dim])
    own = next((d for d in range(len(old)) if math.prod(old[:d]) == outer and old[d] > 1), None)
    if own is None:
        raise NotSliceableError("a view mixes that dimension with others")
    # Entries of the finer of the two dimensions that make one of the coarser.
    many, few = max(old[own], after[dim]), min(old[own], after[dim])
    step, rest = divmod(many, few)
    if rest:
        raise NotSliceableError("a view mixes that dimension with others")
    if old[own] >= after[dim]:
        where = start * step, stop * step
    elif start % step or stop % step:
        raise NotSliceableError("a view mixes that dimension with others")
    else:
        where = start // step, stop // step
    size = [*after[:dim], stop - start, *after[dim + 1 :]]
    return insert(node, values.path, aten.reshape.default, values.at(before, own, *where), size)


def _moved(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice a call that moves dimensions; strides of a marked tensor show which one comes here."""
    before = arguments(node)["self"]
    size = _shape(before)
    strides = torch.empty(size, device="meta").stride()
    for own, (length, stride) in enumerate(zip(size, strides, strict=True)):
        marked = [0] * len(size)
        marked[own] = stride
        like = torch.empty_strided(size, marked, device="meta")
        others = {n: v for n, v in arguments(node).items() if n != "self"}
        if node.target(like, *others.values()).stride(dim) and length > 1:  # type: ignore[operator]
            return values.call(node, {"self": values.at(before, own, start, stop)})
    raise NotSliceableError(f"{base_name(node)} makes a new dimension")


def _item(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice one of the tensors that a call has split another into, or sums of a table's bags."""
    split, index = node.args
    assert isinstance(split, fx.Node)
    if "embedding_bag" in base_name(split) and index == 0:
        values.visited.add(split)
        bags = values.call(split, {"weight": values.at(arguments(split)["weight"], 1, start, stop)})
        return insert(node, values.path, operator.getitem, bags, 0)
    if not isinstance(split, fx.Node) or base_name(split) not in _SPLITS:
        raise NotSliceableError("the call makes several values")
    values.visited.add(split)
    options = arguments(split)
    if options["dim"] % len(_shape(node)) != dim:
        raise NotSliceableError("the values are split along another dimension")
    offset = sum(part.shape[dim] for part in split.meta["val"][:index])
    return values.at(options["self"], dim, offset + start, offset + stop)


def _attention(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice attention by heads: queries, and the keys and values that they share."""
    options, heads = arguments(node), _shape(node)[dim]
    if dim >= len(_shape(node)) - 2 or options["dropout_p"]:
        raise NotSliceableError("attention is cut by heads, and without dropout of its own")
    changed = {"query": values.at(options["query"], dim, start, stop)}
    for name in ("key", "value"):
        shared, rest = divmod(heads, _shape(options[name])[dim])
        if rest or start % shared or stop % shared:
            raise NotSliceableError("heads share keys with heads of another slice")
        changed[name] = values.at(options[name], dim, start // shared, stop // shared)
    changed["attn_mask"] = _broadcast(values, options["attn_mask"], node, dim, start, stop)
    return values.call(node, changed)


def _beside(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Slice a call along one dimension, such as a softmax or a slice, in another dimension."""
    options = arguments(node)
    if options["dim"] % len(_shape(node)) == dim:
        raise NotSliceableError(f"{base_name(node)} is along that dimension")
    return values.call(node, {"self": values.at(options["self"], dim, start, stop)})


def _expanded(values: SlicedValues, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    size = [*_shape(node)]
    size[dim] = stop - start
    own = _broadcast(values, arguments(node)["self"], node, dim, start, stop)
    return values.call(node, {"self": own, "size": size})


_RULES: dict[str, Rule] = {
    "cat": _cat,
    "dropout": _dropout,
    "addmm": _addmm,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "expand": _expanded,
    "getitem": _item,
    **dict.fromkeys(words("linear conv1d conv2d conv3d"), _product),
    **dict.fromkeys(words("matmul mm bmm"), _matmul),
    **dict.fromkeys(words("softmax _softmax slice"), _beside),
    **dict.fromkeys(words("view reshape _unsafe_view flatten unflatten"), _reshaped),
    **dict.fromkeys(words("transpose permute t movedim unsqueeze squeeze"), _moved),
}


def concatenated_widths(node: fx.Node, dim: int) -> list[int]:
    """Return widths of non-empty inputs of a concatenation, perhaps behind elementwise calls."""
    if node.op == "call_function" and base_name(node) in _ELEMENTWISE:
        widest = [n for n in node.all_input_nodes if _shape(n) == _shape(node)]
        return concatenated_widths(widest[0], dim) if len(widest) == 1 else []
    if node.op != "call_function" or base_name(node) != "cat":
        return []
    options = arguments(node)
    if options["dim"] % len(_shape(node)) != dim % len(_shape(node)):
        return []
    return [width for part in options["tensors"] if (width := _shape(part)[dim])]
