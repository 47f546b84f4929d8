"""A captured forward pass as one flat list of tensor operations for a number of samples.

An exported program has the batch size as a symbol, lifts parameters into arguments, folds
``no_grad`` regions into calls, and bakes devices in. ``lower`` undoes all of this::

    p_weight, x: [s, 8]                             weight, x: [4, 8]
    n   = sym_size(x, 0)                            y = linear(x, weight)
    y   = linear(x, p_weight)              ->       z = view(y, [4, 2, 4])
    z   = view(y, [n, 2, 4])                        d = detach(z)
    w   = wrap_with_set_grad_enabled(f, z)          w = ...             the region's own calls

``propagation`` runs it once on fake tensors, which tells shapes, gradients and shared storage.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from anabranch.errors import CaptureError
from anabranch.graph.operations import BATCH_NORMS

PARAMETER, BUFFER, CONSTANT, BATCH_LEAF = "parameter", "buffer", "constant", "batch"
APART = "apart"
"""Key of a node's ``meta`` that keeps it from being absorbed into a neighbouring operator."""


_Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_CHECKS = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}


@dataclass(frozen=True, slots=True)
class PlaceholderSource:
    """Origin of a placeholder: its kind (one of the constants above) and name there."""

    kind: str
    name: str


@dataclass(frozen=True)
class FlatProgram:
    """The flat program for one number of samples.

    Attributes:
        graph: placeholders, calls in program order, and an output ``(loss, *metrics)``. After
            ``propagate`` each node has ``meta["val"]``, a fake tensor whose ``requires_grad`` is
            true to eager execution.
        sources: placeholder -> where it comes from. A parameter shared under two names is one
            placeholder.
        constants: tensors that the forward pass created from literals.
        regions: sub-graphs that could not be made flat (autocast), by the name that a ``get_attr``
            node has.
        known: what makes statistics of a batch (``whole_batch.Known``), where the program reads
            those of the whole batch.
    """

    samples: int
    graph: fx.Graph
    sources: dict[fx.Node, PlaceholderSource]
    constants: Mapping[str, torch.Tensor]
    regions: Mapping[str, nn.Module] = field(default_factory=dict)
    known: Any = None

    @property
    def calls(self) -> list[fx.Node]:
        """The operations in program order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The loss, then the metrics."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def drop_dead(self) -> None:
        """Leave out calls that nothing depends on."""
        for node in reversed(list(self.graph.nodes)):
            leaf = node in self.sources and self.sources[node].kind == BATCH_LEAF
            if node.op != "output" and not (node.users or leaf or written(node)):
                self.graph.erase_node(node)
                self.sources.pop(node, None)

    def writes_to(self, kind: str) -> Iterator[tuple[fx.Node, PlaceholderSource]]:
        """Calls that change what a placeholder of a kind is in place, also by a view of it."""
        sources = {
            node.meta["storage"]: source
            for node, source in self.sources.items()
            if source.kind == kind
        }
        for call in self.calls:
            for target in written(call):
                if target.meta.get("storage") in sources:
                    yield call, sources[target.meta["storage"]]

    def signature(self) -> list[tuple[str, str]]:
        """Operation and module of every call, which are equal for any number of samples."""
        return [(str(node.target), frame(node)) for node in self.calls]


def upstream(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of one graph with all that they depend on, in the order of the graph."""
    reached = set(nodes)
    order = list(next(iter(reached)).graph.nodes) if reached else []
    for node in reversed(order):
        if node in reached:
            reached.update(node.all_input_nodes)
    return [node for node in order if node in reached]


def frame(node: fx.Node) -> str:
    """Path of the innermost module that the node was called in; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    if path != "module" and not path.startswith("module."):
        return ""  # the wrapper around the user's module, or a frame of the tracer's own
    path = re.sub(r"@\d+", "", path)  # a second call of one module is path@1
    return path.removeprefix("module").removeprefix(".")


def schema_name(node: fx.Node) -> str:
    """Name of the called operation, such as ``aten::linear``."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name)
    return getattr(node.target, "__name__", str(node.target))


