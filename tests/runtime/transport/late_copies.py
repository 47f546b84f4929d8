"""Copies to the host that are done when somebody waits for them, never before: for tests.

A GPU that is far behind the host does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LateCopies:
    """See ``Copies``."""

    def down(self, tensors: Sequence[Tensor]) -> _Late:
        return _Late(tensors)

    def up(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]


class _Late:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._source = list(tensors)
        self.tensors = [torch.empty_like(tensor) for tensor in tensors]
        self._is_done = False

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        for copy, tensor in zip(self.tensors, self._source, strict=True):
            copy.copy_(tensor)
        self._is_done = True
