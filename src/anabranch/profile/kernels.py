"""Kernels that an operator would launch on a GPU, forward and backward, without having one.

A dispatch mode sees every tensor operation on meta tensors, also of the backward. Attention and
dropout are replaced by PyTorch's fused kernels for GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch.device.kinds import GPU
from anabranch.errors import ProfileError
from anabranch.graph.operations import words
from anabranch.graph.user_lines import user_line
from anabranch.profile.kernel_trace import Kernel

aten = torch.ops.aten


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the kernels of all operations inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_free(func):
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.kernels.append(_kernel(func, args, inputs, outputs))
        return result


class MetaRun(fx.Interpreter):
    """Runs a traced module on meta tensors, its attention and dropout as a GPU would.

    ``tensors`` has a meta tensor for each parameter and buffer of the graph, by its name there.
    """

    def __init__(self, module: fx.GraphModule, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.extra_traceback = False

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the meta tensor, or a sub-graph, such as that of an autocast region."""
        tensor = self.tensors.get(target)
        return super().get_attr(target, args, kwargs) if tensor is None else tensor

    def run_node(self, n: fx.Node) -> Any:
        """Run one call; ProfileError where it needs values."""
        try:
            return super().run_node(n)
        except (RuntimeError, TypeError, ValueError) as error:
            raise cannot_estimate(f"{n.target}, {user_line(n)},", error) from error

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the operation that a GPU runs instead, if there is one."""
        return _AS_ON_GPU.get(target, target)(*args, **kwargs)


def cannot_estimate(what: str, error: Exception) -> ProfileError:
    """Return the error for an operation that does not run on tensors without values."""
    text = re.split(r"\n|\. ", str(error))[0].rstrip(".")
    return ProfileError(
        f"{what} cannot be estimated ({text}): an estimate computes sizes without values, as on "
        f"the meta device; measure the model on a device (anabranch profile MODEL --device {GPU} "
        "or cpu), or let sizes follow from those of the batch, such as with a mask; if one process "
        "raises the same without anabranch, correct it there"
    )


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    # A sparse gradient without padding has a size that depends on the data: at most all rows.
    padding_idx = -1 if sparse else padding_idx
    made: Tensor = aten.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return made


def _masked_select(value: Tensor, mask: Tensor) -> Tensor:
    broadcast: Any = torch.broadcast_tensors
    value, mask = broadcast(value, mask)
    return value[mask]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() != 4:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
        value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
    keep_sums = any(t.requires_grad for t in (query, key, value))
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keep_sums, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return aten.dropout(input, p, train)  # type: ignore[no-any-return]
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


_AS_ON_GPU: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.embedding.default: _embedding,
    aten.masked_select.default: _masked_select,
}

_FREE = words(
    """
    detach empty empty_like empty_strided new_empty new_empty_strided _unsafe_view
    _reshape_alias lift_fresh resize_
    """
)
"""Operations that launch nothing, besides those that only return a view."""


@cache
def _is_free(func: Any) -> bool:
    if func._schema.name.removeprefix("aten::") in _FREE:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _kernel(
    func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]
) -> Kernel:
    name = func._schema.name.removeprefix("aten::")
    written = sum(_nbytes(t) for t in outputs)
    if name in _LOOKUPS:
        nbytes = _LOOKUPS[name](inputs, outputs)
    elif name in _WRITE_ONLY:
        nbytes = written
    elif name == "copy_":
        nbytes = _nbytes(inputs[0]) + _nbytes(inputs[1])
    else:
        nbytes = written + sum(_nbytes(t) for t in inputs)
    products = _PRODUCTS[name](args, outputs) if name in _PRODUCTS else ()
    floats = (t.dtype for t in (*outputs, *inputs) if t.is_floating_point())
    dtype = next(floats, torch.float32)
    number = str(dtype).removeprefix("torch.")
    return Kernel(name, nbytes, products, number, _LAUNCHES.get(name, 1))


def _nbytes(tensor: Tensor) -> float:
    # An expanded dimension (stride 0) is in memory once.
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


_WRITE_ONLY = words(
    """
    zero_ fill_ zeros ones full zeros_like ones_like full_like new_zeros new_full new_ones
    arange bernoulli_ uniform_ normal_ scalar_tensor
    """
)

# Table look-ups touch the rows that are asked for, not the whole table; their gradients are dense:
# the whole table is written, then the rows of the samples are added (read and written).
_LOOKUPS: dict[str, Callable[[list[Tensor], list[Tensor]], float]] = {
    "embedding": lambda i, o: 2 * _nbytes(o[0]) + _nbytes(i[1]),
    "index_select": lambda i, o: 2 * _nbytes(o[0]) + _nbytes(i[-1]),
    "gather": lambda i, o: 2 * _nbytes(o[0]) + _nbytes(i[-1]),
    "index": lambda i, o: 2 * _nbytes(o[0]) + sum(_nbytes(t) for t in i[1:]),
    "_embedding_bag": lambda i, o: _rows(i[0], i[1]) + _nbytes(o[0]) + _nbytes(i[1]),
    "_embedding_bag_forward_only": lambda i, o: _rows(i[0], i[1]) + _nbytes(o[0]) + _nbytes(i[1]),
    "embedding_dense_backward": lambda i, o: _nbytes(o[0]) + 3 * _nbytes(i[0]),
    "_embedding_bag_backward": lambda i, o: _nbytes(o[0]) + _nbytes(i[0]) + 2 * _rows(o[0], i[1]),
    "_embedding_bag_dense_backward": lambda i, o: (
        _nbytes(o[0]) + _nbytes(i[0]) + 2 * _rows(o[0], i[1])
    ),
}


def _rows(table: Tensor, indices: Tensor) -> float:
    return indices.numel() * table.shape[-1] * table.element_size()


_LAUNCHES = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 3,
    "native_batch_norm": 2,
    "native_batch_norm_backward": 2,
    "embedding_dense_backward": 4,  # sorts the indices
    "_embedding_bag_backward": 4,
    "_embedding_bag_dense_backward": 4,
    "_scaled_dot_product_efficient_attention_backward": 3,
    "convolution_backward": 2,
}

_Products = tuple[tuple[float, float, float, float], ...]


def _mm(a: Tensor, b: Tensor) -> _Products:
    batch = a.shape[0] if a.dim() == 3 else 1
    return ((a.shape[-2], b.shape[-1], a.shape[-1], batch),)


def _convolution(args: tuple[Any, ...], outputs: list[Tensor]) -> _Products:
    # As an implicit product: output pixels x output channels, over input channels x filter.
    x, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    image = x if transposed else outputs[0]
    pixels = image.numel() // image.shape[1]
    saved = _winograd(weight, stride, groups)
    return ((pixels, weight.shape[0] / groups, weight[0].numel() / saved, groups),)


def _convolution_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> _Products:
    grad, x, weight, stride = args[:3] + args[4:5]
    transposed, groups, mask = args[7], args[9], args[10]
    image = x if transposed else grad
    saved = _winograd(weight, stride, groups)
    pixels = image.numel() // image.shape[1]
    inner, channels = weight[0].numel(), weight.shape[0] / groups
    products: _Products = ()
    if mask[0]:
        products += ((pixels, inner, channels / saved, groups),)
    if mask[1]:
        products += ((channels, inner, pixels / saved, groups),)
    return products


def _winograd(weight: Tensor, stride: Sequence[int], groups: int) -> float:
    # Winograd's transform saves a factor of 4 for 3 x 3 filters in float32, less what it costs:
    # DAPPLE's V100 profile of VGG-19 has such layers at up to 2.6 times the peak of the data sheet.
    square = weight.dtype == torch.float32 and tuple(weight.shape[2:]) == (3, 3)
    return 3.0 if square and set(stride) == {1} and groups == 1 else 1.0


def _fused_attention(args: tuple[Any, ...], outputs: list[Tensor]) -> _Products:
    # Scores and their product with the values; the processors share out blocks of queries.
    query, key, value = args[:3]
    heads = query.shape[0] * query.shape[1]
    width = query.shape[-1] + value.shape[-1]
    return ((query.shape[2], width / 2, 2 * key.shape[2], heads),)


def _fused_attention_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> _Products:
    # Five products instead of two: the scores again, and four gradients.
    query, key, value = args[1:4]
    heads = query.shape[0] * query.shape[1]
    width = query.shape[-1] + value.shape[-1]
    return ((key.shape[2], width / 2, 5 * query.shape[2], heads),)


_PRODUCTS: dict[str, Callable[[tuple[Any, ...], list[Tensor]], _Products]] = {
    "mm": lambda a, o: _mm(a[0], a[1]),
    "bmm": lambda a, o: _mm(a[0], a[1]),
    "addmm": lambda a, o: _mm(a[1], a[2]),
    "baddbmm": lambda a, o: _mm(a[1], a[2]),
    "mv": lambda a, o: ((a[0].shape[0], 1, a[0].shape[1], 1),),
    "addmv": lambda a, o: ((a[1].shape[0], 1, a[1].shape[1], 1),),
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_efficient_attention": _fused_attention,
    "_scaled_dot_product_efficient_attention_backward": _fused_attention_backward,
}
