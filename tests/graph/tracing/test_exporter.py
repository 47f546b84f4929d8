"""Metrics that are numbers: of a batch in slices, what they are of the whole batch."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from tests.graph.chain import run_stages
from tests.graph.nets import one_stage

Metric = Callable[[Tensor, Tensor, Tensor], float | Tensor]


METRICS: list[Metric] = [
    lambda found, y, loss: (found == y).float().mean().item(),
    lambda found, y, loss: 100 * (found == y).float().mean().item(),
    lambda found, y, loss: 1 + (found == y).sum().item() / len(y) - 0.5,
    lambda found, y, loss: 1 - (found == y).sum().item() / len(y),
    lambda found, y, loss: 100.0 * (found == y).sum().item() / float(len(y)),
    lambda found, y, loss: -loss.item(),
    lambda found, y, loss: (found == y).sum().half().item() * 100_000,
    lambda found, y, loss: (y - y).to(torch.uint8).sum(dtype=torch.uint8).item() - 5,
    lambda found, y, loss: (found == y).sum().item(),
    lambda found, y, loss: (found == y).sum(),
    lambda found, y, loss: loss.tolist(),
    lambda found, y, loss: float(loss),
    lambda found, y, loss: int((found == y).sum()),
    lambda found, y, loss: 0.07,
    lambda found, y, loss: len(y),
    lambda found, y, loss: (y > 0).sum(),
    lambda found, y, loss: 2 * (y > 0).sum() - (y > 1).sum(),
    lambda found, y, loss: (y > 0).float().mean(),
    lambda found, y, loss: 1 - (y > 0).float().mean() / 2,
    lambda found, y, loss: (y == 0).sum() / (y == 2).sum(),
]
"""Of what was guessed, the labels and the loss."""


class Classifies(nn.Module):
    """A loss, and some of the metrics, by their places."""

    def __init__(self, places: Iterable[int]) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(4, 3), [*places]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, float | Tensor]:
        scores = self.layer(x)
        loss = nn.functional.cross_entropy(scores, y)
        guessed = scores.argmax(-1)
        return {"loss": loss} | {f"{i}": METRICS[i](guessed, y, loss) for i in self.places}


@pytest.fixture(scope="module")
def compared() -> Mapping[str, tuple[float, float]]:
    """Every metric of the batch: from its slices by the weights of the capture, and as it is.

    A few captures have all of them; each reads the number of the loss once, as torch wants it.
    """
    numbers: dict[str, tuple[float, float]] = {}
    for first in range(4):
        torch.manual_seed(0)
        module = Classifies(range(first, len(METRICS), 4))
        x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2])
        captured = capture(module, (x, y))
        stages = split(captured, one_stage(captured))
        weights = captured.weights(4, 8)
        parts = [run_stages(stages, (x, y), rows=slice(i, i + 4))[1] for i in (0, 4)]
        whole = module(x, y)
        for name in map(str, module.places):
            found = sum(weights[name] * float(part[name]) for part in parts)
            numbers[name] = found, float(whole[name])
    return numbers


@pytest.mark.parametrize("place", range(len(METRICS)))
def test_slices_have_the_number_of_the_batch(
    place: int, compared: Mapping[str, tuple[float, float]]
) -> None:
    """By the weights of the capture, whether it is a mean, a sum, a count of labels or constant."""
    found, expected = compared[f"{place}"]
    assert found == pytest.approx(expected)


class SequenceFirst(nn.Module):
    """Refuses a symbolic number of samples; what it transposes is contiguous for one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(torch.zeros(1, 1, 4)), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(1, int(str(len(x))), 4).contiguous()
        return self.layer(x.transpose(0, 1).contiguous(), start)[0].square().mean()


def test_one_sample_has_the_calls_of_several_where_each_number_is_exported() -> None:
    """Python's ``contiguous`` is no call of what is contiguous already."""
    captured = capture(SequenceFirst(), (x := torch.randn(2, 3, 4),))
    assert len(captured.programs.exporter.fixed) > 1  # as many exports as numbers of samples
    module = captured.module
    whole, stages = module(x), split(captured, one_stage(captured))
    parts = [run_stages(stages, (x,), rows=slice(i, i + 1))[0] for i in (0, 1)]
    torch.testing.assert_close(sum(parts) / 2, whole)
