"""Contexts that restore the state which computations inside them change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from anabranch.graph.capture import Captured
from anabranch.graph.module_state import with_attributes


def written_state(captured: Captured, module: nn.Module) -> list[Tensor]:
    """Return the tensors of a module, or a part of it, that the traced forward changes."""
    program = captured.programs.example
    names = program.changed("buffer", "parameter")
    named = (*module.named_parameters(), *module.named_buffers())
    return _writable(tensor for name, tensor in named if name in names)


def changing_state(captured: Captured) -> list[Tensor]:
    """Return all buffers, and parameters that the traced forward changes."""
    state = *_writable(captured.module.buffers()), *written_state(captured, captured.module)
    return list(dict.fromkeys(state))


def _writable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors that can be written to: no elements of theirs share memory."""
    shapes = ((t, zip(t.shape, t.stride(), strict=True)) for t in tensors)
    return [t for t, sizes in shapes if not any(n > 1 and not s for n, s in sizes)]


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers that change inside, or are replaced; no autograd graph may be alive then."""
    tables = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        with unchanged(_writable(module.buffers())):
            yield
    finally:
        for table, before in tables:
            table.update(before)


@contextmanager
def unchanged_state(captured: Captured) -> Iterator[None]:
    """Restore all state that a forward changes inside."""
    with unchanged_buffers(captured.module), unchanged(written_state(captured, captured.module)):
        yield


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore tensors that change inside; no autograd graph may be alive then."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        put(tensors, before)


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values, unseen by autograd."""
    # All of them, without a look at the device: versions do not show every change (not that of
    # running means), and must not change, because autograd may have saved the buffer.
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:  # observers of quantisation have no entries at first
                tensor.resize_(value.shape)
            tensor.copy_(value)


def without_gradients(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Context manager that sets the gradients of parameters aside, and restores them at the end."""
    return with_attributes((parameter, "grad", None) for parameter in parameters)
