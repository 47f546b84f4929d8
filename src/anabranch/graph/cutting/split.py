"""Programs of the stages that a captured module is cut into.

A stage's program holds the calls of its operators in program order, copies of the free calls that
they need, and the model's own parameters. What crosses a stage boundary goes through a port::

    stage 0                    stage 1
    +----------------+         +----------------+
    | a -> b         |  port   | c = f(b)       |
    |      +---------|---------|->              |        (f, b) is a use of b
    |      +-> d     |         |                |
    +----------------+         +----------------+

Where samples share a dimension with something else, as with the frames of a video, a port carries a
view with a dimension for the samples, and its reader restores the value::

    v: [n * f, l]     sent: v.unflatten(0, [1, n, f]).movedim(1, 0)     read: the same undone

One port per value and consuming stage makes gradients right. Gradients bitwise those of one process
(``exact``) need a port for each use that autograd would add on its own; the producer adds what
comes back in the order of one process (``gradient_order``). The uses that are added first may be
summed where they are, because ((g3 + g2) + g1) begins with their sum. The same holds for a
parameter that several stages read.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from anabranch.errors import some
from anabranch.graph.call_traits import node_arguments
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.gradient_order import dense, fan_out, keep_strides
from anabranch.graph.cutting.ports import Port, PortMap, TiedUse, Use
from anabranch.graph.flat_program import CALL, FlatProgram, gradient_strides
from anabranch.graph.group import FREE
from anabranch.graph.opgraph import Precision
from anabranch.remembered import remembered

__all__ = ["Port", "Split", "StageProgram", "TiedUse", "split", "stages_like"]

_aten = torch.ops.aten
Strides = dict[fx.Node, tuple[int, ...]]

_GRAPH_MODULE_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


@dataclass(frozen=True)
class StageProgram:
    """Program of one stage for a number of samples.

    ``module(*inputs, *tied, *batch)`` returns ``(*outputs, loss if has_loss, *metrics)``. Every
    tensor of a port has its samples in dimension 0.

    Attributes:
        module: holds the model's own parameters and buffers under the model's own names.
        inputs, outputs: ports to and from this stage.
        tied: uses of tied parameters, to be given as aliases of the parameter (exact mode only).
        batch: names of the batch leaves that are read.
        metrics: names of the metrics that are made here.
        shapes: per value of the ports, shape and type for this number of samples.
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    tied: tuple[TiedUse, ...]
    batch: tuple[str, ...]
    outputs: tuple[Port, ...]
    has_loss: bool
    metrics: tuple[str, ...]
    shapes: dict[int, tuple[torch.Size, torch.dtype]]

    @property
    def ways_back(self) -> set[str]:
        """Names of the module's inputs through which gradients go back."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        entering = zip(self.inputs, placeholders, strict=False)
        return {node.name for port, node in entering if port.grad}


def split(captured: Captured, stages: Sequence[Sequence[str]], *, exact: bool = False) -> Split:
    """Cut a captured module into stages, given by the names of their operators, in topological
    order; ``exact`` makes gradients bitwise those of one process.

    Raises:
        ValueError: unless stages hold every operator exactly once, and values flow to later stages.
    """
    graph = captured.graph
    held = Counter(name for names in stages for name in names)
    if others := sorted(held.keys() ^ graph.index.keys() | {n for n in held if held[n] > 1}):
        raise ValueError(f"{some(others)} is not once in the stages and once in the model")
    stage_of = {graph.index[name]: s for s, names in enumerate(stages) for name in names}
    for a, b in graph.edges:
        if stage_of[a] > stage_of[b]:
            raise ValueError(
                f"{graph.ops[a].name} in stage {stage_of[a]} feeds {graph.ops[b].name} in stage "
                f"{stage_of[b]}; stages have to be in topological order"
            )
    return Split(captured, tuple(stage_of[i] for i in range(len(graph))), len(stages), exact)


def stages_like(evaluation: Captured, stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return stages of the training graph without the operators that the evaluation graph lacks."""
    return [[name for name in names if name in evaluation.graph.index] for names in stages]


