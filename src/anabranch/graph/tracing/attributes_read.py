"""Attributes of modules that a forward reads in Python, and that a captured program keeps.

``loss * self.weight`` with a number is fixed when the model is captured, so a loop that changes the
number trains something else. While a forward is traced, reads of attributes that are no parameters,
buffers or modules are noted; before each step they are compared, most of them by identity, and so
are all parameters, buffers and modules, which may have been replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from anabranch.graph.module_state import with_attributes

_OWN = frozenset((*vars(nn.Module()), *vars(nn.Module))) - {"training"}
"""Attributes of every module, but for its mode, in which a loop may put one part alone."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_NOTHING = object()
_LONGEST = 64
"""Entries of a list that are compared."""


class AttributesRead:
    """Attributes that the forward of a module reads and does not change itself.

    Args:
        module: the user's module.
        traced: the module whose forward is traced, the same or a copy.
    """

    def __init__(self, module: nn.Module, traced: nn.Module) -> None:
        self._module, self._traced = module, traced
        self._changes: set[tuple[str, str]] = set()
        self._kept: dict[tuple[str, str], tuple[nn.Module, Any, Any]] = {}
        self._entries: dict[str, nn.Module | torch.Tensor | None] = {}
        self.buffers: dict[str, tuple[torch.Tensor, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note reads of attributes of the traced module's parts inside the block."""
        paths = {id(vars(part)): path for path, part in self._traced.named_modules()}
        first: dict[tuple[str, str], Any] = {}

        def read(part: Any, name: str) -> Any:
            value = object.__getattribute__(part, name)
            if name not in _OWN and not name.startswith("__"):
                path = paths.get(id(object.__getattribute__(part, "__dict__")))
                if path is not None and (path, name) not in first and _is_value(part, name, value):
                    first[path, name] = _snapshot(value)
            return value

        def assign(part: Any, name: str, value: Any) -> None:
            set_plainly(part, name, value)
            path = paths.get(id(object.__getattribute__(part, "__dict__")))
            if path is not None:  # a value that the forward itself has made is no older one
                first.setdefault((path, name), _NOTHING)

        set_plainly = nn.Module.__setattr__
        patches = [(nn.Module, "__getattribute__", read), (nn.Module, "__setattr__", assign)]
        with with_attributes(patches):
            yield
        for (path, name), before in first.items():
            if name == "training":  # an evaluation has all parts in its mode
                if self._traced.training:  # whatever the mode outside of the trace
                    self._kept[path, name] = self._module.get_submodule(path), before, before
            elif _snapshot(getattr(self._traced.get_submodule(path), name, _NOTHING)) != before:
                self._changes.add((path, name))
            elif (path, name) not in self._kept:
                self._keep(path, name, self._module.get_submodule(path))
        for changed in self._changes & self._kept.keys():
            del self._kept[changed]

    def changed(self) -> list[str]:
        """Return the attributes that have changed since the forward was traced, as text."""
        entries, same = _entries(self._module), set[int]()
        known = self._entries = self._entries or entries
        texts = [n for n in {**known, **entries} if known.get(n) is not entries.get(n)]
        for (path, name), (part, kept, before) in self._kept.items():
            if name == "training" and not self._module.training:
                continue
            now = getattr(part, name, _NOTHING)
            if now is kept and (type(now) in _PLAIN or id(now) in same):
                continue
            if _snapshot(now) == before:
                same.add(id(now))
                continue
            what = f"{path}.{name}" if path else name
            plain = isinstance(now, _PLAIN) and isinstance(kept, _PLAIN)
            values = textwrap.shorten(f"(was {kept!r}, now {now!r})", 80) if plain else ""
            texts.append(f"{what} {values}".rstrip())
        return texts

    def changed_buffers(self) -> list[str]:
        """Return the kept buffers whose values differ from those in the trace, by name."""
        names = []
        for name, (kept, before) in self.buffers.items():
            now = self._module.get_buffer(name)
            if _snapshot(now) == before:
                continue
            if torch.equal(now.to(kept.device), kept):
                self.buffers[name] = kept, _snapshot(now)
            else:
                names.append(name)
        return names

    def keep_buffers(self, names: Iterable[str]) -> None:
        """Compare these buffers from now on, as their values decide between branches."""
        first = {id(buffer): name for name, buffer in self._module.named_buffers()}
        for now in map(self._module.get_buffer, names):
            name = first[id(now)]
            self.buffers[name] = now.detach().clone(), _snapshot(now)

    def accept(self) -> None:
        """Take the attributes as they are now, after a call of the forward has changed some."""
        self._entries = _entries(self._module)
        for (path, name), (part, _, _) in list(self._kept.items()):
            if name != "training":
                self._keep(path, name, part)

    def _keep(self, path: str, name: str, part: nn.Module) -> None:
        value = getattr(part, name, _NOTHING)
        self._kept[path, name] = part, value, _snapshot(value)


def _entries(module: nn.Module) -> dict[str, nn.Module | torch.Tensor | None]:
    """Parameters, buffers and parts of a module by name."""
    return {
        f"{path}.{name}" if path else name: held
        for path, part in module.named_modules()
        for table in (part._parameters, part._buffers, part._modules)
        for name, held in table.items()
    }


def _is_value(part: nn.Module, name: str, value: Any) -> bool:
    """True for an attribute of a module or its class that is no method and no part of the model."""
    if isinstance(value, nn.Module | nn.Parameter) or callable(value):
        return False
    kept = object.__getattribute__(part, "__dict__").get(name, _NOTHING)
    return kept is value or inspect.getattr_static(type(part), name, _NOTHING) is value


def _snapshot(value: Any, depth: int = 0) -> Any:
    """Return a key, equal for equal values: identity and version of tensors, entries of lists."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, nn.Parameter):  # in a list; every step changes it, and it is read anew
        return id(value)
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if depth > 2:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return len(value), tuple(_snapshot(entry, depth + 1) for entry in value[:_LONGEST])
    if isinstance(value, dict):
        keys = list(value)[:_LONGEST]
        return len(value), tuple((str(key), _snapshot(value[key], depth + 1)) for key in keys)
    held = getattr(value, "__dict__", {}) if not isinstance(value, nn.Module) else {}
    plain = tuple((n, v) for n, v in held.items() if isinstance(v, _PLAIN))
    return type(value).__name__, plain
