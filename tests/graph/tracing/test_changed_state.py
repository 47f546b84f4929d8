"""State that a forward changes."""

from copy import deepcopy

import torch
from torch import nn

from anabranch.graph.capture import capture


class Following(nn.Module):
    """A norm, and a frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.teacher = deepcopy(self.norm).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.norm.weight, 0.5)
        return (self.norm(x) - self.teacher(x)).square().mean()


def test_a_norm_that_is_changed_otherwise_as_well_is_told() -> None:
    """Running means are known to change with every micro-batch; a weight that follows is not."""
    captured = capture(Following(), (torch.randn(4, 4),))
    assert captured.graph.stateful == ("teacher.weight",)
