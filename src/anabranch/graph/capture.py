"""Capture of a module that returns its loss as a graph of operators.

Labels and inputs are ordinary inputs of the forward pass, so nothing is special about the end of
the model::

    module, example --export--> program with a symbol for the samples
                                  |-- at(4) --> flat program of 4 --+-- group --> OpGraph
                                  |-- at(8) --> flat program of 8 --+   (what doubles is samples)

A model that refuses a symbolic batch size is exported again for each number of samples; the
operations have to be the same ones each time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from anabranch.errors import CaptureError
from anabranch.graph.batch_layout import BatchLayout, leaf_name
from anabranch.graph.batch_norms import in_one_process, with_whole_batch_norms
from anabranch.graph.call_traits import base_name
from anabranch.graph.export import ReturnsLoss, export, plain_calls, user_line
from anabranch.graph.flat_program import (
    BATCH_LEAF,
    BUFFER,
    PARAMETER,
    FlatProgram,
    PlaceholderSource,
    RefusedError,
    batch_sizes,
    frame,
    gradient_calls,
    lower,
    propagate,
)
from anabranch.graph.group import FREE, Grouping, group, group_like
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.meta_kernels import MetaKernels
from anabranch.graph.meta_trace import NotPlainError, trace_on_meta
from anabranch.graph.number_metrics import numbers_as_tensors
from anabranch.graph.opgraph import Granularity, OpGraph
from anabranch.graph.opgraph_builder import build
from anabranch.graph.sample_flow import Flow, above, loss_kind, sample_flow
from anabranch.graph.whole_batch import WholeBatch, counted_means
from anabranch.graph.without_dynamo import without_dynamo
from anabranch.workload import Batch

Sizes = tuple[tuple[int, ...], ...]
"""Shapes of a batch's tensors without the samples, in their order."""


def capture(
    module: nn.Module,
    example: Batch,
    *,
    granularity: Granularity = "layer",
    training: bool = True,
) -> Captured:
    """Capture a module as a graph of operators.

    The module is left as it was. Submodules that the user put into evaluation mode (frozen
    statistics) stay in it, unless the module as a whole is in the other mode than asked for.

    Args:
        module: its forward returns the loss; real, or on the meta device for planning only.
        example: a batch; sizes other than dimension 0 are fixed by it, and so are entries that are
            not tensors.
        granularity: ``operator`` is the finest, ``layer`` about a sub-layer of a transformer,
            ``block`` a whole entry of a repeated list.
        training: in training mode, or in evaluation mode.

    Raises:
        CaptureError: if the module cannot be captured; the message names the user's line, the cause
            and a remedy.
    """
    if granularity not in ("operator", "layer", "block"):
        raise ValueError(f"granularity {granularity!r} is none of operator, layer, block")
    return Captured._of(module, BatchLayout.of(example), granularity, training)


