"""Prediction of a stage's weights after s more updates.

    predicted = W_t - lr * s * dW_t

dW_t is the last step of the optimizer, computed by its own rule from its state (PipeOptim, Table
I)::

    SGD            v_t                                 the momentum buffer
    Adam, AdamW    m_hat_t / (sqrt(v_hat_t) + eps)     with amsgrad the largest v so far
    any other      (W_{t-1} - W_t) / lr                the last update itself, kept for this

Where the paper is silent:

- lr is the rate of the next update, as the scheduler has left it in the parameter group. The last
  update of an optimizer without a rule is repeated with the rate that it had.
- Weight decay of SGD and Adam is part of the gradient and so of dW. AdamW's decay is left out: it
  moves a weight by lr * decay of itself, far less than a step.
- Nesterov's step is ``g + momentum * v``. Its g belongs to one mini-batch and is gone; such steps
  add up to v, so dW is v here too.
- SGD without momentum predicts the current weights.
- A parameter without optimizer state, or without a gradient at the last update, is not moved.
- Subclasses of an optimizer may do anything in their step, so they count as "any other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.runtime.state.optimizer_facts import rule_of

_Rows = list[tuple[Tensor, Mapping[str, Any]]]
"""(weight, optimizer state of its parameter)."""


class WeightPrediction:
    """Predicts the weights of one optimizer."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self.rule = rule_of(optimizer)
        self._place = {id(parameter): i for i, parameter in enumerate(parameters)}

    def move(
        self,
        weights: Sequence[Tensor],
        ahead: int,
        *,
        moved: frozenset[int] | None = None,
        rate: float = 1.0,
        last: Sequence[Tensor] | None = None,
    ) -> None:
        """Move current weights, in place, to their predicted values.

        Args:
            ahead: s, a number of updates.
            moved: indices of parameters that the last update moved; None if unknown, after a
                restart.
            rate: factor on the learning rate.
            last: ``W_{t-1} - W_t`` of each parameter, for optimizers without a rule; None before
                the first update.
        """
        if self.rule == "last update":
            if last is not None:
                torch._foreach_add_(list(weights), list(last), alpha=-ahead)
            return
        state = self._optimizer.state
        step = _momentum if self.rule == "momentum" else _adam
        # The groups are looked up every time: loading a state dict replaces them.
        for group in self._optimizer.param_groups:
            indices = (self._place[id(p)] for p in group["params"] if id(p) in self._place)
            rows = [
                (_real(weights[i]), state[self._parameters[i]])
                for i in indices
                if (moved is None or i in moved) and state.get(self._parameters[i])
            ]
            if rows:
                step(group, rows, group["lr"] * rate * ahead)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _momentum(group: Mapping[str, Any], rows: _Rows, rate: float | Tensor) -> None:
    """``w -= rate * v``."""
    rows = [row for row in rows if row[1].get("momentum_buffer") is not None]
    if not (rows and group["momentum"]):
        return
    moved = [weight for weight, _ in rows]
    buffers = [_real(state["momentum_buffer"]) for _, state in rows]
    if _on_device(rate):
        torch._foreach_sub_(moved, torch._foreach_mul(buffers, rate))
    else:
        torch._foreach_add_(moved, buffers, alpha=-float(rate))


def _adam(group: Mapping[str, Any], rows: _Rows, rate: float | Tensor) -> None:
    """``w -= rate * m_hat / (sqrt(v_hat) + eps)``, in the order of operations of torch's Adam."""
    weights, states = [weight for weight, _ in rows], [state for _, state in rows]
    beta1, beta2 = map(float, group["betas"])
    second = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    means = [_real(state["exp_avg"]) for state in states]
    roots = list(torch._foreach_sqrt([_real(state[second]) for state in states]))
    steps = [state["step"] for state in states]
    if _on_device(rate) or _on_device(steps[0]):
        # Nothing is read back: the host would wait for the device.
        corrections = [(1 - beta1**step, (1 - beta2**step).sqrt()) for step in steps]
        torch._foreach_div_(roots, [c2 for _, c2 in corrections])
        torch._foreach_add_(roots, group["eps"])
        moves = list(torch._foreach_div(means, roots))
        torch._foreach_mul_(moves, [rate / c1 for c1, _ in corrections])
        torch._foreach_sub_(weights, moves)
        return
    numbers = [float(step) for step in steps]
    torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in numbers])
    torch._foreach_add_(roots, group["eps"])
    factors = [-(float(rate) / (1 - beta1**step)) for step in numbers]
    torch._foreach_addcdiv_(weights, means, roots, factors)


def _on_device(number: object) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"
