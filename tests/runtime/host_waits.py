"""Counts how often a step on the CPU looks at what would be on a device, each a wait for a GPU.

What comes of parameters, gradients and the batch is on the device; what was looked at is on the
host, and so is what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_LOOKS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")


class HostWaits(TorchDispatchMode):
    """Counts them inside.

    Attributes:
        found: what looked, in order.

    Args:
        device: tensors that are on the device from the start.
    """

    def __init__(self, device: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        for tensor in device:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_device = any(map(self.has, read))
        if is_on_device and func.name().partition(".")[0] in _LOOKS:
            self.found.append(func.name())
        result = func(*args, **(kwargs or {}))
        if is_on_device:
            for leaf in tree_iter(result):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
        return result


@contextmanager
def host_waits(device: Iterable[Tensor]) -> Iterator[HostWaits]:
    """What waits for the device inside: also methods that no operation shows."""
    counting = HostWaits(device)

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def look(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if counting.has(tensor):
                counting.found.append(name)
                tensor = tensor.clone() if name == "cpu" else tensor
            return method(tensor, *args, **kwargs)

        return look

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, counted(name))
        with counting:
            yield counting
