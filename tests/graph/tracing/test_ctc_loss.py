"""``ctc_loss`` as it is traced."""

import pytest
import torch
from torch.nn import functional as F

from anabranch.graph.tracing.ctc_loss import traceable


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_losses_and_gradients_are_those_of_pytorch_bit_for_bit(
    reduction: str, is_flat: bool
) -> None:
    """With padded targets and with those of all samples one after the other, a target of no length
    and one that does not fit its frames.
    """
    generator = torch.Generator().manual_seed(0)
    frames, lengths = torch.tensor([6, 5, 6, 2]), torch.tensor([3, 0, 2, 3])
    targets = torch.randint(1, 5, (4, 3), generator=generator)
    targets = targets[torch.arange(3) < lengths[:, None]] if is_flat else targets
    for zero_infinity in (True, False):
        results = []
        for function in (F.ctc_loss, traceable(F.ctc_loss)):
            scores = torch.randn(6, 4, 5, generator=generator.manual_seed(1), requires_grad=True)
            loss = function(
                scores.log_softmax(-1),
                targets,
                frames,
                lengths,
                reduction=reduction,
                zero_infinity=zero_infinity,
            )
            results.append((loss, *torch.autograd.grad(loss.sum(), scores)))
        (loss, gradient), (traced, traced_gradient) = results
        assert torch.equal(loss, traced)
        assert torch.equal(gradient.nan_to_num(7), traced_gradient.nan_to_num(7))


def test_lengths_of_python_are_left_to_pytorch() -> None:
    """As are log probabilities of one sample."""
    log = torch.zeros(4, 2, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 1]])
    loss = traceable(F.ctc_loss)(log, targets, (4, 4), (2, 1))
    assert torch.equal(loss, F.ctc_loss(log, targets, (4, 4), (2, 1)))
