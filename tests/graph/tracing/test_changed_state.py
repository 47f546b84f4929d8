"""State that a forward changes."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from tests.graph.chain import run_stages
from tests.graph.nets import stage_each


class Following(nn.Module):
    """A norm, and a frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.teacher = deepcopy(self.norm).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.norm.weight, 0.5)
        return (self.norm(x) - self.teacher(x)).square().mean()


def test_a_norm_that_is_changed_otherwise_as_well_is_told() -> None:
    """Running means are known to change with every micro-batch; a weight that follows is not."""
    captured = capture(Following(), (torch.randn(4, 4),))
    assert captured.graph.stateful == ("teacher.weight",)


class Averaged(nn.Module):
    """A layer, and a frozen one whose ``.data`` a function of both assigns (MoCo, ALBEF)."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.follow = nn.Linear(4, 4), follow
        self.teacher = deepcopy(self.layer).requires_grad_(False)
        self.teacher.bias.fill_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data = self.follow(own, other)
        return (self.layer(x) - self.teacher(x)).square().mean()


def test_new_values_that_are_assigned_to_data_are_copied() -> None:
    """They are those of a plain call after a step."""
    module = Averaged(lambda own, other: own.data * 0.5 + other.data * 0.5)
    plain, batch = deepcopy(module), (torch.randn(4, 4),)
    captured = capture(module, batch)
    loss, _ = run_stages(split(captured, stage_each(captured), exact=True), batch)
    assert torch.equal(loss, plain(*batch))
    assert torch.equal(module.teacher.bias, plain.teacher.bias)


@pytest.mark.parametrize(
    "follow",
    [
        lambda own, other: other.data,  # from now on the two are one
        lambda own, other: (own.data * 0.5).double(),
        lambda own, other: own.data[:1] * 0.5,
    ],
)
def test_anything_else_that_is_assigned_to_data_is_refused(
    follow: Callable[..., torch.Tensor],
) -> None:
    """As a captured program cannot make another tensor of one."""
    with pytest.raises(CaptureError, match=r"state.py:\d+ .*own.data = .*assigns to the .data"):
        capture(Averaged(follow), (torch.randn(4, 4),))


def old_values(module: Averaged, x: torch.Tensor) -> torch.Tensor:
    old, module.teacher.bias.data = module.teacher.bias.data, module.teacher.bias * 0.5
    return x * old


def new_values(module: Averaged, x: torch.Tensor) -> torch.Tensor:
    new = module.teacher.bias * 0.5
    module.teacher.bias.data = new
    new.add_(1)
    return x


def both(module: Averaged, x: torch.Tensor) -> torch.Tensor:
    new = module.teacher.bias * 0.5
    module.teacher.bias.data = new
    module.teacher.bias.data.add_(1)
    return x * new


@pytest.mark.parametrize("use", [old_values, new_values, both])
def test_values_of_data_that_go_by_two_names_are_refused(use: Callable[..., torch.Tensor]) -> None:
    """An assignment joins or parts them, and a copy does not."""
    module = Averaged(lambda own, other: own * 1)
    module.layer.register_forward_pre_hook(lambda _, inputs: use(module, *inputs))
    with pytest.raises(CaptureError, match=r"state.py:\d+ .*whose old values are read afterwards"):
        capture(module, (torch.randn(4, 4),))
