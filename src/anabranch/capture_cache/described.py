"""Descriptions of a module that was built, its example, and the values in the user's code.

Two workloads of equal description give equal captures. What has no certain description (an open
file, a lambda, an object of a class without Python code) raises ``UncertainError``.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from anabranch.capture_cache.key import is_installed
from anabranch.workload import Workload

LARGEST_VALUES = 2**20
"""Bytes of a tensor outside of parameters, buffers and the example whose values are compared."""

_PLAIN = (bool, int, str, bytes, float, complex, type(None), type(...), type(NotImplemented))
_SHOWN = (
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size),
    *(slice, range, PurePath, types.GenericAlias, types.UnionType),
)
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_HEAP_TYPE = 1 << 9
"""The flag of classes that are made by a class statement."""
_ENVIRONMENT = re.compile(rb"\b(environ|environb|getenv|argv)\b")


class UncertainError(Exception):
    """Something about a model that two commands may see differently; it is captured each time."""


def described(workload: Workload, files: Mapping[str, Path]) -> Any:
    """Everything of a workload and of the user's modules that enters a capture, as JSON.

    Args:
        workload: as the user's function returned it.
        files: the user's modules and their files (``own_modules``).

    Raises:
        UncertainError: if that cannot be told for certain.
    """
    for name, path in files.items():
        word = _ENVIRONMENT.search(path.read_bytes())
        if word is not None:
            raise UncertainError(f"{name} reads {word.group().decode()}")
    describer = _Describer(frozenset(files))
    values = [[name, describer.attributes(vars(sys.modules[name]))] for name in files]
    return [describer.value(workload.module), describer.example(workload.example), values]


class _Describer:
    """One description, in which an object that occurs again is named by its number."""

    def __init__(self, own: frozenset[str]) -> None:
        self.own = own
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no address is given twice

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _SHOWN) or kind.__module__ == "typing":
            return [kind.__name__, repr(value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)]]
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        if isinstance(value, enum.Enum):
            return [_name(kind), value.name]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, re.Pattern):
            return ["pattern", repr(value.pattern), value.flags]
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, type):
            return self.of_class(value)
        return self.collection(value) or self.function(value) or self.instance(value)

    def collection(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
            factory = self.value(getattr(value, "default_factory", None))
            items = [[self.value(k), self.value(v)] for k, v in value.items()]
            return [kind.__name__, factory, items]
        if kind in (list, tuple):
            return [kind.__name__, [self.value(item) for item in value]]
        if kind in (set, frozenset):
            if not all(type(item) in _PLAIN for item in value):
                raise UncertainError("a set of objects has no order")
            return [kind.__name__, sorted(map(repr, value))]
        return None

    def function(self, value: Any) -> Any:
        """A function by its name, as its file is hashed, with what is bound to it."""
        if isinstance(value, functools.partial):
            return ["partial", *map(self.value, (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, types.FunctionType):
            if "<lambda>" in value.__qualname__:
                raise UncertainError(f"{value.__qualname__} has no name")
            self.require_code(value.__module__, value.__qualname__)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            bound = cells, value.__defaults__, value.__kwdefaults__
            line = value.__code__.co_firstlineno
            return [value.__module__, value.__qualname__, line, *map(self.value, bound)]
        if isinstance(value, _BUILT_IN):
            bound_to = getattr(value, "__self__", None)  # a module, where it is a plain function
            return ["built in", value.__qualname__, self.value(bound_to)]
        return None

    def instance(self, value: Any) -> Any:
        """An object of a Python class: its class and its attributes."""
        kind = type(value)
        for base in kind.__mro__:
            if base not in (object, dict, list, tuple, nn.Module) and not _is_plain(base):
                raise UncertainError(f"a {_name(kind)} has a state of its own")
        state = dict(getattr(value, "__dict__", {}))
        if is_dataclass(value):
            state |= {
                f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)
            }
        elif any(base.__dict__.get("__slots__") for base in kind.__mro__):
            raise UncertainError(f"a {_name(kind)} has slots")
        items: list[Any] = []
        if isinstance(value, dict | list | tuple):
            items = [*(value.items() if isinstance(value, dict) else value)]
        return [self.value(kind), self.value(state), self.value(items)]

    def of_class(self, kind: type) -> Any:
        """A class by its name, as its file is hashed, with the values in it if it is the user's."""
        self.require_code(kind.__module__, kind.__qualname__)
        if kind.__module__ not in self.own:
            return ["class", _name(kind)]
        bases = [self.value(base) for base in kind.__mro__[1:]]
        return ["class", _name(kind), bases, self.attributes(vars(kind))]

    def attributes(self, of: Mapping[str, Any]) -> Any:
        """The values in a module or class, without what Python itself puts there."""
        found = []
        for name, value in sorted(of.items()):
            if isinstance(value, staticmethod | classmethod):
                found.append([name, self.value(value.__func__)])
            elif isinstance(value, property):
                found.append([name, self.value((value.fget, value.fset, value.fdel))])
            elif not name.startswith("__") and not isinstance(
                value, types.GetSetDescriptorType | types.MemberDescriptorType
            ):
                found.append([name, self.value(value)])
        return found

    def require_code(self, module: str, name: str) -> None:
        """Accept code in a file that is hashed or installed."""
        if module in self.own:
            return
        home = sys.modules.get(module)
        file = getattr(home, "__file__", None)
        if home is None or module == "__main__" or (file and not is_installed(Path(file))):
            raise UncertainError(f"{name} is in no file that is known")

    def tensor(self, value: torch.Tensor) -> Any:
        """Shape and type, with the values where they may matter."""
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise UncertainError(f"a tensor of class {_name(type(value))}")
        like = [str(value.dtype), list(value.shape), str(value.device), value.requires_grad]
        if value.layout is torch.strided:
            like.append(list(value.stride()))
        if isinstance(value, nn.Parameter) or value.is_meta:
            return ["tensor", *like]
        large = value.numel() * value.element_size() > LARGEST_VALUES
        if large or value.layout is not torch.strided:
            raise UncertainError("a tensor is too large to compare its values")
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return ["tensor", *like, hashlib.sha256(data).hexdigest()]

    def example(self, batch: Any) -> Any:
        """A batch without the values of its tensors."""
        if isinstance(batch, torch.Tensor):
            return ["tensor", str(batch.dtype), list(batch.shape)]
        if isinstance(batch, Mapping):
            return ["mapping", [[str(k), self.example(v)] for k, v in batch.items()]]
        if type(batch) in (list, tuple):
            return [type(batch).__name__, [self.example(value) for value in batch]]
        return self.value(batch)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(kind: type) -> bool:
    """Whether objects of a class are their attributes: it is written in Python, and is copied and
    pickled as any class is.
    """
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    special = {"__reduce__", "__reduce_ex__", "__getstate__"} & vars(kind).keys()
    return bool(kind.__flags__ & _HEAP_TYPE) and home.endswith(".py") and not special
