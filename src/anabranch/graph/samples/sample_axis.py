"""Sample axes: the sample that each element of a value belongs to, in a shared dimension too.

A tensor's samples are in one dimension, alone or folded with others. Folded, an index into that
dimension counts through ``outer``, then samples, then ``inner``::

    [n, h, l]                  view(n * h, l)         index // h is the sample         inner = h
    [h, n, l]                  view(h * n, l)         index % n is the sample          inner = 1
    [l, n, h * e]   view(l, n * h, e).transpose(0, 1)     index // h                   inner = h

Sizes at two numbers of samples tell the dimension, strides of views how samples are folded in it.
Other operations that keep the folded size are taken to keep its order, unless they are known to
reorder; ``sample_order`` runs operations that are not known either way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from anabranch.graph import operations
from anabranch.graph.call_traits import (
    SampleAxis,
    arguments,
    base_name,
    dims_along,
    is_integer,
    keyed,
    tensor,
    value_inputs,
)
from anabranch.graph.flat_program import CallKey, FlatProgram, is_random

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
_REPEATS = ("repeat", "tile", "repeat_interleave")
_REORDER = operations.words(
    """
    cat stack concat index_select gather flip roll sort argsort topk index_copy index_add
    index_reduce scatter scatter_add scatter_reduce masked_scatter
    """
)


PAIRS = "it relates samples with each other"
RAGGED = "its size depends on the data"
APART = "a view takes its samples apart"
MIXED = "its rows, as many as samples, have parts of several of them"
UNORDERED = "its samples are folded in an unknown way"
MADE = "it is made of their number alone, as torch.arange(2 * n) is"


def blocks(axis: SampleAxis, shape: Sequence[int], samples: int) -> tuple[int, int, int]:
    """Return sizes ``[before, samples, after]`` of a value in order; 0 samples if it has none."""
    if axis.dim < 0:
        return 1, 0, math.prod(shape)
    outer, _, inner = axis.parts(shape, samples)
    before = math.prod(shape[: axis.dim]) * outer
    return before, samples, inner * math.prod(shape[axis.dim + 1 :])


def sample_axes(
    program: FlatProgram, other: FlatProgram, reordering: Collection[CallKey] = ()
) -> dict[fx.Node, SampleAxis]:
    """Return the sample axis of every tensor of a program; ``other`` has twice its samples. The
    calls in ``reordering`` do not keep the order of folded samples, though their sizes look so.
    """
    twins = dict(zip(program.graph.nodes, other.graph.nodes, strict=True))
    unordered = {node for key, node in keyed(program.calls) if key in reordering}
    axes: dict[fx.Node, SampleAxis] = {}
    for node in program.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            here, there = tensor(node), tensor(twins[node])
            if here is not None and there is not None:
                axis = _axis(node, here, there, program.samples, axes)
                axes[node] = replace(axis, trouble=UNORDERED) if node in unordered else axis
    return axes


def is_order_known(node: fx.Node) -> bool:
    """True for operations that keep folded samples in order, or are known to reorder them."""
    if base_name(node) == "getitem":
        (node,) = node.all_input_nodes
    name = base_name(node).rstrip("_")
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in (*_VIEWS, *_REORDER):
        return True
    return name in operations.KEEPS_ORDER or is_random(node.target)


def _sizes(value: torch.Tensor) -> list[Any]:
    """Return sizes; None for a size that only a run knows, as of a mask's entries."""
    return [n if isinstance(n, int) else n.node.maybe_as_int() for n in value.shape]


