"""Work that is left out on an empty selection: traced if it changes nothing then, else refused."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.tracing.export import CaptureWarning
from tests.graph.chain import check_split
from tests.graph.nets import one_stage

Expert = Callable[[int, Tensor], Tensor]


def by_size(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def by_shape(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows, slot = torch.where(chosen == e)
        if rows.shape[0] == 0:  # as older Mixtrals ask
            continue
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def by_length(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows, slot = torch.where(chosen == e)
        if len(rows) > 0:
            out.index_add_(0, rows, expert(e, x[rows]) * weights[rows, slot, None])
        if rows.numel():
            out.index_add_(0, rows, expert(e, x[rows]))
        if len(rows):
            out.index_add_(0, rows, x[rows])
        if 0 >= len(rows):  # noqa: SIM300
            continue
        if 0 < len(rows):  # noqa: SIM300
            out.index_add_(0, rows, x[rows] * weights[rows, slot, None])
    return out


def or_zeros(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        mask = chosen == e
        if mask.any():
            rows = mask.any(-1).nonzero().flatten()
            out.index_add_(0, rows, expert(e, x[rows]) * weights[mask].view(-1, 1))
        elif x.requires_grad or e:
            out[0, 0] += 0 * expert(e, x).sum()
    return out


def by_number(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        is_chosen = (chosen == e).any(-1)
        if is_chosen.sum().item() >= 1:
            scale = weights[is_chosen].sum(1, keepdim=True)
            out[is_chosen] += expert(e, x[is_chosen]) * scale
        if not is_chosen.any():
            continue
        out[is_chosen] += expert(e, x[is_chosen]) * weights[is_chosen].sum(1, keepdim=True)
    return out


def by_counts(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=2).tolist()  # as DeepSeek-V3 asks
    for e in range(2):
        if counts[e] == 0:
            continue
        rows, slot = torch.where(chosen == e)
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def by_the_next_count(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=3).tolist()
    for e in range(2):
        if counts[e + 1] == 0:
            continue
        rows, slot = torch.where(chosen == e)
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def by_weight(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    sums = torch.bincount(chosen.flatten(), weights.relu().flatten(), minlength=2)
    for e in range(2):
        if sums[e] == 0:
            continue
        rows, slot = torch.where(chosen == e)
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
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


def clears(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = expert(1, x) * 2
    for e in range(2):
        is_chosen = (chosen == e).any(-1)
        if is_chosen.any():
            scale = weights.sum() / is_chosen.sum().clamp(min=1)
            out[is_chosen] = 0
            out.masked_fill_(is_chosen[:, None], e)
            out[is_chosen] += expert(e, x[is_chosen]) * scale
    return out


def first_ones(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        if (chosen == e).any():
            rows = torch.where(chosen == e)[0][:3]
            out[rows] += expert(e, x[rows])
    return out


def grows(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        out *= 1.5
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def another(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        if (chosen == e).any():
            rows, slot = torch.where(chosen == (e + 1) % 4)
            out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out


def counts(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, active = torch.zeros_like(x), 0
    for e in range(2):
        rows, slot = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        active += 1
        out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out / active


def collects(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    parts = []
    for e in range(2):
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


def of_no_one(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        is_chosen = (chosen == e).any(-1)
        # The gradient of the weights would be zero times infinity, where nobody chooses.
        scale = weights.mean(0)[:1] / is_chosen.sum()
        if is_chosen.any():
            out[is_chosen] += scale * expert(e, x[is_chosen])
    return out


def roots(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        is_chosen = (chosen == e).any(-1)
        if is_chosen.any():
            scale = (weights * (chosen == e)).sum().sqrt()
            out[is_chosen] += scale * expert(e, x[is_chosen])
    return out


def of_no_row(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += expert(e, x[rows]) / x[rows].abs().max()
    return out


def of_no_first(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += expert(e, x[rows]) + x[rows][0]
    return out


def of_no_count(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += expert(e, x[rows]) * (weights.mean() / rows.numel())
    return out


def eighths(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() % 8 == 0:
            continue
        out[rows] += expert(e, x[rows])
    return out


def by_rest(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if len(rows[3:]) == 0:
            continue
        out[rows] += expert(e, x[rows])
    return out


def keeps(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, kept = torch.zeros_like(x), SimpleNamespace()
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += expert(e, x[rows])
            _ = setattr(kept, "scale", weights.mean() * e)  # type: ignore[func-returns-value]
    scaled: Tensor = out * kept.scale
    return scaled


def appends(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, active = torch.zeros_like(x), list[int]()
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            _ = active.append(e)  # type: ignore[func-returns-value]
            out[rows] += expert(e, x[rows])
    return out / len(active)


def of_outside(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, active = torch.zeros_like(x), 0

    def add(e: int) -> None:
        nonlocal active
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            active += 1
            out[rows] += expert(e, x[rows])

    for e in range(2):
        add(e)
    return out / active


def columns(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    rows = torch.where(chosen == 1)[0]
    some = x.mean(0) > 9
    if some.any():
        cells = x[rows][:, some]  # as many rows as there are, though no column
        out.index_add_(0, rows, expert(1, x[rows]) + cells.sum(-1, keepdim=True))
    return out


def overwritten(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    is_chosen = (chosen == 1).any(-1)
    rows = torch.where(is_chosen)[0]
    is_chosen[:4] = False
    if is_chosen.any():
        out.index_add_(0, rows, expert(1, x[rows]))
    return out


def truncated(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out = torch.zeros_like(x)
    if weights.long().any():
        rows = weights.nonzero()[:, 0]
        out.index_add_(0, rows, expert(1, x[rows]))
    return out


def misses(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, mask = torch.zeros_like(x), F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
    for index in (mask.sum(dim=(-1, -2)) == 0).nonzero():
        rows = torch.where(mask[index][0])[1]
        out.index_add_(0, rows, x[rows])
    return out


def next_hits(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, mask = torch.zeros_like(x), F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
    for index in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        rows = torch.where(mask[(index + 1) % 4][0])[1]
        out.index_add_(0, rows, x[rows])
    return out


def samples_hit(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    out, mask = torch.zeros_like(x), F.one_hot(chosen[:, 0], num_classes=4)
    for index in (mask.sum(0) > 0).nonzero():
        rows = torch.where(mask[index][0])[0]
        out.index_add_(0, rows, x[rows])
    return out


def overwritten_hits(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    chosen = chosen.clone()
    chosen[:, 0] = 4
    return hits(x, chosen, weights, lambda e, x: expert(e % 4, x))


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


@pytest.mark.parametrize(
    "mix",
    [
        by_size,
        by_shape,
        by_length,
        or_zeros,
        by_number,
        by_counts,
        hits,
        overwritten_hits,
        clears,
        first_ones,
    ],
)
def test_work_on_empty_selections_is_traced(mix: Callable[..., Tensor]) -> None:
    """Loss and gradients are those of the plain call, which leaves it out; a warning says so."""
    torch.manual_seed(0)
    module, batch = Mixture(mix), torch.randn(4, 3)
    with pytest.warns(CaptureWarning, match=r"test_empty_selections.py:\d+ \((if|for).*not none"):
        captured = capture(module, batch)
    assert check_split(captured, batch, one_stage(captured), exact=True) == 0


@pytest.mark.parametrize(
    "mix", [grows, another, counts, collects, chooses, eighths, of_outside, by_rest]
)
def test_work_that_does_more_is_refused(mix: Callable[..., Tensor]) -> None:
    """The captured model would do it also where the plain call leaves it out."""
    with pytest.raises(CaptureError, match=r"test_empty_selections.py:\d+ \(if .*differ"):
        capture(Mixture(mix), torch.randn(4, 3))


OTHERS = (
    *(
        by_the_next_count,
        by_weight,
        of_no_one,
        roots,
        of_no_row,
        of_no_first,
        of_no_count,
        keeps,
        appends,
        columns,
        overwritten,
        truncated,
    ),
    *(misses, next_hits, samples_hit),
)


@pytest.mark.parametrize("mix", OTHERS)
def test_work_with_other_results_is_refused(mix: Callable[..., Tensor]) -> None:
    """On an empty selection it would compute infinities, fail, keep something, or be of another
    selection.
    """
    with pytest.raises(CaptureError, match=r"test_empty_selections.py:\d+ \((if|for) .*differ"):
        capture(Mixture(mix), torch.randn(4, 3))
