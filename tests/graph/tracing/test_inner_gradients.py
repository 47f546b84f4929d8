"""Gradients that a forward asks for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.verification import verify
from anabranch.workload import Workload
from tests.graph.chain import check_split
from tests.graph.nets import Net, batch, stage_each


def penalised(net: Net, h: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(net.last(h).sum(), h, create_graph=True)
    return h * slope.norm(dim=1, keepdim=True)


def curved(net: Net, h: Tensor) -> Tensor:
    """Second derivatives, through a result that autograd keeps (tanh)."""
    y = net.last(h.tanh())
    (slope,) = torch.autograd.grad(y, h, torch.ones_like(y), create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), h.requires_grad_(), create_graph=True)
    return h + bend


def scattered(net: Net, h: Tensor) -> Tensor:
    """Through tensors that the calls between make and change."""
    sums = torch.zeros_like(h).index_add_(1, torch.tensor([0, 0, 1]), h.exp()[:, :3])
    (slope,) = torch.autograd.grad(sums.square().sum(), h, create_graph=True)
    return h + slope


def fitted(net: Net, h: Tensor) -> Tensor:
    """A step on the weights that lowers a mean over the samples (MAML)."""
    weight = net.last.weight
    error = F.mse_loss(F.linear(h, weight), h[:, :1] + 1)
    (slope,) = torch.autograd.grad(error, weight, create_graph=True)
    return h + F.linear(h, weight - slope)


def looked_at(net: Net, h: Tensor) -> Tensor:
    """Without ``create_graph`` a gradient is a constant; another one there is not."""
    other = torch.ones(3, requires_grad=True) * 1
    slope, none = torch.autograd.grad(net.last(h).exp().sum(), [h, other], allow_unused=True)
    assert none is None
    return h * slope


def attended(net: Net, h: Tensor) -> Tensor:
    """Kernels of attention but one have no second derivative."""
    near = h[:, None, :, None]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y = F.scaled_dot_product_attention(near, near, near)
    (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return h + slope


def written_in_parts(net: Net, h: Tensor) -> Tensor:
    """Through writes to parts of a tensor, whose results nobody reads but by the whole."""
    y = (h * net.last(h)).tanh().clone()
    y[:, 0] = y[:, 1] * 3
    y[:, :2].mul_(2)
    turned = torch.zeros_like(y)
    turned[:, ::2] = -y[:, ::2]
    (slope,) = torch.autograd.grad((y * turned).sum(), h, create_graph=True)
    return h + slope


def in_waves(net: Net, h: Tensor) -> Tensor:
    """Through complex numbers."""
    waves = torch.fft.rfft(h * net.last(h))
    (slope,) = torch.autograd.grad(waves.abs().square().sum(), h, create_graph=True)
    return h + slope


BODIES = [
    penalised,
    curved,
    scattered,
    fitted,
    looked_at,
    attended,
    written_in_parts,
    in_waves,
]


@pytest.mark.parametrize("body", BODIES)
def test_a_gradient_inside_the_forward_is_part_of_the_program(body: Any) -> None:
    """Its own gradient too, in stages and for other numbers of samples."""
    captured = capture(Net(body), batch())
    assert captured.graph.loss_kind == ("coupled" if body is fitted else "mean")
    for samples in (4, 7):
        assert check_split(captured, batch(samples), stage_each(captured), exact=False) < 1e-5


def nearer(net: Net, h: Tensor) -> Tensor:
    error = F.mse_loss(net.last(h), h[:, :1] + 1)
    return h + torch.autograd.grad(error, h, create_graph=True)[0]


def divided(net: Net, h: Tensor) -> Tensor:
    error = F.soft_margin_loss(net.last(h), torch.ones(len(h), 1))
    return h + torch.autograd.grad(error, h, create_graph=True)[0]


@pytest.mark.dist
@pytest.mark.parametrize("body", [fitted, nearer, divided])
def test_the_gradient_of_a_mean_over_the_samples_is_that_of_the_whole_batch(body: Any) -> None:
    """Though stages have micro-batches."""
    assert verify(Workload(Net(body), batch()), 2).is_good


def dropped(net: Net, h: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(F.dropout(net.last(h)).sum(), h, create_graph=True)
    return h * slope


def normed(net: Net, h: Tensor) -> Tensor:
    y = F.batch_norm(h, net.mean, net.spread, training=True)
    return h * torch.autograd.grad(y.square().sum(), h, create_graph=True)[0]


def cast(net: Net, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = net.last(h)
    return h * torch.autograd.grad(y.sum(), h, create_graph=True)[0]


@pytest.mark.parametrize("body", [dropped, normed, cast])
def test_a_gradient_that_cannot_be_traced_is_refused(body: Any) -> None:
    """With the line, and with what may be in it."""
    module = Net(body)
    module.register_buffer("mean", torch.zeros(8))
    module.register_buffer("spread", torch.ones(8))
    with pytest.raises(CaptureError, match=r"gradients.py:\d+ .*asks for a gradient inside.*call"):
        capture(module, batch())
