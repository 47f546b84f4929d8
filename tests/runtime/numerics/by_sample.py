"""One stage whose random operations are by sample."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.numerics.dropout import BySample


class One(nn.Module):
    """One function on the batch, times a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight * x).mean()


def rewritten(
    function: Callable[[Tensor], Tensor], samples: int, shape: tuple[int, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The only stage of a model, by sample, called with key, first sample and batch."""
    captured = capture(One(function), {"x": torch.ones(4, *shape)})
    parts = split(captured, [[op.name for op in captured.graph.ops]])
    program = parts.program(0, samples)
    module = BySample(captured).rewritten(program, samples)
    assert module is not None
    assert not is_random(module)
    return module
