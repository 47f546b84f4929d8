"""The step in slow motion is the step: same loss, same gradients."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.profile.measure import measure
from anabranch.profile.operator_runner import example_batch, operator_programs, run_operators
from tests.profile.tiny import MODELS, captured_towers, two_towers

CPU = torch.device("cpu")


class Diary:
    """Writes down what happens."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def forward(self, op: int) -> AbstractContextManager[None]:
        self.entries.append(f"F{op}")
        return nullcontext()

    def made(self, op: int, outputs: Sequence[Tensor]) -> None:
        self.entries.append(f"={len(outputs)}")

    def backward(self, op: int, gradients: Sequence[Tensor]) -> AbstractContextManager[None]:
        self.entries.append(f"B{op}")
        return nullcontext()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_model(name: str) -> None:
    """All operators forward, then backward in reverse: every parameter's gradient is eager's."""
    model, batch = MODELS[name]()
    captured = capture(model, batch, granularity="operator")
    samples = len(batch["label"])
    torch.manual_seed(1)
    model(**batch).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    program = operator_programs(captured, samples)
    torch.manual_seed(1)
    run_operators(
        program,
        example_batch(captured, samples, CPU),
        lambda op, inputs: program[op].module(*inputs),
        diary := Diary(),
    )
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], msg=n)
    backwards = [int(e[1:]) for e in diary.entries if e[0] == "B"]
    assert backwards == sorted(backwards, reverse=True)
    assert [e for e in diary.entries if e[0] == "F"] == [f"F{i}" for i in range(len(program))]


def test_batch_is_repeated_and_cut() -> None:
    """Three samples give five (0 1 2 0 1) and two (0 1); integers stay valid indices."""
    captured, (_, batch) = captured_towers(), two_towers()
    five = example_batch(captured, 5, CPU)
    assert torch.equal(five["text"], batch["text"][[0, 1, 2, 0, 1]])
    assert torch.equal(example_batch(captured, 2, CPU)["label"], batch["label"][:2])
    meta = example_batch(captured, 7, torch.device("meta"))
    assert [(t.is_meta, t.dtype, len(t)) for t in meta.values()] == [
        (True, torch.int64, 7),
        (True, torch.float32, 7),
        (True, torch.int64, 7),
        (True, torch.float64, 7),  # shares of the count of labels
    ]


def test_what_nobody_differentiates_has_no_backward() -> None:
    """A frozen tower: no gradient enters it, so it has no backward."""
    model, batch = two_towers()
    model.pixels.requires_grad_(False)
    model.image.requires_grad_(False)
    captured = capture(model, batch, granularity="block")
    program = operator_programs(captured, 3)
    diary = Diary()
    tensors = example_batch(captured, 3, CPU)
    run_operators(program, tensors, lambda op, inputs: program[op].module(*inputs), diary)
    frozen = {i for i, op in enumerate(captured.graph.ops) if op.name.startswith("image")}
    assert frozen
    assert frozen.isdisjoint(int(e[1:]) for e in diary.entries if e[0] == "B")


class Mixed(nn.Module):
    """Samples mixed with others of the batch, which the batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return self.last(0.7 * x + 0.3 * x[order]).square().mean()


def test_a_batch_may_name_its_samples() -> None:
    """A part of the example has not all of them, so it reads what the whole example has."""
    captured = capture(Mixed(), {"x": torch.randn(6, 4), "order": torch.arange(6).flip(0)})
    tensors = dict(zip(captured.layout.names, captured.layout.leaves, strict=True))
    whole = captured.programs.with_statistics(tensors)
    assert captured.programs.statistics
    for name, tensor in example_batch(captured, 2, CPU).items():
        assert tensor.equal(whole[name][:2])
    measure(captured, (1, 2), repeats=1)
    assert not captured.programs.is_even(tensors, [(0, 2), (2, 6)])
