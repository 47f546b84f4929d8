"""One process that the pipeline is compared with."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.numerics.dropout import NoDropout
from anabranch.runtime.reference import call, reference
from tests.runtime.small import batch, built, slices


def test_slices_of_the_reference_tile_the_batch() -> None:
    assert slices(10, 4) == [(0, 4), (4, 8), (8, 10)]


class Elsewhere(Tensor):
    """A tensor on another device than the model: it can be cut and moved, not computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.to:
            return result.as_subclass(Tensor)
        if func in (Tensor.__getitem__, Tensor.shape.__get__):  # type: ignore[attr-defined]
            return result
        raise RuntimeError(f"expected all tensors to be on one device, in {func}")


def test_the_batch_comes_to_the_model() -> None:
    """Data loaders yield tensors of the CPU; the model may be on a GPU."""
    model = built("TwoBranch")
    here = batch(6)
    expected = reference(model.module, here, [(0, 4), (4, 6)])
    there = {name: leaf.as_subclass(Elsewhere) for name, leaf in here.items()}
    found = reference(model.module, there, [(0, 4), (4, 6)])
    assert found.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient)


class Viewed(nn.Module):
    """A view that needs contiguous labels."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() - y.view(-1).sum()


def test_a_module_that_fails_by_itself_is_told_where() -> None:
    """A capture makes a copy of what is not contiguous, where torch has no view."""
    labels = {"x": torch.ones(4, 2), "y": torch.ones(2, 4).t()}
    with (
        NoDropout(),
        pytest.raises(TrainingError, match=r"Viewed .* 4 samples .*test_reference.py:\d+"),
    ):
        reference(Viewed(), labels, [(0, 4)])


class Gathers(nn.Module):
    """A loss that counts other processes, as those do that gather features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum() / (dist.get_world_size() if dist.is_initialized() else 1)


def test_a_module_finds_no_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the whole batch, and a collective of one rank alone would wait for ever."""
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", group := Mock())
    module, x = Gathers(), torch.ones(4)
    assert call(module, (x,))["loss"] == 4
    nodes = capture(module, (x,)).programs.exporter.program(4).graph.nodes
    assert [n.args[1] for n in nodes if n.target is torch.ops.aten.div.Tensor] == [1]
    assert dist.GroupMember.WORLD is group
