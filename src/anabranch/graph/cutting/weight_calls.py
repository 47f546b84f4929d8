"""Calls whose gradients of weights can wait until gradients of a stage's inputs are sent.

A parameter can wait if one call alone reads it, perhaps through a transpose. One with several uses
cannot: autograd adds up its uses in one order. Until then the gradients of the call's result stay
in memory. Group normalisation does not wait: PyTorch's kernel for tensors with channels last on a
CPU ends the process if the gradient of the input is not asked for as well (2.13).
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

import torch
from torch import Tensor, fx, nn

from anabranch.graph.cutting.split import StageProgram
from anabranch.graph.flat_program import requires_grad


def waiting_bytes(program: StageProgram) -> int:
    """Return bytes of the gradients that are held until those of the weights are computed, without
    gradients of a size that depends on the data, as of the tokens of an expert.
    """
    calls = calls_with_weights(program.module, program.ways_back)
    values = [node.meta["val"] for node in calls]
    return sum(v.nbytes for v in values if all(isinstance(size, int) for size in v.shape))


def calls_with_weights(
    module: fx.GraphModule, inputs: Collection[str]
) -> dict[fx.Node, tuple[nn.Parameter, ...]]:
    """Return calls behind the inputs of a stage, with the parameters that each alone reads."""
    behind = {n for n in module.graph.find_nodes(op="placeholder") if n.name in inputs}
    alone: dict[fx.Node, tuple[nn.Parameter, ...]] = {}
    calls: dict[fx.Node, tuple[nn.Parameter, ...]] = {}
    for node in module.graph.nodes:
        sources = node.all_input_nodes
        read = tuple(parameter for source in sources for parameter in alone.get(source, ()))
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(module)
            if not isinstance(value, nn.Parameter):
                alone[node] = ()
            elif len(node.users) == 1:
                alone[node] = (value,)
        elif node.op == "call_function" and behind.intersection(sources):
            if requires_grad(node):  # unlike an index, or what is detached
                behind.add(node)
            is_noted = node in behind and node.target is not torch.ops.aten.group_norm.default
            if is_noted and read and isinstance(node.meta.get("val"), Tensor):
                calls[node] = read
        elif node.op == "call_function" and len(node.users) == 1 and alone.keys() >= set(sources):
            alone[node] = read  # such as the transpose of a weight
    return calls
