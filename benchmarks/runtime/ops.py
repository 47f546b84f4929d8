"""Operators that take a known time, or none, the same in both systems.

``wait`` sleeps in its forward and in its backward, so that ranks can outnumber processor cores and
the ideal step is known exactly. ``still`` does not even touch its tensors: what a step of it takes
is messages and bookkeeping.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

_PR_SET_TIMERSLACK = 29

_AWAKE_S = 2e-4
"""The end of a wait is not slept, so that it ends in time: to wake up takes about half of this."""


def precise_sleep() -> None:
    """Let this process sleep to the microsecond; Linux may otherwise add 50 of them to each."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        if left > _AWAKE_S:
            time.sleep(left - _AWAKE_S)


@torch.library.custom_op("anabranch_benchmark::wait", mutates_args=())
def wait(x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """A copy of ``x``, after so many seconds."""
    deadline = time.perf_counter() + forward_s
    result = x.clone()
    _sleep_until(deadline)
    return result


@wait.register_fake
def _(x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, _, ctx.backward_s = inputs
    ctx.save_for_backward(weight)


def _wait_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    deadline = time.perf_counter() + ctx.backward_s
    (weight,) = ctx.saved_tensors
    result = gradient, torch.zeros_like(weight), None, None
    _sleep_until(deadline)
    return result


wait.register_autograd(_wait_backward, setup_context=_keep)


_STANDING: dict[tuple[int, ...], Tensor] = {}


def _standing(shape: torch.Size) -> Tensor:
    """Zeros that nobody writes to, made once; every caller gets a tensor object of its own."""
    if tuple(shape) not in _STANDING:
        _STANDING[tuple(shape)] = torch.zeros(shape)
    return _STANDING[tuple(shape)].detach()


@torch.library.custom_op("anabranch_benchmark::still", mutates_args=())
def still(x: Tensor, weight: Tensor) -> Tensor:
    """Zeros of the shape of ``x``, which are there already."""
    return _standing(x.shape)


@still.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


still.register_autograd(
    lambda ctx, gradient: (_standing(gradient.shape), torch.zeros_like(ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@torch.library.custom_op("anabranch_benchmark::verdict", mutates_args=())
def verdict(x: Tensor) -> Tensor:
    """A loss that reads nothing."""
    return torch.zeros(())


@verdict.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty((), dtype=x.dtype)


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


verdict.register_autograd(lambda ctx, gradient: _standing(ctx.shape), setup_context=_keep_shape)


class Wait(nn.Module):
    """A layer of a known time and one parameter, so that its backward is asked for."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.seconds = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> the same."""
        return wait(x, self.weight, *self.seconds)


class SplitWait(nn.Module):
    """``Wait`` with the backward in two halves that a schedule may run apart.

    The gradient of the input takes one, that of the weight the other, as for a linear layer.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.half_s = forward_s, backward_s / 2
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("nothing", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> the same."""
        used = wait(self.weight, self.nothing, 0.0, self.half_s)
        return wait(x, self.nothing, self.forward_s, self.half_s) + used


class Still(nn.Module):
    """A layer that takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> the same."""
        return still(x, self.weight)
