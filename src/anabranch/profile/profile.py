"""Seconds and bytes of every operator on one kind of device, measured or estimated."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Floats
from anabranch.graph.opgraph import OpGraph


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one operator.

    Attributes:
        forward_s, backward_s: seconds, one figure per sample count of the profile.
        kept_bytes: bytes per sample that it keeps between its forward and its backward: tensors
            that autograd saves inside it, and its own outputs that any operator saves. A saved
            output of another operator counts there.
        working_bytes: bytes per sample that one of its passes takes besides, while it runs.
        weight_s: seconds of its backward that only gradients of its weights need, which can wait
            until gradients of its inputs are sent; empty where unknown, for which half is taken.
        kept_fixed_bytes: bytes that it keeps besides ``kept_bytes`` whatever the number of samples,
            such as casts of its weights under autocast.
        waiting_bytes: bytes per sample of the gradients of its results that it holds until the
            gradients of its weights are computed, where a backward is split.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_bytes: int
    working_bytes: int = 0
    weight_s: tuple[float, ...] = ()
    kept_fixed_bytes: int = 0
    waiting_bytes: int = 0

    @property
    def second_half_s(self) -> tuple[float, ...]:
        """Seconds of gradients of weights; half of a backward where ``weight_s`` is empty."""
        return self.weight_s or tuple(seconds / 2 for seconds in self.backward_s)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return sample counts to measure at: 1, 2, 4 ... and ``largest`` itself."""
    return tuple(sorted({1 << i for i in range(largest.bit_length())} | {largest}))


ADAM_STATE = 2.0
"""Bytes of Adam's state per byte of parameters."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Seconds of an update of trainable parameters, clipping included, and its extra memory.

    ``fixed_s`` of each update, ``tensor_s`` for each parameter, ``byte_s`` for each of their bytes.

    Attributes:
        all_temporary: bytes that are alive at once only in an update, per byte of all parameters.
        largest_temporary: the same per byte of the largest parameter; an optimizer that goes from
            parameter to parameter has only these.
        state: bytes of the optimizer's state per byte of parameters.
    """

    fixed_s: float
    tensor_s: float
    byte_s: float
    all_temporary: float = 0.0
    largest_temporary: float = 0.0
    state: float = ADAM_STATE

    def __post_init__(self) -> None:
        for seconds in (self.fixed_s, self.tensor_s, self.byte_s):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise ValueError(f"an update has a time of {seconds} s")
        for share in (self.all_temporary, self.largest_temporary, self.state):
            if not (share >= 0 and math.isfinite(share)):
                raise ValueError(f"an update takes {share} bytes per byte of its parameters")

    def seconds(self, tensors: float, nbytes: float) -> float:
        """Seconds for a number of parameters with these bytes in all; none for no parameters."""
        if not tensors:
            return 0.0
        return self.fixed_s + self.tensor_s * tensors + self.byte_s * nbytes


