"""Counts how often a step on the CPU looks at what would be on a device, each a wait for a GPU.

What comes of parameters, gradients and the batch is on the device; what was looked at is on the
host, and so is what is made of it.

``late_device`` has the CPU play a device that runs beside the host: numbers that are copied to the
host are read when an event has happened. A read behind which the device has been given some pass is
a late one; the others leave it idle.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from anabranch.device import accelerator

_LOOKS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")


class HostWaits(TorchDispatchMode):
    """Counts them inside.

    Attributes:
        found: what looked, in order; of a late device ``late`` and ``dry``.
        work: matrix products that the device has been given: forwards and backwards have some, and
            updates have none.

    Args:
        device: tensors that are on the device from the start.
    """

    def __init__(self, device: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self.work = 0
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
            self.work += func.name().endswith("mm")
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
        patch.setattr(_Arrival, "counting", counting)
        with counting:
            yield counting


class _Arrival:
    """The event behind a copy to the host."""

    counting: HostWaits | None = None

    def __init__(self) -> None:
        self._work = self.counting.work if self.counting is not None else 0

    def synchronize(self) -> None:
        if self.counting is not None:
            self.counting.found.append("late" if self.counting.work > self._work else "dry")


def _to_host(tensor: Tensor) -> tuple[Tensor, _Arrival]:
    with _disable_current_modes():
        return tensor.clone(), _Arrival()


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays a device that runs beside the host."""
    monkeypatch.setattr(accelerator, "has_streams", lambda device: True)
    monkeypatch.setattr(accelerator, "pinned", lambda tensor, device: tensor)
    monkeypatch.setattr(accelerator, "to_host", _to_host)
