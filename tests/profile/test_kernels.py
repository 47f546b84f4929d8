"""Which kernels operators launch: names, sizes of products, bytes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from anabranch.profile.kernels import Kernel, MetaRun, Recorder

aten = torch.ops.aten


def meta(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=grad)


def recorded(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of the forward and of the backward."""
    with Recorder() as forward:
        output = function(*inputs)
    with Recorder() as backward:
        output.backward(torch.empty_like(output))
    return forward.kernels, backward.kernels


def products(kernels: list[Kernel]) -> list[tuple[float, ...]]:
    return [product for kernel in kernels for product in kernel.products]


def test_linear() -> None:
    """[8, 3] x [3, 5]: one product forward; backward one for the weight and one for the input."""
    forward, backward = recorded(F.linear, meta(8, 3), meta(5, 3), meta(5))
    assert products(forward) == [(8, 5, 3, 1)]
    assert sorted(products(backward)) == [(5, 3, 8, 1), (8, 3, 5, 1)]


def test_no_gradient_for_the_input_costs_less() -> None:
    """The first layer has one product backward, not two."""
    _, backward = recorded(F.linear, meta(8, 3, grad=False), meta(5, 3), meta(5))
    assert products(backward) == [(5, 3, 8, 1)]


def test_bytes_of_a_product() -> None:
    """[8, 3] x [3, 5] reads 24 + 15 floats and writes 40; transposing is free."""
    forward, _ = recorded(lambda a, b: a @ b.t(), meta(8, 3), meta(5, 3))
    assert [(k.name, k.nbytes) for k in forward] == [("mm", 4 * (24 + 15 + 40))]


def test_views_are_free() -> None:
    """Views launch nothing; a copy does."""
    forward, _ = recorded(lambda x: x.view(6, 4).transpose(0, 1)[None, :2], meta(3, 8))
    assert forward == []
    forward, _ = recorded(lambda x: x.transpose(0, 1).contiguous(), meta(3, 8))
    assert [(k.name, k.nbytes) for k in forward] == [("clone", 2 * 96)]


def test_expanded_input_is_read_once() -> None:
    """Adding a row to 100 rows reads the row, not a hundred copies of it."""
    forward, _ = recorded(lambda x, row: x + row.expand(100, 8), meta(100, 8), meta(1, 8))
    assert [k.nbytes for k in forward] == [4 * (800 + 8 + 800)]


def test_accumulating_gradients_is_a_kernel() -> None:
    """With a gradient from the micro-batch before, the new one is added: two reads, one write."""
    weight = meta(5, 3)
    weight.grad = torch.empty_like(weight)
    _, backward = recorded(F.linear, meta(8, 3, grad=False), weight)
    assert [(k.name, k.nbytes) for k in backward if not k.products] == [("add_", 3 * 15 * 4)]


def test_embedding_touches_rows_forward_and_the_table_backward() -> None:
    """20 rows of 8 floats out of 1000: copied forward; backward writes a dense gradient."""
    indices = meta(20, grad=False, dtype=torch.int64)
    forward, backward = recorded(lambda w: F.embedding(indices, w), meta(1000, 8))
    assert [k.nbytes for k in forward] == [2 * 20 * 32 + 20 * 8]
    assert sum(k.nbytes for k in backward) == 1000 * 32 + 3 * 20 * 32