@dataclass(eq=False)
class Captured:
    """A captured module.

    Attributes:
        module: the user's, whose parameters every program uses.
        metrics: names of the scalars that the module returns besides the loss.
        samples: the example's number of samples (2 where it had one).
        value_calls: value of the graph -> position of the call that makes it, -1 for a leaf of the
            batch.
        batch_dims: value of the graph -> which dimension is the samples, None where there is none.
        unused: trainable parameters that the loss does not depend on.
        loss_kind: of which kind the loss is, over the samples of a batch.
        degrees: loss and metrics -> the power of the number of samples in it: the value of a batch
            is the sum over slices of (n / n of the slice) ** degree times that of the slice. None
            for what only the whole batch tells.
        coupling: operations that are right for the whole batch only, each with the module and the
            operator that it is in.
        sizes: of the batch's tensors without the samples.
        alike: this one, and the same operators for batches of other sizes (``like``), by sizes.
    """

    graph: OpGraph
    module: nn.Module
    metrics: tuple[str, ...]
    granularity: Granularity
    training: bool
    samples: int
    value_calls: tuple[int, ...]
    batch_dims: tuple[int | None, ...]
    unused: tuple[str, ...]
    loss_kind: LossKind
    degrees: Mapping[str, int | None]
    coupling: tuple[Coupling, ...]
    _layout: BatchLayout
    _exporter: _Exporter
    _grouping: Grouping
    _signature: list[tuple[str, str]]
    _whole_batch: WholeBatch
    _programs: dict[tuple[int, torch.device], FlatProgram] = field(default_factory=dict)
    _evaluation: Captured | None = None

    def __post_init__(self) -> None:
        self.alike: dict[Sizes, Captured] = {self.sizes: self}

    @staticmethod
    def _of(
        module: nn.Module,
        layout: BatchLayout,
        granularity: Granularity,
        training: bool,
        like: Captured | None = None,
    ) -> Captured:
        device = _device(module) if like is None else like.capture_device
        exporter = _Exporter(module, layout, training, device)
        samples = max(2, layout.samples)
        try:
            program, other = exporter.traced(samples), exporter.traced(2 * samples)
            is_same = other.signature() == program.signature()
        except NotPlainError:
            is_same = False
        if not is_same:
            program, other = exporter.at(samples), exporter.at(2 * samples)
        signature = program.signature()
        if other.signature() != signature:
            raise _other_samples(module, samples, signature, other)
        alike = like if like is not None and like.training == training else None
        if alike is not None and signature != alike._signature:
            raise _other_sizes(module, alike, layout, program)
        loss = program.outputs[0]
        if training and not (isinstance(loss, fx.Node) and loss.meta["val"].requires_grad):
            raise CaptureError(
                f"the loss of {type(module).__name__} does not depend on any parameter that "
                "requires a gradient; is its forward decorated with torch.no_grad, or is every "
                "parameter frozen?"
            )
        flow = with_whole_batch_norms(sample_flow(program, other), module)
        whole_batch = WholeBatch.of(program, flow)
        names = ("loss", *exporter.metrics)
        degrees = {
            name: _degree(flow.flows[node])
            for name, node in zip(names, program.outputs, strict=True)
        }
        kind, coupling = loss_kind(flow, loss), above(flow.coupling, loss)
        program, other = whole_batch.put_in(program), whole_batch.put_in(other)
        if like is None:
            grouping = group(program, other, module, granularity)
        elif alike is not None:
            grouping = alike._grouping
        else:
            grouping = group_like(program, other, like._programs_at(like.samples), like._grouping)
        owner_of = dict(zip(program.calls, grouping.owners, strict=True))
        couplings = tuple(
            Coupling(base_name(node), frame(node), grouping.names[owner_of[node]])
            for node in coupling
            if owner_of.get(node, FREE) != FREE
        )
        graph, calls, dims = build(module, program, other, grouping, training)
        coupled = {c.operator for c in couplings}
        ops = tuple(replace(op, whole_batch=op.name in coupled) for op in graph.ops)
        graph = replace(
            graph,
            ops=ops,
            granularity=granularity,
            loss_kind=kind,
            normalised=tuple(dict.fromkeys(frame(node) for node in flow.normalised)),
        )
        carriers = gradient_calls(program)
        trained = {s.name for n, s in program.sources.items() if carriers & n.users.keys()}
        return Captured(
            graph=graph,
            module=module,
            metrics=exporter.metrics,
            granularity=granularity,
            training=training,
            samples=samples,
            value_calls=calls,
            batch_dims=dims,
            unused=tuple(
                n for n, p in module.named_parameters() if p.requires_grad and n not in trained
            ),
            loss_kind=kind,
            degrees=degrees,
            coupling=couplings,
            _layout=layout,
            _exporter=exporter,
            _grouping=grouping,
            _signature=signature,
            _whole_batch=whole_batch,
            _programs={(samples, exporter.device): program, (2 * samples, exporter.device): other},
        )

    @property
    def normalised(self) -> tuple[str, ...]:
        """Modules that take statistics over the samples of a micro-batch while training."""
        return self.graph.normalised

    @cached_property
    def leaf_types(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Leaf of a batch -> the shape without the samples, and the type that programs take."""
        layout = self._layout
        leaves = [layout.leaves[i] for i in layout.positions]
        return {
            name: (tuple(leaf.shape[1:]), leaf.dtype)
            for name, leaf in zip(layout.names, leaves, strict=True)
        }

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that were not trainable when the module was captured."""
        return self._exporter.frozen

    @property
    def sizes(self) -> Sizes:
        """Of the batch's tensors, in their order, without the samples."""
        return tuple(shape for shape, _ in self.leaf_types.values())

    def flatten_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The tensors of a batch by name, the names of the values that the batch produces; raises
        ValueError if the batch is built otherwise than the example was.
        """
        paths, _ = pytree.tree_flatten_with_path(batch)
        chosen = {leaf_name(path): leaf for path, leaf in paths if isinstance(leaf, torch.Tensor)}
        names = self._layout.names
        if len(paths) != len(self._layout.leaves) or tuple(chosen) != names:
            missing = [name for name in names if name not in chosen]
            extra = [name for name in chosen if name not in names]
            wrong = [f"lacks {', '.join(missing)}"] if missing else []
            wrong += [f"has {', '.join(extra)} besides"] if extra else []
            raise ValueError(
                f"the batch holds {', '.join(chosen) or 'no tensors'}, but the workload's example "
                f"holds {', '.join(names)}: it {' and '.join(wrong) or 'differs'}; "
                "every batch has to be built as the example is"
            )
        return chosen

    def at(self, samples: int, *, device: torch.device | str | None = None) -> FlatProgram:
        """The flat program for a number of samples.

        Args:
            samples: at least 1.
            device: where tensors are constructed; by default where the module's parameters are now.

        Raises:
            CaptureError: if the model cannot run with that many samples, or runs other operations.
            ValueError: for less than one sample, or a device that this machine does not have.
        """
        if samples < 1:
            raise ValueError(f"{samples} samples; at least 1 is needed")
        place = torch.device(device) if device is not None else self.device
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"a program for {place} was asked for, but no such device is here")
        if (samples, place) not in self._programs:
            self._programs[samples, place] = self._made(samples, place)
        return self._programs[samples, place]

    def _made(self, samples: int, place: torch.device) -> FlatProgram:
        with only_frozen(self.module, self.frozen):
            return self._whole_batch.put_in(self._plain(samples, place))

    def _plain(self, samples: int, place: torch.device) -> FlatProgram:
        signature = self._signature
        if not self._exporter.is_exported:
            with suppress(NotPlainError):
                program = self._exporter.traced(samples, place)
                if program.signature() == signature:
                    return program
        program = self._exporter.at(samples, place)
        if program.signature() != signature:
            raise _other_samples(self.module, self.samples, signature, program)
        return program

    def _programs_at(self, samples: int) -> FlatProgram:
        return self._programs[samples, self._exporter.device]

    def weights(self, samples: int, batch_size: int) -> dict[str, float]:
        """What loss and metrics of a slice count for in those of a batch; metrics that only the
        whole batch tells count by samples.
        """
        share = samples / batch_size
        return {
            name: share if degree is None else float(share**-degree)
            for name, degree in self.degrees.items()
        }

    @property
    def statistics(self) -> frozenset[str]:
        """Names of what programs read of a batch besides its own tensors."""
        return frozenset(self._whole_batch.names)

    def tensors_for(self, names: frozenset[str]) -> frozenset[str]:
        """The tensors of a batch itself that these need, of which some may be statistics."""
        own = names - self.statistics
        return own if own == names else own | self.at(self.samples).known.leaves

    def with_statistics(
        self, leaves: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of a whole batch, and what programs of its slices read of it besides.

        Args:
            device: where that is computed, by default where the tensors are.

        Raises:
            CaptureError: if the model cannot run with as many samples as are left over when the
                batch is taken in parts.
        """
        if not self._whole_batch.statistics:
            return dict(leaves)
        first = next(iter(leaves.values()))
        samples, place = int(first.shape[0]), device or first.device
        sums: list[torch.Tensor] = []
        start = 0
        module = self.module

        def find(source: PlaceholderSource) -> torch.Tensor:
            if source.kind == BATCH_LEAF:
                return leaves[source.name][start : start + size].to(place)
            if source.kind == BUFFER:
                return module.get_buffer(source.name).to(place)
            return program.constants[source.name].to(place)

        while start < samples:
            size = self._part(samples - start, place)
            program = self.at(size, device=place)
            sums = program.known.add(size, find, sums)
            start += size
        values = program.known.values(samples, sums, find)
        return {**leaves, **self._whole_batch.rows(values, samples)}

    def is_even(self, batch: Batch, slices: Sequence[tuple[int, int]]) -> bool:
        """Whether every slice of a batch has the share of its samples in all that is counted."""
        if not self._whole_batch.statistics:
            return True
        leaves = self.flatten_batch(batch)
        whole = self.with_statistics(leaves)
        for start, stop in slices:
            mine = self.with_statistics({name: leaf[start:stop] for name, leaf in leaves.items()})
            for name in self.statistics:
                if not torch.allclose(mine[name].sum(0), whole[name][start:stop].sum(0), rtol=1e-9):
                    return False
        return True

    def _part(self, samples: int, place: torch.device) -> int:
        """The most of so many samples for which there is a program."""
        known = (size for size, where in self._programs if where == place and size <= samples)
        return max(known, default=samples)

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are now."""
        return _device(self.module)

    @property
    def capture_device(self) -> torch.device:
        """Where the module's parameters were when it was captured."""
        return self._exporter.device

    def owners(self, program: FlatProgram) -> dict[fx.Node, int]:
        """Per call of a program, the index of its operator, or ``FREE`` for calls to copy."""
        return dict(zip(program.calls, self._grouping.owners, strict=True))

    def evaluation(self) -> Captured:
        """The same module in evaluation mode.

        It shares the parameters and has the same operators, without those that do nothing in
        evaluation, so that the stages of a training plan cut it as well. Made once.
        """
        if self._evaluation is None:
            with only_frozen(self.module, self.frozen):
                self._evaluation = Captured._of(
                    self.module, self._layout, self.granularity, training=False, like=self
                )
        return self._evaluation

    def like(self, example: Batch) -> Captured:
        """The same operators for batches with other sizes besides the samples, such as shorter
        sequences. Made once, and kept in ``alike``.

        Raises:
            CaptureError: if the module runs other operations for them.
            ValueError: if a tensor is larger than in the example of this one, by which plans count
                memory, or of another type, or the example is built otherwise.
        """
        leaves, own = self.flatten_batch(example), self.leaf_types
        for name, leaf in leaves.items():
            (shape, dtype), here = own[name], tuple(leaf.shape[1:])
            fits = len(here) == len(shape) and all(a <= b for a, b in zip(here, shape, strict=True))
            if not fits or leaf.dtype != dtype:
                raise ValueError(
                    f"a bucket has {name} as {told_type(here, leaf.dtype)}, the example of the "
                    f"workload as {told_type(shape, dtype)}; plans count memory by the example, so "
                    "make the largest of them the example, all of one type"
                )
        sizes = sizes_of(leaves)
        if sizes not in self.alike:
            layout = BatchLayout.of(example)
            with only_frozen(self.module, self.frozen):
                found = Captured._of(
                    self.module, layout, self.granularity, self.training, like=self
                )
            if (found.value_calls, found.batch_dims) != (self.value_calls, self.batch_dims):
                raise CaptureError(
                    f"{type(self.module).__name__} has its samples in other places for batches of "
                    f"{_told_sizes(found)} than for those of {_told_sizes(self)}"
                )
            self.alike[sizes] = found
        return self.alike[sizes]

    def for_batch(self, leaves: Mapping[str, torch.Tensor]) -> Captured:
        """The one of ``alike`` for the sizes of a batch; this one where there is none."""
        return self.alike.get(sizes_of(leaves), self)


@dataclass(frozen=True, slots=True)
class Coupling:
    """An operation across samples, the path of the module it is called in, and its operator."""

    operation: str
    module: str
    operator: str


def _degree(flow: Flow) -> int | None:
    """The power of the number of samples in an output; one without samples is its own mean."""
    if flow.kind in ("additive", "statistic"):
        return flow.degree if flow.is_sum else None
    return None if flow.kind == "coupled" else -1


def sizes_of(leaves: Mapping[str, torch.Tensor]) -> Sizes:
    """Of the tensors of a batch."""
    return tuple(tuple(leaf.shape[1:]) for leaf in leaves.values())


def told_type(shape: Sequence[int], dtype: torch.dtype) -> str:
    """``[samples, 64] int64``."""
    return f"[{', '.join(['samples', *map(str, shape)])}] {str(dtype).removeprefix('torch.')}"


def _told_sizes(captured: Captured) -> str:
    return ", ".join(f"{n} {told_type(*kind)}" for n, kind in captured.leaf_types.items())


def _other_samples(
    module: nn.Module, samples: int, signature: list[tuple[str, str]], other: FlatProgram
) -> CaptureError:
    """What to say of a program that has not the operations of another number of samples."""
    here, there = f"{samples} samples", f"{other.samples} samples"
    found = _first_other(module, signature, other, here, there)
    return CaptureError(
        f"{type(module).__name__} runs other operations for {there} than for {samples}, so its "
        f"operators are not the same for every micro-batch: {found}; look for a Python loop or a "
        "branch over the samples there, or for a list with an entry per sample, and write it with "
        "tensor operations"
    )


def _other_sizes(
    module: nn.Module, like: Captured, layout: BatchLayout, other: FlatProgram
) -> CaptureError:
    """Likewise of a bucket."""
    sizes = [tuple(layout.leaves[i].shape[1:]) for i in layout.positions]
    changed = [
        f"{name} [{', '.join(['samples', *map(str, size)])}]"
        for name, size, own in zip(layout.names, sizes, like.sizes, strict=True)
        if size != own
    ]
    found = _first_other(module, like._signature, other, "the example", "the bucket")
    return CaptureError(
        f"{type(module).__name__} runs other operations for a bucket ({', '.join(changed)}) than "
        f"for the workload's example, so the stages of its plan do not hold them: {found}; look "
        "for a Python loop or a branch over that size there, and write it with tensor operations"
    )


def _first_other(
    module: nn.Module,
    signature: list[tuple[str, str]],
    other: FlatProgram,
    known: str,
    unknown: str,
) -> str:
    """Where a program parts from the operations that are known."""
    pairs = zip_longest(signature, other.signature())
    first = next(i for i, (here, there) in enumerate(pairs) if here != there)
    here = f"calls {signature[first][0]}" if first < len(signature) else "has ended"
    there, where = "has ended", ""
    if first < len(other.calls):
        node = other.calls[first]
        there, where = f"calls {node.target}", f", {_place(module, node)}"
    return (
        f"the first that differs is number {first + 1}, where the forward of {known} {here} and "
        f"that of {unknown} {there}{where}"
    )


def _place(module: nn.Module, node: fx.Node) -> str:
    """The module that an operation is called in, with its class, and the line."""
    path = frame(node)
    owner = type(module.get_submodule(path)).__name__
    return f"in {path} ({owner}), {user_line(node)}" if path else f"in {owner}, {user_line(node)}"


def _device(module: nn.Module) -> torch.device:
    places = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    meta = (place for place in places if place.type == "meta")
    return next(meta, places[0] if places else torch.device("cpu"))


class _Exporter:
    """Programs of one module for any number of samples."""

    def __init__(
        self, module: nn.Module, layout: BatchLayout, training: bool, device: torch.device
    ) -> None:
        # What has sizes alone stays so here, whatever values the module is given.
        self.module = module = on_meta(module) if device.type == "meta" else module
        self.layout = layout
        self.training = training
        self.device = device
        self.wrapped = ReturnsLoss(module, layout.rebuild)
        self.names = _first_names(module)
        self.tensors: dict[PlaceholderSource, torch.Tensor] = {
            **{PlaceholderSource(PARAMETER, n): p for n, p in module.named_parameters()},
            **{PlaceholderSource(BUFFER, n): b for n, b in module.named_buffers()},
        }
        self.frozen = frozenset(n for n, p in module.named_parameters() if not p.requires_grad)
        self.samples = max(2, layout.samples)
        self.fixed: dict[int, torch.export.ExportedProgram] = {}
        self.dynamic: torch.export.ExportedProgram | None = None
        self.outputs: tuple[str, ...] = ()
        self.is_exported = False
        self.known = MetaKernels()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scalars besides the loss, once there is a program."""
        return self.outputs[1:]

    def traced(self, samples: int, device: torch.device | None = None) -> FlatProgram:
        """A program with values and without an export; raises NotPlainError."""
        if self.device.type != "meta" or (device or self.device) != self.device:
            raise NotPlainError("the module has values")
        leaves = self.layout.resized(samples, self.device)
        sources = [PlaceholderSource(BATCH_LEAF, name) for name in self.layout.names]
        batch = dict(zip(sources, leaves, strict=True))
        with self.in_mode(), plain_calls(), without_dynamo():
            program, self.outputs = trace_on_meta(
                self.wrapped, leaves, samples, {**self.tensors, **batch}, self.known
            )
        if any(program.writes_to(BATCH_LEAF)):
            raise NotPlainError("the batch is changed in place")
        with without_dynamo():
            return counted_means(program)

    def export(self) -> None:
        """Export the module, if possible for any number of samples."""
        if self.is_exported:
            return
        try:
            self.dynamic = self.run(self.samples, dynamic=True)
        except CaptureError as error:
            if error.__cause__ is None:
                raise  # what is wrong does not depend on how the module is exported
            self.fixed[self.samples] = self.run(self.samples, dynamic=False)
        if self.dynamic is not None and _is_fixed(self.dynamic):
            self.dynamic = None
            self.fixed[self.samples] = self.run(self.samples, dynamic=False)
        chosen = self.dynamic or self.fixed[self.samples]
        self.outputs = tuple(chosen.call_spec.out_spec.context)
        self.is_exported = True

    @contextmanager
    def in_mode(self) -> Iterator[None]:
        """Inside, the module is in the mode that it is captured in."""
        modes = {part: part.training for part in self.module.modules()}
        try:
            if self.module.training != self.training:
                self.module.train(self.training)
            with in_one_process():
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode

    def run(
        self, samples: int, *, dynamic: bool, works_with: int | None = None
    ) -> torch.export.ExportedProgram:
        leaves = self.layout.resized(samples, self.device)
        with self.in_mode(), on_one_device(self.module, self.device):
            return export(self.wrapped, leaves, dynamic=dynamic, works_with=works_with)

    def at(self, samples: int, device: torch.device | None = None) -> FlatProgram:
        """A program with values; tensors are constructed on the device."""
        self.export()
        if self.dynamic is not None:
            with suppress(RefusedError):
                return self.lowered(self.dynamic, samples, device)
        if samples not in self.fixed:
            self.fixed[samples] = self.run(samples, dynamic=False, works_with=self.samples)
        return self.lowered(self.fixed[samples], samples, device)

    def lowered(
        self, exported: torch.export.ExportedProgram, samples: int, device: torch.device | None
    ) -> FlatProgram:
        program = lower(
            exported, samples, names=self.names, batch_names=list(self.layout.names), device=device
        )
        program = numbers_as_tensors(program, self.outputs)
        examples = self.layout.resized(1, torch.device("meta"))
        leaves = dict(zip(self.layout.names, examples, strict=True))

        def find(source: PlaceholderSource) -> torch.Tensor:
            if source.kind == BATCH_LEAF:
                leaf = leaves[source.name]
                return torch.empty(
                    (samples, *leaf.shape[1:]), dtype=leaf.dtype, device=device or self.device
                )
            known = self.tensors.get(source)
            return program.constants[source.name] if known is None else known

        try:
            propagate(program, find, device)
        except Exception as error:
            if exported is self.dynamic:
                raise RefusedError from error
            raise
        for node, source in program.writes_to(BATCH_LEAF):
            raise CaptureError(
                f"{type(self.module).__name__} changes {source.name}, a tensor of the batch, in "
                f"place ({node.target}, {_place(self.module, node)}); other stages read the same "
                "batch, which may find it changed or not: work on a copy of it (clone), or take "
                "the operation that returns a new tensor"
            )
        return counted_means(program)


def _is_fixed(exported: torch.export.ExportedProgram) -> bool:
    """Whether the tracer met a line that needs the number of samples as a constant."""
    sizes = batch_sizes(exported)
    return any(isinstance(size, int) or size.node.expr.is_number for size in sizes)


@contextmanager
def only_frozen(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, parameters of these names are frozen and no others, whatever is for a while."""
    changed = [p for n, p in module.named_parameters() if p.requires_grad == (n in names)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


@contextmanager
def on_one_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, what of a module is elsewhere is copied to one device, as its forward needs it."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    away = [(tensor, tensor.data) for tensor in tensors if tensor.device != device]
    for tensor, data in away:
        tensor.data = data.to(device)
    try:
        yield
    finally:
        for tensor, data in away:
            tensor.data = data


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without values, and without the memory of any."""
    memo: dict[int, torch.Tensor] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        bare = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = bare
    return copy.deepcopy(module, memo)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer in the wrapped module -> its first in the user's."""
    result = {}
    for named in (module.named_parameters, module.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            result[f"module.{name}"] = first.setdefault(id(tensor), name)
    return result
