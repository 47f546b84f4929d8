"""A stage as a plain ``nn.Module`` that calls the user's own submodules.

A stage's program is a list of tensor operations. If a whole submodule lies in the stage, its
operations become one call of the user's module, under its full name, so that anything applied to it
(``fully_shard``, ``parallelize_module``, ``quantize_``, hooks) takes effect::

    embedding                                    words(x)
    linear, relu, add, layer_norm      ->        layers.0(words)
    linear, relu                                 linear, relu       a cut goes through layers.1

A module keeps its operations if its arguments or results are no plain containers of tensors, or if
operations outside read values inside.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ModuleCallSignature
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from anabranch.graph.capture import Captured
from anabranch.graph.cutting.gradient_order import dense
from anabranch.graph.cutting.split import Split, StageProgram, split
from anabranch.graph.flat_program import CALL, frame
from anabranch.graph.group import FREE
from anabranch.graph.slices import whole_name
from anabranch.interchange.chain import StageChain


@dataclass(frozen=True)
class StageModules:
    """Submodules of each stage.

    Attributes:
        names: largest submodules that lie as a whole in each stage; modules without parameters are
            in each stage that calls them.
        opened: modules with parts in several stages.
        loose: parameters in each stage that belong directly to opened modules.
    """

    names: tuple[tuple[str, ...], ...]
    opened: tuple[str, ...]
    loose: tuple[tuple[str, ...], ...]


def stage_modules(split: Split) -> StageModules:
    module = split.captured.module
    program = split.captured.programs.example
    homes: dict[str, set[int]] = defaultdict(set)
    for s in range(split.num_stages):
        paths = {frame(node) for node in split.needed(program, s) if node.op == "call_function"}
        for name in split.parameters(s):
            paths.add(whole_name(name).rpartition(".")[0])
        for path in paths:
            while path:
                homes[path].add(s)
                path = path.rpartition(".")[0]
    names: list[list[str]] = [[] for _ in range(split.num_stages)]
    loose: list[list[str]] = [[] for _ in range(split.num_stages)]
    opened = []
    held = [set(map(whole_name, split.parameters(s))) for s in range(split.num_stages)]

    def visit(path: str, part: nn.Module) -> None:
        has_parameters = next(part.parameters(), None) is not None
        if path and (len(homes[path]) < 2 or not has_parameters):
            for s in sorted(homes[path]):
                names[s].append(path)
            return
        opened.append(path)
        start = f"{path}." if path else ""
        for name, _ in part.named_parameters(recurse=False):
            for s, own in enumerate(held):
                loose[s] += [start + name] if start + name in own else []
        for name, child in part.named_children():
            visit(start + name, child)

    visit("", module)
    return StageModules(tuple(map(tuple, names)), tuple(opened), tuple(map(tuple, loose)))


_aten = torch.ops.aten
_RESTORES = (_aten.movedim.int, dense, _aten.flatten.using_ints)


@dataclass(frozen=True)
class PlainStage:
    """A stage for PyTorch's pipelining.

    Attributes:
        module: ``module(*inputs, batch=tensors)`` returns the next stage's inputs, the last one the
            loss, of shape [1]. Parameters and submodules are the model's own, by full names.
        called: names of the user's submodules that it calls.
        inputs: meta tensors like its inputs, and ``outputs`` like its outputs.
        leaves: names of the batch's tensors that it reads.
    """

    index: int
    module: fx.GraphModule
    called: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    leaves: tuple[str, ...]


def plain_stages(
    chain: StageChain,
    captured: Captured,
    stages: Iterable[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> list[PlainStage]:
    """Return stages of a chain plan, by default all, as plain modules.

    Args:
        captured: the model, in training mode.
        device: device of constants; by default that of the parameters.
    """
    graph, samples = chain.plan.stage_graph, chain.microbatch_size
    parts = split(captured, [stage.operators for stage in graph.stages])
    signatures = captured.programs.exporter.signatures(samples)
    names = stage_modules(parts).names
    made = []
    for s in range(len(graph)) if stages is None else stages:
        program = parts.program(s, samples, device=device)
        builder = _Builder(parts, program, signatures, captured.programs.at(samples, device=device))
        for name in names[s]:
            builder.call(name)
        module = builder.finish(program)
        if graph.stages[s].recompute:
            forward = partial(checkpoint, module.forward, use_reentrant=False)
            module.forward = forward
        inputs, outputs = (
            tuple(
                torch.empty(shape, dtype=dtype, device="meta").requires_grad_(port.grad)
                for port in ports
                for shape, dtype in (program.shapes[port.value],)
            )
            for ports in (program.inputs, program.outputs)
        )
        if program.has_loss:
            outputs = (torch.empty(1, device="meta", requires_grad=True),)
        made.append(PlainStage(s, module, (*builder.called,), inputs, outputs, program.batch))
    return made


class _Builder:
    """Builder of the graph of a stage, in which calls of submodules replace operations.

    Attributes:
        called: submodules that are called, by name.
        by_name: nodes of the stage by names of nodes of the whole program.
    """

    def __init__(
        self,
        parts: Split,
        program: StageProgram,
        signatures: dict[str, ModuleCallSignature],
        whole: Any,
    ) -> None:
        self.captured, self.signatures = parts.captured, signatures
        self.source = program.module
        self.graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        result = self.graph.graph_copy(program.module.graph, copied)
        self.graph.output(result)
        self.called: dict[str, nn.Module] = {}
        calls = whole.calls
        self.by_name = {calls[n.meta[CALL]].name: n for n in self.graph.nodes if CALL in n.meta}
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.leaves = placeholders[len(program.inputs) + len(program.tied) :]
        self.by_name |= {node.name: node for node in self.leaves}
        for port, node in zip(program.inputs, placeholders, strict=False):
            last = node
            while len(last.users) == 1 and (user := next(iter(last.users))).target in _RESTORES:
                if CALL in user.meta:
                    break
                last = user
            self.by_name[calls[parts.captured.value_calls[port.value]].name] = last
        owners = parts.captured.programs.grouping.owner_of(whole)
        self.instances: dict[str, set[str]] = {}
        for node in calls:
            if owners[node] != FREE:
                for instance in _instances(node):
                    self.instances.setdefault(instance, set()).add(node.name)

    def call(self, name: str) -> None:
        """Call the user's submodule in place of its operations, or else its children."""
        stem = f"module.{name}"
        calls = [c for c in self.instances if c == stem or c.startswith(f"{stem}@")]
        kept = [instance for instance in calls if not self._replaced(instance, name)]
        if kept or not calls:
            for child, _ in self.captured.module.get_submodule(name).named_children():
                self.call(f"{name}.{child}")

    def _replaced(self, instance: str, name: str) -> bool:
        """Insert a call of the submodule if it is certain to compute the same; True if it is."""
        signature = self.signatures.get(instance)
        inside = [n for n in self.graph.nodes if CALL in n.meta and instance in _instances(n)]
        within, values = set(inside), list[Any]()
        here = {name for name, node in self.by_name.items() if node in within}
        if signature is None or not self.instances[instance] <= here:
            return False
        for argument in signature.inputs:
            if isinstance(argument, ConstantArgument):
                values.append(argument.value)
            elif isinstance(argument, TensorArgument) and argument.name in self.by_name:
                values.append(self.by_name[argument.name])
            else:
                return False
        results = {
            self.by_name.get(result.name): k
            for k, result in enumerate(signature.outputs)
            if isinstance(result, TensorArgument)
        }
        state = {"get_attr", "placeholder"}
        read = {n for node in inside for n in node.all_input_nodes if n not in within}
        unknown = {n for n in read - set(values) if n.op not in state or n in self.leaves}
        seen = {node for node in inside if node.users.keys() - within}
        if unknown or not seen <= results.keys():
            return False
        args, kwargs = tree_unflatten(values, signature.in_spec)
        try:
            with self.graph.inserting_before(inside[0]):
                new = self.graph.call_module(name, args, kwargs)
                taken = {n: self.graph.call_function(_leaf, (new, results[n])) for n in seen}
        except NotImplementedError:  # an argument that fx cannot express
            return False
        for node, leaf in taken.items():
            outside = node.users.keys() - within
            node.replace_all_uses_with(leaf, delete_user_cb=outside.__contains__)
            self.by_name |= {name: leaf for name, known in self.by_name.items() if known is node}
        for node in reversed(inside):
            self.graph.erase_node(node)
        self.called[name] = self.captured.module.get_submodule(name)
        return True

    def finish(self, program: StageProgram) -> fx.GraphModule:
        """Return the module, with the tensors of the batch as one argument."""
        output = self.graph.output_node()
        results = tuple(output.args[0])[: len(program.outputs) + program.has_loss]  # type: ignore[arg-type]
        if program.has_loss:
            with self.graph.inserting_before(output):
                loss: Any = results[-1]
                results = (self.graph.call_function(torch.ops.aten.reshape, (loss, [1])),)
        output.args = (results[0] if len(results) == 1 else results,)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            batch = self.graph.placeholder("batch", default_value=None)
            for leaf, name in zip(self.leaves, program.batch, strict=True):
                read = self.graph.call_function(operator.getitem, (batch, name))
                leaf.replace_all_uses_with(read)
                self.graph.erase_node(leaf)
        self.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        self.graph.lint()
        attributes: dict[str, Any] = dict(self.called)
        for node in self.graph.nodes:
            if node.op == "get_attr":
                attributes[str(node.target)] = operator.attrgetter(str(node.target))(self.source)
        module = fx.GraphModule(attributes, self.graph, f"Stage{type(self.source).__name__}")
        for target in attributes:
            owner, _, name = target.rpartition(".")
            if name in self.source.get_submodule(owner)._non_persistent_buffers_set:
                module.get_submodule(owner)._non_persistent_buffers_set.add(name)
        return module


def _instances(node: fx.Node) -> list[str]:
    """Return the calls of submodules to which a node belongs: paths, with @1 for a second call."""
    keys = node.meta.get("nn_module_stack", {}) if frame(node) else ()
    return [str(key).removeprefix("L__self__") for key in keys]


def _leaf(result: Any, index: int) -> Any:
    """Return a tensor from the result of a submodule."""
    return tree_leaves(result)[index]
