"""A stage's program as a plain function, whose operators cost the host as little as they can.

A graph calls operators through their ``OpOverload`` objects, each of which is a call of Python more
than the ordinary binding of the same operator (``torch.add``), and finds every parameter by the
names of the modules around it. Here bindings take their place where they are known to take the same
arguments, and parameters are looked up where the module keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_aten = torch.ops.aten
_nn: Any = torch._C._nn

BINDINGS: Mapping[Any, tuple[Callable[..., Any], int]] = {
    _aten.linear.default: (_nn.linear, 3),
    _aten.addmm.default: (torch.addmm, 3),
    _aten.mm.default: (torch.mm, 2),
    _aten.bmm.default: (torch.bmm, 2),
    _aten.matmul.default: (torch.matmul, 2),
    _aten.conv2d.default: (torch.conv2d, 7),
    _aten.layer_norm.default: (torch.layer_norm, 6),
    _aten.batch_norm.default: (torch.batch_norm, 9),
    _aten.embedding.default: (torch.embedding, 5),
    _aten.scaled_dot_product_attention.default: (_nn.scaled_dot_product_attention, 6),
    _aten.add.Tensor: (torch.add, 2),
    _aten.sub.Tensor: (torch.sub, 2),
    _aten.mul.Tensor: (torch.mul, 2),
    _aten.div.Tensor: (torch.div, 2),
    _aten.relu.default: (torch.relu, 1),
    _aten.gelu.default: (_nn.gelu, 1),
    _aten.silu.default: (_nn.silu, 1),
    _aten.tanh.default: (torch.tanh, 1),
    _aten.sigmoid.default: (torch.sigmoid, 1),
    _aten.softmax.int: (torch.softmax, 2),
    _aten.dropout.default: (torch.dropout, 3),
    _aten.transpose.int: (torch.transpose, 3),
    _aten.permute.default: (torch.permute, 2),
    _aten.unsqueeze.default: (torch.unsqueeze, 2),
    _aten.flatten.using_ints: (torch.flatten, 3),
    _aten.reshape.default: (torch.reshape, 2),
    _aten.view.default: (torch.Tensor.view, 2),
    _aten.select.int: (torch.select, 3),
}
"""Operator -> binding, and how many arguments by position both take alike, with the same defaults
(which ``cross_entropy_loss`` has not).
"""


def fast_call(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that does what a graph does."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    read: list[tuple[Mapping[str, Any], str]] = []
    for node in module.graph.find_nodes(op="placeholder"):
        copied[node] = graph.node_copy(node)
    for node in module.graph.find_nodes(op="get_attr"):
        read.append(_where(module, str(node.target)))
        copied[node] = graph.placeholder(f"{node.name}_")
    for node in module.graph.nodes:
        if node in copied:
            continue
        new = copied[node] = graph.node_copy(node, copied.__getitem__)
        binding, count = BINDINGS.get(node.target, (None, 0))
        if binding is not None and len(node.args) <= count and not node.kwargs:
            if binding is torch.Tensor.view:
                new.op, new.target = "call_method", "view"
            elif all(isinstance(arg, fx.Node) for arg in node.args[: 1 + _is_binary(node)]):
                new.target = binding
    call = fx.GraphModule(module, graph).forward
    if not read:
        return call
    return lambda *args: call(*args, *[tensors[name] for tensors, name in read])


def _is_binary(node: fx.Node) -> bool:
    """True for an operator whose second operand may be a number, which would be another one."""
    return str(node.target).startswith(("aten.add.", "aten.sub.", "aten.mul.", "aten.div."))


def _where(module: nn.Module, target: str) -> tuple[Mapping[str, Any], str]:
    """Return the mapping that has what a name means, which is looked up for each call."""
    *path, name = target.split(".")
    for part in path:
        module = getattr(module, part)
    for tensors in (module._parameters, module._buffers):
        if isinstance(tensors.get(name), Tensor):
            return tensors, name
    return {name: getattr(module, name)}, name
