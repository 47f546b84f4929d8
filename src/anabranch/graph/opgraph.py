"""The model as planners see it: operators and the values that flow between them.

An operator is a convex group of tensor operations, named after the module that they come from. A
value is one tensor, made by one operator (or part of the batch) and read by any number; it crosses
to a stage once however many operators there read it::

            +--> text.0 --> text.1 --+
    batch --+                        +--> head --> loss
            +--> image.0 -> image.1 -+

Sets of operators are integer bit masks in hot paths (bit i is operator i), else tuples of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from typing import Literal

from anabranch.graph.loss_kinds import LossKind

Granularity = Literal["operator", "layer", "block"]
Precision = Literal["fp32", "bf16", "fp16"]
"""``torch.autocast`` around the forward: to bfloat16, to float16, or none."""

BATCH = -1
"""The producer of a value that is part of the batch: every device has it, so it is never sent."""


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A table of embeddings: each sample looks some rows up, and only these have gradients.

    Attributes:
        lookups: rows of one sample, a row that is looked up twice counted twice.
        row_bytes: bytes of a row.
        sparse: the model asks for sparse gradients.
    """

    lookups: int
    row_bytes: int
    sparse: bool = False

    def __post_init__(self) -> None:
        if self.lookups < 1 or self.row_bytes < 1:
            raise ValueError(
                f"a table of which a sample looks up {self.lookups} rows of {self.row_bytes} bytes "
                "is none"
            )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter under the model's own name. Operators that name the same one are tied.

    ``table``: facts about it if the model does nothing with it but look up rows.
    """

    name: str
    nbytes: int
    trainable: bool = True
    table: LookupTable | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: unique name, names of its parameters, and a kind such as ``Linear``.

    ``whole_batch``: it computes across samples, so its values are right for the whole batch only.
    """

    name: str
    parameters: tuple[str, ...] = ()
    kind: str = ""
    whole_batch: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that operators exchange.

    Attributes:
        producer: index of the operator that makes it, or ``BATCH``.
        consumers: indices of the operators that read it, ascending, each larger than the producer.
        nbytes: bytes for one sample; for a value without a batch dimension, bytes in all.
        batched: has a batch dimension, so that it is sliced by samples.
        grad: a gradient of the same size flows back.
        name: for messages; the name of a batch entry where the producer is ``BATCH``.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: int
    batched: bool = True
    grad: bool = True
    name: str = ""

    def size(self, samples: float) -> float:
        """Return the bytes of the value for that many samples."""
        return self.nbytes * samples if self.batched else self.nbytes


