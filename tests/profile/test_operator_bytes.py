"""Kept bytes: each storage once, with the operator that made it. Working bytes: of a pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.profile.operator_bytes import BytesObserver
from anabranch.profile.storages import TensorWatch


def kept(at_hand: list[Tensor], *ops: Callable[[Tensor], Tensor], start: Tensor) -> list[int]:
    """Bytes that a chain of operators keeps, each cut from the one before as in a walk."""
    result = BytesObserver(len(ops), at_hand)
    x = start
    for i, op in enumerate(ops):
        with result.forward(i):
            y = op(x)
        result.made(i, [y])
        x = y.detach().requires_grad_(y.requires_grad)
    return result.kept


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(4, 10)  # 160 bytes


def test_own_inside(batch: Tensor) -> None:
    """exp inside an operator keeps its result (160 bytes); batch and weight are at hand."""
    weight = torch.randn(10, 10, requires_grad=True)
    assert kept([batch, weight], lambda x: (x @ weight).exp().sum(), start=batch) == [160]


def test_input_belongs_to_its_producer(batch: Tensor) -> None:
    """A linear layer keeps its input, which the operator before it made: 160 bytes there."""
    first, second = nn.Linear(10, 10), nn.Linear(10, 3)
    state = [batch, *first.parameters(), *second.parameters()]
    assert kept(state, first, second, start=batch) == [160, 0]


def test_shared_by_two_readers_counts_once(batch: Tensor) -> None:
    """What both the producer (relu keeps its result) and its reader save is kept once."""
    first, second = nn.Linear(10, 10), nn.Linear(10, 3)
    state = [batch, *first.parameters(), *second.parameters()]
    assert kept(state, lambda x: first(x).relu(), second, start=batch) == [160, 0]


def test_view_keeps_the_whole_storage(batch: Tensor) -> None:
    """Saving one column of a tensor keeps all of it, with the operator that made it."""
    weight = torch.randn(10, 10, requires_grad=True)
    ops = (lambda x: x @ weight, lambda x: x[:, :1], lambda x: x.square().sum())
    assert kept([batch, weight], *ops, start=batch) == [160, 0, 0]


def test_a_sparse_tensor_is_at_hand_or_counted_by_its_parts(batch: Tensor) -> None:
    """Autograd keeps it for the gradient of the product: 4 rows and columns, 64 bytes, and 4
    values, 16 bytes.
    """
    near = torch.eye(4).to_sparse()
    op = lambda x: torch.sparse.mm(near, x)  # noqa: E731
    assert kept([batch, near], op, start=batch.requires_grad_()) == [0]
    assert kept([batch], op, start=batch) == [80]


def test_nothing_without_gradients(batch: Tensor) -> None:
    """Where no gradient is needed autograd saves nothing."""
    assert kept([batch], torch.exp, torch.exp, start=batch) == [0, 0]


def test_meta_tensors_have_storages_too() -> None:
    """Storages of meta tensors have no address, yet are told apart."""
    batch, weight = torch.empty(4, 10, device="meta"), torch.empty(10, 10, device="meta")
    weight.requires_grad_()
    op = lambda x: ((x @ weight).exp() @ weight).exp().sum()  # noqa: E731
    assert kept([batch, weight], op, start=batch) == [320]


def test_a_forward_has_results_that_nobody_keeps() -> None:
    """Two numbers of 160 bytes are alive at once, the next result and the one before it. What is
    kept in the end is no work.
    """
    x = torch.ones(4, 10)
    work = BytesObserver(1, [x])
    with TensorWatch(work.see), work.forward(0):
        y = x * 2 + 1
        y = y * 3
    assert work.working == [320]
    work.kept = [320]
    assert work.working == [0]


def test_a_backward_has_gradients_of_activations() -> None:
    """Of 160 bytes each that which arrived, and of three tanh the next one and the one after it;
    what is given back meanwhile makes room for the last.
    """
    x, gradient = torch.ones(4, 10, requires_grad=True), torch.ones(4, 10)
    work = BytesObserver(1, [x, gradient])
    with TensorWatch(work.see), work.forward(0):
        y = x.tanh().tanh().tanh()
    with TensorWatch(work.see), work.backward(0, [gradient]):
        y.backward(gradient)
    assert work.kept == [480]
    assert work.working == [480]
