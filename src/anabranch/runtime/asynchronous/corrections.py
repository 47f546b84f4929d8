"""Corrections of a stage's updates that make up for stale gradients; a policy names its own.

A correction changes gradients before a step of the optimizer, or the update after it. Arguments are
the policy, whose fields are the options, the ``Step``, and tensors that are kept from step to step,
by the index of a parameter (a tensor of the whole stage is under every index).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.data_parallel.buckets import entries

_MEMORY = 0.9
"""Weight of the past in the running norm of gradients."""

_DIRECTIONS = "exp_avg", "momentum_buffer"
"""Entries of an optimizer's state that are sums of gradients, and so are rotated like these."""

Kept = dict[int, Tensor]
Correction = Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a stage's optimizer that is about to be made.

    Attributes:
        parameters: trainable parameters, each with its gradient or without.
        updates: number of updates made before.
        lag: updates of the stage between forward and backward.
        dims: dimensions of a matrix; one more in a benchmark that trains several models at once.
    """

    parameters: tuple[Any, ...]
    optimizer: Any
    updates: int
    lag: int
    dims: int = 2


def rate_of(policy: Any, lag: int, updates: int) -> float:
    """Return the factor of a policy's ramp on the learning rate, also of predictions."""
    return policy.rate(lag, updates) if "ramp" in policy.corrections else 1.0


@contextmanager
def ramp(policy: Any, step: Step, *kept: Kept) -> Iterator[None]:
    """Lower the learning rates of all groups in the first updates."""
    groups, factor = step.optimizer.param_groups, rate_of(policy, step.lag, step.updates)
    rates = [group["lr"] for group in groups]
    for group in groups if factor != 1 else []:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, before in zip(groups, rates, strict=True):
            group["lr"] = before


@contextmanager
def norm_clip(policy: Any, step: Step, *kept: Kept) -> Iterator[None]:
    """Scale gradients to at most ``clip`` times their usual norm, without reading a number back.

    The usual norm is a running mean of clipped norms, so one outlier does not raise it.
    """
    grads = [p.grad for p in step.parameters if p.grad is not None]
    if policy.clip and grads:
        norms = torch._foreach_norm([entries(gradient) for gradient in grads])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        usual = next(iter(kept[0].values()), torch.zeros_like(norm))
        # A norm of zero does not count: a last layer that starts at zero passes no gradient then.
        before = torch.where(usual > 0, usual, norm)
        limit = policy.clip * before
        torch._foreach_mul_(grads, torch.where(norm > limit, limit / norm, torch.ones_like(norm)))
        mean = _MEMORY * before + (1 - _MEMORY) * torch.minimum(norm, limit)
        mean = torch.where(norm.isfinite(), mean, usual)
        kept[0].update(dict.fromkeys(range(len(step.parameters)), mean))
    yield


@contextmanager
def error_feedback(policy: Any, step: Step, *kept: Kept) -> Iterator[None]:
    """``W -= share * (u_t - u_(t-1))`` after the optimizer has made its own update ``u_t``."""
    moving = [(i, p) for i, p in enumerate(step.parameters) if p.grad is not None]
    before = [p.detach().clone() for _, p in moving]
    yield
    for (i, parameter), update in zip(moving, before, strict=True):
        update.sub_(parameter.data)
        if i in kept[0]:
            parameter.data.sub_(update - kept[0][i], alpha=policy.share)
        kept[0][i] = update


@contextmanager
def basis_rotation(policy: Any, step: Step, *kept: Kept) -> Iterator[None]:
    """Rotate weights and gradients of matrices into an eigenbasis, and their updates back.

    ``A`` is the running mean of ``G G'``, or of ``G' G`` if a matrix has more rows than columns,
    and ``Q`` its eigenvectors, which one step of the power method updates::

        W -= Q step(Q' G)

    First moments are rotated with them and back, so that a checkpoint has them as in any run;
    second moments exist only in the basis.
    """
    turned: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for i, parameter in enumerate(step.parameters):
        if _is_turned(parameter, step.dims):
            weight, basis = parameter.data, _basis(policy, step, i, *kept)
            start = _turned(weight, basis)
            turned.append((parameter, weight, start, basis))
            parameter.grad, parameter.data = _turned(parameter.grad, basis), start.clone()
            for direction in _directions(step.optimizer, parameter):
                direction.copy_(_turned(direction, basis))
    try:
        yield
    finally:
        for parameter, weight, start, basis in turned:
            weight.add_(_turned_back(parameter.data - start, basis))
            parameter.grad, parameter.data = None, weight
            for direction in _directions(step.optimizer, parameter):
                direction.copy_(_turned_back(direction, basis))


def _directions(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    state = optimizer.state.get(parameter, {})
    return [state[name] for name in _DIRECTIONS if isinstance(state.get(name), Tensor)]


def _is_turned(parameter: Tensor, dims: int) -> bool:
    if parameter.grad is None or parameter.grad.is_sparse or parameter.dim() != dims:
        return False
    return parameter.dtype in (torch.float32, torch.float64) and min(parameter.shape[-2:]) > 1


def _basis(policy: Any, step: Step, i: int, moments: Kept, bases: Kept) -> Tensor:
    parameter = step.parameters[i]
    gradient = parameter.grad if _is_wide(parameter) else parameter.grad.mT
    square = gradient @ gradient.mT
    if i not in bases:
        moments[i] = square
        bases[i] = torch.linalg.eigh(square).eigenvectors.flip(-1)
        return bases[i]
    moments[i].lerp_(square, 1 - policy.memory)
    if step.updates % policy.every == 0:
        bases[i] = torch.linalg.qr(moments[i] @ bases[i]).Q
    return bases[i]


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _turned(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis.mT @ matrix if _is_wide(matrix) else matrix @ basis


def _turned_back(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis @ matrix if _is_wide(matrix) else matrix @ basis.mT


CORRECTIONS: Mapping[str, tuple[Correction, tuple[str, ...]]] = {
    "ramp": (ramp, ()),
    "norm-clip": (norm_clip, ("asynchronous-norm",)),
    "error-feedback": (error_feedback, ("asynchronous-update",)),
    "basis-rotation": (basis_rotation, ("asynchronous-moments", "asynchronous-basis")),
}
"""Name -> (correction, names of its kept tensors in a checkpoint)."""