@dataclass(frozen=True)
class OpGraph:
    """Operators in topological order, the values between them, and the parameters they share.

    ``loss_kind`` is None where nothing is known of the loss; ``normalised`` are the modules that
    take statistics over the samples of a micro-batch while training, as batch normalisation does;
    ``stateful`` are other buffers and frozen parameters that a forward in training changes.
    ``rewrites`` are those of the program (``graph.rewrites``), with their sites; ``rewritable``
    are names of others that it has sites for. ``whole_parameters``: the optimizer is not known to
    work on each element alone, so that none may cut a parameter. ``precision``: values are those
    under this autocast.

    Raises:
        ValueError: if a name occurs twice, a value runs against the order, a parameter is unknown.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...] = ()
    name: str = field(default="", compare=False)
    granularity: Granularity = field(default="layer", compare=False)
    loss_kind: LossKind | None = field(default=None, compare=False)
    normalised: tuple[str, ...] = field(default=(), compare=False)
    stateful: tuple[str, ...] = field(default=(), compare=False)
    rewrites: tuple[str, ...] = field(default=(), compare=False)
    rewritable: tuple[str, ...] = field(default=(), compare=False)
    whole_parameters: bool = field(default=False, compare=False)
    precision: Precision = field(default="fp32", compare=False)

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("a graph needs at least one operator")
        if len(self.index) != len(self.ops):
            twice = [op.name for i, op in enumerate(self.ops) if self.index[op.name] != i]
            raise ValueError(
                f"operator names occur more than once: {', '.join(sorted(set(twice)))}"
            )
        known = {parameter.name for parameter in self.parameters}
        if len(known) != len(self.parameters):
            raise ValueError("a parameter is listed more than once")
        for op in self.ops:
            for name in op.parameters:
                if name not in known:
                    raise ValueError(f"{op.name} reads parameter {name}, which is not listed")
        for value in self.values:
            if value.nbytes < 0 or not BATCH <= value.producer < len(self.ops):
                raise ValueError(f"value {value.name or value} has no size or no producer")
            if list(value.consumers) != sorted(set(value.consumers)):
                raise ValueError(f"consumers of value {value.name or value} are not ascending")
            if value.consumers and not value.producer < value.consumers[0]:
                raise ValueError(f"value {value.name or value} runs against the order")
            if value.consumers and value.consumers[-1] >= len(self.ops):
                raise ValueError(f"value {value.name or value} has a consumer that does not exist")

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def index(self) -> dict[str, int]:
        """Operator name -> position in the topological order."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (producer, consumer), each once, sorted; the batch makes none."""
        pairs = {(v.producer, c) for v in self.values if v.producer != BATCH for c in v.consumers}
        return tuple(sorted(pairs))

    @cached_property
    def successors(self) -> tuple[int, ...]:
        """Per operator, the bit mask of the operators that read a value of it."""
        return self._neighbours(self.edges)

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """Per operator, the bit mask of the operators whose values it reads."""
        return self._neighbours((b, a) for a, b in self.edges)

    @cached_property
    def gradient_targets(self) -> tuple[int, ...]:
        """Per operator, the bit mask of the operators to which it sends gradients."""
        values = (v for v in self.values if v.grad and v.producer != BATCH)
        return self._neighbours((c, v.producer) for v in values for c in v.consumers)

    def way_back(self, mask: int) -> int:
        """Return the operators of a set through which gradients go back to its inputs; none if no
        operator outside waits for any.
        """
        way = 0
        for op in bits(mask):
            if self.gradient_targets[op] & (way | ~mask):
                way |= 1 << op
        return way

    def _neighbours(self, pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        masks = [0] * len(self.ops)
        for a, b in pairs:
            masks[a] |= 1 << b
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Per operator, the bit mask of everything that depends on it, itself left out."""
        return _reached(self.successors, reversed(range(len(self.ops))))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per operator, the bit mask of everything that it depends on, itself left out."""
        return _reached(self.predecessors, range(len(self.ops)))

    @cached_property
    def whole_batch(self) -> int:
        """Bit mask of the operators that compute across samples."""
        return sum(1 << i for i, op in enumerate(self.ops) if op.whole_batch)

    @cached_property
    def parameter_bytes(self) -> dict[str, int]:
        """Parameter name -> bytes."""
        return {parameter.name: parameter.nbytes for parameter in self.parameters}

    @cached_property
    def readers(self) -> dict[str, int]:
        """Parameter name -> bit mask of its readers, for parameters that any operator reads."""
        readers: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            for name in op.parameters:
                readers[name] = readers.get(name, 0) | 1 << i
        return readers

    @cached_property
    def tied(self) -> dict[str, int]:
        """Trainable parameter that several operators read -> bit mask of these."""
        several = ((p.name, self.readers.get(p.name, 0)) for p in self.parameters if p.trainable)
        return {name: mask for name, mask in several if mask.bit_count() > 1}

    def mask(self, names: Iterable[str]) -> int:
        """Bit mask of the named operators; raises KeyError for a name that is not there."""
        return reduce(or_, (1 << self.index[name] for name in names), 0)

    def names(self, mask: int) -> tuple[str, ...]:
        """Return the names of the operators in a bit mask, in topological order."""
        return tuple(self.ops[i].name for i in bits(mask))

    def is_convex(self, mask: int) -> bool:
        """Return True if no path leaves the set and comes back."""
        below = above = 0
        for i in bits(mask):
            below |= self.descendants[i]
            above |= self.ancestors[i]
        return not below & above & ~mask


def _reached(next_to: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return, per operator, the mask of all that it reaches by ``next_to``, without itself."""
    masks = [0] * len(next_to)
    for i in order:
        for j in bits(next_to[i]):
            masks[i] |= masks[j] | 1 << j
    return tuple(masks)


def bits(mask: int) -> Iterator[int]:
    """Generate the positions of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of parameters and values, which tell models with operators of the same names apart.

    Attributes:
        parameter_bytes: bytes of all parameters, tied ones counted once.
        value_bytes: bytes of the batch and of all operator outputs, for one sample.
    """

    parameter_bytes: int
    value_bytes: int

    @staticmethod
    def of(graph: OpGraph) -> ModelSize:
        """Compute the size of a model from its graph."""
        return ModelSize(
            sum(graph.parameter_bytes.values()), sum(value.nbytes for value in graph.values)
        )
