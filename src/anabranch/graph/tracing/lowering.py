"""Exported programs lowered to flat programs for a number of samples.

An exported program has the batch size as a symbol, lifts parameters into arguments, folds
``no_grad`` regions into calls, and bakes devices in. ``lower`` undoes all of this by a run on fake
tensors of that many samples, which also tells shapes, gradients and shared storage::

    p_weight, x: [s, 8]                             weight, x: [4, 8]
    n   = sym_size(x, 0)                            y = linear(x, weight)
    y   = linear(x, p_weight)              ->       z = view(y, [4, 2, 4])
    z   = view(y, [n, 2, 4])                        d = detach(z)
    w   = wrap_with_set_grad_enabled(f, z)          w = ...             the region's own calls
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_unflatten

from anabranch.errors import CaptureError
from anabranch.graph.flat_program import (
    CALL,
    IN_AUTOCAST,
    FlatProgram,
    PlaceholderSource,
    SourceKind,
    copy_origin,
    schema_name,
    set_value,
    written,
)
from anabranch.graph.group import Grouping
from anabranch.graph.tracing.autocast import AutocastRegion, region_of
from anabranch.graph.tracing.empty_selections import EmptySelections
from anabranch.graph.tracing.export import quiet
from anabranch.graph.tracing.patches import without_raising_guards
from anabranch.graph.tracing.written_views import new_value, put_back, viewed, views, writes_first
from anabranch.graph.user_lines import user_line

_aten = torch.ops.aten
_LARGEST = torch.finfo(torch.float32).max
_CHECKS = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}


class RefusedError(Exception):
    """The program cannot be specialised to this number of samples; it has to be exported for it."""


def lower(
    exported: torch.export.ExportedProgram,
    samples: int,
    *,
    names: Mapping[str, str],
    batch_names: Sequence[str],
    find: Callable[[PlaceholderSource], torch.Tensor],
    device: torch.device | None = None,
    copied: Collection[str] = (),
) -> FlatProgram:
    """Flatten an exported program for a number of samples.

    Args:
        exported: its forward takes the batch leaves and returns a dict, ``loss`` first.
        names: every name of a parameter or buffer in the exported module -> the user's first one.
        batch_names: names of the batch leaves.
        find: gives a tensor like a parameter, a buffer or a leaf of the batch.
        device: put all tensors here instead of where they were during the export.
        copied: batch leaves that the forward changes in place: it works on copies, as other stages
            read the same batch.

    Raises:
        RefusedError: if the export fixed its batch size to another number.
        CaptureError: if the module needs something that is neither a tensor nor a constant.
    """
    require_samples(exported, samples)
    builder = _ProgramBuilder(device)
    kinds = torch.export.graph_signature.InputKind
    named: dict[Any, SourceKind] = {kinds.PARAMETER: "parameter", kinds.BUFFER: "buffer"}
    batch = iter(batch_names)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.enable_grad():
        specs = exported.graph_signature.input_specs
        for spec, node in zip(specs, exported.graph.nodes, strict=False):
            if spec.kind in named:
                source = PlaceholderSource(named[spec.kind], names[str(spec.target)])
                builder.placeholder(node, source, find(source))
            elif spec.kind is kinds.CONSTANT_TENSOR:
                builder.constant(node, str(spec.target), exported.constants[str(spec.target)])
            elif spec.kind is kinds.USER_INPUT:
                source = PlaceholderSource("batch", next(batch))
                builder.placeholder(node, source, find(source))
                if source.name in copied:
                    leaf = builder.env[node]
                    builder.env[node] = builder.made(node, _aten.clone.default, leaf)
            else:
                raise CaptureError(
                    f"the forward reads {exported.constants.get(str(spec.target), spec.target)}, "
                    "which is neither a tensor nor a constant; keep it out of the forward"
                )
        outputs = builder.body(exported.graph_module, exported.graph)
        return builder.finish(samples, outputs)


@quiet()
@without_raising_guards(set(), EmptySelections())
def with_casts(
    program: FlatProgram, region: AutocastRegion, grouping: Grouping
) -> tuple[FlatProgram, Grouping]:
    """Return a program under autocast, with its casts as calls in the operators that read them.

    Calls under an autocast of the model's own stay as they are.
    """
    owner_of = grouping.owner_of(program)
    builder = _ProgramBuilder(None, region)
    builder.constants |= program.constants
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.enable_grad():
        for node, source in program.sources.items():
            builder.placeholder(node, source, node.meta["val"])
        for node in program.graph.nodes:
            if node.op == "get_attr":
                builder.env[node] = program.regions[str(node.target)]
            elif node.op == "call_function":
                builder.operator = owner_of[node]
                builder.call(node)
                _know_sizes(builder.env[node], node)
        cast = builder.finish(program.samples, [builder.env[node] for node in program.outputs])
    for call, node in enumerate(program.calls):
        node.meta.setdefault(CALL, call)
    for node, new in reversed(builder.env.items()):  # what is written to has the name of the write
        if isinstance(new, fx.Node):
            new.meta |= {key: node.meta[key] for key in node.meta.keys() - new.meta.keys()}
    owners = tuple(builder.owners[call] for call in cast.calls)
    return replace(cast, statistics=program.statistics), replace(grouping, owners=owners)


def _know_sizes(new: Any, known: fx.Node) -> None:
    """Give a value whose sizes depend on the data the sizes that a later call has determined."""
    if isinstance(new, fx.Node) and isinstance(known.meta["val"], torch.Tensor):
        for size, other in zip(new.meta["val"].shape, known.meta["val"].shape, strict=True):
            number = other.node.maybe_as_int() if isinstance(other, torch.SymInt) else other
            if isinstance(size, torch.SymInt) and number is not None:
                torch._check(size == number)  # type: ignore[no-untyped-call]


def require_samples(exported: torch.export.ExportedProgram, samples: int) -> None:
    """Raise RefusedError if a program is not for that many samples."""
    known: dict[Any, int] = {}
    guards: list[Any] = []
    for size in batch_sizes(exported):
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if isinstance(size, torch.SymInt) and expression.is_Symbol:
            known[expression] = samples
            scope = size.node.shape_env
            guards = [
                guard.expr.xreplace(scope.replacements)
                for guard in scope.guards
                if samples > 1
                or getattr(guard.sloc.framework_loc, "filename", None) != torch._ops.__file__
            ]
        elif expression != samples:
            raise RefusedError
    # The tracer takes one sample for a size of its own and asks nothing about it, or an operation
    # asks for an order of strides, which one sample has none of; the operations are right for it
    # all the same.
    if any(guard.xreplace(known) == sympy.false for guard in guards):
        raise RefusedError


def batch_sizes(exported: torch.export.ExportedProgram) -> list[int | torch.SymInt]:
    """Return the size of dimension 0 of every leaf of the batch."""
    user_input = torch.export.graph_signature.InputKind.USER_INPUT
    pairs = zip(exported.graph_signature.input_specs, exported.graph.nodes, strict=False)
    return [node.meta["val"].shape[0] for spec, node in pairs if spec.kind is user_input]


class _ProgramBuilder:
    """A program under construction; ``env``: exported node -> a node, a number or a module."""

    def __init__(self, device: torch.device | None, autocast: AutocastRegion | None = None) -> None:
        self.device = device
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.by_source: dict[PlaceholderSource, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.regions: dict[str, nn.Module] = {}
        self.autocast = autocast
        self.in_region = False  # of the model's own, also one that disables autocast
        self.operator = 0
        self.owners: dict[fx.Node, int] = {}  # call -> the operator that was current

    def placeholder(self, node: fx.Node, source: PlaceholderSource, like: torch.Tensor) -> None:
        if source not in self.by_source:
            new = self.by_source[source] = self.graph.placeholder(node.name)
            device = self.device or like.device
            value = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
            set_value(new, value.requires_grad_(like.requires_grad))
        self.env[node] = self.by_source[source]

    def constant(self, node: fx.Node, name: str, value: torch.Tensor) -> None:
        self.constants[name] = value
        self.placeholder(node, PlaceholderSource("constant", name), value)

    def body(self, owner: nn.Module, graph: fx.Graph) -> Any:
        """Copy the calls of a graph whose placeholders are known; return its outputs."""
        for node in graph.nodes:
            if node.op == "call_function":
                self.call(node)
            elif node.op == "get_attr":
                value: Any = operator.attrgetter(str(node.target))(owner)
                if isinstance(value, nn.Module):
                    self.env[node] = value  # the body of a region
                else:
                    self.constant(node, f"{node.target}_{len(self.constants)}", value)
        return map_aggregate(graph.output_node().args[0], self.operand)

    def operand(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.env[argument]
        is_moved = isinstance(argument, torch.device) and self.device is not None
        return self.device if is_moved else argument

    def call(self, node: fx.Node) -> None:
        if schema_name(node) in _CHECKS:
            return
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self.inline(node, bool(node.args[0]), node.args[1:])
            return
        is_settled = IN_AUTOCAST in node.meta
        if node.target is torch.ops.higher_order.wrap_with_autocast and not is_settled:
            device_type, dtype, enabled, *_ = node.args
            region = AutocastRegion(str(device_type), dtype)  # type: ignore[arg-type]
            outside = self.autocast, self.in_region
            self.autocast, self.in_region = region if enabled else None, True
            self.inline(node, True, node.args[4:])
            self.autocast, self.in_region = outside
            return
        args: Any = map_aggregate(node.args, self.operand)
        kwargs: Any = map_aggregate(node.kwargs, self.operand)
        if node.target is operator.getitem and not isinstance(args[0], fx.Node):
            self.env[node] = args[0][args[1]]
        elif self.autocast is None or is_settled:
            self.env[node] = self.made(node, node.target, *args, name=node.name, **kwargs)
        else:
            self.env[node] = self.cast(self.autocast, node, args, kwargs)

    def cast(self, region: AutocastRegion, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Make a call as autocast does, in a region of its own if its casts cannot come before."""
        types = region.casts(node.target, args, kwargs)
        if types is None:
            body, inputs = region_of(node.target, args, kwargs)
            fixed = region.device_type, region.dtype, True, True
            target = torch.ops.higher_order.wrap_with_autocast
            several = self.made(node, target, *fixed, body, *inputs)
            return self.made(node, operator.getitem, several, 0, name=node.name)

        read = [source for source in args if isinstance(source, fx.Node)]
        dtypes = {types.get(source, getattr(source.meta["val"], "dtype", None)) for source in read}
        half = torch.finfo(region.dtype if region.dtype in dtypes else torch.float32)

        def operand(source: Any) -> Any:
            if isinstance(source, float) and abs(source) == _LARGEST:  # as a model asks of a type
                return math.copysign(half.max, source)
            dtype = types.get(source) if isinstance(source, fx.Node) else None
            if dtype is None:
                return source
            key = source, dtype, self.operator
            call = region.cast_parameters.get(key)
            call = call or self.made(node, _aten.to.dtype, source, dtype)
            if source.op == "placeholder" and source.meta["val"].requires_grad:
                region.cast_parameters[key] = call
            return call

        leaves, spec = tree_flatten((args, kwargs))
        # Autocast begins with the last; in that order gradients of several uses are added.
        args, kwargs = tree_unflatten([operand(leaf) for leaf in leaves[::-1]][::-1], spec)
        return self.made(node, node.target, *args, name=node.name, **kwargs)

    def made(
        self, like: fx.Node, target: Any, *args: Any, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Make a call with its value, or return a number that is known without the data."""
        if (shared := self.written(like, target, args, kwargs)) is not None:
            return shared
        values, options = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        try:
            value = target(*values, **options)
        except Exception as error:
            if target is _aten.view.default:
                # A kernel of another device orders its results in memory in another way, so that a
                # tensor that was contiguous in the trace, and not copied, has to be copied now.
                return self.made(like, _aten.reshape.default, *args, name=name, **kwargs)
            error.add_note(user_line(like))
            raise
        if isinstance(value, int | float):
            return value
        args = map_aggregate(args, self.region)
        new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        copy_origin(like, new)
        if self.in_region:
            new.meta[IN_AUTOCAST] = True
        self.owners[new] = self.operator
        set_value(new, value)
        returns = target._schema.returns if hasattr(target, "_schema") else ()
        if [bool(r.alias_info and r.alias_info.is_write) for r in returns] == [True]:
            # One tensor has one name at a time: a reader of x after relu_(x) reads the result.
            for changed in (node for node in written(new) if node.op != "placeholder"):
                self.env |= {node: new for node, held in self.env.items() if held is changed}
        return new

    def written(self, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node | None:
        """Return the new value of memory that a write changes under several names, or None."""
        changed = args[0] if args else None
        if not (
            isinstance(changed, fx.Node) and writes_first(target) and "storage" in changed.meta
        ):
            return None
        read_later = {
            node: held
            for node, held in self.env.items()
            if isinstance(held, fx.Node)
            and held.meta.get("storage") == changed.meta["storage"]
            and any(user not in self.env and user is not like for user in node.users)
        }
        others = dict.fromkeys(held for held in read_later.values() if held is not changed)
        path = views(changed)
        if not others or path[0].op == "placeholder":
            return None
        make = partial(self.made, like)
        value = new_value(target, args, kwargs, make)
        for source, view in reversed(list(pairwise(path))):
            value = None if value is None else put_back(view, source, value, make)
        if value is None:
            return None
        now = {held: viewed(views(held), value, make) for held in (*others, changed)}
        if any(new.meta["storage"] != value.meta["storage"] for new in now.values()):
            return None
        self.env |= {node: now[held] for node, held in self.env.items() if held in now}
        return now[changed]

    def region(self, argument: Any) -> Any:
        if not isinstance(argument, nn.Module):
            return argument
        name = f"region_{len(self.regions)}"
        self.regions[name] = argument
        return self.graph.create_node("get_attr", name)

    def inline(self, node: fx.Node, enabled: bool, arguments: tuple[Any, ...]) -> None:
        """Copy the calls of a region. Without gradients its inputs are detached and still share
        their storage; one that it returns, also written to in place or cast to its own type, is the
        same tensor as outside, with its gradient.
        """
        body, *inputs = map_aggregate(arguments, self.operand)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        originals: dict[int, fx.Node] = {}
        for placeholder, source in zip(placeholders, inputs, strict=True):
            self.env[placeholder] = source
            if isinstance(source, fx.Node) and not enabled:
                inside = self.env[placeholder] = self.made(node, _aten.detach.default, source)
                originals[id(inside.meta["val"])] = source

        def outside(value: Any) -> Any:
            known = isinstance(value, fx.Node) and originals.get(id(value.meta["val"]))
            return known or value

        self.env[node] = map_aggregate(self.body(body, body.graph), outside)

    def finish(self, samples: int, outputs: Sequence[fx.Node]) -> FlatProgram:
        # An output that is itself a parameter or a buffer becomes the result of a call.
        alias = _aten.alias.default
        self.graph.output(
            tuple(self.made(n, alias, n) if n.op == "placeholder" else n for n in outputs)
        )
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in self.by_source.values():
            first.prepend(node)
        sources = {node: source for source, node in self.by_source.items()}
        program = FlatProgram(samples, self.graph, sources, self.constants, self.regions)
        program.drop_dead()
        self.graph.lint()
        return program
