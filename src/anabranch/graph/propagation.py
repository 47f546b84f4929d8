"""Values and gradients of a flat program, by a run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from anabranch.graph.flat_program import FlatProgram, PlaceholderSource, set_value


def propagate(
    program: FlatProgram,
    find: Callable[[PlaceholderSource], torch.Tensor],
    device: torch.device | None = None,
) -> None:
    """Run the program on fake tensors: fills ``meta["val"]`` and ``meta["storage"]`` of every node.

    ``find`` gives for a source a tensor like the placeholder, on its device unless one is given.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    env: dict[fx.Node, Any] = {}
    with mode, torch.enable_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                like = find(program.sources[node])
                env[node] = torch.empty_strided(
                    like.size(), like.stride(), dtype=like.dtype, device=device or like.device
                ).requires_grad_(like.requires_grad)
            elif node.op == "get_attr":
                env[node] = program.regions[str(node.target)]
                continue
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            else:
                continue
            set_value(node, env[node])


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
