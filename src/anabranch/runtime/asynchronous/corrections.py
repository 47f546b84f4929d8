"""Corrections of a policy (``weights.corrections``), with the tensors that they keep.

Each surrounds the optimizer's step: before it gradients can be changed, after it the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.runtime.data_parallel.buckets import entries

_MEMORY = 0.9
"""Weight of the past in the running norm of gradients."""

_DIRECTIONS = "exp_avg", "momentum_buffer"
"""Entries of an optimizer's state that are sums of gradients, so that they turn with the basis."""


class Corrector(Protocol):
    """One correction on one stage.

    Attributes:
        kept: its tensors by the first part of their name in a checkpoint, then by parameter; those
            of a whole stage are there for every parameter.
    """

    kept: dict[str, dict[int, Tensor]]

    def around(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, updates: int
    ) -> AbstractContextManager[None]:
        """Surround the optimizer's step after so many updates; parameters are those with a place,
        with or without a gradient.
        """


class Ramp:
    """A lower learning rate in all groups."""

    def __init__(self, correction: Any, lag: int) -> None:
        self._correction, self._lag = correction, lag
        self.kept: dict[str, dict[int, Tensor]] = {}

    @contextmanager
    def around(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, updates: int
    ) -> Iterator[None]:
        factor, groups = self._correction.rate(self._lag, updates), optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor if factor != 1 else group["lr"]
        try:
            yield
        finally:
            for group, before in zip(groups, rates, strict=True):
                group["lr"] = before


class NormClip:
    """Gradients scaled to at most so many times their usual norm, without asking for a number.

    The running norm is over the clipped ones, so one outlier does not raise it.
    """

    def __init__(self, correction: Any, lag: int) -> None:
        self._multiple = correction.multiple
        self.kept: dict[str, dict[int, Tensor]] = {"asynchronous-norm": {}}

    @contextmanager
    def around(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, updates: int
    ) -> Iterator[None]:
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            self._clip(grads, len(parameters))
        yield

    def _clip(self, grads: list[Tensor], count: int) -> None:
        norms = torch._foreach_norm([entries(gradient) for gradient in grads])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        kept = self.kept["asynchronous-norm"]
        usual = next(iter(kept.values()), torch.zeros_like(norm))
        # Zero is no usual norm: a last layer that starts at zero lets no gradient through at first.
        before = torch.where(usual > 0, usual, norm)
        limit = self._multiple * before
        torch._foreach_mul_(grads, torch.where(norm > limit, limit / norm, torch.ones_like(norm)))
        mean = _MEMORY * before + (1 - _MEMORY) * torch.minimum(norm, limit)
        kept.update(dict.fromkeys(range(count), torch.where(norm.isfinite(), mean, usual)))


class ErrorFeedback:
    """``W -= share * (u_t - u_(t-1))`` after the optimizer has made its own update ``u_t``."""

    def __init__(self, correction: Any, lag: int) -> None:
        self._share = correction.share
        self.kept: dict[str, dict[int, Tensor]] = {"asynchronous-update": {}}

    @contextmanager
    def around(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, updates: int
    ) -> Iterator[None]:
        before = {i: p.detach().clone() for i, p in enumerate(parameters) if p.grad is not None}
        yield
        last = self.kept["asynchronous-update"]
        for i, update in before.items():
            weight = parameters[i].data
            update.sub_(weight)
            if i in last:
                weight.sub_(update - last[i], alpha=self._share)
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

    def __init__(self, correction: Any, lag: int) -> None:
        self._every, self._memory = correction.every, correction.memory
        self.kept: dict[str, dict[int, Tensor]] = {
            "asynchronous-moments": {},
            "asynchronous-basis": {},
        }

    @contextmanager
    def around(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, updates: int
    ) -> Iterator[None]:
        turned: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for i, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or not self._is_matrix(parameter):
                continue
            basis = self._basis(i, gradient, optimizer.state.get(parameter, {}), updates)
            weight, start = parameter.data, _turned(parameter.data, basis)
            turned.append((parameter, weight, start, basis))
            parameter.grad, parameter.data = _turned(gradient, basis), start.clone()
        try:
            yield
        finally:
            for parameter, weight, start, basis in turned:
                weight.add_(_turned_back(parameter.data - start, basis))
                parameter.grad, parameter.data = None, weight

    def _basis(self, i: int, gradient: Tensor, state: Mapping[str, Any], updates: int) -> Tensor:
        moments, bases = self.kept.values()
        square = gradient @ gradient.mT if _is_wide(gradient) else gradient.mT @ gradient
        if i not in bases:
            moments[i] = square
            bases[i] = torch.linalg.eigh(square).eigenvectors.flip(-1)
            return bases[i]
        moments[i].lerp_(square, 1 - self._memory)
        if updates % self._every == 0:
            old, bases[i] = bases[i], torch.linalg.qr(moments[i] @ bases[i]).Q
            for name in _DIRECTIONS:
                if isinstance(direction := state.get(name), Tensor):
                    direction.copy_(_turned(_turned_back(direction, old), bases[i]))
        return bases[i]

    def _is_matrix(self, parameter: Tensor) -> bool:
        is_real = parameter.dtype in (torch.float32, torch.float64)
        return is_real and parameter.dim() == self.dims and min(parameter.shape[-2:]) > 1


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _turned(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis.mT @ matrix if _is_wide(matrix) else matrix @ basis


def _turned_back(matrix: Tensor, basis: Tensor) -> Tensor:
    return basis @ matrix if _is_wide(matrix) else matrix @ basis.mT


CORRECTIONS: Mapping[str, Callable[[Any, int], Corrector]] = {
    "ramp": Ramp,
    "norm-clip": NormClip,
    "error-feedback": ErrorFeedback,
    "basis-rotation": BasisRotation,
}
"""Name -> how it is made, from the correction and the lag of the stage."""
