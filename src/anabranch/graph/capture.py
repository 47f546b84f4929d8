"""Capture of a module that returns its loss as a graph of operators.

Labels and inputs are ordinary inputs of the forward pass; the end of the model is nothing special::

    module, example --export--> program with a symbol for the samples
                                  |-- at(4) --> flat program of 4 --+-- group --> OpGraph
                                  |-- at(8) --> flat program of 8 --+   (what doubles is samples)

A model that refuses a symbolic batch size is exported again for each number of samples; the
operations have to be the same ones each time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from anabranch.errors import CaptureError
from anabranch.graph.batch_layout import BatchLayout, Sizes, sizes_of, type_text
from anabranch.graph.call_traits import CallTraits, SampleAxis, axes_at, base_name, keyed
from anabranch.graph.flat_program import CallKey, frame, schema_name, unused_parameters
from anabranch.graph.group import FREE, group, group_like
from anabranch.graph.module_state import device_of, only_frozen
from anabranch.graph.opgraph import Granularity, OpGraph, Precision
from anabranch.graph.opgraph_builder import build
from anabranch.graph.programs import Programs, halves_agree, require_same_calls
from anabranch.graph.rewrites import Rewrite, applicable, require_parameters, require_sites
from anabranch.graph.samples.batch_statistics import WholeBatch
from anabranch.graph.samples.flows import Assumption, Total, above, loss_kind
from anabranch.graph.samples.sample_axis import sample_axes
from anabranch.graph.samples.sample_flow import sample_flow
from anabranch.graph.samples.sample_order import reordering_calls, uncertain_calls
from anabranch.graph.slices import in_slices, view_named, whole_name
from anabranch.graph.tracing.exporter import Exporter
from anabranch.remembered import remembered
from anabranch.workload import Batch, Workload, updates_by_element


def capture(
    module: nn.Module,
    example: Batch,
    *,
    granularity: Granularity = "layer",
    training: bool = True,
    per_sample: Collection[str] = (),
    rewrites: Sequence[str] = (),
) -> Captured:
    """Capture a module as a graph of operators.

    The module is left as it was. Submodules that the user put into evaluation mode (frozen
    statistics) stay in it, unless the module as a whole is in the other mode than asked for.

    Args:
        module: its forward returns the loss; real, or on the meta device for planning only.
        example: a batch; it fixes other sizes than dimension 0, and entries that are not tensors.
        granularity: ``operator`` is the finest, ``layer`` about a sub-layer of a transformer,
            ``block`` a whole entry of a repeated list.
        training: whether in training mode, or else in evaluation mode.
        per_sample: names of operators that work on each sample by itself, see ``Workload``.
        rewrites: rewrites of the program, with the same results, such as ``join-split``; see
            ``graph.rewrites``.

    Raises:
        CaptureError: if the module cannot be captured, with the user's line, cause and remedy.
    """
    if granularity not in ("operator", "layer", "block"):
        raise ValueError(f"granularity {granularity!r} is none of operator, layer, block")
    layout = BatchLayout.of(example)
    rules = [Rewrite.parse(text) for text in rewrites]
    require_parameters(module, rules)
    exporter = Exporter(module, layout, training, device_of(module), rules)
    for unknown in ("mean", "sum", "coupled"):
        assumption = Assumption(frozenset(per_sample), unknown)
        captured = _captured(module, exporter, granularity, assumption)
        if set(captured.assumed) <= assumption.per_sample or _is_per_sample(captured):
            break
    if reordering := _reordering(captured):
        assumption = replace(assumption, reordering=reordering)
        captured = _captured(module, exporter, granularity, assumption)
    called = {schema_name(node) for node in captured.programs.example.calls}
    if missing := sorted(set(per_sample) - called):
        raise CaptureError(
            f"{type(module).__name__} calls no operator {', '.join(missing)}, which per_sample "
            f"names; it calls {', '.join(sorted(called))}"
        )
    require_sites(type(module).__name__, rules, exporter.rewrites, exporter.refusals)
    return captured


def capture_workload(workload: Workload, **options: Any) -> Captured:
    """Capture the module of a workload, with options of ``capture``."""
    per_sample = workload.per_sample
    return capture(workload.module, workload.example, per_sample=per_sample, **options)


def capture_to_plan(workload: Workload, **options: Any) -> Captured:
    """Capture a workload; the graph also tells if the optimizer needs whole parameters."""
    captured = capture_workload(workload, **options)
    names = [name for name, _ in workload.module.named_parameters()]
    if not updates_by_element(workload, names):
        captured.graph = replace(captured.graph, whole_parameters=True)
    return captured


@dataclass(frozen=True, slots=True)
class Coupling:
    """An operation across samples, the path of the module it is called in, and its operator."""

    operation: str
    module: str
    operator: str


@dataclass(eq=False, repr=False)
class Captured:
    """A captured module.

    Attributes:
        module: the user's module, whose parameters every program uses.
        granularity: granularity of the operators.
        training: whether captured in training mode, or else in evaluation mode.
        layout: layout of a batch.
        programs: programs of the whole module, for any number of samples.
        metrics: names of the scalars that the module returns besides the loss.
        value_calls: value of the graph -> position of its call, -1 for a tensor of the batch.
        axes: position of a value's call, or -1 -> its samples, for values with samples.
        unused: trainable parameters that the loss does not depend on.
        totals: loss or metric -> how its value for a batch follows from those of its slices;
            coupled if only the whole batch tells.
        coupling: operations that are right for the whole batch only.
        assumption: assumption on operators about which the graph does not tell enough.
        assumed: names of the operators for which the assumption was needed.
        slices: name -> slice of a parameter that a rewrite has cut, made when it is needed.
        variants: sizes of a batch -> the same operators for such batches, this one included.
        plain: this capture without the casts of ``under_autocast``.
    """

    graph: OpGraph
    module: nn.Module
    granularity: Granularity
    training: bool
    layout: BatchLayout
    programs: Programs
    metrics: tuple[str, ...]
    value_calls: tuple[int, ...]
    axes: dict[int, SampleAxis]
    unused: tuple[str, ...]
    totals: Mapping[str, Total]
    coupling: tuple[Coupling, ...]
    assumption: Assumption
    assumed: tuple[str, ...]
    slices: dict[str, nn.Parameter] = field(default_factory=dict)
    variants: dict[Sizes, Captured] = field(init=False)
    plain: Captured = field(init=False)

    def __post_init__(self) -> None:
        self.variants = {self.layout.sizes: self}
        self.plain = self

    def __repr__(self) -> str:
        graph = self.graph
        has = f"{len(graph)} operators, {graph.loss_kind}, {graph.precision}"
        return f"<Captured {graph.name}: {has}>"

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of that name, which may be a slice of one of the module's."""
        if (whole := whole_name(name)) == name:
            return self.module.get_parameter(name)
        if name not in self.slices:
            held = self.module.get_parameter(whole)
            view = view_named(name, held.detach())
            self.slices[name] = nn.Parameter(view, requires_grad=held.requires_grad)
        return self.slices[name]

    def freeze_slices(self) -> None:
        """Give slices the ``requires_grad`` of their parameters, which a loop may freeze."""
        for name, part in self.slices.items():
            part.requires_grad_(self.module.get_parameter(whole_name(name)).requires_grad)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters in its order, slices in place of those that are cut."""
        names = (parameter.name for parameter in self.graph.parameters)
        wholes = dict(self.module.named_parameters())
        return in_slices(wholes, names, lambda name, _: self.parameter(name))

    @cached_property
    def cut(self) -> frozenset[str]:
        """The module's parameters of which operators read slices."""
        names = {parameter.name for parameter in self.graph.parameters}
        return frozenset(whole_name(name) for name in names if whole_name(name) != name)

    @cached_property
    def folded(self) -> dict[int, CallKey]:
        """Position -> key of each call whose value may be sent though samples share a dimension."""
        program, axes = self.programs.example, self.axes
        return {
            call: key
            for call, (key, node) in enumerate(keyed(program.calls))
            if call in axes and axes[call].is_folded(node.meta["val"].shape, program.samples)
        }

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Operators of other libraries, whose computation the graph does not show."""
        names = dict.fromkeys(map(schema_name, self.programs.example.calls))
        return tuple(n for n in names if "::" in n and not n.startswith(("aten::", "prims::")))

    def weights(self, samples: int, batch_size: int) -> dict[str, float]:
        """Return weights of a slice's loss and metrics in the batch's; coupled ones by samples."""
        share = samples / batch_size
        return {name: 1.0 if total == "sum" else share for name, total in self.totals.items()}

    @remembered
    def evaluation(self) -> Captured:
        """Return the same module in evaluation mode.

        It shares the parameters and has the same operators, without those that do nothing in
        evaluation, so that the stages of a training plan cut it as well. Made once.
        """
        return self._again(self.layout, training=False) if self.training else self

    @remembered
    def under_autocast(self, precision: Precision | None, device_type: str) -> Captured:
        """Return the same operators under ``torch.autocast`` around the whole forward, its casts as
        calls; the plain capture for ``fp32`` and None.

        Args:
            device_type: torch's name of it; which operations autocast casts depends on the device.

        Raises:
            ValueError: for another precision.
        """
        if self is not self.plain:
            return self.plain.under_autocast(precision, device_type)
        if precision in (None, "fp32"):
            return self
        programs = self.programs.under_autocast(precision, device_type)
        device = programs.exporter.device
        program, other = (programs.at(n * programs.samples, device=device) for n in (1, 2))
        traits = CallTraits(program, other, axes_at(program, self.axes))
        graph, positions, axes = build(self.module, traits, programs.grouping, self.training)
        graph = replace(self.graph, values=graph.values, precision=precision)
        cast = replace(self, graph=graph, programs=programs, value_calls=positions, axes=axes)
        cast.plain = self
        return cast

    def like(self, example: Batch) -> Captured:
        """Return the same operators for batches of other sizes, such as shorter ones. Made once.

        Raises:
            CaptureError: if the module runs other operations for them.
            ValueError: if a tensor is larger than in the example of this one, by which plans count
                memory, or of another type, or the example is built otherwise.
        """
        tensors = self.layout.flatten(example)
        for name, tensor in tensors.items():
            (shape, dtype), here = self.layout.types[name], tuple(tensor.shape[1:])
            fits = len(here) == len(shape) and all(a <= b for a, b in zip(here, shape, strict=True))
            if not fits or tensor.dtype != dtype:
                raise ValueError(
                    f"a bucket has {name} as {type_text(here, tensor.dtype)}, the example of the "
                    f"workload as {type_text(shape, dtype)}; plans count memory by the example, so "
                    "make the largest of them the example, all of one type"
                )
        sizes = sizes_of(tensors)
        if sizes not in self.variants:
            variant = self._again(BatchLayout.of(example), self.training)
            dims, others = ({c: axis.dim for c, axis in v.axes.items()} for v in (self, variant))
            if (variant.value_calls, others) != (self.value_calls, dims):
                raise CaptureError(
                    f"{type(self.module).__name__} has its samples in other places for batches of "
                    f"{variant.layout.text()} than for those of {self.layout.text()}"
                )
            self.variants[sizes] = variant
        return self.variants[sizes]

    def for_batch(self, tensors: Mapping[str, torch.Tensor]) -> Captured:
        """Return the variant for the sizes of a batch; this one where there is none."""
        return self.variants.get(sizes_of(tensors), self)

    def _again(self, layout: BatchLayout, training: bool) -> Captured:
        with only_frozen(self.module, self.programs.exporter.frozen):
            first = self.programs.exporter
            exporter = Exporter(self.module, layout, training, first.device, first.rewrites)
            exporter.moved |= first.moved
            exporter.shown_warnings = first.shown_warnings
            return _captured(self.module, exporter, self.granularity, self.assumption, self)


def _captured(
    module: nn.Module,
    exporter: Exporter,
    granularity: Granularity,
    assumption: Assumption,
    first: Captured | None = None,
) -> Captured:
    """Capture a module, with the operators of the ``first`` capture of it if there is one."""
    samples, training = exporter.samples, exporter.training
    program, other = exporter.program(samples), exporter.program(2 * samples)
    signature = program.signature()
    here, there = f"{samples} samples", f"{2 * samples} samples"
    require_same_calls(module, signature, other, known=here, unknown=there)
    same_mode = first if first is not None and first.training == training else None
    if same_mode is not None:
        sizes, wanted = exporter.layout.text(unlike=same_mode.layout), same_mode.programs.signature
        here, there = "the workload's example", f"a bucket ({sizes})"
        require_same_calls(module, wanted, program, known=here, unknown=there)
    loss = program.outputs[0]
    if training and not (isinstance(loss, fx.Node) and loss.meta["val"].requires_grad):
        raise CaptureError(
            f"the loss of {type(module).__name__} does not depend on any parameter that "
            "requires a gradient; is its forward decorated with torch.no_grad, or is every "
            "parameter frozen?"
        )
    flow = sample_flow(program, other, module, assumption)
    whole_batch = WholeBatch.of(program, flow)
    kinds = [flow.flows[node].kind for node in program.outputs]
    totals: dict[str, Total] = {
        name: kind if kind in ("sum", "coupled") else "mean"
        for name, kind in zip(exporter.outputs, kinds, strict=True)
    }
    kind, coupling = loss_kind(flow, loss), above(flow.coupling, loss)
    program, other = whole_batch.put_in(program), whole_batch.put_in(other)
    axes = sample_axes(program, other, assumption.reordering)
    traits = CallTraits(program, other, axes, None if first is None else first.folded.values())
    if first is None:
        grouping = group(traits, module, granularity)
    elif same_mode is not None:
        grouping = first.programs.grouping
    else:
        grouping = group_like(traits, first.programs.example, first.programs.grouping)
    owners = grouping.owner_of(program).items()
    operators = {call: grouping.names[owner] for call, owner in owners if owner != FREE}
    couplings = tuple(
        Coupling(base_name(node), frame(node), operators[node])
        for node in coupling
        if node in operators
    )
    coupled = {c.operator for c in couplings}
    graph, calls, value_axes = build(module, traits, grouping, training, coupled)
    graph = replace(
        graph,
        granularity=granularity,
        loss_kind=kind,
        rewrites=tuple(map(str, exporter.rewrites)),
        rewritable=applicable(program),
        normalised=tuple(dict.fromkeys(frame(node) for node in flow.normalised)),
    )
    return Captured(
        slices={} if first is None else first.slices,
        graph=graph,
        module=module,
        granularity=granularity,
        training=training,
        layout=exporter.layout,
        programs=Programs(module, exporter, grouping, whole_batch, signature, (program, other)),
        metrics=exporter.outputs[1:],
        value_calls=calls,
        axes=value_axes,
        unused=unused_parameters(module, program),
        totals=totals,
        coupling=couplings,
        assumption=assumption,
        assumed=flow.assumed,
    )


def _is_per_sample(captured: Captured) -> bool:
    """Compare halves of the example with the whole; true where there are no numbers to compare.

    Training compares gradients before its first step in any case.
    """
    if captured.programs.exporter.device.type == "meta":
        return True
    try:
        twin = captured.evaluation()
        return halves_agree(twin.programs, twin.layout, twin.totals)
    except (CaptureError, RuntimeError):
        return True


def _reordering(captured: Captured) -> frozenset[CallKey]:
    """Return calls that bring folded samples into another order, or may do so."""
    calls = uncertain_calls(captured.programs, captured.folded)
    try:
        twin = captured.evaluation() if calls else captured
        return calls and reordering_calls(twin.programs, twin.layout, calls)
    except (CaptureError, RuntimeError):
        return calls
