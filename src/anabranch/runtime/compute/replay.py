"""A stage that is replayed: what its passes launch is recorded once, and started with one call.

A recording works on fixed memory, so each micro-batch that is between forward and backward has one
of its own, which another takes over afterwards::

    slot 0   F0 ........ B0  F2 ........ B2            what enters is copied in, what leaves is
    slot 1       F1 ........ B1  F3 ...                copied out, since it travels on its own

Where graphs cannot be recorded, as on a CPU, the passes are run again in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.device import accelerator
from anabranch.graph.reverted import unchanged

Outputs = tuple[Tensor, ...]


class ReplayedCall:
    """The call of a stage, with a slot for each micro-batch in flight.

    Attributes:
        reserve: slots that are made at the first call; others when they are needed.

    Args:
        call: takes tensors, and reads the parameters of ``module``.
        written: parameters that it changes.
    """

    def __init__(
        self, call: Callable[..., Outputs], module: nn.Module, written: Iterable[Tensor] = ()
    ) -> None:
        self._call, self._module, self._state = call, module, [*module.buffers(), *written]
        self._free: list[_RecordedPasses] = []
        self.num_slots, self.reserve = 0, 1

    def __call__(self, *args: Tensor) -> Outputs:
        if not torch.is_grad_enabled():
            return self._call(*args)
        while not self._free or self.num_slots < self.reserve:
            with unchanged(self._state):
                self._free.append(_RecordedPasses(self._call, self._module, args))
            self.num_slots += 1
        slot = self._free.pop()
        outputs: Outputs = _Replay.apply(slot, self._free, *args, *slot.parameters)  # type: ignore[no-untyped-call]
        return outputs


class _RecordedPasses:
    """Recorded passes over fixed tensors."""

    def __init__(
        self, call: Callable[..., Outputs], module: nn.Module, args: Sequence[Tensor]
    ) -> None:
        self.inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._call, device = call, self.inputs[0].device
        with accelerator.on_side_stream(device):
            for _ in range(3):  # in which libraries set themselves up
                self.outputs = self._forward()
                self.gradients = [torch.zeros_like(o) for o in self.outputs if o.requires_grad]
                self._backward()
        self.forward = accelerator.recorded(self._forward, device)
        self.outputs = self.forward()
        self.backward = accelerator.recorded(self._backward, device)

    def _forward(self) -> Outputs:
        with torch.enable_grad():
            return tuple(self._call(*self.inputs))

    def _backward(self) -> list[Tensor | None]:
        """Return gradients of the inputs, then of the parameters, where there are some."""
        everything = [*self.inputs, *self.parameters]
        wanted = [tensor for tensor in everything if tensor.requires_grad]
        outputs = [output for output in self.outputs if output.requires_grad]
        if not (wanted and outputs):
            return [None] * len(everything)
        results = torch.autograd.grad(
            outputs, wanted, self.gradients, retain_graph=True, allow_unused=True
        )
        gradients = iter(results)
        return [next(gradients) if tensor.requires_grad else None for tensor in everything]


class _Replay(torch.autograd.Function):
    """Passes of a slot, which is free again after the backward."""

    @staticmethod
    def forward(
        ctx: Any, slot: _RecordedPasses, free: list[_RecordedPasses], *tensors: Tensor
    ) -> Outputs:
        torch._foreach_copy_(slot.inputs, list(tensors[: len(slot.inputs)]))
        slot.outputs = slot.forward()
        results = [output.detach().clone() for output in slot.outputs]
        pairs = zip(results, slot.outputs, strict=True)
        ctx.mark_non_differentiable(*[r for r, o in pairs if not o.requires_grad])
        ctx.slot, ctx.free = slot, free
        if not slot.gradients:
            free.append(slot)  # no backward will come
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> Any:
        slot = ctx.slot
        pairs = zip(arrived, slot.outputs, strict=True)
        torch._foreach_copy_(slot.gradients, [g for g, o in pairs if o.requires_grad])
        gradients = [None if g is None else g.detach().clone() for g in slot.backward()]
        ctx.free.append(slot)
        return (None, None, *gradients)
