"""Results of operations on meta tensors, computed once for equal inputs.

What an operation returns on the meta device depends on the sizes, strides and types of its inputs
alone, and PyTorch computes most of that in Python, in up to a millisecond. The layers of a model
repeat each other, so nearly every call has been made before::

    linear(x, w1, b1)     [8, 16, 64] x [256, 64], [256]   ->  [8, 16, 256], computed
    linear(y, w2, b2)     [8, 16, 64] x [256, 64], [256]   ->  [8, 16, 256], known

Views, operations in place, and results that are more than their sizes are computed every time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (Tensor, nn.Parameter)


class MetaKernels:
    """What operations returned, by operation and inputs."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Hashable | None]:
        """The result of an operation, and a key that is equal for equal calls; None if there is
        none.
        """
        key = _key(func, args, kwargs) if _is_functional(func) else None
        if key is not None and key in self._results:
            return _like(self._results[key]), key
        result = func(*args, **kwargs)
        if key is None or not _is_described(result, (args, kwargs)):
            return result, None
        self._results[key] = _described(result)
        return result, key


class KnownResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations below autograd are called by way of ``MetaKernels``."""

    def __init__(self, known: MetaKernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # whose wrapper takes longer than what it wraps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.known.call(func, args, kwargs or {})[0]


@cache
def _is_functional(func: Any) -> bool:
    """Whether an operation makes new tensors and changes none."""
    schema = func._schema
    return not (schema.is_mutable or any(r.alias_info is not None for r in schema.returns))


class _UnknownError(Exception):
    """An argument that is more than its description."""


def _key(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    try:
        return (func, _argument(args), _argument(kwargs) if kwargs else None)
    except _UnknownError:
        return None


def _argument(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or not _is_plain(value):
            raise _UnknownError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_argument, value))
    if isinstance(value, dict):
        return tuple((name, _argument(item)) for name, item in value.items())
    if value is None or isinstance(value, str | torch.dtype):
        return value
    if isinstance(value, bool | int | float | complex):
        return type(value), repr(value)  # 1, 1.0 and True are equal, and so are the two zeros
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return value
    raise _UnknownError


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.is_meta and tensor.layout is torch.strided
    return strided and not (tensor.is_conj() or tensor.is_neg())


def _is_described(result: Any, inputs: Any) -> bool:
    """Whether a result is new tensors of which sizes, strides and types say everything."""
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(t is None or (type(t) is Tensor and _is_plain(t)) for t in tensors):
        return False
    made = [t for t in tensors if t is not None]
    storages = {t.untyped_storage()._cdata for t in made}
    if len(storages) < len(made) or storages & set(_storages(inputs)):
        return False
    return all(t.storage_offset() == 0 and t.untyped_storage().nbytes() == _nbytes(t) for t in made)


def _storages(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [value.untyped_storage()._cdata]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return []
    return [storage for item in items for storage in _storages(item)]


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the storage that ``empty_strided`` makes."""
    if not tensor.numel():
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()


def _described(result: Any) -> Any:
    if isinstance(result, tuple):
        return [_described(t) for t in result]
    return None if result is None else (result.shape, result.stride(), result.dtype)


def _like(described: Any) -> Any:
    """New tensors of a description."""
    if described is None:
        return None
    if isinstance(described, list):
        return tuple(_like(item) for item in described)
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
