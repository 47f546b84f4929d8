"""Exported programs of one module, lowered to flat programs for any number of samples.

One export with a symbol for the number of samples serves them all. A module that refuses the symbol
is exported again for each number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.export import ModuleCallSignature
from torch.export.graph_signature import TensorArgument

from anabranch.errors import CaptureError
from anabranch.graph.batch_layout import BatchLayout
from anabranch.graph.flat_program import (
    FlatProgram,
    PlaceholderSource,
    insert,
    is_bounding,
    written,
)
from anabranch.graph.module_state import (
    in_mode,
    in_one_process,
    on_meta,
    on_one_device,
    only_frozen,
    with_layouts,
)
from anabranch.graph.rewrites import Rewrite, rewrite
from anabranch.graph.tracing.attributes_read import AttributesRead
from anabranch.graph.tracing.changed_state import copy_changed_state
from anabranch.graph.tracing.counted_means import counted_means
from anabranch.graph.tracing.empty_selections import EmptySelections
from anabranch.graph.tracing.export import ReturnsLoss, export, quiet
from anabranch.graph.tracing.lowering import RefusedError, lower, require_samples
from anabranch.graph.tracing.patches import tracing_alone, without_raising_guards
from anabranch.graph.user_lines import call_place, user_line
from anabranch.remembered import remembered


class Exporter:
    """Flat programs of one module, in training or in evaluation mode.

    Attributes:
        samples: number of samples of the first export.
        device: where the module is exported.
        frozen: names of the parameters that are not trainable.
        outputs: names of the loss and the metrics, once there is a program.
        rewrites: rewrites of every program; with their sites, once there is a program.
        refusals: for each rewrite, why other sites were left as they are.
        fixed: number of samples -> program that was exported for this number alone.
        reads: attributes that its forward reads in Python.
        moved: names of the buffers that it changes, here or in an earlier capture of the module.
        shown_warnings: texts of warnings that a user has seen, likewise.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: BatchLayout,
        training: bool,
        device: torch.device,
        rewrites: Sequence[Rewrite] = (),
    ) -> None:
        _require_layouts(module)
        # A module without values stays one here, whatever values it is given later.
        user, module = module, on_meta(module) if device.type == "meta" else module
        self.module = module
        self.reads = AttributesRead(user, module)
        self.layout = layout
        self.training = training
        self.device = device
        self.samples = max(2, layout.samples)
        self.frozen = frozenset(n for n, p in module.named_parameters() if not p.requires_grad)
        self.outputs: tuple[str, ...] = ()
        self.rewrites: Sequence[Rewrite] = rewrites
        self.refusals: Sequence[str] = ()
        self.moved: set[str] = set()
        self.shown_warnings: set[str] = set()
        self._wrapped = ReturnsLoss(module, layout.rebuild)
        self._names = _first_names(module)
        self._tensors: dict[PlaceholderSource, torch.Tensor] = {
            **{PlaceholderSource("parameter", n): p for n, p in module.named_parameters()},
            **{PlaceholderSource("buffer", n): b for n, b in module.named_buffers()},
        }
        self.fixed: dict[int, torch.export.ExportedProgram] = {}
        self._dynamic: torch.export.ExportedProgram | None = None

    @tracing_alone()
    def program(self, samples: int, device: torch.device | None = None) -> FlatProgram:
        """Return the flat program for a number of samples, which makes its tensors on the device.

        Raises:
            CaptureError: if the module cannot be captured, or not with that many samples.
        """
        with only_frozen(self.module, self.frozen), with_layouts(self.module):
            if not self.outputs:
                self._export()
            if self._dynamic is not None:
                with suppress(RefusedError):
                    return self._lowered(self._dynamic, samples, device)
            if samples not in self.fixed:
                self.fixed[samples] = self._run(samples, dynamic=False, works_with=self.samples)
            return self._lowered(self.fixed[samples], samples, device)

    def _export(self) -> None:
        """Export the module, if possible for any number of samples."""
        try:
            self._dynamic = self._run(self.samples, dynamic=True)
        except CaptureError as error:
            if error.__cause__ is None:
                raise  # what is wrong does not depend on how the module is exported
        if not self.is_general(2 * self.samples):  # a line needs the number as a constant
            self._dynamic = None
            self.fixed[self.samples] = self._run(self.samples, dynamic=False)
        chosen = self._dynamic or self.fixed[self.samples]
        self.outputs = tuple(chosen.call_spec.out_spec.context)

    def _run(self, samples: int, **options: Any) -> torch.export.ExportedProgram:
        leaves = self.layout.resized(samples, self.device)
        mode, home = in_mode(self.module, self.training), on_one_device(self.module, self.device)
        trace = partial(export, self._wrapped, leaves, self.reads, self.shown_warnings, **options)
        with mode, in_one_process(), home:
            try:
                return trace()
            except CaptureError as error:
                if not isinstance(error.__cause__, FakeTensorDeviceMismatchError):
                    raise
            with self.device:  # a forward that makes tensors without naming a device, on the CPU
                return trace()

    @remembered
    @tracing_alone()
    def signatures(self, samples: int) -> dict[str, ModuleCallSignature]:
        """Return submodule, by the tracer's path -> arguments and results of its call, as names of
        the program's nodes; without modules that have children, if the tracer fails on them.
        """
        paths = {f"module.{name}": part for name, part in self.module.named_modules() if name}
        leaves = [path for path, part in paths.items() if next(part.children(), None) is None]
        program, dynamic = self.program(samples), self._dynamic is not None
        for preserve in (tuple(paths), tuple(leaves)):
            with suppress(Exception):
                count = self.samples if dynamic else samples
                exported = self._run(count, dynamic=dynamic, preserve=preserve)
                again = self._lowered(exported, samples, None)
                if again.signature() != program.signature():
                    continue
                pairs = zip(again.graph.nodes, program.graph.nodes, strict=True)
                names = {node.name: known.name for node, known in pairs}
                calls = {call.fqn: call.signature for call in exported.module_call_graph}
                return {fqn: _renamed(call, names) for fqn, call in calls.items() if call}
        return {}

    def is_general(self, samples: int) -> bool:
        """Return True if there is an export for any number of samples, and it covers this one."""
        if self._dynamic is None:
            return False
        with suppress(RefusedError):
            require_samples(self._dynamic, samples)
            return True
        return False

    @quiet()
    @without_raising_guards(set(), EmptySelections())
    def _lowered(
        self, exported: torch.export.ExportedProgram, samples: int, device: torch.device | None
    ) -> FlatProgram:
        def find(source: PlaceholderSource) -> torch.Tensor:
            if source.kind != "batch":
                return self._tensors[source]
            shape, dtype = self.layout.types[source.name]
            return torch.empty((samples, *shape), dtype=dtype, device=device or self.device)

        lowered = partial(
            lower,
            exported,
            samples,
            names=self._names,
            batch_names=self.layout.names,
            find=find,
            device=device,
        )
        try:
            program = lowered()
            if changed := program.changed("batch"):
                program = lowered(copied=changed)
            self.moved |= program.changed("buffer")
            if both := sorted(self.moved & self.reads.buffers.keys()):
                raise CaptureError(
                    f"{type(self.module).__name__} cannot be captured: by the value of {both[0]} "
                    "the forward goes one way or another, and it changes that buffer, so a later "
                    "step may go the other way; where it is set once, call the module before"
                )
        except (CaptureError, RefusedError):
            raise
        except Exception as error:
            if exported is self._dynamic:
                raise RefusedError from error
            text = str(error).partition("\n")[0]
            where = "".join(f"{line}: " for line in getattr(error, "__notes__", ()))
            raise CaptureError(
                f"{type(self.module).__name__} cannot be captured with {samples} samples on "
                f"{device or self.device}: {where}{text} ({type(error).__name__}); write that line "
                "with other tensor operations, whose types are those of that device, and whose "
                "sizes follow from those of the batch, not from its values"
            ) from error
        program = numbers_as_tensors(program, self.outputs)
        self._require_denominator(program)
        for node, source in program.writes_to("parameter"):
            if is_bounding(node):
                for view in written(node):
                    if view.target is _aten.detach.default:
                        view.target = _aten.data.default  # no write that a backward would refuse
            elif self._tensors[source].requires_grad:
                raise CaptureError(
                    f"{type(self.module).__name__} changes {source.name}, a parameter that is "
                    f"trained, in place ({node.target}, {call_place(self.module, node)}); forwards "
                    "of several micro-batches come before the backward of the first: compute what "
                    "the parameter is to be as a new tensor, such as weight.clamp(...), or change "
                    "it between the steps"
                )
        copy_changed_state(program)
        program = counted_means(program)
        self.rewrites, refusals = rewrite(program, self.rewrites)
        self.refusals = self.refusals or refusals
        return program

    def _require_denominator(self, program: FlatProgram) -> None:
        """Refuse a pair of two scalars of which the second is no denominator."""
        loss = program.outputs[0]
        if not self._wrapped.pairs or len(loss.all_input_nodes) != 2:
            return
        if "parameter" in program.kinds_above(loss.all_input_nodes[1:]):
            raise CaptureError(
                f"{type(self.module).__name__} returns two scalars, which are taken as numerator "
                "and denominator of a loss, but the second depends on parameters, as an accuracy "
                'does; return {"loss": ..., "accuracy": ...} for a loss and a metric'
            )


