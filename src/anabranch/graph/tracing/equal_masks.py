"""Masks that a forward computes twice, taken for one.

``prediction[mask > 0]`` and ``target[mask > 0]`` have as many entries, but each comparison makes a
tensor of its own, so a trace has two counts that it does not know to be equal, and joins no values
of the two. Inside of ``EqualMasks`` both choices are by the first of these tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from anabranch.graph.flat_program import is_random, storage, written
from anabranch.graph.tracing.empty_selections import traced_node

_tensor = torch.Tensor
_CHOICES = {
    *(_tensor.__getitem__, _tensor.__setitem__, _tensor.masked_select, torch.masked_select),
    *(_tensor.nonzero, torch.nonzero, torch.where),
}
"""Operations that may choose entries by a mask."""


class EqualMasks(TorchFunctionMode):
    """Inside, entries are chosen by the first of several masks that are computed alike."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: list[FakeTensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CHOICES:
            whole = args[:1] if len(args) > 1 else ()  # of which entries are chosen, or written to
            args = (*whole, *tree_map_only(FakeTensor, self._first, args[len(whole) :]))
        return func(*args, **(kwargs or {}))

    def _first(self, tensor: FakeTensor) -> FakeTensor:
        """Return the first mask that has the values of a mask; other tensors as they are."""
        if tensor.dtype is not torch.bool or (node := traced_node(tensor)) is None:
            return tensor
        for mask in self._masks:
            first = traced_node(mask)
            if first is not None and _are_equal(first, node):
                return mask
        self._masks.append(tensor)
        return tensor


def _are_equal(first: fx.Node, second: fx.Node) -> bool:
    """True if two values are made by the same calls of the same values, none of them random or of
    memory that is written to.
    """
    seen, pending = {(first, second)}, [(first, second)]
    while pending:
        one, other = pending.pop()
        if one is other:
            continue
        if one.target is not other.target or one.op != "call_function" or is_random(one.target):
            return False
        leaves, form = tree_flatten((one.args, one.kwargs))
        other_leaves, other_form = tree_flatten((other.args, other.kwargs))
        if form != other_form:
            return False
        for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
            if isinstance(leaf, fx.Node) and isinstance(other_leaf, fx.Node):
                pair = leaf, other_leaf
                pending += [pair] if pair not in seen else []
                seen.add(pair)
            elif type(leaf) is not type(other_leaf) or leaf != other_leaf:
                return False
    return not are_written(node for pair in seen for node in pair)


def are_written(nodes: Iterable[fx.Node]) -> bool:
    """True if a call of the graph writes to the memory of one of these values."""
    nodes = list(nodes)
    storages = {storage(node) for node in nodes} - {None}
    return any(storage(to) in storages for node in nodes[0].graph.nodes for to in written(node))
