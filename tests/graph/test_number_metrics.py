"""Metrics that are numbers: of a batch in slices, what they are of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.graph.split import split
from tests.graph.chain import run_stages
from tests.graph.nets import one_stage

Metric = Callable[[Tensor, Tensor, Tensor], float | Tensor]


class Classifies(nn.Module):
    """A loss, and a metric of what was guessed, the labels and the loss."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(4, 3), metric

    def forward(self, x: Tensor, y: Tensor) -> dict[str, float | Tensor]:
        scores = self.layer(x)
        loss = nn.functional.cross_entropy(scores, y)
        return {"loss": loss, "metric": self.metric(scores.argmax(-1), y, loss)}


@pytest.mark.parametrize(
    "metric",
    [
        lambda found, y, loss: (found == y).float().mean().item(),
        lambda found, y, loss: 100 * (found == y).float().mean().item(),
        lambda found, y, loss: 1 + (found == y).sum().item() / len(y) - 0.5,
        lambda found, y, loss: 1 - (found == y).sum().item() / len(y),
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
    ],
)
def test_slices_have_the_number_of_the_batch(metric: Metric) -> None:
    """By the weights of the capture, whether it is a mean, a sum, a count of labels or constant."""
    torch.manual_seed(0)
    module = Classifies(metric)
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2])
    captured = capture(module, (x, y))
    stages = split(captured, one_stage(captured))
    weight = captured.weights(4, 8)["metric"]
    found = 0.0
    for part in (slice(0, 4), slice(4, 8)):
        _, metrics = run_stages(stages, (x[part], y[part]))
        found += weight * float(metrics["metric"])
    assert found == pytest.approx(float(module(x, y)["metric"]))
