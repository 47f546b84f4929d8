"""Programs by the ordinary bindings of their operators."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from anabranch.runtime.compute.bindings import BINDINGS, fast_call

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


IDS = torch.tensor([[1, 0, 3]])
ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.linear.default: [(x(2, 3), x(4, 3), x(4)), (x(2, 3), x(4, 3), None)],
    aten.addmm.default: [(x(4), x(2, 3), x(3, 4))],
    aten.mm.default: [(x(2, 3), x(3, 4))],
    aten.bmm.default: [(x(2, 2, 3), x(2, 3, 4))],
    aten.matmul.default: [(x(2, 3), x(3, 4))],
    aten.conv2d.default: [
        (x(1, 2, 5, 5), x(4, 1, 3, 3), x(4), [2, 1], [1, 0], [1, 1], 2),
        (x(1, 2, 5, 5), x(4, 2, 3, 3)),
    ],
    aten.layer_norm.default: [(x(2, 3), [3], x(3), x(3), 1e-3, False), (x(2, 3), [3])],
    aten.batch_norm.default: [(x(4, 3), x(3), x(3), x(3), x(3) ** 2, False, 0.2, 1e-3, False)],
    aten.embedding.default: [(x(5, 2), IDS, 3, True, False), (x(5, 2), IDS)],
    aten.scaled_dot_product_attention.default: [
        (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), None, 0.0, True),
        (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4)),
    ],
    aten.add.Tensor: [(x(2, 3), x(3))],
    aten.sub.Tensor: [(x(2, 3), x(3))],
    aten.mul.Tensor: [(x(2, 3), x(3))],
    aten.div.Tensor: [(x(2, 3), x(3))],
    aten.relu.default: [(x(3),)],
    aten.gelu.default: [(x(3),)],
    aten.silu.default: [(x(3),)],
    aten.tanh.default: [(x(3),)],
    aten.sigmoid.default: [(x(3),)],
    aten.softmax.int: [(x(2, 3), -1)],
    aten.dropout.default: [(x(2, 3), 0.5, True), (x(2, 3), 0.5, False)],
    aten.cat.default: [([x(2, 3), x(4, 3)], 0), ([x(2, 3)],)],
    aten.transpose.int: [(x(2, 3), 0, -1)],
    aten.permute.default: [(x(2, 3, 4), [2, 0, 1])],
    aten.unsqueeze.default: [(x(2, 3), 1)],
    aten.flatten.using_ints: [(x(2, 3, 4), 1), (x(2, 3, 4), 0, 1)],
    aten.reshape.default: [(x(2, 3), [3, -1])],
    aten.view.default: [(x(2, 3), [3, 2])],
    aten.select.int: [(x(2, 3), 1, 2)],
}


@pytest.mark.parametrize("operator", BINDINGS, ids=str)
def test_a_binding_computes_what_the_operator_does(operator: Any) -> None:
    """Bit for bit, and so do the gradients."""
    for given in ARGUMENTS[operator]:
        results = []
        for call in (operator, BINDINGS[operator][0]):

            def leaf(value: Any) -> Any:
                is_float = isinstance(value, Tensor) and value.is_floating_point()
                return value.clone().requires_grad_() if is_float else value

            arguments = tree_map(leaf, given)
            torch.manual_seed(0)
            if operator is aten.batch_norm.default:
                arguments = (*arguments[:3], *(t.detach() for t in arguments[3:5]), *arguments[5:])
            result = call(*arguments)
            result.square().sum().backward()
            found: list[Tensor] = [result.detach()]
            tree_map(
                lambda a, found=found: (
                    found.append(a.grad) if isinstance(a, Tensor) and a.grad is not None else None
                ),
                arguments,
            )
            results.append(found)
        first, second = results
        assert len(first) == len(second) > 1
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Small(nn.Module):
    """Parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.GELU())
        self.register_buffer("shift", torch.ones(4))


def graph_of(module: Small) -> fx.GraphModule:
    """A graph with a number as an operand, a view, and an argument by another place."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    names = ("inner.0.weight", "inner.0.bias", "shift")
    weight, bias, shift = (graph.get_attr(name) for name in names)
    linear = graph.call_function(aten.linear.default, (value, weight, bias))
    twice = graph.call_function(aten.mul.Tensor, (linear, 2))
    shifted = graph.call_function(aten.add.Tensor, (twice, shift))
    viewed = graph.call_function(aten.view.default, (shifted, [4, 2]))
    half = graph.call_function(aten.softmax.int, (viewed, 0, torch.float64))
    graph.output((half, viewed))
    return fx.GraphModule(module, graph)


def test_a_program_reads_its_parameters_anew_at_every_call() -> None:
    """Versions of weights point them at other memory, and a user may give a module others."""
    module = Small()
    graph = graph_of(module)
    call = fast_call(graph)
    for _ in range(2):
        for mine, theirs in zip(call(x(2, 3)), graph(x(2, 3)), strict=True):
            assert torch.equal(mine, theirs)
        graph.inner.get_submodule("0").weight.data = torch.randn(4, 3)
    graph.inner.get_submodule("0").bias = nn.Parameter(torch.randn(4))
    for mine, theirs in zip(call(x(2, 3)), graph(x(2, 3)), strict=True):
        assert torch.equal(mine, theirs)
