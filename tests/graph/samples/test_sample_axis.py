"""Where the samples are, found from sizes and views."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph.call_traits import SampleAxis, base_name
from anabranch.graph.capture import capture
from anabranch.graph.samples.sample_axis import blocks, sample_axes

N, L, H, E = 3, 5, 2, 4


class Net(nn.Module):
    """Applies a function to its input of shape [N, L, H * E]; a sine marks what is asked about."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(H * E))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.function(x * self.weight)).mean()


def axis(function: Callable[[Tensor], Tensor], name: str = "sin") -> SampleAxis:
    captured = capture(Net(function), {"x": torch.randn(N, L, H * E)})
    axes = sample_axes(captured.programs.at(N), captured.programs.at(2 * N))
    return next(axes[node] for node in axes if base_name(node) == name)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], SampleAxis]] = {
    "first": (lambda x: x, SampleAxis(0)),
    "sequence first": (lambda x: x.transpose(0, 1), SampleAxis(1)),
    "flat tokens": (lambda x: x.reshape(-1, H * E), SampleAxis(0, L)),
    "tokens of a sequence first": (
        lambda x: x.transpose(0, 1).reshape(-1, H * E),
        SampleAxis(0, 1),
    ),
    "heads": (lambda x: x.view(-1, L, H, E).transpose(1, 2).reshape(-1, L, E), SampleAxis(0, H)),
    "heads of a sequence first": (
        lambda x: x.transpose(0, 1).reshape(L, -1, E).transpose(0, 1),
        SampleAxis(0, H),
    ),
    "products keep what is folded": (
        lambda x: (h := x.reshape(-1, H, E)) @ h.transpose(1, 2),
        SampleAxis(0, L),
    ),
    "unfolded": (lambda x: x.reshape(-1, E).reshape(-1, L, H * E), SampleAxis(0)),
    "copies in front": (
        lambda x: x.unsqueeze(0).expand(2, -1, -1, -1).reshape(-1, L, H * E),
        SampleAxis(0, 1),
    ),
    "joined": (lambda x: torch.cat([x, x.sqrt() ** 2]), SampleAxis(0, 1)),
    "tokens joined": (
        lambda x: torch.cat([h := x.reshape(-1, H * E), h.sqrt() ** 2]),
        SampleAxis(0, L),
    ),
    "joined beside the samples": (
        lambda x: torch.cat([h := x.reshape(-1, H * E), h], -1),
        SampleAxis(0, L),
    ),
    "repeated": (lambda x: x.repeat(2, 1, 1), SampleAxis(0, 1)),
    "repeated one by one": (lambda x: x.repeat_interleave(2, 0), SampleAxis(0, 2)),
    "numbered": (
        lambda x: (h := x.reshape(-1, H * E))[torch.arange(len(h))],
        SampleAxis(0, L),
    ),
    "halves beside the samples": (
        lambda x: torch.maximum(*x.reshape(-1, H * E).chunk(2, 1)),
        SampleAxis(0, L),
    ),
    "sorted beside the samples": (
        lambda x: x.reshape(-1, H * E).sort(1).values,
        SampleAxis(0, L),
    ),
    "no samples": (lambda x: x.mean(0), SampleAxis(-1)),
}


def test_a_row_that_is_repeated_for_each_sample_has_the_samples() -> None:
    """Positions for all of them are sent, and cut, like a sample's own values."""
    rows = lambda x: x[:, 0] * torch.ones(1, H * E).repeat(len(x), 1)  # noqa: E731
    assert axis(rows, "repeat") == SampleAxis(0)


@pytest.mark.parametrize("name", CASES)
def test_the_axis_is_where_values_change_with_a_sample(name: str) -> None:
    """Dimension, and indices in a row that are of one sample. Each sample is filled with its own
    number; the axis must find the number everywhere.
    """
    function, expected = CASES[name]
    found = axis(function)
    assert found == expected
    if name == "no samples":
        return
    numbers = torch.arange(1.0, N + 1).view(N, 1, 1).expand(N, L, H * E).contiguous()
    if name.startswith("products"):
        numbers = numbers.sqrt() / E**0.5
    value = function(numbers)
    before, samples, after = blocks(found, value.shape, N)
    assert samples == N
    rows = value.reshape(before, N, after)
    for sample in range(N):
        torch.testing.assert_close(rows[:, sample], torch.full((before, after), sample + 1.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 0] @ x[:, 0].T,
        lambda x: torch.cat([x.reshape(-1, E), x.transpose(0, 1).reshape(-1, E)]),
        lambda x: x.reshape(-1, E)[torch.randperm(x.numel() // E)],
        lambda x: (h := x.reshape(-1, E))[len(h) - 1 - torch.arange(len(h))],
        lambda x: (h := x.reshape(-1, E))[h[:, 0].sort().indices],
        lambda x: (h := x.reshape(-1, E)).index_copy(0, h[:, 0].topk(len(h)).indices, h * 2),
        lambda x: x.reshape(-1, E).sort(0).values,
        lambda x: x.reshape(L, -1, H * E),
        lambda x: x.transpose(0, 1).reshape(-1, L, H * E),
    ],
    ids=[
        "pairs",
        "joined in two orders",
        "drawn",
        "backwards",
        "index of a sort",
        "put back by an index",
        "sorted",
        "other rows",
        "mixed",
    ],
)
def test_samples_that_cannot_be_told_apart_are_trouble(
    function: Callable[[Tensor], Tensor],
) -> None:
    """A matrix of pairs, two orders in one dimension, rows in any order, and views that count
    across samples.
    """
    assert axis(function).trouble


def test_blocks_keep_the_order_of_elements() -> None:
    """[2, 12, 5] with 3 samples of 2 in a row: 2 * 2 before, 2 * 5 after."""
    assert blocks(SampleAxis(1, 2), (2, 12, 5), 3) == (4, 3, 10)
    assert blocks(SampleAxis(-1), (2, 3), 4) == (1, 0, 6)