def _renamed(call: ModuleCallSignature, names: Mapping[str, str]) -> ModuleCallSignature:
    """Return the same call with other names of nodes."""

    def renamed(arguments: list[Any]) -> list[Any]:
        return [
            TensorArgument(names.get(a.name, "")) if isinstance(a, TensorArgument) else a
            for a in arguments
        ]

    return replace(call, inputs=renamed(call.inputs), outputs=renamed(call.outputs))


def _require_layouts(module: nn.Module) -> None:
    """Refuse sparse buffers, and sparse tensors that a trace cannot hold; raises CaptureError."""
    for path, part in module.named_modules():
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
            if not isinstance(value, torch.Tensor) or value.layout is torch.strided:
                continue
            if value.layout is not torch.sparse_coo or name not in vars(part):
                buffer = ".".join(filter(None, ("module", path, name)))
                raise CaptureError(
                    f"{buffer} is a sparse tensor ({value.layout}): the captured model has one as "
                    "a constant, in a plain attribute and as torch.sparse_coo, not in a buffer, "
                    f"which checkpoints and messages would hold: del {buffer}, then {buffer} = "
                    "tensor.to_sparse()"
                )


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return name of a tensor in the wrapped module -> its first name in the user's module."""
    result = {}
    for named in (module.named_parameters, module.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            result[f"module.{name}"] = first.setdefault(id(tensor), name)
    return result


_aten = torch.ops.aten
_ARITHMETIC: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.truediv: _aten.div.Tensor,
    operator.neg: _aten.neg.default,
}
_BEHIND: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.sub: _aten.rsub.Scalar,
}
"""Operators for a first operand that is a plain number, which becomes the second one."""


