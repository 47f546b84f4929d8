"""A captured forward pass as one flat list of tensor operations for a number of samples."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from anabranch.graph.operations import BATCH_NORMS
from anabranch.graph.slices import whole_name

SourceKind = Literal["parameter", "buffer", "constant", "batch"]
"""Origin of a tensor that a program reads; ``batch`` stands for a leaf of the batch."""
APART = "apart"
"""Key of a node's ``meta`` that keeps it from being absorbed into a neighbouring operator."""
CALL = "call"
"""Key of a node's ``meta``: place of the call among those of the whole program without casts."""
IN_AUTOCAST = "in_autocast"
"""Key of a node's ``meta`` if the model itself has set or disabled autocast around it."""

_NORMS = BATCH_NORMS | {"instance_norm"}

CallKey = tuple[str, str, int]
"""Key of a call: module, operation, and number of such calls before it; the same in training and in
evaluation mode, and for any number of samples."""


@dataclass(frozen=True, slots=True)
class PlaceholderSource:
    """Origin of a placeholder: its kind, and name there."""

    kind: SourceKind
    name: str


@dataclass(frozen=True)
class FlatProgram:
    """The flat program for one number of samples.

    Attributes:
        graph: placeholders, calls in program order, and an output ``(loss, *metrics)``. Each node
            has ``meta["val"]``, a fake tensor whose ``requires_grad`` is true to eager execution,
            and ``meta["storage"]``, which views share.
        sources: placeholder -> where it comes from; a parameter with two names has one placeholder.
        constants: tensors that the forward pass created from literals.
        regions: sub-graphs that are not flat (autocast casts inside), by ``get_attr`` names.
        statistics: program that computes the statistics of a batch, if this one reads any.
    """

    samples: int
    graph: fx.Graph
    sources: dict[fx.Node, PlaceholderSource]
    constants: Mapping[str, torch.Tensor]
    regions: Mapping[str, nn.Module] = field(default_factory=dict)
    statistics: FlatProgram | None = None

    @property
    def calls(self) -> list[fx.Node]:
        """The operations in program order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The loss, then the metrics."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def run(
        self,
        find: Callable[[PlaceholderSource], torch.Tensor],
        wanted: Sequence[fx.Node] | None = None,
    ) -> list[torch.Tensor]:
        """Compute outputs, or ``wanted`` values, without gradients; ``find`` returns tensors."""
        wanted = self.outputs if wanted is None else wanted
        env: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for node in upstream(wanted):
                call: Any = node.target
                if node.op == "placeholder":
                    env[node] = find(self.sources[node])
                elif node.op == "get_attr":
                    env[node] = self.regions[call]
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                    env[node] = call(*args, **kwargs)
        return [env[node] for node in wanted]

    def drop_dead(self) -> None:
        """Erase calls that nothing depends on."""
        for node in reversed(list(self.graph.nodes)):
            leaf = node in self.sources and self.sources[node].kind == "batch"
            if node.op != "output" and not (node.users or leaf or written(node)):
                self.graph.erase_node(node)
                self.sources.pop(node, None)

    def writes_to(self, *kinds: SourceKind) -> Iterator[tuple[fx.Node, PlaceholderSource]]:
        """Generate calls that change placeholders of some kinds in place, also by views of them."""
        sources = {
            node.meta["storage"]: source
            for node, source in self.sources.items()
            if source.kind in kinds
        }
        for call in self.calls:
            for target in written(call):
                if target.meta.get("storage") in sources:
                    yield call, sources[target.meta["storage"]]

    def changed(self, *kinds: SourceKind) -> set[str]:
        """Return names of the placeholders of some kinds that calls change in place."""
        return {source.name for _, source in self.writes_to(*kinds)}

    def last_writes(self) -> dict[int | None, int]:
        """Return memory -> position of the last call that changes it in place."""
        writes = ((i, target) for i, call in enumerate(self.calls) for target in written(call))
        return {t.meta["storage"]: i for i, t in writes if "storage" in t.meta}

    def kinds_above(self, nodes: Iterable[fx.Node]) -> set[SourceKind]:
        """Return the kinds of the placeholders that nodes depend on."""
        return {self.sources[node].kind for node in upstream(nodes) if node in self.sources}

    def signature(self) -> list[tuple[str, str]]:
        """Return operation and module of every call, equal for any number of samples; views count
        as reshapes, which they may be on another device.
        """
        same: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
        return [(str(same.get(node.target, node.target)), frame(node)) for node in self.calls]


def upstream(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return nodes of one graph with all that they depend on, in the order of the graph."""
    reached = set(nodes)
    order = list(next(iter(reached)).graph.nodes) if reached else []
    for node in reversed(order):
        if node in reached:
            reached.update(node.all_input_nodes)
    return [node for node in order if node in reached]


