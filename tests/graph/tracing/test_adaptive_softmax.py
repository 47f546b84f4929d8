"""``nn.AdaptiveLogSoftmaxWithLoss`` as it is traced."""

import torch
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.graph.tracing.adaptive_softmax import without_questions
from tests.graph.chain import check_split
from tests.graph.nets import stage_each


class Words(nn.Module):
    """Words in three clusters, of which a batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 30, [10, 20], div_value=2.0)

    def forward(self, word: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.table(word), target).loss


def test_losses_are_those_of_pytorch_bit_for_bit() -> None:
    """Also where a cluster has no target, and of one sample without a dimension of samples."""
    layer = Words().loss
    forward = without_questions(type(layer).forward)
    for target in (torch.tensor([2, 11, 9, 29]), torch.tensor([21, 3]), torch.tensor(12)):
        hidden = torch.randn(*target.shape, 8)
        for ours, theirs in zip(forward(layer, hidden, target), layer(hidden, target), strict=True):
            assert torch.equal(ours, theirs)


def test_it_is_captured() -> None:
    """With its gradients, for any batch."""
    captured = capture(Words(), (torch.arange(4), torch.tensor([2, 11, 9, 29])))
    for target in (torch.tensor([2, 11, 9, 29]), torch.tensor([1, 1])):
        batch = torch.arange(len(target)), target
        assert check_split(captured, batch, stage_each(captured), exact=True) == 0.0
