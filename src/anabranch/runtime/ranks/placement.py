"""The device on which a rank computes, and the move of its stages to that device.

A model that was built on the CPU stays there but for the stages of this rank, so a GPU never holds
more of it than the plan counts with. One that is on a GPU already gives the other stages back as
soon as the pipeline is made; the self-check runs it there only where there is room.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from anabranch.device import accelerator
from anabranch.errors import TrainingError


def start_of(module: nn.Module) -> torch.device:
    """Return the device of a model, the CPU for one on the meta device."""
    devices = (t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta)
    return next(devices, torch.device("cpu"))


def own_device(wanted: torch.device | str) -> torch.device:
    """Return the device that a name means for this rank.

    A name without an index is the GPU of the number ``LOCAL_RANK``. Where a host has fewer GPUs
    than ranks, they share them in turn.

    Raises:
        TrainingError: if there is no GPU.
    """
    device = torch.device(wanted)
    if not accelerator.is_on_accelerator(device) or device.index is not None:
        return device
    count = accelerator.count(device.type)
    if count == 0:
        raise TrainingError(
            f"there is no {device.type.upper()} device here; leave the device out to train on CPUs"
        )
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % count)


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move parameters and buffers, which stay the same objects."""
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def roomy_home(module: nn.Module, home: torch.device) -> torch.device:
    """Choose where a whole model runs once, with its gradients: on its GPU if half of its free
    memory has room for what is missing, else on the CPU.
    """
    if not accelerator.has_own_memory(home):
        return home
    sizes = [(p, p.numel() * p.element_size()) for p in module.parameters()]
    weights = sum(size for p, size in sizes if p.device != home)
    gradients = sum(size for p, size in sizes if p.requires_grad)
    return home if weights + gradients <= accelerator.free_bytes(home) // 2 else torch.device("cpu")


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting where it comes from memory of the host."""
    if tensor.is_cpu:
        tensor = accelerator.pinned(tensor, device)
    return tensor.to(device, non_blocking=accelerator.has_streams(device))


class Fetched:
    """Numbers of a device, at least one, on their way to the host, with one copy for them all."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        precise = accelerator.widest_float(numbers[0].device)
        flat = torch.cat([number.detach().to(precise).reshape(-1) for number in numbers])
        self._host, self._arrived = accelerator.to_host(flat)

    def read(self) -> list[float]:
        """Return the numbers; waits for the device to compute them, but not for later work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._host.tolist()
        return values


def fetched(numbers: Sequence[Tensor]) -> list[float]:
    """Return numbers of a device, with one wait for all of them."""
    return Fetched(numbers).read() if numbers else []
