"""Exports made once by each worker of the tests, for modules that only differ in their weights.

A fifth of the time of all tests was in ``torch.export``, nearly half of it for modules that another
test had exported before. Tests of exports themselves, in ``tests/graph``, make their own.
"""

import io
import os
import pickle
import warnings
from collections.abc import Hashable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing import exporter
from anabranch.graph.tracing.attributes_read import AttributesRead
from anabranch.graph.tracing.export import ReturnsLoss

_SOURCES = {"anabranch", "benchmarks", "builtins", "tests", "torch", "transformers"}
"""Packages of classes that no test writes; a model in a file of a test's own may read anything."""

_export: Any = exporter.export
_made: dict[Hashable, tuple[torch.export.ExportedProgram, Any, Any, Any]] = {}


class _Description(pickle.Pickler):
    """All of a module, in bytes, but for the values of parameters, buffers and the batch: of those
    it has type, place and memory. Other tensors, which a program keeps, are refused, as is what has
    no name, such as a class within a function.
    """

    def __init__(self, file: io.BytesIO, wrapped: ReturnsLoss, batch: Sequence[Any]) -> None:
        super().__init__(file)
        self.fast = True  # equal objects are alike, whether they are one object or two
        self.held = {id(t) for t in (*wrapped.parameters(), *wrapped.buffers(), *batch)}
        self.lambdas: list[FunctionType] = []
        self.tensors: dict[int, int] = {}
        self.memory: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__name__ == "<lambda>" and not obj.__closure__:
            self.lambdas.append(obj)
            return len(self.lambdas)
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self.held:
            raise pickle.PicklingError("a tensor of the forward's own")
        number = self.tensors.setdefault(id(obj), len(self.tensors))
        memory = self.memory.setdefault(obj.untyped_storage()._cdata, len(self.memory))
        return number, memory, type(obj), *_kind(obj)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.storage_offset(), tensor.stride(), str(tensor.device)
    return str(tensor.dtype), tuple(tensor.shape), place, tensor.requires_grad


def _key(wrapped: ReturnsLoss, leaves: Sequence[torch.Tensor], options: Any) -> Hashable:
    """All that an export depends on; None for a module that cannot be described."""
    layout = wrapped._rebuild.__self__
    description = io.BytesIO()
    try:
        with with_attributes(_without_recorders(wrapped)):
            found = _Description(description, wrapped, layout.leaves)
            found.dump([wrapped.module, layout, options])
    except Exception:
        return None
    # Tests change methods of classes.
    classes = dict.fromkeys(c for m in wrapped.modules() for c in type(m).__mro__)
    if any(kind.__module__.partition(".")[0] not in _SOURCES for kind in classes):
        return None
    methods = (value for kind in classes for value in vars(kind).values())
    code = *found.lambdas, *classes, *(method for method in methods if callable(method))
    settings = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    return description.getvalue(), code, tuple(map(_kind, leaves)), settings


def _without_recorders(wrapped: ReturnsLoss) -> Iterator[tuple[nn.Module, str, Any]]:
    """Attributes of models of transformers without the hooks that their first call leaves, which
    only act where hidden states are asked for.
    """
    for part in wrapped.modules():
        hooks = {
            number: hook
            for number, hook in part._forward_hooks.items()
            if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
        }
        yield part, "_forward_hooks", hooks
        if type(part).__module__.startswith("transformers."):
            yield part, "_output_capturing_hooks_installed", True


def _export_once(
    wrapped: ReturnsLoss,
    leaves: list[torch.Tensor],
    reads: AttributesRead,
    shown_warnings: set[str],
    **options: Any,
) -> torch.export.ExportedProgram:
    is_own = os.environ.get("PYTEST_CURRENT_TEST", "").startswith("tests/graph/tracing/test_export")
    key = None if is_own else _key(wrapped, leaves, options)
    if key is None or shown_warnings:
        return _export(wrapped, leaves, reads, shown_warnings, **options)
    if key not in _made:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exported = _export(wrapped, leaves, reads, shown_warnings, **options)
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if caught or _key(wrapped, leaves, options) != key:  # the forward changes the module
            return exported
        _made[key] = exported, set(reads._changes), list(reads._kept), set(wrapped.pairs)
    exported, changes, kept, pairs = _made[key]
    wrapped.pairs |= pairs
    reads._changes |= changes
    for path, name in kept:
        reads._keep(path, name, reads._module.get_submodule(path))
    return exported


def install() -> None:
    """Have all captures of this process ask here first."""
    exporter.export = _export_once
