"""Temporary changes of a module: mode, device, frozen parameters, normalisation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def device_of(module: nn.Module) -> torch.device:
    """The meta device if any tensor of a module is there, else that of its first tensor."""
    places = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    meta = (place for place in places if place.type == "meta")
    return next(meta, places[0] if places else torch.device("cpu"))


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Inside, a module is in training or in evaluation mode.

    Submodules keep modes of their own, such as frozen statistics, unless the module as a whole is
    in the other mode.
    """
    modes = {part: part.training for part in module.modules()}
    try:
        if module.training != training:
            module.train(training)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def only_frozen(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, parameters of these names are frozen and no others."""
    changed = [p for n, p in module.named_parameters() if p.requires_grad == (n in names)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


@contextmanager
def on_one_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, all tensors of a module are on one device; those from elsewhere are copies."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    away = [(tensor, tensor.data) for tensor in tensors if tensor.device != device]
    for tensor, data in away:
        tensor.data = data.to(device)
    try:
        yield
    finally:
        for tensor, data in away:
            tensor.data = data


@contextmanager
def in_one_process() -> Iterator[None]:
    """Inside, ``nn.SyncBatchNorm`` takes the statistics of what it is given, also where there are
    other processes, and on a CPU: whoever calls the module has the whole batch.
    """
    forward = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]


def on_meta(module: nn.Module) -> nn.Module:
    """A copy on the meta device, which takes no memory for parameters and buffers."""
    memo: dict[int, torch.Tensor] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        bare = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = bare
    return copy.deepcopy(module, memo)
