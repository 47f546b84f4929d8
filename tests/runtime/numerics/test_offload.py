"""Activations on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.numerics.offload import SETTINGS, Offload, Saved
from tests.runtime.computing import CPU, step
from tests.runtime.small import batch, built, plan


def network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(1), nn.Linear(64, 64)]
    return nn.Sequential(*layers), torch.randn(64, 64)


def gradients(model: nn.Module, x: Tensor, saved: Saved | None) -> list[Tensor]:
    model.zero_grad()
    if saved is None:
        loss = model(x).square().mean()
    else:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_what_is_copied_out_and_back_gives_the_same_gradients() -> None:
    """The copies in line, as memory of one kind has them."""
    model, x = network()
    saved = Saved(model.parameters(), None)
    for mine, plain in zip(gradients(model, x, saved), gradients(model, x, None), strict=True):
        assert torch.equal(mine, plain)
    assert len(saved._entries) >= 5


def test_compiled_stages_hand_over_what_they_save() -> None:
    """Their saved tensors go the same way."""
    model, x = network()
    expected = gradients(model, x, None)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    saved = Saved(model.parameters(), None)
    for mine, plain in zip(gradients(compiled, x, saved), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    assert len(saved._entries) >= 3


def test_parameters_and_views_of_them_stay() -> None:
    """And what is too small to be worth a copy."""
    weight = nn.Parameter(torch.zeros(64, 64))
    saved = Saved([weight], None)
    for kept in (
        weight,
        weight.t(),
        weight.detach()[3:],
        torch.zeros(SETTINGS.smallest_bytes // 4 - 1),
    ):
        assert saved.pack(kept) is kept
    assert saved.pack(torch.zeros(SETTINGS.smallest_bytes // 4)) is not None
    assert len(saved._entries) == 1


def test_entries_are_fetched_ahead_in_the_order_of_backwards() -> None:
    """The last one is asked for: three before it are on their way, and it is dropped when taken."""
    saved = Saved([], None)
    tensors = [torch.full((2000,), float(i)) for i in range(6)]
    entries = [saved.pack(tensor) for tensor in tensors]
    assert torch.equal(saved.unpack(entries[5]), tensors[5])
    assert [entry._back is not None for entry in saved._entries] == [
        False,
        False,
        *[True] * 3,
        False,
    ]
    assert torch.equal(saved.unpack(entries[4]), tensors[4])
    assert [entry._back is not None for entry in saved._entries] == [
        False,
        *[True] * 3,
        False,
        False,
    ]
    # A second backward asks for one that was taken.
    assert torch.equal(saved.unpack(entries[5]), tensors[5])


def test_a_view_comes_back_with_its_strides() -> None:
    """Kernels of the backward are chosen by strides."""
    saved = Saved([], None)
    tensor = torch.randn(64, 32).t()
    back = saved.unpack(saved.pack(tensor))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_on_the_cpu_it_does_nothing() -> None:
    """One memory: accepted, and nothing is copied."""
    with Offload([], CPU)():
        x = torch.randn(100, 100, requires_grad=True)
        y = x.exp()
    assert y.grad_fn is not None
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_option_gives_the_same_results(recompute: bool) -> None:
    model = built("TwoBranch")
    chosen, leaves = plan(model, 2, recompute=recompute), batch(16)
    loss, found = step(model, chosen, leaves, ComputeOptions(offload=True))
    expected, reference = step(model, chosen, leaves)
    assert loss == expected
    # Threads add to what they share in any order; here no parameter is shared.
    assert all(torch.equal(found[name], gradient) for name, gradient in reference.items())


def test_a_stream_is_taken_when_it_is_needed() -> None:
    """PyTorch's pool of streams is small, and stages without offloading take none of it: not even
    the device is asked here, which this machine may lack.
    """
    Offload([], torch.device("cuda"))
