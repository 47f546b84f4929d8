"""Masks that a forward computes twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from tests.graph.chain import check_split
from tests.graph.nets import one_stage


class Masked(nn.Module):
    """A mean over entries that a mask chooses."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 3), loss

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self.layer(x), y, mask)


def compared(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(h[mask > 0], y[mask > 0])


def by_row(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    rows, weight = h.view(-1)[mask.reshape(-1) > 0], y.view(-1)[mask.reshape(-1) > 0]
    return (rows * weight).sum() / (mask > 0).sum()


def by_name(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.l1_loss(h.masked_select(mask.bool()), torch.masked_select(y, mask.bool()))


def written(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[mask > 0] = h[mask > 0]
    some = mask > 0
    some[:, 0] = False
    return (out - y).square().sum() / (mask > 0).sum() + (h[some] - y[some]).square().mean()


def others(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(h[mask > 0], y[mask > 1])


def random(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(h[torch.rand_like(h) > 0.5], y[torch.rand_like(h) > 0.5])


def changed(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask > 0]
    mask[0, 0] = 0
    return F.mse_loss(rows, y[mask > 0])


def rounded(h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    rows = h[y @ torch.ones(3, 3) > 0.1]
    with torch.autocast("cpu", torch.bfloat16):
        return F.mse_loss(rows, y[y @ torch.ones(3, 3) > 0.1])


def batch(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(samples)
    x, y = (torch.randn(samples, 3, generator=draw) for _ in range(2))
    return x, y, torch.randint(0, 3, (samples, 3), generator=draw)


@pytest.mark.parametrize("loss", [compared, by_row, by_name, written])
def test_a_mask_that_is_computed_twice_is_one(loss: Callable[..., Tensor]) -> None:
    """Loss and gradients are those of the plain call, for other numbers of samples too."""
    torch.manual_seed(0)
    captured = capture(Masked(loss), batch(4))
    assert captured.graph.loss_kind == "weighted mean"
    for samples in (4, 7):
        assert check_split(captured, batch(samples), one_stage(captured), exact=True) == 0


@pytest.mark.parametrize("loss", [others, random, changed, rounded])
def test_masks_of_other_values_are_refused(loss: Callable[..., Tensor]) -> None:
    """A trace does not know that they choose as many entries."""
    with pytest.raises(CaptureError, match=r"equal_masks.py:\d+ .*joins values that two masks"):
        capture(Masked(loss), batch(4))