def numbers_as_tensors(program: FlatProgram, names: tuple[str, ...]) -> FlatProgram:
    """Put tensors in place of the numbers that a program returns under ``names``.

    A number such as ``hits.sum().item() / len(y)`` needs the value of a tensor in Python, and
    planning has no values. So the arithmetic is done with tensors.

    Raises:
        CaptureError: if a number is computed otherwise than with + - * /.
    """
    for name, output in zip(names, program.outputs, strict=True):
        if output.target is _aten.scalar_tensor.default and isinstance(output.args[0], fx.Node):
            number = _tensor(output.args[0], name, output)
            output.replace_all_uses_with(insert(output, _aten.to.dtype, number, torch.float32))
    program.drop_dead()
    return program


def _tensor(number: Any, metric: str, output: fx.Node) -> fx.Node:
    """Insert a tensor in place of a number, just before the output."""
    if number.target is _aten.item.default:
        # A sum of one number; it neither overflows nor is as coarse as numbers of small types.
        return insert(output, _aten.sum.default, *number.args, dtype=torch.float64)
    if number.target is torch.sym_float:
        return _tensor(number.args[0], metric, output)
    terms, known = list(number.args), _ARITHMETIC
    if not isinstance(terms[0], fx.Node):
        terms, known = terms[::-1], _BEHIND
    if number.target not in known:
        raise CaptureError(
            f"the module's forward computes the metric {metric} from numbers that it asks tensors "
            f"for ({user_line(number)}); leave .item() out there and compute it with tensors: a "
            "metric may be a scalar tensor"
        )
    operands = [_tensor(n, metric, output) if isinstance(n, fx.Node) else n for n in terms]
    return insert(output, known[number.target], *operands)