class Split:
    """The stages of a captured module; ``stage_of`` has the stage of every operator, ``ports`` are
    by value, then order.
    """

    def __init__(
        self, captured: Captured, stage_of: tuple[int, ...], num_stages: int, exact: bool
    ) -> None:
        self.captured = captured
        self.stage_of = stage_of
        self.num_stages = num_stages
        self.exact = exact
        self._uses = PortMap(captured, captured.programs.example, stage_of, exact)
        self.ports = self._uses.ports

    def under_autocast(self, precision: Precision | None, device_type: str) -> Split:
        """Return the same stages under autocast, see ``Captured.under_autocast``."""
        captured = self.captured.under_autocast(precision, device_type)
        return Split(captured, self.stage_of, self.num_stages, self.exact)

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold -> those stages."""
        holders: dict[str, set[int]] = defaultdict(set)
        for i, op in enumerate(self.captured.graph.ops):
            for name in op.parameters:
                holders[name].add(self.stage_of[i])
        return {name: tuple(sorted(s)) for name, s in holders.items() if len(s) > 1}

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the model's parameters that a stage reads, in the model's order."""
        ops = self.captured.graph.ops
        read = {n for i, op in enumerate(ops) if self.stage_of[i] == stage for n in op.parameters}
        return {n: p for n, p in self.captured.parameters().items() if n in read}

    def buffers(self, stage: int) -> dict[str, torch.Tensor]:
        """Return the model's buffers that a stage reads or updates, in the model's order."""
        read = self._sources(stage, "buffer")
        return {n: b for n, b in self.captured.module.named_buffers() if n in read}

    def leaves(self, stage: int) -> set[str]:
        """Return the names of the tensors of a batch that a stage reads."""
        return self._sources(stage, "batch")

    def _sources(self, stage: int, kind: str) -> set[str]:
        program = self.captured.programs.example
        read = (program.sources.get(node) for node in self.needed(program, stage))
        return {source.name for source in read if source is not None and source.kind == kind}

    def program(
        self, stage: int, samples: int, *, device: torch.device | str | None = None
    ) -> StageProgram:
        """Return a stage for a number of samples; new tensors are on ``device``, by default where
        the parameters are.
        """
        device = torch.device(device) if device is not None else self.captured.programs.device
        return self._stage_program(stage, samples, device)

    @remembered
    def _stage_program(self, stage: int, samples: int, device: torch.device) -> StageProgram:
        program = self.captured.programs.at(samples, device=device)
        needed, strides = self.needed(program, stage), self._strides(samples, device)
        return _Cutter(self, program, stage, needed, strides).cut()

    @remembered
    def _strides(self, samples: int, device: torch.device) -> Strides:
        """Return strides of the gradients of sent values, in exact mode those of one process."""
        program = self.captured.programs.at(samples, device=device)
        sent = {self.captured.value_calls[p.value] for p in self.ports if p.grad and self.exact}
        return gradient_strides(program, [program.calls[call] for call in sent])

    def needed(self, program: FlatProgram, stage: int) -> list[fx.Node]:
        """Return the nodes of a stage in order: its calls, free calls they read, placeholders."""
        owners = self.captured.programs.grouping.owner_of(program)
        nodes = list(program.graph.nodes)
        needed: set[fx.Node] = set()
        for node in reversed(nodes):
            owner = owners.get(node, FREE)
            if node in needed if owner == FREE else self.stage_of[owner] == stage:
                needed.add(node)
                needed.update(n for n in node.all_input_nodes if owners.get(n, FREE) == FREE)
        return [node for node in nodes if node in needed]


