"""Flat programs for any number of samples and any device, with the gradients of the module."""

from typing import Any

import pytest
import torch
from torch import nn

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.flat_program import FlatProgram
from tests.graph.chain import check_split, run_stages
from tests.graph.nets import Net, batch, one_stage, stage_each


def values_of(program: FlatProgram) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves([node.meta["val"] for node in program.calls])


def devices_of(program: FlatProgram) -> set[torch.device]:
    """The devices that stand in the program as constants."""
    given = [(node.args, node.kwargs) for node in program.calls]
    leaves = torch.utils._pytree.tree_leaves(given)
    return {leaf for leaf in leaves if isinstance(leaf, torch.device)}


@pytest.mark.parametrize("samples", [1, 2, 3, 9])
def test_programs_of_any_size_have_fixed_shapes_and_the_loss_of_the_module(samples: int) -> None:
    """No symbol is left, not even for one sample, which tracers treat as a size of its own."""
    module = Net(lambda _, h: h.view(h.shape[0], 2, 4).flatten(1))
    captured = capture(module, batch(4))
    program = captured.programs.at(samples)
    assert all(type(n) is int for value in values_of(program) for n in value.shape)
    loss, _ = run_stages(split(captured, one_stage(captured)), batch(samples))
    assert torch.equal(loss, module(*batch(samples)).detach())
    assert captured.programs.at(samples) is program


class Queries(nn.Module):
    """Learned queries for the images ``[n, 2, 4]`` of a sample, counted by its text ``[n, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.queries = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 4))

    def forward(self, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        text, images = text[:, :-1], self.layer(images.flatten(0, 1))
        images = images.reshape(text.shape[0], images.shape[0] // text.shape[0], 1, 4)
        heads = *images.shape[:2], 2, 2, 2
        attended = self.queries.expand(*images.shape[:2], 2, 4).reshape(heads)
        return (images.reshape(*heads[:2], 1, 2, 2) * attended).sum() + text.square().sum()


def test_order_of_strides_is_no_reason_to_export_one_sample_anew() -> None:
    """What was asked of it holds for several samples only."""
    module, given = Queries(), (torch.randn(3, 2, 4), torch.randn(3, 5))
    captured = capture(module, given)
    one = tuple(leaf[:1] for leaf in given)
    loss, _ = run_stages(split(captured, one_stage(captured)), one)
    assert torch.equal(loss, module(*one).detach())
    assert not captured.programs.exporter.fixed


def test_constructed_tensors_follow_the_device() -> None:
    """Devices are constants in an exported program; a program for another device has none left."""
    positions = lambda _, h: h + torch.arange(8, device=h.device) + torch.tensor(2.0)  # noqa: E731
    captured = capture(Net(positions), batch())
    program = captured.programs.at(4, device="meta")
    assert {value.device.type for value in values_of(program)} == {"meta"}
    assert devices_of(program) == {torch.device("meta")}
    assert devices_of(captured.programs.at(4)) == {torch.device("cpu")}


def _attended(_: Net, h: torch.Tensor) -> torch.Tensor:
    heads = h.view(len(h), 4, 2, 1).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return attended.transpose(1, 2).contiguous().view(len(h), 8)


def test_views_follow_the_order_in_which_a_device_has_its_results() -> None:
    """Attention on a CPU has heads after tokens in memory, so ``contiguous`` is not in the trace,
    but needed on a device without values.
    """
    captured = capture(Net(_attended), batch())
    program = captured.programs.at(2, device="meta")
    assert program.signature() == captured.programs.at(2).signature()


@pytest.mark.parametrize(
    "body",
    [
        lambda net, h: h + _without_grad(h),
        lambda net, h: _written_without_grad(h * 1),
        lambda net, h: h * _chosen(h),
        lambda net, h: h + h.detach(),
        lambda net, h: h * torch.tensor([1.0, 2.0] * 4),
        lambda net, h: _autocast(h),
        lambda net, h: h * h[h[:, 0] > 0].mean(),
    ],
    ids=["no_grad", "written", "same type", "detach", "literal", "autocast", "size from data"],
)
def test_regions_and_constants(body: Any) -> None:
    """Gradients are those of eager execution where parts of the forward run under another mode."""
    captured = capture(Net(body), batch(), granularity="operator")
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


def _without_grad(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h.exp()


def _written_without_grad(h: torch.Tensor) -> torch.Tensor:
    """A value keeps its gradient where what it holds is changed without."""
    with torch.no_grad():
        h.mul_(2).clamp_(-1, 1)
    return h


def _chosen(h: torch.Tensor) -> torch.Tensor:
    """A value keeps its gradient where a cast without one returns the value itself."""
    with torch.no_grad():
        return h.to(torch.float32).contiguous().argmax(1, keepdim=True)


def _autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = h @ h.new_ones(8, 8)
    return h.float()
