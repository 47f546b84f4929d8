"""``ctc_loss`` with lengths in tensors as a function that a trace can follow.

PyTorch's own saves a table for its backward whose size is the longest target of the batch, which a
trace does not know. Here the backward makes the table again, so all sizes are those of the
arguments; numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten


def traceable(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.nn.functional.ctc_loss`` in a form that is traced with lengths in tensors."""

    @wraps(original)
    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        lengths = input_lengths, target_lengths
        if log_probs.dim() != 3 or not all(isinstance(n, Tensor) for n in lengths):
            return original(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        losses: Tensor = CTCLosses.apply(log_probs, targets, *lengths, blank, zero_infinity)  # type: ignore[no-untyped-call]
        if zero_infinity:
            losses = losses.masked_fill(losses == torch.inf, 0.0)
        if reduction == "mean":
            by_label: Tensor = losses / target_lengths.to(losses).clamp_min(1)
            return by_label.mean()
        return losses.sum() if reduction == "sum" else losses

    return ctc_loss


class CTCLosses(torch.autograd.Function):
    """Losses of the samples, ``[n]``, of log probabilities ``[frames, n, classes]`` and targets
    ``[n, u]``, or targets of all samples one after the other.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor, *options: Any) -> Tensor:
        """``options``: lengths of the input and of the targets, blank, zero_infinity."""
        log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
        frames, lengths, *ctx.options = options
        ctx.save_for_backward(log_probs, targets.long(), frames, lengths)
        if _has_no_values(log_probs):
            return log_probs.new_empty(log_probs.shape[1])
        result: Tensor = _aten._ctc_loss.Tensor(*ctx.to_save, *ctx.options)[0]
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Make the table again."""
        kept, options = ctx.saved_tensors, ctx.options
        if _has_no_values(upstream):
            return torch.empty_like(kept[0]), *[None] * 5
        tables = _aten._ctc_loss.Tensor(*kept, *options)
        return _aten._ctc_loss_backward.Tensor(upstream, *kept, *tables, *options), *[None] * 5


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
