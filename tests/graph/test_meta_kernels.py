"""Known results of operations on meta tensors against computed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.graph.meta_kernels import KnownResults, MetaKernels

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shown(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(shown, result))
    return None if result is None else (result.shape, result.stride(), result.dtype)


def twice(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the second of two equal calls is known; it has to return what the first did."""
    known = MetaKernels()
    first, key = known.call(func, args, kwargs)
    second, again = known.call(func, args, kwargs)
    assert shown(first) == shown(second) == shown(func(*args, **kwargs))
    assert key == again
    return key is not None


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.addmm.default, (meta(3), meta(2, 4), meta(4, 3))),
        (aten.add.Tensor, (meta(2, 3).t(), meta(3, 2))),
        (aten.native_layer_norm.default, (meta(2, 4), [4], meta(4), None, 1e-5)),
        (aten.native_dropout.default, (meta(2, 4), 0.5, True)),
        (aten.cat.default, ([meta(2, 3), meta(4, 3)],)),
        (aten.convolution_backward.default, (
            *(meta(2, 4, 8, 8), meta(2, 3, 8, 8), meta(4, 3, 3, 3), None),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]),
        )),
    ],
    ids=lambda value: value.name() if hasattr(value, "name") else "",
)  # fmt: skip
def test_equal_calls_are_known(func: Any, args: tuple[Any, ...]) -> None:
    """New tensors, one or several, some of them none: sizes, strides and types are all there is."""
    assert twice(func, *args)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (meta(2, 4), [8])),
        (aten._unsafe_view.default, (meta(2, 4), [8])),
        (aten.add_.Tensor, (meta(2), meta(2))),
        (aten.split.Tensor, (meta(4, 2), 2)),
        (aten.mul.Tensor, (meta(2), torch.tensor(2.0))),
        (aten.detach.default, (meta(2),)),
    ],
    ids=lambda value: value.name() if hasattr(value, "name") else "",
)
def test_what_is_more_than_its_sizes_is_computed(func: Any, args: tuple[Any, ...]) -> None:
    """Whose storage a result has, and what is written to, is no matter of sizes; a tensor of no
    dimension in memory may be a number, by which types are found otherwise.
    """
    known = MetaKernels()
    for _ in range(2):
        assert known.call(func, args, {})[1] is None


def test_a_known_result_is_a_tensor_of_its_own() -> None:
    """Bytes are counted by storage, so results of two calls may not share one."""
    known = MetaKernels()
    a, b = (known.call(aten.relu.default, (meta(4),), {})[0] for _ in range(2))
    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 16


def test_another_call_is_another() -> None:
    """Sizes, types, and numbers that are equal but of another type tell calls apart."""
    known = MetaKernels()
    whole = meta(4, dtype=torch.int64)
    calls: list[tuple[Any, ...]] = [(whole, 1), (whole, 1.0), (whole, True)]
    calls += [(meta(4), 1), (meta(2, 2), 1), (meta(2, 2).expand(3, 2, 2), 1)]
    keys = set()
    for args in calls:
        result, key = known.call(aten.add.Tensor, args, {})
        assert shown(result) == shown(aten.add.Tensor(*args))
        keys.add(key)
    assert len(keys) == len(calls)
    assert None not in keys


def test_gradients_are_those_without_known_results() -> None:
    """The mode is below autograd: what requires a gradient, and its sizes, stay what they are."""
    layer = torch.nn.Linear(4, 4, device="meta")
    with KnownResults(MetaKernels()):
        loss = layer(layer(meta(2, 4))).sum()
        loss.backward()
    assert loss.requires_grad
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (4, 4)
