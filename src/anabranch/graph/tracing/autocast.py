"""Casts of ``torch.autocast`` as calls of their own, so that a region of it can be cut.

Autocast casts what an operation reads before it runs. A run of each operation on fake tensors, with
a recorder below autocast, tells what is cast to which type::

    with torch.autocast("cpu", torch.bfloat16):        w' = weight.to(bfloat16)
        y = linear(x, weight)                   ->     x' = x.to(bfloat16)
                                                       y  = linear(x', w')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anabranch.device import accelerator
from anabranch.device.kinds import CPU

_aten = torch.ops.aten
HALF: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""``Precision`` -> element type of autocast."""
_CAST_VIEWS = _aten.einsum, _aten.scaled_dot_product_attention
"""Operations that cast views of their inputs to half precision, or cast by themselves as well."""
_CAST_OPERATIONS = (_aten.to, _aten._to_copy, _aten.type_as, _aten.copy_)


@dataclass(frozen=True)
class AutocastRegion:
    """One ``with torch.autocast(...)`` of the forward, or around all of it.

    Attributes:
        device_type, dtype: its arguments.
        cast_parameters: (parameter, type, operator) -> the call that casts it, shared by all calls
            that read it, or by those of one operator where operators are known.
    """

    device_type: str
    dtype: torch.dtype
    cast_parameters: dict[tuple[fx.Node, torch.dtype, int], fx.Node] = field(default_factory=dict)
    _known: dict[str, Sequence[torch.dtype | None] | None] = field(default_factory=dict)

    def casts(self, target: Any, args: Any, kwargs: Any) -> Mapping[fx.Node, torch.dtype] | None:
        """Return types to which autocast casts arguments of a call; None if it casts inside it.

        They depend on the types of arguments alone, so each combination is tried once.
        """
        if getattr(target, "_schema", None) is None or target.overloadpacket in _CAST_OPERATIONS:
            return {}
        number = dict[fx.Node, str]()

        def name(node: fx.Node) -> str:
            value = node.meta["val"]
            dtype = value.dtype if isinstance(value, torch.Tensor) else value
            return number.setdefault(node, f"{len(number)} {dtype}")

        key = f"{target} {fx.map_arg((args, kwargs), name)}"
        if key not in self._known:
            types: Mapping[fx.Node, torch.dtype] | None = {}
            if self.device_type == CPU or accelerator.count(self.device_type):
                types = self._casts(target, args, kwargs)
            else:  # as far as it can be tried without the device
                with suppress(RuntimeError, AssertionError):
                    types = self._casts(target, args, kwargs) or {}
            self._known[key] = None if types is None else [types.get(node) for node in number]
        if (known := self._known[key]) is None:
            return None
        return {node: dtype for node, dtype in zip(number, known, strict=True) if dtype}

    def _casts(self, target: Any, args: Any, kwargs: Any) -> Mapping[fx.Node, torch.dtype] | None:
        alike = dict[fx.Node, Any]()

        def like(node: fx.Node) -> Any:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and node not in alike:
                # On the device of the region, wherever the program constructs its tensors.
                alike[node] = torch.empty_like(value.detach(), device=self.device_type)
            return alike.get(node, value)

        values, options = fx.map_arg((args, kwargs), like)
        options = tree_map_only(torch.device, lambda _: torch.device(self.device_type), options)
        # Enabled inside the block only: an autocast that begins enabled asks for the device.
        autocast = torch.autocast(self.device_type, self.dtype, enabled=False, cache_enabled=False)
        with torch.no_grad(), autocast, _CastRecorder() as casts:
            torch.set_autocast_enabled(self.device_type, True)
            result = target(*values, **options)
        node_of = {id(value): node for node, value in alike.items()}
        types = {node_of[id(t)]: dtype for t, dtype in casts.made if id(t) in node_of}
        casts_views = bool(casts.made) and target.overloadpacket in _CAST_VIEWS
        if casts_views:
            floats = (n for n, v in alike.items() if v.is_floating_point())
            types = {n: self.dtype for n in floats if alike[n].dtype != self.dtype}
        cast = {id(alike[node]): alike[node].to(dtype) for node, dtype in types.items()}
        values, options = tree_map_only(
            torch.Tensor, lambda value: cast.get(id(value), value), (values, options)
        )
        try:
            with torch.no_grad(), _CastRecorder() as others:  # that the operation makes by itself
                again = target(*values, **options)
        except RuntimeError:  # some casts were not recorded
            return None
        inside, own = (
            sum(id(tensor) not in node_of for tensor, _ in recorder.made)
            for recorder in (casts, others)
        )
        is_known = inside <= own or casts_views
        return types if is_known and _types(result) == _types(again) else None


def _types(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class _CastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records floating point tensors that are cast, with the types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if (
            func is _aten._to_copy.default
            and options.get("dtype") is not None
            and args[0].is_floating_point()
        ):
            self.made.append((args[0], options["dtype"]))
        return func(*args, **options)


def region_of(target: Any, args: Any, kwargs: Any) -> tuple[fx.GraphModule, Any]:
    """Return the body of a region with one call, and the nodes that the call reads."""
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()

    def place(node: fx.Node) -> fx.Node:
        if node not in inputs:
            inputs[node] = graph.placeholder(node.name)
        return inputs[node]

    args, kwargs = fx.map_arg((args, kwargs), place)
    graph.output((graph.call_function(target, args, kwargs),))
    return fx.GraphModule(torch.nn.Module(), graph), tuple(inputs)
