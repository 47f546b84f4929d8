"""The corrections that policies name (``weights.Correction``), with their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.data_parallel.buckets import entries
from anabranch.weights.corrections import Correction, Step

_MEMORY = 0.9
"""Weight of the past in the running norm of gradients."""

_DIRECTIONS = "exp_avg", "momentum_buffer"
"""Entries of an optimizer's state that are sums of gradients, so that they turn with the basis."""


class Ramp:
    """A lower learning rate in all groups at first."""

    def __init__(self, policy: Any, lag: int) -> None:
        self._policy, self._lag = policy, lag
        self.kept: dict[str, dict[int, Tensor]] = {}

    def rate(self, updates: int) -> float:
        factor: float = self._policy.rate(self._lag, updates)
        return factor

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        groups, factor = step.optimizer.param_groups, self.rate(step.updates)
        rates = [group["lr"] for group in groups]
        for group in groups if factor != 1 else []:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, before in zip(groups, rates, strict=True):
                group["lr"] = before


class NormClip:
    """Gradients scaled to at most so many times their usual norm, without asking for a number.

    The running norm is over the clipped ones, so one outlier does not raise it.
    """

    def __init__(self, policy: Any, lag: int) -> None:
        self._multiple = policy.clip
        self.kept: dict[str, dict[int, Tensor]] = {"asynchronous-norm": {}}

    def rate(self, updates: int) -> float:
        return 1.0

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        if grads := [p.grad for p in step.parameters if p.grad is not None]:
            norms = torch._foreach_norm([entries(gradient) for gradient in grads])
            norm = torch.linalg.vector_norm(torch.stack(norms))
            kept = self.kept["asynchronous-norm"]
            usual = next(iter(kept.values()), torch.zeros_like(norm))
            # Zero is no usual norm: a last layer that starts at zero lets no gradient through yet.
            before = torch.where(usual > 0, usual, norm)
            limit = self._multiple * before
            scale = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
            torch._foreach_mul_(grads, scale)
            mean = _MEMORY * before + (1 - _MEMORY) * torch.minimum(norm, limit)
            mean = torch.where(norm.isfinite(), mean, usual)
            kept.update(dict.fromkeys(range(len(step.parameters)), mean))
        yield


class ErrorFeedback:
    """``W -= share * (u_t - u_(t-1))`` after the optimizer has made its own update ``u_t``."""

    def __init__(self, policy: Any, lag: int) -> None:
        self._share = policy.share
        self.kept: dict[str, dict[int, Tensor]] = {"asynchronous-update": {}}

    def rate(self, updates: int) -> float:
        return 1.0

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        moving = [(i, p) for i, p in enumerate(step.parameters) if p.grad is not None]
        before = [p.detach().clone() for _, p in moving]
        yield
        last = self.kept["asynchronous-update"]
        for (i, parameter), update in zip(moving, before, strict=True):
            update.sub_(parameter.data)
            if i in last:
                parameter.data.sub_(update - last[i], alpha=self._share)
            last[i] = update


class BasisRotation:
    """Weights and gradients of a matrix turned into an eigenbasis, its update turned back.

    ``A`` is the running mean of ``G G'``, or of ``G' G`` where the matrix has more rows than
    columns, and ``Q`` its eigenvectors, brought up to date by one step of the power method::

        W -= Q step(Q' G)        with the optimizer's moments kept in the basis

    Attributes:
        dims: of a matrix; a benchmark that trains several models at once has one more.
    """

    dims = 2

    def __init__(self, policy: Any, lag: int) -> None:
        self._policy = policy
        self._moments: dict[int, Tensor] = {}
        self._bases: dict[int, Tensor] = {}
        self.kept = {"asynchronous-moments": self._moments, "asynchronous-basis": self._bases}

    def rate(self, updates: int) -> float:
        return 1.0

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        turned: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for i, parameter in enumerate(step.parameters):
            if self._is_turned(parameter):
                weight, basis = parameter.data, self._basis(i, step)
                start = _turned(weight, basis)
                turned.append((parameter, weight, start, basis))
                parameter.grad, parameter.data = _turned(parameter.grad, basis), start.clone()
        try:
            yield
        finally:
            for parameter, weight, start, basis in turned:
                weight.add_(_turned_back(parameter.data - start, basis))
                parameter.grad, parameter.data = None, weight

    def _is_turned(self, parameter: Tensor) -> bool:
        if parameter.grad is None or parameter.grad.is_sparse or parameter.dim() != self.dims:
            return False
        return parameter.dtype in (torch.float32, torch.float64) and min(parameter.shape[-2:]) > 1

    def _basis(self, i: int, step: Step) -> Tensor:
        parameter, moments, bases = step.parameters[i], self._moments, self._bases
        gradient = parameter.grad if _is_wide(parameter) else parameter.grad.mT
        square = gradient @ gradient.mT
        if i not in bases:
            moments[i] = square
            bases[i] = torch.linalg.eigh(square).eigenvectors.flip(-1)
            return bases[i]
        moments[i].lerp_(square, 1 - self._policy.memory)
        if step.updates % self._policy.every == 0:
            old, bases[i] = bases[i], torch.linalg.qr(moments[i] @ bases[i]).Q
            state = step.optimizer.state.get(parameter, {})
            for direction in (state[name] for name in _DIRECTIONS if name in state):
                direction.copy_(_turned(_turned_back(direction, old), bases[i]))
        return bases[i]


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _turned(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis.mT @ matrix if _is_wide(matrix) else matrix @ basis


def _turned_back(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis @ matrix if _is_wide(matrix) else matrix @ basis.mT


CORRECTIONS: Mapping[str, Callable[[Any, int], Correction]] = {
    "ramp": Ramp,
    "norm-clip": NormClip,
    "error-feedback": ErrorFeedback,
    "basis-rotation": BasisRotation,
}
"""Name -> how it is made, from the policy, whose fields are its options, and the stage's lag."""
