"""Gradients that a forward asks for (``torch.autograd.grad``), traced as calls of the program.

Autograd works below what a trace sees. So the calls between inputs and outputs are traced once more
with their derivative, and the calls of that derivative join the forward's own::

    y = tanh(linear(x, w))                     y = tanh(linear(x, w))
    g, = autograd.grad(y.sum(), x)    ->       g = mm(tanh_backward(expand(1), y), w)

What the forward has computed is read from there, so gradients of higher order go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.amp.autocast_mode import _enter_autocast
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from anabranch.graph.call_traits import draws
from anabranch.graph.flat_program import tensors, written
from anabranch.graph.operations import words
from anabranch.graph.tracing.empty_selections import traced_node

_aten = torch.ops.aten
_OVER_SAMPLES = [
    getattr(_aten, f"{loss}_backward")
    for loss in words(
        "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy nll_loss "
        "nll_loss2d"
    )
]
"""Calls that divide by the number of their samples, which other calls say openly."""


def traced_gradients(
    engine: Callable[..., tuple[Tensor, ...]],
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    create_graph: bool,
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of weighted outputs by the inputs, None for an input that has none; None
    if they cannot be traced: a call between is under autocast, draws random numbers or changes a
    tensor from elsewhere, or an input follows from another one.

    Args:
        engine: what ``torch.autograd.grad`` calls with these arguments.
    """
    mode: Any = get_proxy_mode()
    values = [v for v in (*outputs, *weights, *inputs) if isinstance(v, Tensor)]
    nodes = [node for node in map(traced_node, values) if node is not None]
    if len(nodes) < len(outputs) + len(weights) + len(inputs):
        return None
    results, factors = nodes[: len(outputs)], nodes[len(outputs) : -len(inputs)]
    sources, tracer = nodes[-len(inputs) :], mode.tracer
    calls = _calls_between(sources, results)
    is_traced = all(node.target is not _enter_autocast for node in tracer.graph.nodes)
    if not is_traced or any(c in sources or c.op != "call_function" or draws(c) for c in calls):
        return None
    own, operands = set(calls), [node for call in calls for node in call.all_input_nodes]
    read = [n for n in dict.fromkeys([*sources, *factors, *results, *operands]) if n not in own]

    def derivative(*values: Any) -> list[Any]:
        value = dict(zip(read, values, strict=True))
        value.update((source, value[source].detach().requires_grad_()) for source in sources)
        for call in calls:
            args, kwargs = fx.map_arg((call.args, call.kwargs), value.__getitem__)
            target: Any = call.target
            value[call] = target(*args, **kwargs)
        groups = results, factors, sources
        ends, weighted, origins = (tuple(map(value.__getitem__, group)) for group in groups)
        gradients = engine(ends, weighted, True, True, origins, True, accumulate_grad=False)
        return [*gradients, *(value[node] for node in (*sources, *calls))]

    rules: Any = get_decompositions(_OVER_SAMPLES)
    with (
        torch._C.DisableTorchFunction(),
        disable_proxy_modes_tracing(),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # other kernels have no second derivative
    ):
        traced = make_fx(derivative, rules)(*(node.meta["val"] for node in read))
    ends: Any = traced.graph.output_node().args[0]
    placed = dict(zip(traced.graph.find_nodes(op="placeholder"), read, strict=True))
    for end, node in zip(ends[len(sources) :], (*sources, *calls), strict=True):
        if isinstance(end, fx.Node):  # not a list of tensors
            placed.setdefault(end, node)
    return tuple(
        None if end is None else _tensor(_placed(end, placed, tracer), tracer, create_graph)
        for end in ends[: len(sources)]
    )


def _calls_between(sources: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Return calls with real numbers as values that lie on a way from a source to a result, with
    those that make or change a tensor that one of them changes.
    """
    graph = results[0].graph
    behind, ahead = set[fx.Node](), set(results)
    reached, wanted = set[int](), {place for result in results for place in _places(result)}
    for node in graph.nodes:
        is_real = any(v.is_floating_point() or v.is_complex() for v in tensors(node))
        inputs = node.all_input_nodes
        follows = any(n in behind or n in sources or reached & _places(n) for n in inputs)
        if is_real and follows:
            behind.add(node)
            reached.update(place for target in written(node) for place in _places(target))
    for node in reversed(graph.nodes):
        is_wanted = node in ahead or any(wanted & _places(target) for target in written(node))
        if is_wanted and node in behind:
            ahead.update((node, *node.all_input_nodes))
            wanted.update(place for n in node.all_input_nodes for place in _places(n))
    between = behind & ahead
    changed = {place for node in between for target in written(node) for place in _places(target)}
    if changed:
        between |= {n for n in graph.nodes if not changed.isdisjoint(_places(n))}
        between |= {n for n in graph.nodes if any(changed & _places(t) for t in written(n))}
    return [node for node in graph.nodes if node in between]


def _places(node: fx.Node) -> set[int]:
    return {value.untyped_storage()._cdata for value in tensors(node)}


def _placed(end: fx.Node, placed: dict[fx.Node, fx.Node], tracer: Any) -> fx.Node:
    """Return the node of a value of a derivative in the forward, with the calls that make it."""
    missing, places = {end}, _places(end)
    for node in reversed(end.graph.nodes):
        is_written = any(places & _places(target) for target in written(node))
        if node not in placed and (node in missing or is_written):
            missing.update((node, *node.all_input_nodes))
            places.update(place for n in node.all_input_nodes for place in _places(n))
    for node in end.graph.nodes:
        if node in placed or node not in missing:
            continue
        if node.target is _aten.detach.default:
            placed[node] = placed[node.args[0]]  # how autograd keeps a result of a call
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), placed.__getitem__)
            placed[node] = tracer.create_node("call_function", node.target, args, kwargs)
            placed[node].meta["val"] = node.meta["val"]
    return placed[end]


def _tensor(node: fx.Node, tracer: Any, requires_grad: bool) -> Tensor:
    """Return a tensor for the value of a node, whose further calls are traced."""
    with disable_proxy_modes_tracing():
        value: Tensor = node.meta["val"].detach().requires_grad_(requires_grad)
    if not requires_grad:
        node = tracer.create_node("call_function", _aten.detach.default, (node,), {})
        node.meta["val"] = value
    track_tensor_tree(value, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return value
