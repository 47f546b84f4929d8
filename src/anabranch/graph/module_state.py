"""Temporary changes of a module: mode, device, frozen parameters, normalisation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

_NOTHING = object()
_Module = TypeVar("_Module", bound=nn.Module)


def device_of(module: nn.Module) -> torch.device:
    """Return the meta device if any tensor of a module is there, else that of its first tensor."""
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    meta = (device for device in devices if device.type == "meta")
    return next(meta, devices[0] if devices else torch.device("cpu"))


@contextmanager
def with_attributes(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context manager that sets attributes, given as (object or class, name, value)."""
    changed = list(values)
    # A class has descriptors, which getattr would bind; a tensor has its data in no dictionary.
    before = [
        getattr(owner, name) if isinstance(owner, torch.Tensor) else vars(owner).get(name, _NOTHING)
        for owner, name, _ in changed
    ]
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(reversed(changed), reversed(before), strict=True):
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def without_keeping(module: nn.Module) -> Iterator[None]:
    """Remove fake tensors that a trace has left in modules, or in dictionaries of theirs."""
    owners = [vars(part) for part in module.modules()]
    held = [*owners, *(v for owner in owners for v in owner.values() if type(v) is dict)]
    before = [(names, dict(names)) for names in held]
    try:
        yield
    finally:
        for names, values in before:
            for name in [n for n, value in names.items() if isinstance(value, FakeTensor)]:
                del names[name]
                names |= {n: value for n, value in values.items() if n == name}


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Context manager that puts a module in training or in evaluation mode.

    Submodules keep modes of their own (frozen statistics), unless the whole is in the other mode.
    """
    with with_attributes((part, "training", part.training) for part in module.modules()):
        if training and not module.training:
            module.train()  # some keep parts of themselves in evaluation mode
        # Not by train(False): adapters merge themselves with weights there. Their forward computes
        # the same without that, and steps change the weights later.
        for part in module.modules() if module.training and not training else ():
            part.training = False
        yield


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Context manager that calls a module's own ``eval``, which may prepare weights, and then its
    ``train``; submodules get back their modes.
    """
    with with_attributes([(part, "training", part.training) for part in module.modules()]):
        was_training = module.training
        module.eval()
        try:
            yield
        finally:
            module.train(was_training)


def only_frozen(module: nn.Module, names: Collection[str]) -> AbstractContextManager[None]:
    """Context manager that freezes the parameters of these names and no others."""
    named = module.named_parameters()
    return with_attributes((p, "requires_grad", n not in names) for n, p in named)


def on_one_device(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Context manager that puts all tensors of a module, or copies of them, on one device."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    away = (tensor for tensor in tensors if tensor.device != device)
    return with_attributes((tensor, "data", tensor.data.to(device)) for tensor in away)


def with_layouts(module: nn.Module) -> AbstractContextManager[None]:
    """Context manager that lays out parameters of other ranks' stages, which are one number without
    memory, as usual if they may be viewed as complex numbers (pairs in the last dimension): that
    view needs it. Nothing reads or writes them.
    """
    pairs = (p for p in module.parameters() if p.shape[-1:] == (2,) and not any(p.stride()))
    return with_attributes(
        (p, "data", torch.empty_like(p, memory_format=torch.contiguous_format).data) for p in pairs
    )


@contextmanager
def in_one_process() -> Iterator[None]:
    """Context manager under which a module finds no other processes: it gathers nothing from them,
    and ``nn.SyncBatchNorm`` takes the statistics of its input, also on a CPU, as the caller has the
    whole batch.
    """
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        with with_attributes([(nn.SyncBatchNorm, "forward", _BatchNorm.forward)]):
            yield
    finally:
        dist.GroupMember.WORLD = group


def on_meta(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, which takes no memory for parameters and buffers."""
    return copied(module, torch.device("meta"), {})


def copied(
    module: _Module, device: torch.device, twins: dict[torch.Tensor, torch.Tensor]
) -> _Module:
    """Copy a module to a device; ``twins`` has tensors copied already, and gets the others."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor not in twins:
            twin = tensor.detach().to(device, copy=True)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            twins[tensor] = twin
    return copy.deepcopy(module, {id(tensor): twin for tensor, twin in twins.items()})


def layer_dropout(module: nn.Module) -> str:
    """Return the option by which a module, or its configuration, leaves out layers at random."""
    owners = [owner for part in module.modules() for owner in (part, getattr(part, "config", None))]
    options = (option for owner in owners for option in getattr(owner, "__dict__", {}).items())
    return next((name for name, value in options if name.endswith("layerdrop") and value), "")
