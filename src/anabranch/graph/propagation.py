"""Gradients of a flat program, by a backward of its fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from anabranch.graph.flat_program import FlatProgram


def gradient_calls(program: FlatProgram) -> set[fx.Node]:
    """The calls that a gradient of the loss goes through."""
    reached = {program.outputs[0]}
    for node in reversed(program.calls):
        if node in reached and requires_grad(node):
            reached.update(source for source in node.all_input_nodes if requires_grad(source))
    return {node for node in reached if node.op == "call_function" and requires_grad(node)}


def gradient_strides(
    program: FlatProgram, nodes: Sequence[fx.Node]
) -> dict[fx.Node, tuple[int, ...]]:
    """Strides of the gradients that values have in one process, by a backward of fake tensors; as
    the value's own where there is no gradient.
    """
    if not nodes:
        return {}
    values = [node.meta["val"] for node in nodes]
    loss = program.outputs[0].meta["val"]
    gradients = torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True)
    return {
        node: (value if gradient is None else gradient).stride()
        for node, value, gradient in zip(nodes, values, gradients, strict=True)
    }


def requires_grad(node: fx.Node) -> bool:
    """True if eager execution tracks gradients of the node's value, or of a part of it."""
    return any(
        isinstance(v, torch.Tensor) and v.requires_grad for v in tree_leaves(node.meta.get("val"))
    )
