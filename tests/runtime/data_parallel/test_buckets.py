"""Gradients as views of the buffer that is summed."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from anabranch.runtime.data_parallel.buckets import DenseBucket

ALONE: Any = SimpleNamespace(size=1, rank=0)


def bucket(*parameters: nn.Parameter) -> DenseBucket:
    return DenseBucket((0, 1), [(f"p{i}", p) for i, p in enumerate(parameters)], ALONE)


def held(parameter: nn.Parameter, into: DenseBucket) -> bool:
    """Whether the gradient is in the bucket's memory."""
    assert parameter.grad is not None
    assert into.flat is not None
    return parameter.grad.untyped_storage().data_ptr() == into.flat.untyped_storage().data_ptr()


def test_the_first_gradient_is_copied_and_the_others_are_added_in_its_place() -> None:
    """-0 stays -0, as it would not in a buffer of zeros; autograd adds to what it finds."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    place = bucket(weight)
    (weight * torch.tensor([-0.0, 3.0])).sum().backward()
    place.hold(0)
    assert held(weight, place)
    assert weight.grad is not None
    assert torch.signbit(weight.grad).tolist() == [True, False]
    (weight * torch.tensor([5.0, 4.0])).sum().backward()
    place.hold(0)
    assert held(weight, place)
    assert weight.grad.tolist() == [5.0, 7.0]


def test_no_gradient_stays_none_and_is_a_zero_in_the_sum() -> None:
    """Whatever the buffer had there from the step before."""
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    place = bucket(weight, other)
    for gradient, flags in ((torch.full((2,), 9.0), [1.0, 0.0]), (None, [0.0, 0.0])):
        place.begin()
        weight.grad = gradient
        place.put(0)
        place.hold(1)
        assert other.grad is None
        place.put(1)
        assert place.flat is not None
        assert place.flat.tolist() == [*([9.0] * 2 if flags[0] else [0.0] * 2), 0.0, *flags]
        assert weight.grad is None


def test_rows_of_an_embedding_are_dense_in_the_sum() -> None:
    """Until then the rows of all micro-batches are kept as rows."""
    table = nn.Embedding(3, 1, sparse=True)
    place = bucket(table.weight)  # type: ignore[arg-type]
    for rows in ([0, 0, 2], [2]):
        table(torch.tensor(rows)).sum().backward()
        place.hold(0)
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
    place.put(0)
    assert place.flat is not None
    assert place.flat.tolist() == [2, 0, 2, 1]