def frame(node: fx.Node) -> str:
    """Return the path of the innermost module of a node's call; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    if path != "module" and not path.startswith("module."):
        return ""  # the wrapper around the user's module, or a frame of the tracer's own
    path = re.sub(r"@\d+", "", path)  # a second call of one module is path@1
    return path.removeprefix("module").removeprefix(".")


def schema_name(node: fx.Node) -> str:
    """Return the name of the called operation, such as ``aten::linear``."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name)
    return getattr(node.target, "__name__", str(node.target))


def is_random(target: Any) -> bool:
    """Return True for an operation that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def trains_norm(node: fx.Node) -> bool:
    """Return True if a batch normalisation takes the statistics of its input."""
    return len(node.args) > 5 and bool(node.args[5])


def is_bounding(node: fx.Node) -> bool:
    """Return True for a call that bounds what it writes to, with the same result however often it
    is called: rows of a table by their norm (``max_norm``), entries by numbers (``clamp_``) before
    anything else reads them.
    """
    if schema_name(node) != "aten::clamp_" or any(isinstance(b, fx.Node) for b in node.args[1:]):
        return schema_name(node) == "aten::embedding_renorm_"
    own = node.meta["storage"]
    for call in node.graph.nodes:
        if call is node:
            break
        is_read = any(source.meta.get("storage") == own for source in call.all_input_nodes)
        if is_read and call.meta.get("storage") != own:
            return False
    return True


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that the call changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function":
        return []
    # Running mean and variance change; no schema says so.
    changes_means = schema.name.removeprefix("aten::") in _NORMS and trains_norm(node)
    if not (schema.is_mutable or changes_means):
        return []
    positions = {3, 4} if changes_means else set()
    names = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.add(i)
            names.add(argument.name)
    chosen = [arg for i, arg in enumerate(node.args) if i in positions]
    chosen += [arg for name, arg in node.kwargs.items() if name in names]
    return [leaf for leaf in tree_leaves(chosen) if isinstance(leaf, fx.Node)]


def insert(
    before: fx.Node, target: Any, *args: Any, origin: fx.Node | None = None, **kwargs: Any
) -> fx.Node:
    """Insert a call, with its value, before another one, with line and module of ``origin``, by
    default of that other one.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    copy_origin(origin or before, node)
    args, kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with torch.enable_grad():
        set_value(node, target(*args, **kwargs))
    return node


def copy_origin(source: fx.Node, node: fx.Node) -> None:
    """Give a call the line and module of another one, and its autocast."""
    copied = {"nn_module_stack", "stack_trace", IN_AUTOCAST} & source.meta.keys()
    node.meta |= {key: source.meta[key] for key in copied}


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors in a node's value."""
    return [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def storage(node: fx.Node) -> int | None:
    """Identity of the memory of a node's value, which its views share; None without a tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def set_value(node: fx.Node, value: Any) -> None:
    """Note the value of a node, a fake tensor or anything else."""
    node.meta["val"] = value
    # All values are alive at once, so addresses are unique.
    if isinstance(value, torch.Tensor):
        node.meta["storage"] = storage(node)


def gradient_calls(program: FlatProgram) -> set[fx.Node]:
    """Return the calls that a gradient of the loss goes through."""
    reached = {program.outputs[0]}
    for node in reversed(program.calls):
        if node in reached and requires_grad(node):
            reached.update(source for source in node.all_input_nodes if requires_grad(source))
    return {node for node in reached if node.op == "call_function" and requires_grad(node)}


def unused_parameters(module: nn.Module, program: FlatProgram) -> tuple[str, ...]:
    """Return trainable parameters of a module on which the loss of its program does not depend."""
    carriers = gradient_calls(program)
    read = program.sources.items()
    trained = {whole_name(source.name) for node, source in read if carriers & node.users.keys()}
    parameters = module.named_parameters()
    return tuple(n for n, p in parameters if p.requires_grad and n not in trained)


def gradient_types(program: FlatProgram) -> set[torch.dtype]:
    """Return the types of all values on the way of gradients of the loss, parameters included."""
    calls = gradient_calls(program)
    nodes = {node for call in calls for node in (call, *call.all_input_nodes)}
    return {v.dtype for node in nodes for v in tensors(node) if v.requires_grad}


def gradient_strides(
    program: FlatProgram, nodes: Sequence[fx.Node]
) -> dict[fx.Node, tuple[int, ...]]:
    """Return the strides of the gradients of values in one process, by a backward of fake tensors;
    the value's own strides where there is no gradient, or no backward: with sizes that depend on
    the data, or if the forward changes state that the backward reads.
    """
    if not nodes:
        return {}
    values = [node.meta["val"] for node in nodes]
    loss = program.outputs[0].meta["val"]
    gradients: Sequence[torch.Tensor | None] = [None] * len(values)
    with contextlib.suppress(RuntimeError):
        gradients = torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True)
    return {
        node: (value if gradient is None else gradient).stride()
        for node, value, gradient in zip(nodes, values, gradients, strict=True)
    }


def requires_grad(node: fx.Node) -> bool:
    """Return True if eager execution tracks gradients of the node's value, or of a part of it."""
    return any(value.requires_grad for value in tensors(node))
