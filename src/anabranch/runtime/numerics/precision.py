"""Scale of the loss under fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import NonFiniteError


@dataclass
class LossScale:
    """The factor on the loss under fp16, by the rules and defaults of ``torch.amp.GradScaler``.

    Gradients of half-precision activations underflow below 6e-8, so the loss is scaled before the
    backwards and the parameters' gradients are divided after them. An overflow anywhere multiplies
    the scale by ``backoff`` on all ranks, and the step is left out; a ``streak`` of ``interval``
    steps without overflow multiplies it by ``growth``.
    """

    scale: float = 2.0**16
    streak: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    LEAST = 2.0**-16
    """An overflow at or below this scale is not due to the scale."""

    def unscale(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        """Divide gradients in place; return a tensor, 0 unless all are finite, if there are any."""
        held = [gradient for gradient in gradients if gradient is not None]
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in held]
        values = [torch.view_as_real(v) if v.is_complex() else v for v in values if v.numel()]
        if not values:
            return []
        device = values[0].device
        by_entry = accelerator.has_streams(device)  # the fastest norm that never overflows
        kind = (math.inf, None) if by_entry else (2.0, accelerator.widest_float(device))
        norms = torch.stack(torch._foreach_norm(values, *kind))
        torch._foreach_mul_(values, 1.0 / self.scale)
        return [norms.isfinite().all()]

    def update(self, overflow: bool) -> None:
        """Update the scale after a step; NonFiniteError for an overflow at the smallest scale."""
        if not overflow:
            self.streak += 1
            if self.streak == self.interval:
                self.streak = 0
                grown = self.scale * self.growth
                self.scale = grown if grown <= _LARGEST else self.scale
            return
        self.streak = 0
        if self.scale <= self.LEAST:
            raise NonFiniteError(
                f"gradients are not finite even with the loss scaled by {self.scale:g}: no step is "
                "left to try; lower the learning rate, look at the data, or train in bf16 or fp32"
            )
        self.scale *= self.backoff


_LARGEST = math.ldexp(1.0, 127)
"""GradScaler keeps its scale in a float32."""
