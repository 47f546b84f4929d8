"""Means over entries that a mask chooses keep their micro-batches where the mask is the batch's."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import capture


class SeveralTasks(nn.Module):
    """A loss of each task over the samples that have its label."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.score = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor, kind: Tensor, score: Tensor, scored: Tensor) -> Tensor:
        labelled = kind >= 0
        of_kind = F.cross_entropy(self.kind(x)[labelled], kind[labelled])
        return of_kind + F.mse_loss(self.score(x).squeeze(-1)[scored], score[scored])


def test_means_over_samples_that_masks_select_keep_their_micro_batches() -> None:
    """How many each mask selects is known of the batch alone, so every mean has its own count."""
    masks = torch.tensor([0, 1, -1, 2, 0, 1, 2, -1]), torch.tensor([True, False] * 4)
    example = {"x": torch.rand(8, 4), "kind": masks[0], "score": torch.rand(8), "scored": masks[1]}
    for model in (SeveralTasks(), ByPlace()):
        graph = capture(model, example).graph
        assert graph.loss_kind == "weighted mean"
        assert not any(op.whole_batch for op in graph.ops)
    assert capture(Emptied(), example).graph.loss_kind == "coupled"


class ByPlace(SeveralTasks):
    """The same samples by their places."""

    def forward(self, x: Tensor, kind: Tensor, score: Tensor, scored: Tensor) -> Tensor:
        labelled, at = torch.where(kind >= 0), scored.nonzero()[:, 0]
        of_kind = F.cross_entropy(self.kind(x)[labelled], kind[labelled])
        return of_kind + F.mse_loss(self.score(x).squeeze(-1)[at], score[at])


class Emptied(SeveralTasks):
    """Places of a mask that is changed before they are read."""

    def forward(self, x: Tensor, kind: Tensor, score: Tensor, scored: Tensor) -> Tensor:
        mask = kind >= 0
        places = torch.where(mask)
        mask[:] = False
        return self.score(x).squeeze(-1)[places].square().mean() + self.kind(x).mean()


class OfItsOwn(SeveralTasks):
    """A mean over the samples that the model itself chooses."""

    def forward(self, x: Tensor, kind: Tensor, score: Tensor, scored: Tensor) -> Tensor:
        value = self.score(self.kind(x).repeat(1, 2)[:, :4]).squeeze(-1)
        return value[value > 0].square().mean()


def test_mean_over_samples_that_the_model_selects_has_the_whole_batch() -> None:
    """Their number depends on parameters, so it is not known before the forward."""
    example = {
        "x": torch.rand(8, 4),
        "kind": torch.ones(8),
        "score": torch.rand(8),
        "scored": torch.rand(8) > 0,
    }
    graph = capture(OfItsOwn(), example).graph
    assert graph.loss_kind == "coupled"
    assert any(op.whole_batch for op in graph.ops)
