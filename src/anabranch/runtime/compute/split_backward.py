"""A backward in two halves: gradients of what entered a stage first, those of its weights later.

The stages before wait for the gradients of inputs alone, so these are computed and sent at first.
Autograd skips what a call does for its weights if nobody asks for their gradients. What arrives at
a call that reads weights is kept, and later goes through that call alone, towards its weights::

    whole     gradient -> call k -> call k-1 -> ... -> inputs
                            v         v
                            W         W
    halves    gradient -> call k -> call k-1 -> ... -> inputs      then  call k -> W, call k-1 -> W

Both halves run the same kernels on the same numbers in the same order of micro-batches, so
gradients are bitwise those of a whole backward. (Zero Bubble Pipeline Parallelism, Qi et al., 2024,
section 2, writes the halves of each operator by hand.)

Deferred are parameters that one call reads alone, perhaps behind a transpose. A parameter with
several uses belongs to the first half: autograd adds up its uses in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, Node


@dataclass(slots=True)
class _Call:
    """A call that reads weights, in the forward of one micro-batch.

    Attributes:
        arrived: gradients of its results, once the first half has been there.
    """

    node: Node
    parameters: Sequence[nn.Parameter]
    arrived: tuple[Tensor | None, ...] = ()

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.arrived = gradients


@dataclass(slots=True)
class DeferredWeights:
    """Calls of one micro-batch whose weights have no gradients yet, in the order of the forward."""

    calls: list[_Call] = field(default_factory=list)

    def add(self, result: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Note the result of a call that reads these parameters."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if result.grad_fn is not None and trained:
            call = _Call(result.grad_fn, trained)
            result.grad_fn.register_prehook(call.keep)
            self.calls.append(call)

    def input_gradients(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Iterable[Tensor]
    ) -> None:
        """Compute the gradients of inputs from those of results; the graph is kept.

        Args:
            inputs: all but the deferred parameters that are to have a gradient.
        """
        torch.autograd.backward(tensors, gradients, retain_graph=True, inputs=list(inputs))

    def weight_gradients(self) -> None:
        """Add the gradients of the deferred parameters to theirs, last calls first."""
        for call in reversed(self.calls):
            arrived = {i: g for i, g in enumerate(call.arrived) if g is not None}
            if arrived:
                edges = [GradientEdge(call.node, number) for number in arrived]
                torch.autograd.backward(edges, list(arrived.values()), inputs=call.parameters)
        self.calls.clear()


class _Note(nn.Module):
    """Identity that notes the result of a call."""

    def __init__(self, deferred: DeferredWeights, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._deferred, self._read = deferred, tuple(parameters)  # a tuple is not registered

    def forward(self, result: Tensor) -> Tensor:
        self._deferred.add(result, self._read)
        return result


def with_deferred_weights(
    module: fx.GraphModule, inputs: int, deferred: DeferredWeights
) -> tuple[fx.GraphModule, frozenset[nn.Parameter]]:
    """Return the same stage with notes on the calls whose weights can wait, and these weights.

    Args:
        inputs: number of placeholders, the first ones, through which gradients go back.
        deferred: where calls are noted; one micro-batch at a time.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    result = fx.GraphModule(module, graph)
    waiting: set[nn.Parameter] = set()
    for number, (node, parameters) in enumerate(_calls_with_weights(module, inputs).items()):
        result.add_submodule(f"_deferred.{number}", _Note(deferred, parameters))
        call = copies[node]
        with graph.inserting_after(call):
            note = graph.call_module(f"_deferred.{number}", (call,))
        call.replace_all_uses_with(note, note.__ne__)
        waiting.update(parameters)
    result.recompile()
    return result, frozenset(waiting)


def _calls_with_weights(
    module: fx.GraphModule, inputs: int
) -> dict[fx.Node, tuple[nn.Parameter, ...]]:
    """Return calls behind the inputs of a stage, with the parameters that each alone reads."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    behind = set(placeholders[:inputs])
    alone: dict[fx.Node, tuple[nn.Parameter, ...]] = {}
    calls: dict[fx.Node, tuple[nn.Parameter, ...]] = {}
    for node in module.graph.nodes:
        sources = node.all_input_nodes
        read = tuple(parameter for source in sources for parameter in alone.get(source, ()))
        if node.op == "get_attr" and len(node.users) == 1:
            value = attrgetter(str(node.target))(module)
            alone[node] = (value,) if isinstance(value, nn.Parameter) else ()
        elif node.op == "call_function" and behind.intersection(sources):
            behind.add(node)
            if read and isinstance(node.meta.get("val"), Tensor):
                calls[node] = read
        elif node.op == "call_function" and len(node.users) == 1 and alone.keys() >= set(sources):
            alone[node] = read  # such as the transpose of a weight
    return calls
