"""Flat programs of a captured module, with the statistics of a whole batch put in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from anabranch.device import accelerator
from anabranch.errors import CaptureError
from anabranch.graph.batch_layout import BatchLayout
from anabranch.graph.call_traits import arguments, is_size
from anabranch.graph.flat_program import FlatProgram, PlaceholderSource, upstream
from anabranch.graph.group import Grouping
from anabranch.graph.module_state import device_of
from anabranch.graph.opgraph import Precision
from anabranch.graph.samples.batch_statistics import WholeBatch
from anabranch.graph.samples.flows import Total
from anabranch.graph.slices import view_named, whole_name
from anabranch.graph.tracing.autocast import HALF, AutocastRegion
from anabranch.graph.tracing.exporter import Exporter
from anabranch.graph.tracing.lowering import with_casts
from anabranch.graph.user_lines import call_place
from anabranch.remembered import remembered


def jump(
    program: FlatProgram, twice: FlatProgram, other: FlatProgram
) -> tuple[fx.Node, Any, Any] | None:
    """Return the first call of ``other`` with a number that does not follow from the programs for
    some samples and for twice as many; with the number that it contradicts, and its own::

        x.mean() * 2                           the same for all
        x.sum() / len(x)                       another for each: that of the whole batch is put in
        x.mean() * (2 if len(x) > 9 else 1)    jumps: slices of a batch would have another loss

    Sizes are left out: they have to fit the tensors, or nothing runs.
    """
    for calls in zip(program.calls, twice.calls, other.calls, strict=True):
        numbers = [tree_leaves(list(_values(call))) for call in calls]
        if len({len(values) for values in numbers}) > 1:
            continue  # lists of tensors
        for a, b, value in zip(*numbers, strict=True):
            if _jumps(a, b, value):
                return calls[2], a if value != a else b, value
    return None


def _values(call: fx.Node) -> Iterator[Any]:
    """Generate the arguments that are neither tensors nor sizes."""
    for name, value in arguments(call).items():
        if not (is_size(call, name) or isinstance(value, fx.Node | torch.device)):
            yield value


def _jumps(a: Any, b: Any, value: Any) -> bool:
    """Return True unless a number is always the same, or another for twice the samples."""
    are_numbers = all(type(number) in (int, float) for number in (a, b, value))
    is_any = any(isinstance(number, fx.Node | torch.device) for number in (a, b, value))
    return not is_any and (a == b or not are_numbers) and not a == b == value


Signature = list[tuple[str, str]]
"""Operation and module of every call of a program."""


@dataclass(eq=False, repr=False)
class Programs:
    """Flat programs of one module, which have the same calls for any number of samples.

    Attributes:
        module: the user's module, whose parameters the programs use.
        exporter: exporter of the module; has its device, its rewrites and their refusals.
        made: programs that exist already, on the exporter's device.
    """

    module: nn.Module
    exporter: Exporter
    grouping: Grouping
    whole_batch: WholeBatch
    signature: Signature
    made: InitVar[Sequence[FlatProgram]]

    def __post_init__(self, made: Sequence[FlatProgram]) -> None:
        self._made = {(program.samples, self.exporter.device): program for program in made}
        self._make = self._lowered

    @property
    def samples(self) -> int:
        """Number of samples of the example (2 where it had one)."""
        return self.exporter.samples

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    @property
    def example(self) -> FlatProgram:
        """The program of the example, on the device of the capture."""
        return self.at(self.samples, device=self.exporter.device)

    def at(self, samples: int, *, device: torch.device | str | None = None) -> FlatProgram:
        """Return the flat program for a number of samples.

        Args:
            samples: at least 1.
            device: where tensors are constructed; by default where the module's parameters are now.

        Raises:
            CaptureError: if the model cannot run with that many samples, or runs other operations.
            ValueError: for less than one sample, or a device that this machine does not have.
        """
        if samples < 1:
            raise ValueError(f"{samples} samples; at least 1 is needed")
        device = torch.device(device) if device is not None else self.device
        if accelerator.is_on_accelerator(device) and not accelerator.count(device.type):
            raise ValueError(f"a program for {device} was asked for, but no such device is here")
        if (samples, device) not in self._made:
            self._made[samples, device] = self._make(samples, device)
        return self._made[samples, device]

    def _lowered(self, samples: int, device: torch.device) -> FlatProgram:
        program = self.exporter.program(samples, device)
        self._require_same(program)
        return self.whole_batch.put_in(program)

    def under_autocast(self, precision: Precision, device_type: str) -> Programs:
        """Return the same programs under autocast, with casts in the operators that read them.

        Raises:
            ValueError: for another precision than bf16 and fp16.
        """
        if precision not in HALF:
            raise ValueError(f"precision {precision!r} is none of fp32, bf16, fp16")
        region, programs = AutocastRegion(device_type, HALF[precision]), copy(self)
        example, programs.grouping = with_casts(self.example, region, self.grouping)
        programs._made = {(self.samples, self.exporter.device): example}

        def make(samples: int, device: torch.device) -> FlatProgram:
            program = self.at(samples, device=device)
            return with_casts(program, region, self.grouping)[0]

        programs._make = make
        return programs

    @remembered
    def require_alike(self, samples: int) -> None:
        """Raise CaptureError if the module does something else with a whole batch of so many
        samples than with slices of it. Where it does not run with so many, slices are all there is.
        """
        if self.exporter.is_general(samples):
            return
        try:
            program = self.exporter.program(samples, self.exporter.device)
        except CaptureError:
            return
        self._require_same(program)

    def _require_same(self, program: FlatProgram) -> None:
        """Raise CaptureError if a program has other calls than the example's, or other numbers."""
        here, there = _counted(self.samples), _counted(program.samples)
        require_same_calls(self.module, self.signature, program, known=here, unknown=there)
        if not self.exporter.fixed:
            return
        first, twice = (
            self.exporter.program(count * self.samples, self.exporter.device) for count in (1, 2)
        )
        if (difference := jump(first, twice, program)) is not None:
            call, known, number = difference
            raise CaptureError(
                f"{type(self.module).__name__} computes with {number!r} for {program.samples} "
                f"samples where it has {known!r} for {self.samples} or {2 * self.samples} "
                f"({call.target}, {call_place(self.module, call)}), so a batch and its "
                "micro-batches would have other losses: leave out the branch on the number of "
                "samples there, or decide before the forward and pass the number in the batch, as "
                "a tensor with an entry per sample"
            )

    @property
    def statistics(self) -> frozenset[str]:
        """Names of the whole batch's statistics, which programs read besides its tensors."""
        return frozenset(self.whole_batch.names)

    def tensors_for(self, names: frozenset[str]) -> frozenset[str]:
        """Return the tensors of a batch from which tensors and statistics of these names follow."""
        own = names - self.statistics
        program = self.at(self.samples).statistics
        if own == names or program is None:
            return own
        # Statistics of no tensor are those of the number of samples.
        read = {s.name for s in program.sources.values() if s.kind == "batch"}
        return own | read or frozenset(self.exporter.layout.names[:1])

    def with_statistics(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a whole batch, with the statistics that its slices read.

        Args:
            device: where statistics are computed, by default where the tensors are.

        Raises:
            CaptureError: if the model cannot run with as many samples.
        """
        if not self.whole_batch.statistics:
            return dict(tensors)
        first = next(iter(tensors.values()))
        samples, device = int(first.shape[0]), device or first.device
        program = self.at(samples, device=device).statistics
        assert program is not None
        if device.type == "meta":
            like = [node.meta["val"] for node in program.outputs]
            values = [torch.empty(v.shape, dtype=v.dtype, device=device) for v in like]
        else:
            values = self.run(program, tensors, device)
        return {**tensors, **self.whole_batch.rows(values, samples)}

    def run(
        self,
        program: FlatProgram,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | None = None,
        wanted: Sequence[fx.Node] | None = None,
    ) -> list[torch.Tensor]:
        """Compute outputs, or ``wanted`` values, for a batch, with the module's own state."""
        written = program.changed("parameter")

        def find(source: PlaceholderSource) -> torch.Tensor:
            if source.kind == "batch":
                value = tensors[source.name]
            elif source.kind == "parameter":
                value = view_named(source.name, self.module.get_parameter(whole_name(source.name)))
                value = value.clone() if source.name in written else value
            elif source.kind == "buffer":
                value = self.module.get_buffer(source.name).clone()  # it may count calls
            else:
                value = program.constants[source.name].clone()
            return value if device is None else value.to(device)

        return program.run(find, wanted)

    def is_even(
        self, tensors: Mapping[str, torch.Tensor], slices: Sequence[tuple[int, int]]
    ) -> bool:
        """Return True if the statistics that the loss reads, or state that the forward changes, are
        in proportion to the samples of slices.
        """
        program = self.example
        writes = (call for call, _ in program.writes_to("buffer", "parameter"))
        above = upstream([*program.outputs[:1], *writes])
        read = {program.sources[node].name for node in above if node in program.sources}
        if not (names := self.statistics & read):
            return True
        whole = self.with_statistics(tensors)
        for start, stop in slices:
            try:
                part = self.with_statistics(_sliced(tensors, start, stop))
            except (IndexError, RuntimeError):  # the batch names samples that the part has not
                return False
            for name in names:
                if not torch.allclose(part[name].sum(0), whole[name][start:stop].sum(0), rtol=1e-9):
                    return False
        return True


def _counted(samples: int) -> str:
    return f"{samples} sample{'s' * (samples > 1)}"


def require_same_calls(
    module: nn.Module, signature: Signature, other: FlatProgram, *, known: str, unknown: str
) -> None:
    """Raise CaptureError if a program has other calls than a signature.

    Args:
        known, unknown: descriptions of the inputs of the signature and of the program.
    """
    if (calls := other.signature()) == signature:
        return
    pairs = zip_longest(signature, calls)
    first = next(i for i, (here, there) in enumerate(pairs) if here != there)
    here = f"calls {signature[first][0]}" if first < len(signature) else "has ended"
    there, where = "has ended", ""
    if first < len(calls):
        node = other.calls[first]
        there, where = f"calls {node.target}", f", {call_place(module, node)}"
    raise CaptureError(
        f"{type(module).__name__} runs other operations for {unknown} than for {known}, so its "
        f"operators are not the same for both: the first that differs is number {first + 1}, where "
        f"the forward of {known} {here} and that of {unknown} {there}{where}; look for a Python "
        "loop or a branch over that size there, or for a list with an entry per sample, and write "
        "it with tensor operations; a vision-language model of transformers takes batches of "
        "anabranch.multimodal_batch as it is"
    )


TOLERANCE = 1e-2
"""Relative difference that rounding may make, in half precision as well; a loss that compares
samples differs by tens of percent."""


def halves_agree(programs: Programs, layout: BatchLayout, totals: Mapping[str, Total]) -> bool:
    """Compare loss and metrics of the example's halves with those of the whole example, which tells
    what the graph does not: whether an operator of another library computes across samples.

    Args:
        programs: programs of a module with values, in evaluation mode, so without dropout.
        totals: totals of the loss and the metrics, in the order of the outputs, see ``Captured``.

    Raises:
        CaptureError: if the module does not run with as many samples.
        RuntimeError: if an operator does not run on this machine.
    """
    half = max(1, layout.samples // 2)
    resized = layout.resized(2 * half, programs.exporter.device)
    tensors = programs.with_statistics(dict(zip(layout.names, resized, strict=True)))
    slices = (0, 2 * half), (0, half), (half, 2 * half)
    whole, *parts = (
        map(float, programs.run(programs.at(stop - start), _sliced(tensors, start, stop)))
        for start, stop in slices
    )
    return all(
        math.isclose(math.fsum(part) / (1 + (kind == "mean")), one, rel_tol=TOLERANCE, abs_tol=1e-6)
        for kind, one, *part in zip(totals.values(), whole, *parts, strict=True)
        if kind != "coupled"
    )


def _sliced(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[start:stop] for name, tensor in tensors.items()}
