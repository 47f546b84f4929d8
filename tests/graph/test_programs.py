"""Operators that are not PyTorch's own: numbers or the user decide whether they couple samples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph.capture import Captured, capture
from anabranch.workload import Workload

WIDTH = 6


def operator(name: str, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A registered operator with a backward, of which nothing but sizes is known."""

    def forward(x: Tensor) -> Tensor:
        return compute(x).clone()

    custom = torch.library.custom_op(f"anabranch_halves::{name}", mutates_args=(), schema=SCHEMA)(
        forward
    )
    custom.register_fake(lambda x: torch.empty_like(compute(x)))

    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(compute(x), x, gradient)[0]

    custom.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return lambda x: custom(x)  # which can be copied, as models are


SCHEMA = "(Tensor x) -> Tensor"

mean = operator("mean", lambda x: x.square().mean())
total = operator("total", lambda x: x.square().sum())
spread = operator("spread", lambda x: x.std())
padded = operator("padded", lambda x: torch.cat([x.new_zeros(3, WIDTH), x.flip(0)]))
unpadded = operator("unpadded", lambda x: x[3:].flip(0))


class Net(nn.Module):
    """A layer and a loss of its results."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.drop(self.body(x)))


def captured(
    loss: Callable[[Tensor], Tensor], *per_sample: str, device: str = "cpu", samples: int = 4
) -> Captured:
    torch.manual_seed(0)
    module = Net(loss).to(device)
    return capture(module, (torch.randn(samples, WIDTH, device=device),), per_sample=per_sample)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean, "mean"),
        (total, "sum"),
        (spread, "coupled"),
        (lambda h: h.mean() + mean(h).exp(), "coupled"),
        (lambda x: unpadded(2 * padded(x)).square().mean(), "mean"),
        (lambda x: mean(x) + x.square().mean(), "mean"),
    ],
    ids=["mean", "sum", "coupled", "not linear", "other leading size", "two terms"],
)
def test_numbers_of_two_halves_decide(loss: Callable[[Tensor], Tensor], kind: str) -> None:
    """Two halves of the example make the loss of the whole, or the operator couples samples."""
    found = captured(loss)
    assert found.graph.loss_kind == kind
    assert bool(found.graph.whole_batch) == (kind == "coupled")
    assert found.evaluation().graph.loss_kind == kind


def test_the_word_of_the_user_counts() -> None:
    """The operator is taken as it is named, whatever the numbers are; a wrong name is refused."""
    assert captured(spread, "anabranch_halves::spread").graph.loss_kind == "mean"
    with pytest.raises(CaptureError, match=r"calls no operator mylib::op, .*_halves::mean"):
        captured(mean, "mylib::op")
    with pytest.raises(TypeError, match=r"a list of names: \['mylib::op'\]"):
        Workload(Net(mean), (torch.ones(2, WIDTH),), per_sample="mylib::op")


def test_without_numbers_an_operator_is_taken_per_sample() -> None:
    """A plan on the meta device has no numbers; training compares before its first step."""
    assert captured(mean, device="meta").graph.loss_kind == "mean"


class Filtered(nn.Module):
    """A parameter that is viewed as complex numbers, as in filters of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(waves, n=4).square().mean()


def test_other_sizes_where_the_parameters_are_of_another_rank() -> None:
    """They are one number there, and yet a program of theirs can be made for another batch, or for
    evaluation.
    """
    captured = capture(Filtered(), torch.ones(4, 4))
    parameter = captured.module.get_parameter("filter")
    parameter.data = torch.tensor(float("nan")).expand(3, 2)
    for each in (captured, captured.evaluation()):
        assert len(each.programs.at(7).calls) == len(each.programs.example.calls)
    assert parameter.stride() == (0, 0)
