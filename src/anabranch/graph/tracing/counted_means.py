"""Means over chosen entries of a batch, such as labels that count, as sums divided by counts.

``F.cross_entropy(x, labels)`` and ``x[mask].mean()`` divide by a count of their own, which differs
between a slice and its batch. In a sum divided by a count, the count can be that of the batch
(``batch_statistics``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from anabranch.graph.call_traits import arguments, base_name, has_classes, inputs_of, tensor
from anabranch.graph.flat_program import FlatProgram, insert, storage, tensors, written
from anabranch.graph.operations import BY_CLASS, words

_aten = torch.ops.aten
_COUNTED = words("cross_entropy_loss nll_loss_nd")
_BY_ROW = words("cosine_embedding_loss triplet_margin_loss")
_NOT_SUMMED = BY_CLASS | words("ctc_loss multi_margin_loss multilabel_margin_loss")
"""Losses whose mean is no sum over a count, or whose sum over nothing is undefined in PyTorch."""
_LOOKS, _PLACES = words("where nonzero nonzero_numpy"), words("getitem select squeeze")
_MEAN, _SUM = 1, 2


def counted_means(program: FlatProgram) -> FlatProgram:
    """Change means over labels that are not ignored, or over entries that a mask chooses, into sums
    divided by a count of these; return the program.
    """
    for node in program.calls:
        _choose_by_mask(program, node)
    program.drop_dead()
    for node in program.calls:
        name, options, read = base_name(node), arguments(node), node.all_input_nodes
        if name == "div" and len(read) == 2 and base_name(read[1]) == "sym_size":
            # x[mask].sum() / len(x[mask])
            count = _chosen_count(node, read[1].all_input_nodes[0], by_row=True)
            if count is not None:
                node.replace_input_with(read[1], count)
            continue
        is_mean, count = node.target is _aten.mean.default, None
        is_loss = options.get("reduction") == _MEAN and "::" not in name
        if is_loss and name in _COUNTED and has_classes(node):
            count = _count(node, options)
        elif is_mean or (is_loss and name not in _NOT_SUMMED):
            count = _chosen_count(node, read[0], by_row=name in _BY_ROW)
        if count is not None:
            target = _aten.sum.default if is_mean else node.target
            in_order, by_name = inputs_of(target, options | {"reduction": _SUM})
            total = insert(node, target, *in_order, **by_name)
            node.replace_all_uses_with(insert(node, _aten.div.Tensor, total, count))
            program.graph.erase_node(node)
    return program


def _choose_by_mask(program: FlatProgram, call: fx.Node) -> None:
    """Have ``x[torch.where(mask)]`` and ``x[mask.nonzero()[:, 0]]`` read ``x[mask]``: the same."""
    places: Any = call.args[1] if call.target is _aten.index.Tensor else [None]
    if any(place is None or base_name(place) not in _PLACES for place in places):
        return
    sources = {source for place in places for source in place.all_input_nodes}
    if len(sources) > 1 or base_name(look := sources.pop()) not in _LOOKS or len(look.args) > 1:
        return
    read, mask = (node.all_input_nodes[0] for node in (call, look))
    value, chosen = read.meta["val"], mask.meta["val"]
    dims, behind = range(chosen.dim()), program.calls[program.calls.index(look) :]
    forms = [(k,) for k in dims], [(1, k) for k in dims], [(1,)][: 2 - len(dims)]
    is_mask = chosen.dtype is torch.bool and chosen.shape == value.shape[: len(dims)]
    is_changed = any(storage(t) == storage(mask) for node in behind for t in written(node))
    if is_mask and not is_changed and [place.args[1:] for place in places] in forms:
        call.args = read, [mask]


def _chosen_count(before: fx.Node, chosen: fx.Node, *, by_row: bool = False) -> fx.Node | None:
    """Insert the count of entries, or rows, of a value whose size a mask decides; else None."""
    value = tensor(chosen)
    if value is None or len(free := [n for n in value.shape if not isinstance(n, int)]) != 1:
        return None
    if (mask := _mask_of(chosen, str(free[0]))) is None:
        return None
    count = insert(before, _aten.sum.default, mask)
    row_size = 1 if by_row else math.prod(n for n in value.shape if isinstance(n, int))
    return count if row_size == 1 else insert(before, _aten.mul.Tensor, count, row_size)


def _mask_of(node: fx.Node, size: str) -> fx.Node | None:
    """Return the mask whose number of true entries is a size; None if it is not found."""
    while node.op == "call_function":
        for source in node.all_input_nodes:
            if any(str(n) == size for value in tensors(source) for n in value.shape):
                node = source
                break
        else:
            break
    read, *others = [*node.all_input_nodes, node]
    masks = [n for n in others[:-1] if (v := tensor(n)) is not None and v.dtype is torch.bool]
    kind, like = base_name(node), tensor(read)
    if len(others) != 2 or len(masks) != 1 or kind not in ("index", "masked_select"):
        return None
    same = like is not None and like.shape == masks[0].meta["val"].shape
    return masks[0] if kind == "index" or same else None


def _count(loss: fx.Node, options: Mapping[str, Any]) -> fx.Node:
    """Insert the count of targets that are not ignored, each with the weight of its class."""
    counts = insert(loss, _aten.ne.Scalar, options["target"], options["ignore_index"])
    if options["weight"] is not None:
        classes = insert(loss, _aten.mul.Tensor, options["target"], counts)
        flat = insert(loss, _aten.flatten.using_ints, classes)
        weights = insert(loss, _aten.index_select.default, options["weight"], 0, flat)
        kept = insert(loss, _aten.flatten.using_ints, counts)
        counts = insert(loss, _aten.mul.Tensor, weights, kept)
    return insert(loss, _aten.sum.default, counts)
