"""State that a computation inside a block changes and that is as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from anabranch.graph.capture import Captured
from anabranch.graph.module_state import with_attributes


def written_state(captured: Captured, module: nn.Module) -> list[Tensor]:
    """Tensors of a module, or of a part of it, that the forward is seen to change."""
    program = captured.programs.example
    names = program.changed("buffer", "parameter")
    named = (*module.named_parameters(), *module.named_buffers())
    return _writable(tensor for name, tensor in named if name in names)


def changing_state(captured: Captured) -> list[Tensor]:
    """Buffers, and parameters that the forward is seen to change."""
    state = *_writable(captured.module.buffers()), *written_state(captured, captured.module)
    return list(dict.fromkeys(state))


def _writable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors without memory that several elements share, which cannot be written to."""
    shapes = ((t, zip(t.shape, t.stride(), strict=True)) for t in tensors)
    return [t for t, sizes in shapes if not any(n > 1 and not s for n, s in sizes)]


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Put buffers back that change inside, or are others, when no autograd graph is alive."""
    tables = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        with unchanged(_writable(module.buffers())):
            yield
    finally:
        for table, before in tables:
            table.update(before)


@contextmanager
def unchanged_state(captured: Captured) -> Iterator[None]:
    """Put everything back that a forward changes inside."""
    with unchanged_buffers(captured.module), unchanged(written_state(captured, captured.module)):
        yield


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors back that change inside, when no autograd graph is alive any more."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        put(tensors, before)


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values, behind the back of autograd."""
    # All of them, without a look at the device: versions do not show every change (not that of
    # running means), and must not change, because autograd may have saved the buffer.
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def without_gradients(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Inside, parameters begin without gradients; afterwards they have those of before."""
    return with_attributes((parameter, "grad", None) for parameter in parameters)
