"""State that a computation inside a block changes and that is as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from anabranch.device import accelerator
from anabranch.graph.capture import Captured


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Put buffers back that change inside, when no autograd graph is alive any more."""
    # Memory that several elements share cannot be written to inside either.
    shapes = ((b, zip(b.shape, b.stride(), strict=True)) for b in module.buffers())
    with unchanged([b for b, sizes in shapes if not any(n > 1 and not s for n, s in sizes)]):
        yield


def frozen_state(captured: Captured) -> list[Tensor]:
    """Parameters that the forward changes and whose values are here."""
    named = dict(captured.module.named_parameters())
    held = [named[name] for name in captured.graph.stateful if name in named]
    return [tensor for tensor in held if any(tensor.stride()) or not tensor.dim()]


@contextmanager
def unchanged_state(captured: Captured) -> Iterator[None]:
    """Put everything back that a forward changes inside."""
    with unchanged_buffers(captured.module), unchanged(frozen_state(captured)):
        yield


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors back that change inside, when no autograd graph is alive any more."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        # All of them, without a look at the device: versions do not show every change (not that of
        # running means), and must not change, because autograd may have saved the buffer.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


@contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters begin without gradients; afterwards they have those of before."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def seeded(seed: int, place: torch.device) -> Iterator[None]:
    """Draw from a generator of its own; data loaders draw from the user's on every rank."""
    generators = accelerator.generators(place)
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