@dataclass(frozen=True)
class Profile:
    """The costs of every operator of a graph.

    Attributes:
        samples: the sample counts that were measured, ascending.
        costs: one entry per operator of the graph.
        device: device on which it was measured, or for which it was estimated.
        source: ``measured``, ``estimated`` or ``imported``.
        proportional: measured at one size (PipeDream's and DAPPLE's files): times are taken as
            proportional to samples.
        update: seconds of the workload's optimizer; None where they were not measured.
        read_sample_s: seconds per sample in which a rank reads a batch; 0 where not measured.

    Raises:
        ValueError: if lengths differ or a figure is negative or not finite.
    """

    graph: OpGraph
    samples: tuple[int, ...]
    costs: tuple[OpCost, ...]
    device: str
    source: str
    proportional: bool = False
    update: UpdateCost | None = None
    read_sample_s: float = 0.0

    @cached_property
    def priced(self) -> dict[Hashable, dict[Hashable, Any]]:
        """Cache of cost models on these costs, by their settings; see ``CostModel.memo``."""
        return {}

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.graph):
            raise ValueError(f"{len(self.costs)} costs for {len(self.graph)} operators")
        if (
            not self.samples
            or list(self.samples) != sorted(set(self.samples))
            or self.samples[0] < 1
        ):
            raise ValueError(f"sample counts {self.samples} are not ascending from at least 1")
        if self.proportional and len(self.samples) != 1:
            raise ValueError("a proportional profile has exactly one sample count")
        for op, cost in zip(self.graph.ops, self.costs, strict=True):
            if not len(cost.forward_s) == len(cost.backward_s) == len(self.samples):
                raise ValueError(
                    f"operator {op.name} lacks a time for one of {self.samples} samples"
                )
            if len(cost.weight_s) not in (0, len(self.samples)):
                raise ValueError(
                    f"operator {op.name} has {len(cost.weight_s)} times of gradients of weights "
                    f"for {self.samples} samples"
                )
            for seconds, whole in zip(cost.weight_s, cost.backward_s, strict=False):
                if not 0 <= seconds <= whole:
                    raise ValueError(
                        f"gradients of weights of operator {op.name} take {seconds} s of the "
                        f"{whole} s of its backward"
                    )
            for seconds in (*cost.forward_s, *cost.backward_s):
                if not (seconds >= 0 and math.isfinite(seconds)):
                    raise ValueError(f"operator {op.name} has a time of {seconds} s")
            nbytes = cost.kept_bytes, cost.kept_fixed_bytes, cost.working_bytes, cost.waiting_bytes
            if min(nbytes) < 0:
                raise ValueError(f"operator {op.name} has bytes below zero: {nbytes}")

    @cached_property
    def seconds(self) -> Floats:
        """Forward and backward seconds: [way, operator, sample count]."""
        ways = [[c.forward_s for c in self.costs], [c.backward_s for c in self.costs]]
        return np.array(ways, dtype=np.float64)

    @cached_property
    def weight_seconds(self) -> Floats:
        """Seconds of backwards that gradients of weights take: [operator, sample count]."""
        return np.array([cost.second_half_s for cost in self.costs], dtype=np.float64)

    def scaled(self, factors: Any) -> Profile:
        """Return the profile with seconds times factors, which broadcast to ``seconds``."""
        ways = (self.seconds * factors).tolist()
        backward_factors = np.broadcast_to(factors, self.seconds.shape)[1]
        weights = (self.weight_seconds * backward_factors).tolist()
        costs = tuple(
            replace(
                cost,
                forward_s=tuple(forward),
                backward_s=tuple(backward),
                # Rounding may not make a part longer than the whole.
                weight_s=tuple(map(min, weight, backward)) if cost.weight_s else (),
            )
            for cost, forward, backward, weight in zip(self.costs, *ways, weights, strict=True)
        )
        return replace(self, costs=costs)

    @property
    def origin(self) -> str:
        """One line for every output that rests on this profile."""
        how = f"{self.source}, {self.device}, at {', '.join(map(str, self.samples))} samples"
        how += f", in {self.graph.precision}" * (self.graph.precision != "fp32")
        return f"{how}; taken as proportional to samples" if self.proportional else how


def bytes_per_sample(
    few: Sequence[int], many: Sequence[int], samples: tuple[int, int]
) -> list[int]:
    """Return the bytes per sample of every operator, from its bytes at two sample counts. Bytes
    that do not grow with the samples (a causal mask, gradients of parameters) drop out.
    """
    low, high = samples
    if low == high:
        return [-(-b // high) for b in many]
    return [max(0, -(-(b - a) // (high - low))) for a, b in zip(few, many, strict=True)]


def fixed_bytes(few: Sequence[int], per_sample: Sequence[int], samples: int) -> list[int]:
    """Return the bytes of every operator at a sample count that do not grow with the samples."""
    pairs = zip(few, per_sample, strict=True)
    return [max(0, nbytes - growing * samples) for nbytes, growing in pairs]


def on_grid(forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Round seconds so that their sums are exact in any order, also with every forward twice."""
    exponent = math.frexp(2 * float(forward.sum()) + float(backward.sum()))[1]
    unit = max(math.ldexp(1.0, exponent - 52), math.ulp(0.0))
    return np.rint(forward / unit) * unit, np.rint(backward / unit) * unit


def interpolation_at(
    samples: float, measured: Sequence[int] | NDArray[np.int64]
) -> tuple[int, float]:
    """Return the index of the count below ``samples``, and their share of the way to the next."""
    below = 0
    while below < len(measured) - 2 and measured[below + 1] < samples:
        below += 1
    low, high = measured[below], measured[below + 1]
    return below, (samples - low) / (high - low)


def interpolated(low: Any, high: Any, share: float) -> Any:
    """Return seconds at a share of the way from low to high; exactly these at either end."""
    return low * (1 - share) + high * share
