"""Losses, metrics and numbers that are not finite, of one step on a device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.runtime.ranks.placement import Fetched, fetched
from anabranch.schedule.schedule import Action


class GradientNorms:
    """Norms of gradients, one each, which show the gradients that are not finite.

    The norms of one device and type take one launch or a few. A Euclidean norm may overflow though
    the numbers do not; a CPU, where it is the fastest pass, looks at such gradients again. A GPU
    takes the largest entry, which cannot overflow, so that nothing waits for a second look.

    Attributes:
        tensors: the norms, on the device.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, gradient in gradients.items():
            values = gradient._values() if gradient.is_sparse else gradient
            if values.numel():
                groups[values.device, values.dtype][name] = values
        self.names = [name for group in groups.values() for name in group]
        self.tensors: list[Tensor] = []
        self._again: dict[str, Tensor] = {}
        for (device, _), group in groups.items():
            is_exact = accelerator.has_streams(device)
            norms = torch._foreach_norm(list(group.values()), math.inf if is_exact else 2.0)
            self.tensors.append(torch.stack(norms))
            if not is_exact:
                self._again |= group

    def bad(self, numbers: Sequence[float]) -> list[str]:
        """Return the names of gradients that are not finite.

        Args:
            numbers: values of ``tensors``, one after the other, on the host.
        """
        seem = [n for n, norm in zip(self.names, numbers, strict=True) if not math.isfinite(norm)]
        again, self._again = self._again, {}
        return [name for name in seem if name not in again or not again[name].isfinite().all()]


Key = tuple[int, int]
"""Stage and micro-batch."""

Timed = tuple[Action, tuple[Any, Any]]
"""An action, and the marks of its start and end."""

_Noted = tuple[Key, Mapping[str, float], Mapping[str, Tensor]]
"""A micro-batch, the weights of its loss and metrics in the batch's, and these numbers."""


class Outcome:
    """Losses, metrics and bad numbers of one step on a device.

    Losses and metrics are read on request only, as reading a GPU waits for all work before it.
    So is the largest number of each tensor that left a stage, which is kept without the tensor: one
    pass, and NaN or infinity if there is any. (The smallest as well made a step of ``mmt``, small,
    3 % longer on a CPU, one of ``transformer`` no longer; the largest alone takes half of that.)

    Attributes:
        times: every action, with marks of the worker's clock at its start and end.
        tied: exact mode: (parameter, micro-batch, order) -> gradient of one use.
    """

    def __init__(self) -> None:
        self.times: list[Timed] = []
        self.tied: dict[tuple[str, int, int], Tensor] = {}
        self._bad_parameters: list[str] = []
        self._further: list[float] = []
        self._coming: list[tuple[list[_Noted], GradientNorms | None, Fetched]] = []
        self._sums: dict[str, float] = {}
        self._bad: Key | None = None
        self._unread: list[_Noted] = []
        self._left: list[tuple[Key, int, bool, Tensor]] = []

    def leaves(self, key: Key, values: Iterable[tuple[int, Tensor]], *, is_gradient: bool) -> None:
        """Keep the largest numbers of values that leave a stage, or of their gradients."""
        for value, tensor in values:
            if tensor.is_floating_point() and tensor.numel():
                self._left.append((key, value, is_gradient, tensor.detach().amax()))

    @property
    def bad_values(self) -> list[tuple[Key, int, bool]]:
        """Stage, value and whether it is a gradient, of each tensor with NaN or infinity that left
        a stage; minus infinity alone may be a mask and does not count.
        """
        largest = fetched([number for *_, number in self._left])
        return [
            (key, value, is_gradient)
            for (key, value, is_gradient, _), number in zip(self._left, largest, strict=True)
            if not number < math.inf
        ]

    def note(self, key: Key, weights: Mapping[str, float], numbers: Mapping[str, Tensor]) -> None:
        """Keep ``loss`` and metrics of a micro-batch, with the weight of each in the batch's."""
        if numbers:
            self._unread.append((key, weights, numbers))

    @property
    def unread_losses(self) -> list[Tensor]:
        """Losses of this device that nobody has asked for yet."""
        return [numbers["loss"] for *_, numbers in self._unread if "loss" in numbers]

    def bring(self, norms: GradientNorms | None = None, further: Sequence[Tensor] = ()) -> None:
        """Start to copy losses and metrics to the host, where they are read later.

        Args:
            norms: norms of gradients, of which bad ones are to be noted.
            further: numbers for ``further``.
        """
        unread, self._unread = self._unread, []
        own = [tensor for *_, numbers in unread for tensor in numbers.values()]
        tensors = [*own, *(norms.tensors if norms is not None else ()), *further]
        if tensors:
            self._coming.append((unread, norms, Fetched(tensors)))

    def _read(self) -> None:
        if self._unread:
            self.bring()
        coming, self._coming = self._coming, []
        for unread, norms, fetched_numbers in coming:
            values = iter(fetched_numbers.read())
            for key, weights, numbers in unread:
                for name, value in zip(numbers, values, strict=False):
                    if name == "loss" and self._bad is None and not math.isfinite(value):
                        self._bad = key
                    self._sums[name] = self._sums.get(name, 0.0) + value * weights[name]
            if norms is not None:
                self._bad_parameters += norms.bad(list(islice(values, len(norms.names))))
            self._further += values

    @property
    def further(self) -> list[float]:
        """Further numbers that were brought."""
        self._read()
        return self._further

    @property
    def bad_parameters(self) -> list[str]:
        """Names of parameters whose gradients are not finite."""
        self._read()
        return self._bad_parameters

    def numbers(self, names: Sequence[str]) -> Tensor:
        """Return the loss and metrics, in float64; 0 for those that this device does not have."""
        metrics = [self.metrics.get(name, 0.0) for name in names]
        return torch.tensor([self.loss, *metrics], dtype=torch.float64)

    @property
    def loss(self) -> float:
        """This device's share of the step's loss."""
        self._read()
        return self._sums.get("loss", 0.0)

    @property
    def metrics(self) -> Mapping[str, float]:
        """This device's shares of the step's metrics."""
        self._read()
        return {name: total for name, total in self._sums.items() if name != "loss"}

    @property
    def bad(self) -> Key | None:
        """Stage and first micro-batch with a loss that is not finite."""
        self._read()
        return self._bad

    @property
    def is_bad(self) -> bool:
        """True if the optimizer must not see the gradients of this step."""
        return self.bad is not None or bool(self.bad_parameters)
