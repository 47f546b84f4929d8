"""Work on empty selections: traced where it changes nothing then, refused where it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.export import CaptureWarning
from tests.graph.chain import check_split
from tests.graph.nets import one_stage

Expert = Callable[[int, Tensor], Tensor]


def by_size(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def by_length(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if len(rows) > 0:
            out.index_add_(0, rows, expert(e, x[rows]) * weights[rows, slot, None])
    return out


def by_entries(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if rows.numel():
            out.index_add_(0, rows, expert(e, x[rows]) * weights[rows, slot, None])
    return out


def by_any(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        is_chosen = (chosen == e).any(-1)
        if not is_chosen.any():
            continue
        out[is_chosen] += expert(e, x[is_chosen]) * weights[is_chosen].sum(1, keepdim=True)
    return out


def by_number(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        is_chosen = (chosen == e).any(-1)
        if is_chosen.sum().item() >= 1:
            scale = weights[is_chosen].sum(1, keepdim=True)
            out[is_chosen] += expert(e, x[is_chosen]) * scale
    return out


def hits(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=5).permute(2, 1, 0)  # no expert 4, as in DBRX
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for index in hit:
        slot, rows = torch.where(mask[index].squeeze(0))
        name = int(f"{index[0]}")
        values = expert(name, x[None, rows].reshape(-1, 3)) * weights[rows, slot, None]
        out.index_add_(0, rows, values)
    return out


def grows(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        out *= 1.5
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def another(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(4):
        if (chosen == e).any():
            rows, slot = torch.where(chosen == (e + 1) % 4)
            out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def counts(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, active = torch.zeros_like(x), 0
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        active += 1
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out / active


def collects(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    parts = []
    for e in range(4):
        rows, slot = torch.where(chosen == e)
        if len(rows):
            parts.append((weights[rows, slot, None] * expert(e, x[rows])).mean(0))
    return x + torch.stack(parts).mean(0)


def chooses(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    if (chosen == 0).any():
        out.index_add_(0, torch.where(chosen == 0)[0], x)
    else:
        out += expert(1, x) * weights[:, :1]
    return out


class Mixture(nn.Module):
    """Two of four experts for each sample, the other two of which no sample chooses."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mix, self.gate = mix, nn.Linear(3, 4)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        with torch.no_grad():
            self.gate.bias[::2] -= 100

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mixed: Tensor = self.mix(x, chosen, weights, self.expert)
        return mixed.square().mean()

    def expert(self, number: int, x: Tensor) -> Tensor:
        value: Tensor = self.experts[number](x).tanh()
        return value


@pytest.mark.parametrize("mix", [by_size, by_length, by_any, by_entries, by_number, hits])
def test_work_on_empty_selections_is_traced(mix: Callable[..., Tensor]) -> None:
    """Loss and gradients are those of the plain call, which leaves it out; it is told."""
    torch.manual_seed(0)
    module, batch = Mixture(mix), torch.randn(4, 3)
    with pytest.warns(CaptureWarning, match=r"test_empty_selections.py:\d+ \((if|for).*not none"):
        captured = capture(module, batch)
    assert check_split(captured, batch, one_stage(captured), exact=True) == 0


@pytest.mark.parametrize("mix", [grows, another, counts, collects, chooses])
def test_work_that_does_more_is_refused(mix: Callable[..., Tensor]) -> None:
    """Of a captured model it would change something where a selection is empty."""
    with pytest.raises(CaptureError, match=r"test_empty_selections.py:\d+ \(if .*differ"):
        capture(Mixture(mix), torch.randn(4, 3))
