"""A backward in two halves: gradients of a stage's inputs first, those of its weights later.

Earlier stages wait for the gradients of inputs alone, so these are computed and sent first.
Autograd skips the weights of a call if nobody asks for their gradients. Gradients that arrive at a
call that reads weights are kept, and later go through that call alone, towards its weights::

    whole     gradient -> call k -> call k-1 -> ... -> inputs
                            v         v
                            W         W
    halves    gradient -> call k -> call k-1 -> ... -> inputs      then  call k -> W, call k-1 -> W

Both halves run the same kernels on the same numbers in the same order of micro-batches, so
gradients are bitwise those of a whole backward. (Zero Bubble Pipeline Parallelism, Qi et al., 2024,
section 2, writes the halves of each operator by hand.)
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, Node

from anabranch.graph.cutting.weight_calls import calls_with_weights


@dataclass(slots=True, weakref_slot=True)
class CallWithWeights:
    """A call that reads weights, in the forward of one micro-batch.

    Attributes:
        arrived: gradients of its results, once the first half has passed it.
    """

    node: Node
    parameters: Sequence[nn.Parameter]
    arrived: tuple[Tensor | None, ...] = ()

    def __post_init__(self) -> None:
        # A node that held its call, which holds the node, would live on with the whole graph: the
        # garbage collector does not see the hooks of a node.
        this = weakref.ref(self)

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if (call := this()) is not None:
                call.arrived = gradients

        self.node.register_prehook(keep)

    def add_gradients(self) -> None:
        """Compute the gradients of the parameters, and add them to their ``.grad``."""
        arrived = {i: g for i, g in enumerate(self.arrived) if g is not None}
        if arrived:
            edges = [GradientEdge(self.node, number) for number in arrived]
            torch.autograd.backward(edges, list(arrived.values()), inputs=self.parameters)


class WeightNotes:
    """Calls with weights in the current or last forward of one program on one rank.

    Attributes:
        parameters: parameters whose gradients can wait for the second half.
    """

    def __init__(self) -> None:
        self.parameters: set[nn.Parameter] = set()
        self._calls: list[CallWithWeights] = []

    def add(self, result: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Note the result of a call that reads these parameters."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A view, as of a linear layer's rows, gets another node where it is changed in place.
        node = (result if result._base is None else result._base).grad_fn
        if node is not None and trained:
            self._calls.append(CallWithWeights(node, trained))

    def take(self) -> list[CallWithWeights]:
        """Return the calls of the last forward, last ones first."""
        calls, self._calls = self._calls[::-1], []
        return calls


class _Note(nn.Module):
    """Identity that notes the result of a call."""

    def __init__(self, notes: WeightNotes, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._notes, self._read = notes, tuple(parameters)  # a tuple is not registered

    def forward(self, result: Tensor) -> Tensor:
        self._notes.add(result, self._read)
        return result


def with_notes(
    module: fx.GraphModule, inputs: Collection[str]
) -> tuple[fx.GraphModule, WeightNotes]:
    """Return the same stage with notes of its calls whose weights can wait.

    Args:
        inputs: names of the placeholders through which gradients go back.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    noting, notes = fx.GraphModule(module, graph), WeightNotes()
    for number, (node, parameters) in enumerate(calls_with_weights(module, inputs).items()):
        name = f"_notes.{number}"
        noting.add_submodule(name, _Note(notes, parameters))
        with graph.inserting_after(copies[node]):
            note = graph.call_module(name, (copies[node],))
        copies[node].replace_all_uses_with(note, note.__ne__)
        notes.parameters.update(parameters)
    noting.recompile()
    return noting, notes
