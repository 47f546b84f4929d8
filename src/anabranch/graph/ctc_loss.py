"""``ctc_loss`` with lengths in tensors as an operator that a trace can follow.

PyTorch's own saves a table for its backward whose size is the longest target of the batch, which a
trace does not know. Here the backward makes the table again, so all sizes are those of the
arguments; numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from anabranch.device.kinds import CPU, USUAL

_aten = torch.ops.aten


def traceable(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.nn.functional.ctc_loss`` that can be traced with lengths in tensors."""

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
        losses: Tensor = operator()(log_probs, targets, *lengths, blank, zero_infinity)
        if zero_infinity:
            losses = losses.masked_fill(losses == torch.inf, 0.0)
        if reduction == "mean":
            by_label: Tensor = losses / target_lengths.to(losses).clamp_min(1)
            return by_label.mean()
        return losses.sum() if reduction == "sum" else losses

    return ctc_loss


@cache
def operator() -> Any:
    """Losses of the samples, ``[n]``, of log probabilities ``[frames, n, classes]``."""

    @torch.library.custom_op("anabranch::ctc_loss", mutates_args=())
    def losses(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        """With targets ``[n, u]``, or those of all samples one after the other."""
        options = targets.long(), input_lengths, target_lengths, blank, zero_infinity
        result: Tensor = _aten._ctc_loss.Tensor(log_probs, *options)[0]
        return result

    @losses.register_fake
    def _(log_probs: Tensor, *_: Any) -> Tensor:
        return log_probs.new_empty(log_probs.shape[1])

    @torch.library.custom_op("anabranch::ctc_loss_backward", mutates_args=())
    def gradient(
        upstream: Tensor,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        options = targets.long(), input_lengths, target_lengths
        tables = _aten._ctc_loss.Tensor(log_probs, *options, blank, zero_infinity)
        result: Tensor = _aten._ctc_loss_backward.Tensor(
            upstream, log_probs, *options, *tables, blank, zero_infinity
        )
        return result

    @gradient.register_fake
    def _(upstream: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(log_probs)

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        *tensors, ctx.blank, ctx.zero_infinity = inputs
        ctx.save_for_backward(*tensors)

    def back(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        options = *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
        return gradient(upstream, *options), *[None] * 5

    losses.register_autograd(back, setup_context=keep)
    for kind in (CPU, USUAL):  # as PyTorch's own
        losses.register_autocast(kind, torch.float32)
    return losses
