"""Prices of stages at one micro-batch size, and the modes in which a stage may use its devices.

The period of a stage, seconds from one micro-batch to the next, is on ceil(b / d) samples, with the
all-reduce over d devices that are numbered in a row, and a byte across the border at
``border_price``::

    work     max(forward + backward,  price per byte * max(bytes in, bytes out))
    left     what the last backward, 2/3 of forward + backward, does not hide of the all-reduce
    period   work + left / micro-batches of a step

Compute hides transfers, the last backward hides a part of the all-reduce, and the rest is spread
over the micro-batches. PipeDream and Piper have their published objectives instead: the largest of
all three, and the sum.

All that crosses the border of a stage is taken to leave its node, unless the whole cluster is one,
on a card that nobody else uses; the simulator knows where the devices are.

Memory is that of ``CostModel.device_bytes`` with min(h + 1, M) micro-batches in flight, h the
stage's height.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.cost.communication import all_reduce_s
from anabranch.cost.footprint import Number, StageFootprint, Traffic
from anabranch.graph.opgraph import bits
from anabranch.plans.stages import slice_sizes
from anabranch.remembered import remembered

UNBOUNDED = 1 << 20
"""A height that no stage reaches."""

ROUNDING = 1 + 1e-9
"""Factor by which seconds and bytes that are summed in another order may differ."""

HIDING = 2 / 3
"""Backward's share of a micro-batch's compute; it runs while gradients are summed."""


def traffic_s(comes: Traffic, goes: Traffic, samples: Number, per_byte_s: Number) -> Number:
    """Return the seconds of transfers per micro-batch, in the direction that takes longer."""
    if comes.has_fixed or goes.has_fixed:
        return np.maximum(comes.at(samples), goes.at(samples)) * per_byte_s
    return np.maximum(comes.per_sample, goes.per_sample) * samples * per_byte_s


def period_s(
    traffic_s: Number, compute_s: Number, reduce_s: Number, num_microbatches: Number
) -> Number:
    """Return the period, by the formula at the head of this file."""
    left_s = np.maximum(0.0, reduce_s - HIDING * compute_s)
    return np.maximum(compute_s, traffic_s) + left_s / num_microbatches


@dataclass(frozen=True, slots=True)
class Mode:
    """Use of devices by a stage: number of replicas, recomputation."""

    replicas: int
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A stage without devices: its operators as a bit mask; the rest as in ``Mode``."""

    mask: int
    replicas: int
    recompute: bool = False


@dataclass(frozen=True)
class MicrobatchPrices:
    """Periods and memory for one micro-batch size, of many stages at once or of one ``Part``.

    Attributes:
        degrees: numbers of replicas that may be used, ascending.
    """

    cost: CostModel
    batch_size: int
    microbatch_size: int
    degrees: tuple[int, ...]
    memory_bytes: float
    recompute: bool = False

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """All modes that may be used, by devices, each first without recomputation."""
        recompute = (False, True) if self.recompute else (False,)
        return tuple(Mode(degree, again) for degree in self.degrees for again in recompute)

    @cached_property
    def num_microbatches(self) -> int:
        return -(-self.batch_size // self.microbatch_size)

    def samples(self, degree: int) -> int:
        """Return the samples on the fullest of ``degree`` replicas."""
        return -(-self.microbatch_size // degree)

    def covers_replicas(self, replicas: int) -> bool:
        """Return True if the profile covers the samples of each of this many replicas."""
        size, short = self.microbatch_size, self.batch_size % self.microbatch_size
        if not 1 <= replicas <= size:
            return False
        samples = (*slice_sizes(size, replicas), *(slice_sizes(short, replicas) if short else ()))
        # The profile covers a range, so its ends are enough.
        return self.cost.covers(min(samples)) and self.cost.covers(max(samples))

    @remembered
    def ring(self, degree: int) -> tuple[float, float]:
        """Return the seconds per byte and of latency of one all-reduce over replicas in a row."""
        cluster = self.cost.cluster
        return self.cost.ring_price(cluster.ring(range(min(degree, cluster.num_devices))), degree)

    def rates(self, replicas: int) -> tuple[float, float, float, float]:
        """Samples on the fullest replica, seconds per byte across the border, and ``ring``."""
        return self.samples(replicas), self.cost.border_price(replicas), *self.ring(replicas)

    def period_s(
        self, footprint: StageFootprint, compute_s: Number, rates: Iterable[Number]
    ) -> Number:
        """Return the seconds from one micro-batch to the next of a stage, or of each of many.

        Args:
            rates: of the mode, or arrays of those of several, with axes that broadcast.
        """
        samples, per_byte, *ring = rates
        traffic = traffic_s(footprint.border.comes, footprint.border.goes, samples, per_byte)
        reduce_s = all_reduce_s(footprint.held.summed, *ring)
        return period_s(traffic, compute_s, reduce_s, self.num_microbatches)

    def headroom(
        self, footprint: StageFootprint, replicas: Number, *, recompute: Number = False
    ) -> NDArray[np.int32]:
        """Return the largest height at which a stage, or each of many, fits; -1 if none."""
        size = self.microbatch_size
        memory = self.cost.memory(footprint, size, replicas, recompute=recompute)
        held = memory.most_in_flight(self.memory_bytes, self.num_microbatches)
        # More than all micro-batches are never in flight.
        return np.where(held == self.num_microbatches, UNBOUNDED, held - 1).astype(np.int32)

    def op_seconds(self, part: Part) -> NDArray[np.float64]:
        """Seconds of a micro-batch for every operator of the model, run as this part is."""
        forward, backward = self.cost.op_seconds(self.samples(part.replicas))
        return forward * (1 + part.recompute) + backward

    def compute_s(self, part: Part) -> float:
        """Return the seconds of a micro-batch on the fullest replica, recomputation included."""
        return float(self.op_seconds(part)[list(bits(part.mask))].sum())

    @remembered
    def part_period_s(self, part: Part) -> float:
        """Return the seconds from one micro-batch to the next."""
        footprint, rates = self.cost.footprint(part.mask), self.rates(part.replicas)
        return float(self.period_s(footprint, self.compute_s(part), rates))

    @remembered
    def part_headroom(self, part: Part) -> int:
        """Return the largest height at which the part fits; -1 if none."""
        footprint = self.cost.footprint(part.mask)
        return int(self.headroom(footprint, part.replicas, recompute=part.recompute))

    def parts(self, mask: int, most: int) -> Iterator[Part]:
        """Generate parts of these operators in every mode with up to ``most`` replicas."""
        for replicas in filter(self.covers_replicas, range(1, most + 1)):
            for recompute in (False, True)[: 1 + self.recompute]:
                yield Part(mask, replicas, recompute)