class _Cutter:
    """Builds the program of one stage."""

    def __init__(
        self,
        parts: Split,
        program: FlatProgram,
        stage: int,
        needed: Sequence[fx.Node],
        strides: Strides,
    ) -> None:
        self.uses = parts._uses
        self.captured = parts.captured
        self.program = program
        self.calls = program.calls
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.stage = stage
        self.needed = needed
        self.strides = strides
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.received: dict[Port, fx.Node] = {}
        self.tied: dict[TiedUse, fx.Node] = {}
        self.aliases: dict[int, list[fx.Node]] = {}
        self.attributes: dict[str, Any] = {}
        self.transient: set[str] = set()

    def node_of(self, value: int) -> fx.Node:
        return self.calls[self.captured.value_calls[value]]

    def cut(self) -> StageProgram:
        inputs = tuple(p for p in self.uses.ports if p.target == self.stage)
        outputs = tuple(p for p in self.uses.ports if p.source == self.stage)
        tied = tuple(use for stage, use in self.uses.tied if stage == self.stage)
        for port in inputs:
            self.received[port] = self.graph.placeholder(f"value_{port.value}_{port.order}")
        for k, use in enumerate(tied):
            self.tied[use] = self.graph.placeholder(f"tied_{k}")
        batch = tuple(self.leaves())
        for port in inputs:
            self.received[port] = self.restored(port)
        for node in self.needed:
            if node.op == "call_function":
                self.copy(node)
        loss, *metrics = self.program.outputs
        made = [
            (name, node)
            for name, node in zip(self.captured.metrics, metrics, strict=True)
            if node in self.env
        ]
        returned = [self.sent(port) for port in outputs]
        returned += [self.env[loss]] if loss in self.env else []
        returned += [
            self.graph.call_function(_aten.detach.default, (self.env[n],)) for _, n in made
        ]
        self.graph.output(tuple(returned))
        module = fx.GraphModule(self.attributes, self.graph, f"Stage{self.stage}")
        for target in self.transient:
            owner, _, name = target.rpartition(".")
            module.get_submodule(owner)._non_persistent_buffers_set.add(name)
        return StageProgram(
            module=module,
            inputs=inputs,
            tied=tied,
            batch=batch,
            outputs=outputs,
            has_loss=loss in self.env,
            metrics=tuple(name for name, _ in made),
            shapes={p.value: self.shape(p.value) for p in (*inputs, *outputs)},
        )

    def leaves(self) -> list[str]:
        names = []
        needed = set(self.needed)
        for node, source in self.program.sources.items():
            if source.kind == "batch" and node in needed:
                self.env[node] = self.graph.placeholder(node.name)
                names.append(source.name)
        return names

    def unfolded(self, value: int) -> tuple[torch.Tensor, int, list[int]]:
        """Return a tensor like a value with a dimension for the samples, that dimension, and the
        sizes of the dimension that samples share in the value, if they share one.
        """
        like, call = self.node_of(value).meta["val"].detach(), self.captured.value_calls[value]
        axis = self.captured.axes.get(call)
        if axis is None or call not in self.captured.folded:
            return like, 0 if axis is None else axis.dim, []
        sizes = axis.parts(like.shape, self.program.samples)
        return like.unflatten(axis.dim, sizes), axis.dim + 1, sizes

    def shape(self, value: int) -> tuple[torch.Size, torch.dtype]:
        like, dim, _ = self.unfolded(value)
        return like.movedim(dim, 0).shape, like.dtype

    def restored(self, port: Port) -> fx.Node:
        """Undo what ``sent`` did, in memory too: views need the strides, kernels differ by them."""
        node = self.received[port]
        like, dim, sizes = self.unfolded(port.value)
        if dim:
            node = self.graph.call_function(_aten.movedim.int, (node, 0, dim))
        if dim or not like.is_contiguous():
            strides = like.stride()
            order = sorted(range(like.dim()), key=lambda d: -strides[d])
            node = self.graph.call_function(dense, (node, order))
        if sizes:
            node = self.graph.call_function(_aten.flatten.using_ints, (node, dim - 1, dim + 1))
        return node

    def sent(self, port: Port) -> fx.Node:
        call, (_, dim, sizes) = self.captured.value_calls[port.value], self.unfolded(port.value)
        result = self.env[self.calls[call]]
        if port.grad and call in self.uses.summands:
            result = self.alias(call, port.order)
        elif port.grad:
            result = self.with_strides(call)
        if sizes:
            result = self.graph.call_function(_aten.unflatten.int, (result, dim - 1, sizes))
        if dim:
            result = self.graph.call_function(_aten.movedim.int, (result, dim, 0))
        return result

    def alias(self, call: int, order: int) -> fx.Node:
        if call not in self.aliases:
            count = self.uses.summands[call]
            fan = self.graph.call_function(fan_out, (self.with_strides(call), count))
            self.aliases[call] = [
                self.graph.call_function(operator.getitem, (fan, k)) for k in range(count)
            ]
        return self.aliases[call][order]

    def with_strides(self, call: int) -> fx.Node:
        """Return a value to send; in exact mode its gradient gets the strides of one process."""
        node = self.calls[call]
        strides = self.strides.get(node)
        if strides is None:
            return self.env[node]
        return self.graph.call_function(keep_strides, (self.env[node], strides))

    def copy(self, node: fx.Node) -> None:
        slots = iter(range(len(node_arguments(node))))

        def take(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            return self.argument(argument, (self.position[node], next(slots)))

        args, kwargs = map_aggregate(node.args, take), map_aggregate(node.kwargs, take)
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        new.meta = {CALL: self.position[node], **node.meta}
        self.env[node] = new

    def argument(self, source: fx.Node, use: Use) -> fx.Node:
        call = self.position.get(source, -1)
        if (call, use) in self.uses.port_of and source not in self.env:
            return self.received[self.uses.port_of[call, use]]
        if use in self.uses.local.get(call, {}) and call in self.uses.summands:
            return self.alias(call, self.uses.local[call][use])
        if source in self.program.sources:
            tied = self.uses.tied_of.get((self.program.sources[source].name, use))
            if tied is not None:
                return self.tied[tied]
        if source not in self.env:
            self.env[source] = self.attribute(source)
        return self.env[source]

    def attribute(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            target = str(node.target)
            self.attributes[target] = self.program.regions[target]
            return self.graph.get_attr(target)
        source = self.program.sources[node]
        if source.kind == "constant":
            target = f"_constants.{source.name.replace('.', '_')}"
            value = self.program.constants[source.name]
            at_home = value if value.is_meta else value.to(node.meta["val"].device)
            self.attributes[target] = at_home
            self.transient.add(target)
        else:
            owner, _, name = source.name.rpartition(".")
            # A model may call a part of itself ``graph`` or ``code``, as a GraphModule does.
            taken = source.name.partition(".")[0] in _GRAPH_MODULE_NAMES
            target = f"_taken.{source.name}" if taken else source.name
            if source.kind == "buffer":
                holder = self.captured.module.get_submodule(owner)
                self.attributes[target] = getattr(holder, name)
                if name in holder._non_persistent_buffers_set:
                    self.transient.add(target)
            else:
                self.attributes[target] = self.captured.parameter(source.name)
        new = self.graph.get_attr(target)
        new.meta = dict(node.meta)
        return new