def _axis(
    node: fx.Node,
    here: torch.Tensor,
    there: torch.Tensor,
    samples: int,
    axes: dict[fx.Node, SampleAxis],
) -> SampleAxis:
    pairs = list(zip(_sizes(here), _sizes(there), strict=True))
    if any(None in pair for pair in pairs):
        return SampleAxis(-1, trouble=RAGGED)
    moving = [d for d, (a, b) in enumerate(pairs) if a != b]
    if not moving:
        return SampleAxis(-1)
    dim = moving[0]
    size, twice = pairs[dim]
    if len(moving) > 1 or size % samples or twice != 2 * size:
        return SampleAxis(dim, trouble=PAIRS)
    if base_name(node) in _VIEWS:
        return _viewed(node.all_input_nodes[0], here, dim, samples, axes)
    if base_name(node) in _REPEATS and len(node.all_input_nodes) == 1:
        axis, before = axes.get(node.all_input_nodes[0]), tensor(node.all_input_nodes[0])
        if axis is not None and before is not None and axis.dim >= 0 and not axis.trouble:
            by_entry = base_name(node) == "repeat_interleave"  # or as a whole
            # All dimensions are one where none is named.
            first = 0 if arguments(node).get("dim", 0) is None else axis.dim
            times = size // math.prod(before.shape[first : axis.dim + 1]) if by_entry else 1
            return SampleAxis(dim, axis.inner * times)
    return _kept(node, here, dim, samples, axes)