def trains_norm(node: fx.Node) -> bool:
    """True if a batch normalisation takes the statistics of its input."""
    return len(node.args) > 5 and bool(node.args[5])


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments that the call changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function":
        return []
    is_norm = schema.name.removeprefix("aten::") in {*BATCH_NORMS, "instance_norm"}
    # Running mean and variance change; no schema says so.
    positions = {3, 4} if is_norm and trains_norm(node) else set()
    names = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.add(i)
            names.add(argument.name)
    chosen = [arg for i, arg in enumerate(node.args) if i in positions]
    chosen += [arg for name, arg in node.kwargs.items() if name in names]
    return [leaf for leaf in tree_leaves(chosen) if isinstance(leaf, fx.Node)]


def insert(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before another one, of the same line and module, with its value."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    copied = {"nn_module_stack", "stack_trace"} & before.meta.keys()
    node.meta |= {key: before.meta[key] for key in copied}
    args, kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with torch.enable_grad():
        set_value(node, target(*args, **kwargs))
    return node


def set_value(node: fx.Node, value: Any) -> None:
    """Note the value of a node, a fake tensor or what else it is."""
    node.meta["val"] = value
    # All values are alive at once, so addresses are unique.
    if isinstance(value, torch.Tensor):
        node.meta["storage"] = value.untyped_storage()._cdata


class RefusedError(Exception):
    """The program cannot be specialised to this number of samples; it has to be exported for it."""


def lower(
    exported: torch.export.ExportedProgram,
    samples: int,
    *,
    names: Mapping[str, str],
    batch_names: Sequence[str],
    device: torch.device | None = None,
) -> FlatProgram:
    """Flatten an exported program for a number of samples.

    Args:
        exported: its forward takes the batch leaves and returns a dict, ``loss`` first.
        names: every name of a parameter or buffer in the exported module -> its first name in the
            user's.
        batch_names: names of the batch leaves.
        device: put constructed tensors here instead of where they were during the export.

    Raises:
        RefusedError: if the export fixed its batch size to another number.
        CaptureError: if the module needs something that is neither a tensor nor a constant.
    """
    builder = ProgramBuilder(_symbols(exported, samples), device)
    kinds = torch.export.graph_signature.InputKind
    batch = iter(batch_names)
    nodes = iter(exported.graph.nodes)
    for spec, node in zip(exported.graph_signature.input_specs, nodes, strict=False):
        if spec.kind is kinds.PARAMETER or spec.kind is kinds.BUFFER:
            kind = PARAMETER if spec.kind is kinds.PARAMETER else BUFFER
            builder.placeholder(node, PlaceholderSource(kind, names[str(spec.target)]))
        elif spec.kind is kinds.CONSTANT_TENSOR:
            builder.placeholder(node, PlaceholderSource(CONSTANT, str(spec.target)))
            builder.constants[str(spec.target)] = exported.constants[str(spec.target)]
        elif spec.kind is kinds.USER_INPUT:
            builder.placeholder(node, PlaceholderSource(BATCH_LEAF, next(batch)))
        else:
            raise CaptureError(
                f"the module holds {spec.target}, which is neither a tensor nor a constant "
                f"({spec.kind.name}); keep it out of the forward"
            )
    builder.body(exported.graph_module, exported.graph)
    return builder.finish(samples)


def _symbols(exported: torch.export.ExportedProgram, samples: int) -> dict[Any, int]:
    """Every symbol that stands for the number of samples -> that number."""
    known: dict[Any, int] = {}
    guards: list[Any] = []
    for size in batch_sizes(exported):
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
            known[size.node.expr] = samples
            scope = size.node.shape_env
            guards = [g.expr.xreplace(scope.replacements) for g in scope.guards]
        elif (isinstance(size, torch.SymInt) and not size.node.expr.is_number) or int(
            size
        ) != samples:
            raise RefusedError
    # The tracer takes one sample for a size of its own and asks nothing about it; the operations
    # are right for it all the same.
    if any(guard.xreplace(known) == sympy.false for guard in guards):
        raise RefusedError
    return known


def batch_sizes(exported: torch.export.ExportedProgram) -> list[int | torch.SymInt]:
    """Dimension 0 of every leaf of the batch."""
    user_input = torch.export.graph_signature.InputKind.USER_INPUT
    pairs = zip(exported.graph_signature.input_specs, exported.graph.nodes, strict=False)
    return [node.meta["val"].shape[0] for spec, node in pairs if spec.kind is user_input]


class ProgramBuilder:
    """A flat program under construction: from the calls of an exported one, or call by call."""

    def __init__(self, symbols: dict[Any, int], device: torch.device | None) -> None:
        self.symbols = symbols
        self.device = device
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.sources: dict[fx.Node, PlaceholderSource] = {}
        self.by_source: dict[PlaceholderSource, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.regions: dict[str, nn.Module] = {}

    def placeholder(self, node: fx.Node, source: PlaceholderSource) -> None:
        if source not in self.by_source:
            new = self.graph.placeholder(node.name)
            self.by_source[source] = new
            self.sources[new] = source
        self.env[node] = self.by_source[source]

    def body(self, owner: nn.Module, graph: fx.Graph) -> Any:
        """Copy the calls of a graph whose placeholders are known; returns what it outputs."""
        for node in graph.nodes:
            if node.op == "call_function":
                self.call(owner, node)
            elif node.op == "get_attr":
                self.env[node] = self.attribute(owner, node)
            elif node.op == "output":
                self.result = map_aggregate(node.args[0], self.value)
        return self.result

    def attribute(self, owner: nn.Module, node: fx.Node) -> Any:
        value: Any = owner
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, nn.Module):
            return value  # the body of a region, resolved by the call that uses it
        name = f"{node.target}_{len(self.constants)}"
        self.constants[name] = value
        new = self.graph.placeholder(node.name)
        self.sources[new] = PlaceholderSource(CONSTANT, name)
        return new

    def value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.env[argument]
        if isinstance(argument, torch.device) and self.device is not None:
            return self.device
        return self.number(argument)

    def number(self, symbolic: Any) -> Any:
        """A symbolic number for this many samples, None if it depends on the data."""
        if not isinstance(symbolic, _Symbolic):
            return symbolic
        expression = symbolic.node.expr.xreplace(self.symbols)
        if not getattr(expression, "free_symbols", None):
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(symbolic)]
            return kind(expression)
        return None

    def call(self, owner: nn.Module, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, int | float | bool | _Symbolic):
            known = self.number(value)
            if known is not None:
                self.env[node] = known
                return
        if schema_name(node) in _CHECKS:
            return
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self.inline(node, bool(node.args[0]), node.args[1:])
            return
        args = map_aggregate(node.args, self.value)
        kwargs = map_aggregate(node.kwargs, self.value)
        if node.target is operator.getitem and not isinstance(args[0], fx.Node):
            self.env[node] = args[0][args[1]]  # type: ignore[index]
            return
        args = map_aggregate(args, self.keep_region)
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                new.meta[key] = node.meta[key]
        self.env[node] = new

    def keep_region(self, argument: Any) -> Any:
        if not isinstance(argument, nn.Module):
            return argument
        name = f"region_{len(self.regions)}"
        self.regions[name] = argument
        return self.graph.create_node("get_attr", name)

    def inline(self, node: fx.Node, enabled: bool, arguments: tuple[Any, ...]) -> None:
        """Without gradients means: on detached inputs, which still share their storage."""
        body, *inputs = map_aggregate(arguments, self.value)
        places = [n for n in body.graph.nodes if n.op == "placeholder"]
        for place, source in zip(places, inputs, strict=True):
            if isinstance(source, fx.Node) and not enabled:
                call = self.graph.call_function(torch.ops.aten.detach.default, (source,))
                call.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
                source = call
            self.env[place] = source
        self.env[node] = self.body(body, body.graph)

    def finish(self, samples: int) -> FlatProgram:
        self.graph.output(tuple(self.made(output) for output in self.result))
        _to_front(self.graph)
        _follow_writes(self.graph)
        program = FlatProgram(samples, self.graph, self.sources, self.constants, self.regions)
        program.drop_dead()
        self.graph.lint()
        return program

    def made(self, output: fx.Node) -> fx.Node:
        """An output that is itself a parameter or a buffer as the result of a call."""
        if output.op == "placeholder":
            return self.graph.call_function(torch.ops.aten.alias.default, (output,))
        return output


def _to_front(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op == "placeholder":
            first.prepend(node)


def _follow_writes(graph: fx.Graph) -> None:
    """Let who reads x after ``relu_(x)`` read the result: one tensor has one name at a time."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        returns = list(schema.returns) if schema is not None else []
        alias = returns[0].alias_info if len(returns) == 1 else None
        if alias is None or not alias.is_write:
            continue
        for target in written(node):
            if target.op != "placeholder":
                for user in [u for u in target.users if position[u] > position[node]]:
                    user.replace_input_with(target, node)