def test_embedding_bag() -> None:
    """4 bags of 10 rows of 8 floats: all rows are read, one sum per bag is written."""
    indices = meta(4, 10, grad=False, dtype=torch.int64)
    forward, backward = recorded(lambda w: F.embedding_bag(indices, w, mode="sum"), meta(1000, 8))
    bag = next(k for k in forward if k.name == "_embedding_bag")
    assert bag.nbytes == 40 * 32 + 4 * 32 + 40 * 8
    assert sum(k.nbytes for k in backward) == 1000 * 32 + 4 * 32 + 2 * 40 * 32


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups: int) -> None:
    """As products: 2 images of 6 x 6 outputs, 3 x 3 filters, 4 channels in, 8 out.

    Whole 3 x 3 filters go through Winograd's transform, which saves two thirds.
    """
    weight = meta(8, 4 // groups, 3, 3)
    saved = 3 if groups == 1 else 1
    convolve = lambda x, w: F.conv2d(x, w, groups=groups)  # noqa: E731
    forward, backward = recorded(convolve, meta(2, 4, 8, 8), weight)
    flops = 2 * 72 * 8 * 9 * 4 / groups / saved
    assert products(forward) == [(72, 8 / groups, 9 * 4 / groups / saved, groups)]
    assert [2 * m * n * k * b for m, n, k, b in products(backward)] == [flops, flops]


def test_transposed_convolution() -> None:
    """Every input pixel meets every filter: 2 * 64 pixels, 4 channels in, 8 * 25 out."""
    forward, backward = recorded(F.conv_transpose2d, meta(2, 4, 8, 8), meta(4, 8, 5, 5))
    flops = 2 * 128 * 4 * 200
    assert [2 * m * n * k * b for m, n, k, b in products(forward)] == [flops]
    assert [2 * m * n * k * b for m, n, k, b in products(backward)] == [flops, flops]


def traced(function: Callable[..., Tensor], names: int) -> fx.GraphModule:
    """A graph of one ATen call on its placeholders."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(names)]
    graph.output(function(graph, inputs))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_one_fused_kernel(masked: bool) -> None:
    """Forward two products per head (scores, values), backward five; no scores in memory."""
    attention = aten.scaled_dot_product_attention.default
    module = traced(lambda g, x: g.call_function(attention, tuple(x)), 4 if masked else 3)
    inputs = [meta(2, 4, 16, 8) for _ in range(3)]
    if masked:
        inputs.append(meta(2, 1, 16, 16, grad=False, dtype=torch.bool))
    with Recorder() as forward:
        output = MetaRun(module, {}).run(*inputs)
    with Recorder() as backward:
        output.backward(torch.empty_like(output))
    product = 2 * 8 * 16 * 16 * 8  # per product: 8 heads in all, 16 x 16 scores, 8 wide
    fused = [k for k in forward.kernels if k.products]
    assert [k.name for k in fused] == ["_scaled_dot_product_efficient_attention"]
    assert [2 * m * n * k * b for m, n, k, b in products(fused)] == [2 * product]
    fused = [k for k in backward.kernels if k.products]
    assert [2 * m * n * k * b for m, n, k, b in products(fused)] == [5 * product]


def test_attention_of_grouped_queries_and_of_three_dimensions() -> None:
    """Fewer keys than queries are repeated; without a dimension for heads, plain products run."""
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    attention = aten.scaled_dot_product_attention.default
    graph.output(graph.call_function(attention, (q, k, v), {"enable_gqa": True}))
    module = fx.GraphModule(nn.Module(), graph)
    output = MetaRun(module, {}).run(meta(2, 4, 16, 8), meta(2, 2, 16, 8), meta(2, 2, 16, 8))
    assert output.shape == (2, 4, 16, 8)
    module = traced(lambda g, x: g.call_function(attention, tuple(x)), 3)
    assert MetaRun(module, {}).run(*(meta(4, 16, 8) for _ in range(3))).shape == (4, 16, 8)


def test_dropout_keeps_one_byte_per_number() -> None:
    """As on a GPU: one kernel and a mask of bytes; nothing at all where nothing is dropped."""
    module = traced(lambda g, x: g.call_function(aten.dropout.default, (x[0], 0.5, True)), 1)
    with Recorder() as recorder:
        MetaRun(module, {}).run(meta(8, 8))
    assert [(k.name, k.nbytes) for k in recorder.kernels] == [("native_dropout", 64 * (4 + 4 + 1))]
    module = traced(lambda g, x: g.call_function(aten.dropout.default, (x[0], 0.0, True)), 1)
    with Recorder() as recorder:
        MetaRun(module, {}).run(meta(8, 8))
    assert recorder.kernels == []


def test_parameters_by_name() -> None:
    """A graph reads its parameters through the tensors that it is given, not the module's own."""
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (x, graph.get_attr("weight"))),))
    (output,) = MetaRun(fx.GraphModule(root, graph), {"weight": meta(3)}).run(meta(3))
    assert output.is_meta
