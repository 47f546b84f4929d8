"""Traits of calls that decide how they are grouped: weight, dependence, whether they can be sent.

A tower that has the frames of all samples in one dimension, or two views of every sample joined by
``torch.cat``, makes values without a dimension for the samples alone. Where another module reads
such a value, it can be sent as a view with such a dimension (``split``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from anabranch.graph import flat_program
from anabranch.graph.operations import CHEAP, FACTORIES, HEAVY, LIKE, NOT_A_REMAINDER

CHANCES = ("p", "dropout_p", "dropout")
"""Names of the arguments with the probability of dropout."""


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """The samples of a value: in dimension ``dim`` (-1: it has none), ``inner`` consecutive indices
    each; ``trouble`` says why they cannot be told apart, if so.
    """

    dim: int
    inner: int = 1
    trouble: str = ""

    def is_folded(self, shape: Sequence[int], samples: int) -> bool:
        """Return True if the samples share their dimension of a shape with something else."""
        return shape[self.dim] != samples

    def parts(self, shape: Sequence[int], samples: int) -> list[int]:
        """Return the sizes ``[outer, samples, inner]`` that make the samples' dimension."""
        return [shape[self.dim] // (samples * self.inner), samples, self.inner]


def base_name(node: fx.Node) -> str:
    """Return the operation without overload, such as ``linear``; with its library if that is
    another's, as ``mine::linear`` may do anything.
    """
    library, _, name = flat_program.schema_name(node).rpartition("::")
    name = name.rpartition(".")[2]
    return name if library in ("", "aten", "prims", "anabranch") else f"{library}::{name}"


def keyed(calls: Sequence[fx.Node]) -> Iterator[tuple[flat_program.CallKey, fx.Node]]:
    """Generate the calls of a program with their keys."""
    count = Counter[tuple[str, str]]()
    for node in calls:
        kind = flat_program.frame(node), base_name(node)
        yield (*kind, count[kind]), node
        count[kind] += 1


def axes_at(
    program: flat_program.FlatProgram, axes: Mapping[int, SampleAxis]
) -> dict[fx.Node, SampleAxis]:
    """Return the axes of calls, which are known by position, by the calls of a program."""
    known = [node for node in program.calls if node.meta.get(flat_program.CALL) in axes]
    return {node: axes[node.meta[flat_program.CALL]] for node in known}


def tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_integer(node: fx.Node) -> bool:
    """Return True for a tensor of whole numbers."""
    value = tensor(node)
    return value is not None and not (value.dtype.is_floating_point or value.dtype is torch.bool)


def node_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that are nodes, in order, a node as often as it occurs."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def value_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs on whose entries a call's value depends, each as often as it is read."""
    inputs = node_arguments(node)
    if base_name(node) in LIKE:
        return inputs[:1]
    return inputs[1:] if base_name(node) in FACTORIES else inputs


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by name, in order, with defaults where a schema has them."""
    schema = getattr(node.target, "_schema", None)
    declared = schema.arguments if schema is not None else ()
    values = {argument.name: argument.default_value for argument in declared}
    values |= {argument.name: value for argument, value in zip(declared, node.args, strict=False)}
    return values | node.kwargs


def draws(node: fx.Node) -> bool:
    """Return True if a call draws random numbers; dropout with p=0 or out of training does not."""
    if not flat_program.is_random(node.target):
        return False
    options = arguments(node)
    idle = any(options.get(name) is False for name in ("train", "training"))
    idle = idle or options.get("num_layers") == 1  # dropout of LSTMs is between layers
    return not idle and not any(options.get(name) == 0 for name in CHANCES)


def inputs_of(target: Any, options: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split arguments by name into positional ones and those by keyword."""
    declared = target._schema.arguments
    in_order = tuple(options[a.name] for a in declared if not a.kwarg_only)
    return in_order, {a.name: options[a.name] for a in declared if a.kwarg_only}


def with_tensor(call: fx.Node, argument: str) -> Any:
    """Return the overload of a call's operation that takes a tensor for a number, or None."""
    packet, options = getattr(call.target, "overloadpacket", None), arguments(call)
    present = {name: value for name, value in options.items() if value is not None}
    is_tensor = {name: isinstance(v, fx.Node) or name == argument for name, v in present.items()}
    for overload in map(packet.__getattr__, packet.overloads()) if packet else ():
        takes = {a.name: "Tensor" in str(a.real_type) for a in overload._schema.arguments}
        if takes.keys() == options.keys() and is_tensor.items() <= takes.items():
            return overload
    return None


def is_size(node: fx.Node, argument: str) -> bool:
    """Return True for an argument that has whole numbers alone: sizes, dimensions, indices."""
    schema = getattr(node.target, "_schema", None)
    declared = schema.arguments if schema is not None else ()
    return all("int" in str(a.real_type) for a in declared if a.name == argument)


def batch_dim(small: torch.Tensor, large: torch.Tensor, sizes: tuple[int, int]) -> int | None:
    """Return the dimension of the samples, or None; the values are for both numbers of samples.

    Raises:
        ValueError: if samples are folded, occur in several dimensions, or the size depends on data.
    """
    pairs = list(zip(small.shape, large.shape, strict=True))
    if not all(isinstance(n, int) for pair in pairs for n in pair):
        raise ValueError("size depends on the data")
    moving = [d for d, (a, b) in enumerate(pairs) if a != b]
    if not moving:
        return None
    if len(moving) > 1 or pairs[moving[0]] != sizes:
        raise ValueError("samples are folded into other dimensions")
    return moving[0]


def has_classes(node: fx.Node) -> bool:
    """Return True if the targets of a loss are indices of classes."""
    target = node.args[1]
    value = tensor(target) if isinstance(target, fx.Node) else None
    return value is not None and not value.is_floating_point()


def dims_along(node: fx.Node, rank: int) -> list[int]:
    """Return the dimensions along which an operation works; all of them if it names none."""
    options = arguments(node)
    for name in ("dim", "dims"):
        dims = options.get(name)
        if isinstance(dims, int):
            return [dims % rank]
        if isinstance(dims, list | tuple) and dims:
            return [d % rank for d in dims]
    return list(range(rank))


class CallTraits:
    """Traits of the calls of a program.

    Args:
        other: the program for other samples, which shows where these are.
        axes: the samples of values, by ``sample_axes``, also of those where they are folded.
        known: calls whose values may be sent with folded samples, from the first capture, if the
            program is of another mode or other sizes; None to find them here.
    """

    def __init__(
        self,
        program: flat_program.FlatProgram,
        other: flat_program.FlatProgram,
        axes: Mapping[fx.Node, SampleAxis] = MappingProxyType({}),
        known: Collection[flat_program.CallKey] | None = None,
    ) -> None:
        self.program = program
        self.axes = axes
        self.known = known
        self.calls = program.calls
        self.keys = {node: key for key, node in keyed(self.calls)}
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.twins = dict(zip(self.calls, other.calls, strict=True))
        self.sizes = (program.samples, other.samples)
        self.outputs = set(program.outputs)
        self.last_writes = program.last_writes()
        self.on_parameters: dict[fx.Node, bool] = {}
        self.on_batch: dict[fx.Node, bool] = {}
        self.free: dict[fx.Node, bool] = {}
        for node in program.graph.nodes:
            self._classify(node)

    def _classify(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            source = self.program.sources[node]
            self.on_parameters[node] = source.kind == "parameter"
            self.on_batch[node] = source.kind == "batch"
            self.free[node] = (
                source.kind != "parameter" and node.meta["storage"] not in self.last_writes
            )
        elif node.op in ("call_function", "get_attr"):
            inputs = node.all_input_nodes
            self.on_parameters[node] = any(self.on_parameters[n] for n in value_inputs(node))
            self.on_batch[node] = any(self.on_batch[n] for n in value_inputs(node))
            # Outputs have to be made in one place.
            self.free[node] = node.op == "get_attr" or (
                node not in self.outputs
                and all(self.free[n] for n in inputs)
                and self._copyable(node)
            )

    def _copyable(self, node: fx.Node) -> bool:
        name = base_name(node)
        value = tensor(node)
        return (
            (name in CHEAP or not self.on_batch[node])
            and not flat_program.is_random(node.target)
            and not flat_program.written(node)
            and (value is None or not value.requires_grad)
            and node.meta.get("storage") not in self.last_writes
        )

    def axis(self, node: fx.Node) -> SampleAxis | None:
        """Return the samples of a call's value, if any; ValueError if they cannot be cut."""
        try:
            dim = batch_dim(node.meta["val"], self.twins[node].meta["val"], self.sizes)
        except ValueError:
            axis = self.axes.get(node)
            if axis is None or axis.dim < 0 or axis.trouble:
                raise
            return axis
        return None if dim is None else SampleAxis(dim)

    def sendable(self, node: fx.Node) -> bool:
        """Return True if this value can be sent to another device for a slice of the samples."""
        value = tensor(node)
        if value is None or value.layout is not torch.strided:
            return False
        try:
            axis = self.axis(node)
        except ValueError:
            return False
        # Without a batch dimension but made from the batch: it mixes samples, such as a mean over
        # them.
        if axis is None:
            return not self.on_batch[node]
        return not axis.is_folded(value.shape, self.program.samples) or self._unfolds(node)

    def _unfolds(self, node: fx.Node) -> bool:
        """True if a value may be sent though its samples share a dimension with something else."""
        if self.known is not None:
            return self.keys[node] in self.known
        is_read = any(
            flat_program.frame(user) != flat_program.frame(node)
            for user in node.users
            if user.op != "output"
        )
        # Evaluation mode has no calls of dropout, but has their readers.
        is_stable = "dropout" not in base_name(node)
        return is_read and is_stable and node.meta["storage"] not in self.last_writes

    def weight(self, node: fx.Node) -> int:
        """0: remainder; 1: worth an operator; 2: products, convolutions and embeddings."""
        if flat_program.APART in node.meta:
            return 2
        name = base_name(node)
        library = flat_program.schema_name(node).partition("::")[0]
        if name in HEAVY or (library not in ("aten", "prims") and name != "getitem"):
            # A table that is looked up at constant places, such as positions, is no more than a
            # parameter.
            return 2 if self.on_batch[node] else 1
        return 0 if name in CHEAP and name not in NOT_A_REMAINDER else 1

    def transforms(self, node: fx.Node) -> bool:
        """Return True for a product, a convolution or an embedding with parameters."""
        own = (self.on_parameters[n] and not self.on_batch[n] for n in node.all_input_nodes)
        return self.weight(node) == 2 and any(own)
