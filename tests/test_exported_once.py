"""Exports that tests share are those of modules that are alike in all but their weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph.capture import Captured, capture


class Scaled(nn.Module):
    """A layer, and a number that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(3, 3), 2.0, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale
        return (y if self.shift is None else y + self.shift).mean()


def captured(change: Callable[[Scaled], object] = lambda _: None) -> Captured:
    module = Scaled()
    change(module)
    return capture(module, (torch.ones(4, 3),))


def test_modules_with_other_weights_share_an_export() -> None:
    """Each program has the weights of its own module, and knows what the forward has read."""
    first, second = captured(), captured(lambda module: nn.init.zeros_(module.layer.weight))
    exports = [each.programs.exporter._dynamic for each in (first, second)]
    assert exports[0] is exports[1] is not None
    assert torch.equal(second.parameter("layer.weight"), torch.zeros(3, 3))
    assert second.programs.exporter.reads.changed() == []
    second.module.scale = 3.0
    assert second.programs.exporter.reads.changed() == ["scale (was 2.0, now 3.0)"]


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "scale", 3.0),
        lambda module: setattr(module, "shift", torch.ones(3)),
        lambda module: module.layer.bias.requires_grad_(False),
        lambda module: setattr(module.layer, "bias", None),
    ],
)
def test_another_module_has_its_own(change: Callable[[Scaled], object]) -> None:
    """A number, a tensor that is no parameter, what is trained, what is there."""
    first = captured().programs.exporter._dynamic
    assert captured(change).programs.exporter._dynamic is not first


def test_a_changed_method_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests replace methods of classes."""
    first = captured().programs.exporter._dynamic
    monkeypatch.setattr(Scaled, "forward", lambda module, x: module.layer(x).sum())
    assert captured().programs.exporter._dynamic is not first
