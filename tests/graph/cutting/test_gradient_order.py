"""Gradients of a tensor with several uses, added in the order of one process."""

import torch

from anabranch.graph.cutting.gradient_order import dense, fan_out, fold, keep_strides


def test_aliases_hold_the_tensor_and_its_gradient_is_their_sum() -> None:
    """Every alias is the tensor; an alias without a gradient counts for nothing."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    first, second, third = fan_out(x, 3)
    assert torch.equal(first, x)
    (first * 10 + third * 100).sum().backward()
    assert torch.equal(x.grad, torch.tensor([110.0, 110.0]))
    assert second.requires_grad


def test_sum_runs_from_the_first_alias_to_the_last() -> None:
    """(1e8 - 1e8) + 1 is 1 in single precision, 1e8 + (-1e8 + 1) is 0."""
    x = torch.ones(1, requires_grad=True)
    a, b, c = fan_out(x, 3)
    torch.autograd.backward([c, b, a], [torch.tensor([g]) for g in (1.0, -1e8, 1e8)])
    assert x.grad.item() == 1.0
    assert fold((torch.tensor(1e8), torch.tensor(-1e8), None, torch.tensor(1.0))).item() == 1.0
    assert fold((torch.tensor(1.0), torch.tensor(-1e8), torch.tensor(1e8))).item() == 0.0


def test_nothing_to_add_is_no_gradient() -> None:
    """Where no use has a gradient there is none, as in autograd itself."""
    assert fold((None, None)) is None


def test_a_gradient_gets_the_strides_that_it_is_to_have() -> None:
    """One that was sent row by row comes back column by column, with gaps, or as one element for
    all that are equal.
    """
    seen = []
    x = torch.randn(2, 3, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append((grad.stride(), grad.tolist())))
    rows, equal = torch.arange(6.0).reshape(2, 3), torch.tensor([[1.0] * 3, [2.0] * 3])
    for strides, given in (((1, 2), rows), ((4, 1), rows), ((1, 0), equal)):
        keep_strides(y, strides).backward(given, retain_graph=True)
        assert seen.pop() == (strides, given.tolist())


def test_dense_keeps_values_and_closes_gaps() -> None:
    """An expanded and transposed tensor has the same values afterwards, and no stride of 0."""
    x = torch.arange(3.0).expand(2, 3).unsqueeze(2)
    result = dense(x, [1, 0, 2])
    assert torch.equal(result, x)
    assert result.permute(1, 0, 2).is_contiguous()
