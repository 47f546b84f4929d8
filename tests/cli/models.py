"""Workloads that the command line tests name as package.module:function."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from anabranch import Workload


class Towers(nn.Module):
    """Two towers and a head, small enough to train in a test."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(2 * width, 1)

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """[samples, 8] twice and [samples] -> loss and error."""
        joined = torch.cat([self.left(left), self.right(right)], -1)
        off = self.head(joined).squeeze(-1) - target
        return {"loss": (off**2).mean(), "error": off.abs().mean()}


class Branching(Towers):
    """Asks a tensor for its value, which has no graph."""

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Cannot be captured."""
        if left.sum() > 0:
            left = -left
        return super().forward(left, right, target)


def batches(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Ten batches of random numbers, of which a sum is to be learnt."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(10):
        left, right = torch.randn(2, batch_size, 8, generator=generator)
        yield {"left": left, "right": right, "target": left[:, 0] + right[:, 0]}


def failing(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Raises in the middle."""
    for i, batch in enumerate(batches(batch_size, epoch)):
        if i == 3:
            raise OSError("the disk is on fire")
        yield batch


def towers(width: str = "16") -> Workload:
    """The workload."""
    torch.manual_seed(0)
    return Workload(
        Towers(int(width)),
        next(batches(4, 0)),
        data=batches,
        eval_data=lambda batch_size: batches(batch_size, 1),
        chance={"error": 1.1},
    )


def branching() -> Workload:
    """One that cannot be captured."""
    return Workload(Branching(4), next(batches(4, 0)))


def with_failing_data() -> Workload:
    """One whose data raises."""
    return Workload(Towers(4), next(batches(4, 0)), data=failing)
