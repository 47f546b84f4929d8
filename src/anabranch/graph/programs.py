"""Flat programs of a captured module, with the statistics of a whole batch put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import fx, nn

from anabranch.errors import CaptureError
from anabranch.graph.exporter import Exporter, place_of
from anabranch.graph.flat_program import (
    BATCH_LEAF,
    BUFFER,
    FlatProgram,
    PlaceholderSource,
)
from anabranch.graph.group import Grouping
from anabranch.graph.module_state import device_of, only_frozen
from anabranch.graph.rewrites import Rewrite
from anabranch.graph.whole_batch import WholeBatch

Signature = list[tuple[str, str]]
"""Operation and module of every call of a program."""


class Programs:
    """Flat programs of one module, which have the same calls for any number of samples.

    Args:
        module: the user's, whose parameters the programs use.
        made: the programs that there are, on the exporter's device.
    """

    def __init__(
        self,
        module: nn.Module,
        exporter: Exporter,
        grouping: Grouping,
        whole_batch: WholeBatch,
        signature: Signature,
        made: Sequence[FlatProgram],
    ) -> None:
        self.module = module
        self.grouping = grouping
        self.signature = signature
        self._exporter = exporter
        self._whole_batch = whole_batch
        self._made = {(program.samples, exporter.device): program for program in made}

    @property
    def samples(self) -> int:
        """Number of samples of the example (2 where it had one)."""
        return self._exporter.samples

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that were not trainable when the module was captured."""
        return self._exporter.frozen

    @property
    def rewrites(self) -> Sequence[Rewrite]:
        """Rewrites of the programs, with their sites."""
        return self._exporter.rewrites

    @property
    def refusals(self) -> Sequence[str]:
        """For each rewrite, why other sites could not be rewritten."""
        return self._exporter.refusals

    @property
    def device(self) -> torch.device:
        """Device of the module's parameters now."""
        return device_of(self.module)

    @property
    def capture_device(self) -> torch.device:
        """Device of the module's parameters when it was captured."""
        return self._exporter.device

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
        if (samples, place) not in self._made:
            with only_frozen(self.module, self.frozen):
                program = self._exporter.program(samples, place)
                require_same_calls(self.module, self.samples, self.signature, program)
                self._made[samples, place] = self._whole_batch.put_in(program)
        return self._made[samples, place]

    def owners(self, program: FlatProgram) -> dict[fx.Node, int]:
        """Per call of a program, the index of its operator, or ``FREE`` for calls to copy."""
        return dict(zip(program.calls, self.grouping.owners, strict=True))

    @property
    def statistics(self) -> frozenset[str]:
        """Names of the whole batch's statistics, which programs read besides its tensors."""
        return frozenset(self._whole_batch.names)

    def tensors_for(self, names: frozenset[str]) -> frozenset[str]:
        """The tensors of a batch that tensors and statistics of these names are made of."""
        own = names - self.statistics
        return own if own == names else own | self.at(self.samples).known.leaves

    def with_statistics(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of a whole batch, with the statistics that programs of its slices read.

        Args:
            device: where statistics are computed, by default where the tensors are.

        Raises:
            CaptureError: if the model cannot run with as many samples as are left over when the
                batch is taken in parts.
        """
        if not self._whole_batch.statistics:
            return dict(tensors)
        first = next(iter(tensors.values()))
        samples, place = int(first.shape[0]), device or first.device
        sums: list[torch.Tensor] = []
        start = 0

        def find(source: PlaceholderSource) -> torch.Tensor:
            if source.kind == BATCH_LEAF:
                return tensors[source.name][start : start + size].to(place)
            if source.kind == BUFFER:
                return self.module.get_buffer(source.name).to(place)
            return program.constants[source.name].to(place)

        while start < samples:
            size = self._part(samples - start, place)
            program = self.at(size, device=place)
            sums = program.known.add(size, find, sums)
            start += size
        values = program.known.values(samples, sums, find)
        return {**tensors, **self._whole_batch.rows(values, samples)}

    def is_even(
        self, tensors: Mapping[str, torch.Tensor], slices: Sequence[tuple[int, int]]
    ) -> bool:
        """True if the statistics of every slice of a batch are in proportion to its samples."""
        if not self._whole_batch.statistics:
            return True
        whole = self.with_statistics(tensors)
        for start, stop in slices:
            part = self.with_statistics({n: tensor[start:stop] for n, tensor in tensors.items()})
            for name in self.statistics:
                if not torch.allclose(part[name].sum(0), whole[name][start:stop].sum(0), rtol=1e-9):
                    return False
        return True

    def _part(self, samples: int, place: torch.device) -> int:
        """The most of so many samples for which there is a program."""
        known = (size for size, where in self._made if where == place and size <= samples)
        return max(known, default=samples)


def require_same_calls(
    module: nn.Module, samples: int, signature: Signature, other: FlatProgram
) -> None:
    """Raise CaptureError if a program has not the calls of that for another number of samples."""
    if other.signature() == signature:
        return
    here, there = f"{samples} samples", f"{other.samples} samples"
    difference = first_difference(module, signature, other, here, there)
    raise CaptureError(
        f"{type(module).__name__} runs other operations for {there} than for {samples}, so its "
        f"operators are not the same for every micro-batch: {difference}; look for a Python loop "
        "or a branch over the samples there, or for a list with an entry per sample, and write it "
        "with tensor operations"
    )


def first_difference(
    module: nn.Module, signature: Signature, other: FlatProgram, known: str, unknown: str
) -> str:
    """The first call at which a program differs from a signature, in words."""
    pairs = zip_longest(signature, other.signature())
    first = next(i for i, (here, there) in enumerate(pairs) if here != there)
    here = f"calls {signature[first][0]}" if first < len(signature) else "has ended"
    there, where = "has ended", ""
    if first < len(other.calls):
        node = other.calls[first]
        there, where = f"calls {node.target}", f", {place_of(module, node)}"
    return (
        f"the first that differs is number {first + 1}, where the forward of {known} {here} and "
        f"that of {unknown} {there}{where}"
    )
