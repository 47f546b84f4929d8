"""Masks that a forward computes twice, as in ``prediction[mask > 0]`` and ``target[mask > 0]``: a
trace does not know that both choose as many entries, and joins no values of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from anabranch.graph.flat_program import is_random, storage, upstream, written
from anabranch.graph.tracing.empty_selections import traced_node

_CHOICES = {"__getitem__", "__setitem__", "masked_select", "nonzero", "where"}


class EqualMasks(TorchFunctionMode):
    """Mode in which entries are chosen by the first of several masks that are computed alike."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[int, FakeTensor] = {}
        self._numbers: dict[fx.Node, int] = {}  # of values, the same for the same calls of the same
        self._calls: dict[str, int] = {}
        self._written: set[int | None] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _CHOICES:
            whole = args[:1] if len(args) > 1 else ()  # of which entries are chosen, or written to
            args = (*whole, *tree_map_only(FakeTensor, self._first, args[len(whole) :]))
        return func(*args, **(kwargs or {}))

    def _first(self, tensor: FakeTensor) -> FakeTensor:
        """Return the first mask that has the values of a mask; other tensors as they are."""
        if tensor.dtype is not torch.bool or (node := traced_node(tensor)) is None:
            return tensor
        mask = self._masks.setdefault(self._number(node), tensor)
        if mask is tensor or (first := traced_node(mask)) is None:
            return tensor
        is_changed = any(storage(call) in self._written for call in upstream([first, node]))
        return tensor if is_changed else mask

    def _number(self, node: fx.Node) -> int:
        for call in node.graph.nodes:
            if call not in self._numbers:
                if call.target in (_enter_autocast, _exit_autocast):
                    self._calls.clear()  # the same calls have other values under autocast
                read = fx.map_arg((call.args, call.kwargs), lambda arg: f"%{self._numbers[arg]}")
                is_own = call.op != "call_function" or is_random(call.target)
                text = call.name if is_own else repr((call.target, read))
                self._numbers[call] = self._calls.setdefault(text, len(self._numbers))
                self._written.update(storage(target) for target in written(call))
        return self._numbers[node]
