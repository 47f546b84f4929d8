"""State that is as before after a block."""

import pytest
import torch

from anabranch.graph.reverted import unchanged_buffers


def test_buffers_that_a_forward_changed_or_assigned_before_it_failed_are_as_before() -> None:
    """The module can be used on, by a loop that goes on behind the failure."""
    norm = torch.nn.BatchNorm1d(1)
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None

    @unchanged_buffers(norm)
    def forward() -> None:
        mean.add_(1)
        norm.running_var = torch.zeros(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert norm.running_mean is mean
    assert mean.item() == 0
    assert norm.running_var is variance


def test_a_buffer_that_a_forward_resizes_is_as_before() -> None:
    """As the observers of quantisation-aware training do in their first call."""
    module = torch.nn.Module()
    module.register_buffer("least", torch.empty(0))
    with unchanged_buffers(module):
        module.get_buffer("least").resize_(3).zero_()
    assert module.get_buffer("least").shape == (0,)
