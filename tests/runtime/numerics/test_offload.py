"""Activations on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.device import accelerator
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.numerics.offload import SETTINGS, Offload, Saved
from tests.runtime.small import batch, built, plan
from tests.runtime.threads import CPU, step


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
        give_back(saved)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def saving(kept: Iterable[Tensor] = ()) -> Saved:
    """What the forward of a micro-batch saves, on a stream of the device that ``main`` plays."""
    stream: Any = Line([])
    return Saved(kept, stream)


def give_back(saved: Saved) -> None:
    """The forward has ended, and the memory of what it saved is needed."""
    saved.end()
    saved.release()


def test_what_is_copied_out_and_back_gives_the_same_gradients(main: Line) -> None:
    model, x = network()
    saved = saving(model.parameters())
    for mine, plain in zip(gradients(model, x, saved), gradients(model, x, None), strict=True):
        assert torch.equal(mine, plain)
    assert len(saved._entries) >= 5


def test_compiled_stages_hand_over_what_they_save(main: Line) -> None:
    """Their saved tensors go the same way."""
    model, x = network()
    expected = gradients(model, x, None)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    saved = saving(model.parameters())
    for mine, plain in zip(gradients(compiled, x, saved), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    assert len(saved._entries) >= 3


def test_parameters_and_views_of_them_stay(main: Line) -> None:
    """And what is too small to be worth a copy."""
    weight = nn.Parameter(torch.zeros(64, 64))
    saved = saving([weight])
    for kept in (
        weight,
        weight.t(),
        weight.detach()[3:],
        torch.zeros(SETTINGS.smallest_bytes // 4 - 1),
    ):
        assert saved.pack(kept) is kept
    assert saved.pack(torch.zeros(SETTINGS.smallest_bytes // 4)) is not None
    assert len(saved._entries) == 1


def test_entries_are_fetched_ahead_in_the_order_of_backwards(main: Line) -> None:
    """The last one is asked for: three before it are on their way, and it is dropped when taken."""
    saved = saving()
    tensors = [torch.full((2000,), float(i)) for i in range(6)]
    entries = [saved.pack(tensor) for tensor in tensors]
    give_back(saved)
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


def test_a_view_comes_back_with_its_strides(main: Line) -> None:
    """Kernels of the backward are chosen by strides."""
    saved = saving()
    tensor = torch.randn(64, 32).t()
    packed = saved.pack(tensor)
    give_back(saved)
    back = saved.unpack(packed)
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


class Line:
    """A stream that writes down what it is told to wait for."""

    def __init__(self, log: list[tuple[str, object]]) -> None:
        self.log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self) -> object:
        return object()

    def wait_stream(self, other: Line) -> None:
        pass

    def wait_event(self, event: object) -> None:
        self.log.append(("waits", event))


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Line:
    """The main stream of a device with two, which the CPU plays."""
    line = Line([])
    monkeypatch.setattr(accelerator, "has_streams", lambda device: True)
    monkeypatch.setattr(accelerator, "new_stream", lambda device: Line([]))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: line)
    monkeypatch.setattr(accelerator, "host_like", torch.empty_like)
    return line


def forward(offload: Offload, x: Tensor, held: list[Tensor]) -> tuple[Tensor, Saved]:
    """A loss that saves one tensor of its own twice, and what it has saved."""
    with offload(held):
        loss = (x * x).exp().sin().sum()
        saved = loss.grad_fn.next_functions[0][0]._raw_saved_self  # type: ignore[union-attr]
    assert saved is not None
    return loss, offload._copying[-1]()  # type: ignore[return-value]


def test_no_more_than_two_micro_batches_are_copied_at_a_time(main: Line) -> None:
    """The device waits for the copies of the one before them, the host for none; then their memory
    is free for the forward that begins.
    """
    offload, losses, all_saved = Offload([], CPU), [], []
    for i in range(4):
        x = torch.full((2000,), 0.1 * i, requires_grad=True)
        loss, saved = forward(offload, x, [x])
        losses.append((loss, x))
        all_saved.append(saved)
        on_device = [all(entry.tensor is not None for entry in each._entries) for each in all_saved]
        gone = [not any(entry.tensor is not None for entry in each._entries) for each in all_saved]
        first = max(i + 1 - SETTINGS.behind, 0)
        assert on_device == [False] * first + [True] * (i + 1 - first)
        assert gone == [True] * first + [False] * (i + 1 - first)
        assert main.log == [("waits", each._copied) for each in all_saved[:first]]
    for loss, x in losses:
        loss.backward()  # type: ignore[no-untyped-call]
        y = x.detach().requires_grad_()
        (y * y).exp().sin().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_a_backward_that_comes_soon_copies_nothing_back(main: Line) -> None:
    """Its tensors are still there, also for the second half of a split backward: their memory is
    not given back before the copies are waited for.
    """
    x = torch.ones(2000, requires_grad=True)
    loss, saved = forward(Offload([], CPU), x, [x])
    pointers = [entry.tensor.data_ptr() for entry in saved._entries if entry.tensor is not None]
    assert len(pointers) == len(saved._entries) == 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert main.log == []
    assert all(entry.tensor is not None for entry in saved._entries)
    saved.release()
    assert len(main.log) == 1
    assert not any(entry.tensor is not None for entry in saved._entries)


def test_what_is_saved_several_times_is_copied_once(main: Line) -> None:
    """Also as views of one storage; not what was written to in between."""
    saved = saving()
    tensor, base = torch.randn(64, 64), torch.randn(100, 64)
    packed = [saved.pack(view) for view in (tensor, tensor, tensor.t(), tensor.view(-1))]
    assert len(saved._entries) == 1
    parts = [saved.pack(base[:50]), saved.pack(base[:50]), saved.pack(base[50:])]
    assert len(saved._entries) == 3
    before = tensor.clone()
    tensor.mul_(2)
    packed.append(saved.pack(tensor))
    assert len(saved._entries) == 4
    give_back(saved)
    expected = [before, before, before.t(), before.view(-1), tensor]
    for back, want in zip(map(saved.unpack, packed), expected, strict=True):
        assert torch.equal(back, want)
        assert back.stride() == want.stride()
    for part, want in zip(parts, [base[:50], base[:50], base[50:]], strict=True):
        assert torch.equal(saved.unpack(part), want)


def test_a_freed_storage_is_not_taken_for_another(main: Line) -> None:
    """One that is made after it may have its address."""
    saved = saving()
    packed = []
    for i in range(20):
        packed.append((saved.pack(torch.full((2000,), float(i))), float(i)))
        saved.release()
    give_back(saved)
    assert all(bool((saved.unpack(entry) == value).all()) for entry, value in packed)


def test_what_arrives_and_the_batch_stay(main: Line) -> None:
    """They are held until the backward in any case."""
    x, label = torch.ones(2000, requires_grad=True), torch.full((2000,), 2.0)
    offload = Offload([], CPU)
    with offload([x, label]):
        loss = (x * label).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    saved = offload._copying[-1]()
    assert saved is None or not saved._entries


def test_a_stream_is_taken_when_it_is_needed() -> None:
    """PyTorch's pool of streams is small, and stages without offloading take none of it: not even
    the device is asked here, which this machine may lack.
    """
    Offload([], torch.device("cuda"))
