"""The attribute ``data`` of tensors while a forward is traced.

Tracing makes a tensor without values of what ``weight.data`` is, so reading it fails far from the
line, and a write to it is dropped. ``weight.detach()`` is the same memory, and traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_TORCH = torch.__path__[0]


@contextlib.contextmanager
def data_as_detached(refuse: Callable[[], NoReturn]) -> Iterator[None]:
    """Inside, code that is not PyTorch's reads ``tensor.detach()`` as ``tensor.data``; ``refuse``
    is called where it assigns to it.
    """
    tensors: Any = torch.Tensor
    plain: Any = tensors.data

    def read(tensor: Any) -> Any:
        return plain.__get__(tensor) if _asked_by_torch() else tensor.detach()

    def assign(tensor: Any, value: Any) -> None:
        if not _asked_by_torch():
            refuse()
        plain.__set__(tensor, value)

    tensors.data = property(read, assign)
    try:
        yield
    finally:
        del tensors.data  # inherited


def _asked_by_torch() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)