def _viewed(
    source: fx.Node, here: torch.Tensor, dim: int, samples: int, axes: dict[fx.Node, SampleAxis]
) -> SampleAxis:
    """Return the axis of a view, which counts through the same elements in the same order."""
    axis, before = axes.get(source), tensor(source)
    if axis is None or axis.dim < 0 or axis.trouble or before is None:
        return axis or SampleAxis(dim, trouble=UNORDERED)
    # The sample of element e is (e // stride) % samples.
    stride = axis.inner * math.prod(before.shape[axis.dim + 1 :])
    step = math.prod(here.shape[dim + 1 :])
    if stride % step or (step * here.shape[dim]) % (stride * samples):
        return SampleAxis(dim, trouble=MIXED if here.shape[dim] == samples else APART)
    return SampleAxis(dim, stride // step)


def _kept(
    node: fx.Node, here: torch.Tensor, dim: int, samples: int, axes: dict[fx.Node, SampleAxis]
) -> SampleAxis:
    """Return samples folded as in the inputs of the same folded size, or that are joined to it."""
    size, rank = here.shape[dim], here.dim()
    if base_name(node) == "getitem":
        (node,) = node.all_input_nodes
    joined = base_name(node) in ("cat", "concat") and dim in dims_along(node, rank)
    inner_sizes, has_samples = set(), False
    for source in node.all_input_nodes:
        axis, value = axes.get(source), tensor(source)
        if axis is None or value is None or axis.dim < 0 or axis.trouble in (PAIRS, MADE):
            continue
        if axis.trouble:
            return SampleAxis(dim, trouble=axis.trouble)
        has_samples = True
        if joined or value.shape[axis.dim] == size:
            inner_sizes.add(axis.inner if axis.dim == dim or not joined else 0)
    if size == samples:
        return SampleAxis(dim)
    if not (has_samples or is_random(node.target)):
        return SampleAxis(dim, trouble=MADE)
    if (_reorders(node, dim, rank, axes) and not joined) or len(inner_sizes) != 1:
        return SampleAxis(dim, trouble=UNORDERED)
    return SampleAxis(dim, inner_sizes.pop())


def _reorders(node: fx.Node, dim: int, rank: int, axes: dict[fx.Node, SampleAxis]) -> bool:
    """Return True if an operation may bring the entries of a dimension into another order."""
    name = base_name(node).rstrip("_")
    if name in ("index", "index_put"):
        indices = [index for index in arguments(node)["indices"] if index in axes]
        return any(axes[index].dim >= 0 and not is_in_order(index) for index in indices)
    if name in operations.LOOKUPS:
        return axes.get(arguments(node)["weight"], SampleAxis(-1)).dim >= 0
    if name in ("pad", "constant_pad_nd"):
        return any(arguments(node)["pad"][2 * (rank - 1 - dim) :][:2])
    return name in _REORDER and dim in dims_along(node, rank)


def is_in_order(index: fx.Node) -> bool:
    """Return True for a mask, and for an index that counts, as torch.arange(n) does."""
    value = tensor(index)
    if value is not None and value.dtype is torch.bool:
        return True
    # arange(n)[:, None] is a slice that leaves nothing out.
    while base_name(index) in ("unsqueeze", "expand", "to", "_to_copy", "slice"):
        part, index = index, index.all_input_nodes[0]
        shapes = {str(each.meta["val"].shape) for each in (part, index)}  # sizes may be symbols
        if base_name(part) == "slice" and len(shapes) > 1:
            return False
    options = arguments(index)
    from_zero = options.get("start", 0) == 0 and options.get("step", 1) == 1
    return base_name(index) == "arange" and from_zero


def is_index(node: fx.Node, index: fx.Node, axes: Mapping[fx.Node, SampleAxis]) -> bool:
    """True if a call reads ``index`` as places of samples in its slice, such as ``arange(n)``."""
    options, source = arguments(node), node.all_input_nodes[0]
    dim, value = axes.get(source, SampleAxis(-1)).dim, tensor(source)
    indices = options.get("indices", options.get("index"))
    if isinstance(indices, list | tuple):
        return is_integer(index) and index in indices and indices.index(index) == dim
    is_along = value is not None and dim in dims_along(node, value.dim())
    return (indices is index and is_along) or options.get("offsets") is index


def is_across(
    node: fx.Node, axes: Mapping[fx.Node, SampleAxis], samples: int, known: Collection[fx.Node]
) -> bool:
    """Return True for an operation across the samples of its first input whose result has samples.

    Args:
        known: inputs that are known before the forward begins.
    """
    source, name = node.all_input_nodes[0], base_name(node).rstrip("_")
    axis, value = axes.get(source, SampleAxis(-1)), tensor(source)
    if value is None:
        return False
    dim, rank, options = axis.dim, value.dim(), arguments(node)
    if axis.trouble == RAGGED:
        dim = next(d for d, n in enumerate(value.shape) if not isinstance(n, int))
    if dim < 0:
        return False
    index = dict(enumerate(options["indices"])).get(dim) if name == "index" else None
    if name in ("gather", "index_select") and dim in dims_along(node, rank):
        index = options["index"]
    if index is not None and not is_in_order(index):
        # An index that is known from the batch alone names samples of the whole batch.
        place, is_sample = axes[index], value.shape[dim] == samples
        is_known = index in known and place.dim >= 0 and not place.trouble
        return axis.trouble == RAGGED or (is_known and is_sample)
    if name in operations.ALONG | operations.SCATTERS:
        return dim in dims_along(node, rank)
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return dim >= rank - len(options["normalized_shape"])
    if (
        name in ("group_norm", "native_group_norm", "instance_norm")
        or name in operations.CONVOLUTIONS
    ):
        return dim > 0
    if name in operations.RECURRENT:
        return dim == bool(options.get("batch_first", True))
    return ("scaled_dot_product" in name or name in ("tril", "triu")) and dim >= rank - 2


def pairs_others(node: fx.Node, axes: Mapping[fx.Node, SampleAxis], samples: int) -> bool:
    """Return True for an operation on entries at the same places of values whose samples are folded
    in different ways, such as ``x.flatten(0, 1) + y.repeat(3, 1)``.
    """
    name, read = base_name(node), value_inputs(node)
    if name in operations.LOOKUPS or (name.startswith("index") and any(map(is_integer, read[1:]))):
        return False
    picks = name.startswith(("cat", "concat", "gather", "scatter"))
    folds: dict[int, set[int]] = {}
    for source in read:
        axis, value = axes.get(source, SampleAxis(-1)), tensor(source)
        if axis.dim >= 0 and not axis.trouble and value is not None:
            if picks and axis.dim in dims_along(node, value.dim()):
                continue
            folds.setdefault(_sizes(value)[axis.dim], set()).add(axis.inner)
    return any(len(inner) > 1 for size, inner in folds.items() if size > samples)


def is_over_one_index(einsum: fx.Node, twins: Mapping[fx.Node, fx.Node]) -> bool:
    """Return False for ``ni,mj->ij`` of samples n and m, a product of two sums over them.

    Args:
        twins: node -> the same node in the program for twice the samples.
    """
    changed = set()
    terms = str(einsum.args[0]).partition("->")[0].split(",")
    for term, operand in zip(map(str.strip, terms), value_inputs(einsum), strict=True):
        here, there = (n.meta["val"].shape for n in (operand, twins[operand]))
        letters = term.replace("...", "." * (len(here) - len(term) + 3))
        pairs = zip(letters, here, there, strict=True)
        changed |= {c for c, a, b in pairs if not isinstance(a, int) or a != b}
    return len(changed) == 1
