"""Stages that are replayed, with passes that are run again where a device would replay them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.device import accelerator
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.compute.replay import ReplayedCall
from tests.runtime.small import batch, built, plan
from tests.runtime.threads import step
from tests.runtime.training import run_each

REPLAYED = ComputeOptions(compile="cudagraphs")


@pytest.fixture(autouse=True)
def fixed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording writes to the same memory each time, so what it gave before is gone then."""

    def recorded(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        given: list[Tensor] = []

        def replay() -> Any:
            for tensor in given:
                tensor.data.fill_(7.5e8 if tensor.is_floating_point() else 0)
            result = work()
            given[:] = [tensor for tensor in result if tensor is not None]
            return result

        return replay

    monkeypatch.setattr(accelerator, "recorded", recorded)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["TwoBranch", "Norm", "Tied", "Shared"])
def test_a_step_is_the_one_of_passes_that_are_launched(
    name: str, recompute: bool, schedule: str
) -> None:
    """Loss and gradients, also of buffers that change, of weights that stages share, and of
    micro-batches that are in flight at the same time.
    """
    model = built(name)
    chosen = plan(model, 2, recompute=recompute, schedule=schedule)
    loss, found = step(model, chosen, batch(16), REPLAYED)
    expected, reference = step(model, chosen, batch(16))
    assert loss == expected
    assert found.keys() == reference.keys()
    for gradient, theirs in zip(found.values(), reference.values(), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.dist
def test_training_is_that_of_launched_passes() -> None:
    """Over steps, batches of another size, and evaluation in between."""
    model = built("TwoBranch")
    chosen = plan(model, 2)
    data = [batch(size, seed) for seed, size in enumerate((16, 16, 12, 16))]

    def work(pipeline: Any) -> tuple[list[float], float]:
        losses = list(pipeline.steps(data))
        return losses, pipeline.evaluate(data[:2])["loss"]

    replayed, launched = run_each(model, chosen, (work, {"compute": REPLAYED}), (work, {}))
    assert replayed == launched


def test_a_slot_is_used_again_after_its_backward() -> None:
    """As many as micro-batches are in flight; buffers are not changed by recordings."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    call = ReplayedCall(lambda x: (module(x),), module)
    for _ in range(3):
        x, y = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
        outputs = [call(x)[0], call(y)[0]]
        for output in outputs:
            output.sum().backward()  # type: ignore[no-untyped-call]
    assert call.num_slots == 2
    assert module[1].num_batches_tracked is not None
    assert int(module[1].num_batches_tracked) == 6


def test_all_slots_are_made_by_the_first_micro_batch() -> None:
    """Before messages travel: a recording waits for the device, and must not wait for a rank."""
    module = nn.Linear(4, 4)
    call = ReplayedCall(lambda x: (module(x),), module)
    call.reserve = 3
    call(torch.randn(5, 4))
    assert call.num_slots == 3


def test_what_leaves_is_not_overwritten() -> None:
    """Outputs and gradients are on their way while the slot is replayed."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    call = ReplayedCall(lambda x: (module(x).tanh(),), module)
    kept = []
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        module.zero_grad()
        (output,) = call(x)
        output.sum().backward()  # type: ignore[no-untyped-call]
        y = x.detach().requires_grad_()
        wanted = module(y).tanh()
        weight = module.weight.grad
        assert weight is not None
        kept.append((output, wanted, x.grad, torch.autograd.grad(wanted.sum(), y)[0], weight))
    for output, wanted, gradient, expected, weight in kept:
        assert torch.equal(output, wanted)
        assert gradient is not None
        torch.testing.assert_close(gradient, expected)
        assert float(weight.abs().max()) < 1e3


def test_it_does_not_go_with_offloading() -> None:
    """A recording has its memory for good."""
    with pytest.raises(ValueError, match="leave out one of compile and offload"):
        ComputeOptions(compile="cudagraphs", offload=True)
