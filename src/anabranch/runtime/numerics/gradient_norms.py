"""Norms of gradients, by which those with numbers that are not finite are found.

All of a device and type take one launch or a few. A norm of squares may overflow though the numbers
do not, so what looks bad is looked at again on the CPU, where that norm is the fastest pass. A GPU
takes the largest entry, which cannot: nobody wants to wait for a second look.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anabranch.device import accelerator


class GradientNorms:
    """One norm per gradient.

    Attributes:
        tensors: the norms, on the device.
        overflowed: set by ``bad``: whether a norm was not finite though its gradient is.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, gradient in gradients.items():
            values = gradient._values() if gradient.is_sparse else gradient
            if values.numel():
                groups[values.device, values.dtype][name] = values
        self.names = [name for group in groups.values() for name in group]
        self.tensors: list[Tensor] = []
        self.overflowed = False
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
            numbers: of ``tensors``, one after the other, on the host.
        """
        seem = [n for n, norm in zip(self.names, numbers, strict=True) if not math.isfinite(norm)]
        again, self._again = self._again, {}
        bad = [name for name in seem if name not in again or not again[name].isfinite().all()]
        self.overflowed = bool(seem) and not bad
        return bad
