"""Writes into memory that has several names, as new values.

A program is analysed and cut by the readers of values. A write through a view, ``t[:, 0] = -100``,
has no reader: later readers of ``t`` do not name it. So the write makes a new value for them::

    v = select(t, 1, 0)                       v = select(t, 1, 0)
    fill_(v, -100)                            f = full_like(v, -100)
    loss(t)                        ->         u = select_scatter(t, f, 1, 0)
                                              loss(u)

Parameters, buffers, batches, and writes under ``no_grad`` or at random stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from anabranch.graph.flat_program import is_random, schema_name
from anabranch.graph.operations import words

_aten = torch.ops.aten
Make = Callable[..., fx.Node]
"""Inserts a call of an operation with positional arguments."""

_KEEPS_ORDER = words(
    "alias view reshape flatten unflatten unsqueeze squeeze view_as contiguous to type_as"
)
_SCATTERS = (_aten.select_scatter.default, _aten.slice_scatter.default)
_PARTS = words("split split_with_sizes chunk tensor_split")


def writes_first(target: Any) -> bool:
    """True for an operation that changes its first argument, and nothing else, and returns it."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.endswith("_"):
        return False
    infos = [argument.alias_info for argument in schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write] == [0]


def new_value(target: Any, args: Any, kwargs: Any, make: Make) -> fx.Node | None:
    """Make the value that a write (``writes_first``) leaves in its first argument, as a new value;
    return None if no operation makes it.
    """
    name, (changed, *others) = target._schema.name.removeprefix("aten::").rstrip("_"), args
    if "::" in name or is_random(target):
        return None
    if name == "zero":
        return make(_aten.zeros_like.default, changed)
    if name == "fill" and not isinstance(others[0], fx.Node):
        return make(_aten.full_like.default, changed, others[0])
    overloads = target._overloadname, f"Tensor_{target._overloadname}"  # of pow_.Scalar
    known = [getattr(getattr(_aten, name, None), overload, None) for overload in overloads]
    twins = [twin for twin in known if twin and str(twin._schema.arguments[0].type) == "Tensor"]
    is_copy = name in ("copy", "fill")
    if not twins and not is_copy:
        return None
    value = others[0] if is_copy else make(twins[0], *args, **kwargs)
    like, now = changed.meta["val"], value.meta["val"]
    if now.device != like.device:
        return None
    if now.dtype != like.dtype:
        value = make(_aten.to.dtype, value, like.dtype)
    if now.shape != like.shape:
        value = make(_aten.expand.default, value, list(like.shape))
    return make(_aten.clone.default, value) if is_copy else value


def views(node: fx.Node) -> list[fx.Node]:
    """Return the path of views and writes to a node, from the value in whose memory it is."""
    path = [node]
    while (source := _source(path[0])) is not None:
        path.insert(0, source)
    return path


def _source(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if node.target is operator.getitem and isinstance(source, fx.Node):
        source = source.args[0] if source.args else None
    if not isinstance(source, fx.Node) or "storage" not in node.meta:
        return None
    return source if source.meta.get("storage") == node.meta["storage"] else None


def put_back(view: fx.Node, source: fx.Node, value: fx.Node, make: Make) -> fx.Node | None:
    """Make the source of a view whose new value is ``value``; return None if that is impossible."""
    if writes_first(view.target):
        return value
    make = _of_reals(make)
    if view.target is operator.getitem:
        return _put_part_back(view, source, value, make)
    name, rest = schema_name(view).removeprefix("aten::"), view.args[1:]
    like = source.meta["val"]
    if view.meta["val"].dtype != like.dtype:
        return None
    if name in _KEEPS_ORDER:
        is_same = value.meta["val"].shape == like.shape
        return value if is_same else make(_aten.reshape.default, value, list(like.shape))
    if name == "select":
        return make(_aten.select_scatter.default, source, value, *rest)
    if name == "slice":
        is_all = value.meta["val"].shape == like.shape and (len(rest) < 4 or rest[3] == 1)
        return value if is_all else make(_aten.slice_scatter.default, source, value, *rest)
    if name == "diagonal":
        return make(_aten.diagonal_scatter.default, source, value, *rest)
    if name in ("t", "transpose"):
        target: Any = view.target
        return make(target, value, *rest)
    if name == "permute":
        dims = [d % like.dim() for d in rest[0]]  # type: ignore[union-attr]
        return make(_aten.permute.default, value, [dims.index(d) for d in range(len(dims))])
    return None


def _put_part_back(item: fx.Node, source: fx.Node, value: fx.Node, make: Make) -> fx.Node | None:
    parts, index = item.args
    assert isinstance(parts, fx.Node)
    assert isinstance(index, int)
    name = schema_name(parts).removeprefix("aten::")
    if name == "unbind":
        dim = parts.args[1] if len(parts.args) > 1 else 0
        return make(_aten.select_scatter.default, source, value, dim, index)
    if name not in _PARTS:
        return None
    dim = parts.args[2] if len(parts.args) > 2 else 0
    sizes = [part.shape[dim] for part in parts.meta["val"]]
    start = sum(sizes[:index])
    return make(_aten.slice_scatter.default, source, value, dim, start, start + sizes[index])


def _of_reals(make: Make) -> Make:
    """Return ``make`` with scatters of complex numbers on pairs of reals, since except for that of
    a diagonal they have no derivative.
    """

    def made(target: Any, source: fx.Node, *rest: Any) -> fx.Node:
        like = source.meta["val"]
        if not like.is_complex() or target not in _SCATTERS:
            return make(target, source, *rest)
        value, *places = rest
        for i in range(len(places)):
            if target._schema.arguments[i + 2].name.startswith("dim"):
                places[i] %= like.dim()
        pairs = [make(_aten.view_as_real.default, part) for part in (source, value)]
        return make(_aten.view_as_complex.default, make(target, *pairs, *places))

    return made


def viewed(path: list[fx.Node], value: fx.Node, make: Make) -> fx.Node:
    """Return the last view of a path, of a new value in place of the path's first."""
    for view in path[1:]:
        if writes_first(view.target):
            continue
        target: Any = view.target
        rest = view.args[1:]
        if target is operator.getitem:
            parts: Any = view.args[0]
            value = make(parts.target, value, *parts.args[1:], **parts.kwargs)
        value = make(target, value, *rest, **view.kwargs)
    return value
