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
    """Aliases of a tensor whose gradients are added from the first alias to the last."""
    return tuple(_FanOut.apply(x, count))  # type: ignore[no-untyped-call]


def fold(grads: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Sum from left to right, leaving out what is missing."""
    total = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total + grad
    return total


class _KeepLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        ctx.order = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dense(grad, ctx.order), None


def keep_layout(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The tensor itself, whose gradient is laid out like the tensor was in one process (dimensions
    from the largest stride to the smallest), because sums run in the order of memory.
    """
    result: torch.Tensor = _KeepLayout.apply(x, order)  # type: ignore[no-untyped-call]
    return result


def dense(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values without gaps in memory, dimensions from the largest stride down."""
    back = [order.index(d) for d in range(len(order))]
    return x.permute(order).contiguous().permute(back)
