"""Sums of a tensor's gradients in the order in which one process would have added them.

Autograd adds the gradients of a tensor's uses one by one, the latest use first::

    x --+--> use 1 (stage 0)        grad x = ((g3 + g2) + g1)
        +--> use 2 (stage 1)
        +--> use 3 (stage 0)

With uses on several stages the sum would start with whatever arrives from outside, which is not
equal in floating point. ``fan_out`` gives every use an alias and adds their gradients itself.
"""

from __future__ import annotations

from typing import Any

import torch


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return fold(grads), None


def fan_out(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return aliases of a tensor whose gradients are added from the first alias to the last."""
    return tuple(_FanOut.apply(x, count))  # type: ignore[no-untyped-call]


def fold(grads: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Sum gradients from left to right, leaving out missing ones."""
    total = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total + grad
    return total


class _KeepStrides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.strides = strides
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _with_strides(grad, ctx.strides), None


def keep_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return x; its gradient gets the strides of one process, as sums run in memory order."""
    result: torch.Tensor = _KeepStrides.apply(x, strides)  # type: ignore[no-untyped-call]
    return result


def _with_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy values into memory with these strides; along a stride of 0 they are one element."""
    if x.stride() == strides:
        return x
    once = x
    for dim, stride in enumerate(strides):
        once = once.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] else once
    return x.new_empty_strided(once.shape, strides).copy_(once).expand(x.shape)


def dense(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Copy values into memory without gaps; ``order``: dimensions from the largest stride down."""
    back = [order.index(d) for d in range(len(order))]
    return x.permute(order).contiguous().permute(back)
