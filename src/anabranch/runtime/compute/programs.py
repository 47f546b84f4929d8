"""Programs of the stages as they are called for each micro-batch, under the compute options::

    program --> autocast --> sparse gradients --> random numbers --> torch.compile --> call
                (precision)  (sparse_embeddings)  (dropout)          (compile)

Made once per stage and number of samples, and kept for all batch sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException

from anabranch.errors import TrainingError
from anabranch.graph.call_traits import draws
from anabranch.graph.cutting.split import Split, StageProgram
from anabranch.graph.opgraph_builder import make_sparse
from anabranch.graph.reverted import put, written_state
from anabranch.graph.tracing.changed_state import changed_state
from anabranch.remembered import remembered
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.compute.replay import ReplayedCall
from anabranch.runtime.compute.split_backward import WeightNotes, with_notes
from anabranch.runtime.numerics.dropout import BySample, without_dropout


@dataclass(frozen=True, eq=False)
class StageCall:
    """A stage for some samples: ``call`` takes ``(*inputs, *tied, *batch)``, ``by_sample`` after
    the step's key and the first sample. ``is_random``: it draws from a generator. ``notes``: calls
    whose weights can wait, of a stage with split backwards.
    """

    program: StageProgram
    call: Callable[..., tuple[Tensor, ...]]
    by_sample: bool
    is_random: bool
    notes: WeightNotes | None = None


class StagePrograms:
    """Stages of a model under compute options; a ``ProgramSource``.

    Args:
        parts: stages of the model without options.
    """

    def __init__(self, parts: Split, options: ComputeOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self._parts = parts.under_autocast(options.precision, device.type)
        self.captured = self._parts.captured
        self._by_sample = BySample(parts.captured, device)

    def program(self, stage: int, samples: int) -> StageProgram:
        return self._parts.program(stage, samples, device=self.device)

    @remembered
    def runnable(self, stage: int, samples: int, *, split: bool = False) -> StageCall:
        """Return the call of a stage.

        Args:
            split: for backwards in two halves; a compiled stage does everything in the first.

        Raises:
            CaptureError: if a random operation cannot draw by sample.
        """
        program = self.program(stage, samples)
        if self.options.sparse_embeddings:
            program = replace(program, module=with_sparse_lookups(program.module))
        if self.options.dropout == "off" and is_random(program.module):
            program = replace(program, module=without_dropout(program.module))
        rewritten = None
        if self.options.dropout == "sample":
            rewritten = self._by_sample.rewritten(program, samples)
        module = program.module if rewritten is None else rewritten
        notes = None
        if split and self.options.backend is None:
            module, notes = with_notes(module, program.ways_back)
        drawn = rewritten is None and is_random(program.module)
        if self.options.backend is None or self.options.is_replayed:
            call = fast_call(module)
        else:
            changed = changed_state(self.captured.programs.example, ())
            call = _compiled(module, changed, self.options.backend)
        if self.options.is_replayed and not drawn:
            written = written_state(self.captured, program.module)
            call = ReplayedCall(call, program.module, written)
        return StageCall(program, call, rewritten is not None, drawn, notes)

    @contextmanager
    def compiling(self, stage: int) -> Iterator[None]:
        """Say what to do when a stage, or its backward, does not compile."""
        try:
            yield
        except TorchDynamoException as error:
            text = " ".join(str(error).split())
            raise TrainingError(
                f"stage {stage} cannot be compiled with backend {self.options.backend}: "
                f"{type(error).__name__}: {text[:300]}; choose another backend "
                '("aot_eager" needs no compiler), or leave compile out'
            ) from error


def _compiled(
    module: nn.Module, names: Collection[str], backend: str
) -> Callable[..., tuple[Tensor, ...]]:
    """Compile a stage. State of these names is passed as values and written back after the call: a
    compiled backward may compute again from state, even if that has changed by then.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    state = {name: tensor for name, tensor in named if name in names}

    def changed(before: dict[str, Tensor], *args: Tensor) -> tuple[Any, dict[str, Tensor]]:
        after = {name: value.clone() for name, value in before.items()}
        return torch.func.functional_call(module, after, args), after

    compiled = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
    if not state:
        return compiled(module)
    call = compiled(changed)

    def called(*args: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        results, after = call({n: tensor.detach().clone() for n, tensor in state.items()}, *args)
        put(list(state.values()), [after[name] for name in state])
        return results

    return called


def with_sparse_lookups(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same stage with sparse gradients of its tables."""
    graph = copy.deepcopy(module.graph)
    make_sparse(graph)
    return fx.GraphModule(module, graph)


def is_random(module: nn.Module) -> bool:
    """Return whether a stage draws from a generator."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return any(draws(node) for graph in graphs for node in graph.nodes)


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
"""Operator -> binding, and the number of positional arguments that both take alike, with the same
defaults (unlike ``cross_entropy_loss``).
"""
_BINARY = _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor
"""Operators whose bindings stand for another operator if the second operand is a number."""


def fast_call(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that does what a graph does, with operators that cost the host little.

    A graph calls operators through their ``OpOverload`` objects, each of which is a call of Python
    more than the ordinary binding of the same operator (``torch.add``), and finds every parameter
    by the names of the modules around it. Here bindings take their place where they are known to
    take the same arguments, and parameters are looked up where the module keeps them. That takes a
    fifth off the host's time.
    """
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
            elif all(isinstance(arg, fx.Node) for arg in node.args[: 1 + (node.target in _BINARY)]):
                new.target = binding
    call = fx.GraphModule(module, graph).forward
    if not read:
        return call
    return lambda *args: call(*args, *[tensors[name] for tensors, name in read])


def _where(module: nn.Module, target: str) -> tuple[Mapping[str, Any], str]:
    """Return the mapping and the key by which a target is looked up in each call."""
    *path, name = target.split(".")
    for part in path:
        module = getattr(module, part)
    for tensors in (module._parameters, module._buffers):
        if isinstance(tensors.get(name), Tensor):
            return tensors, name
    return {name: getattr(module, name)}, name
