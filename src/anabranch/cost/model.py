"""CostModel: the prices of one profiled model on one cluster. The package states the formulas.

Seconds of operators are rounded to multiples of one power of two. It is so small that the rounding
is some 2^-52 of their sum, and so large that the sum of all has less than 53 bits. So float64 adds
them without rounding, and sums in any order agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from anabranch.cluster import Calibration, Cluster, Link
from anabranch.compiled import Floats
from anabranch.cost import sparse
from anabranch.cost.communication import Route, all_reduce_price, all_reduce_s, border_price
from anabranch.cost.footprint import (
    Border,
    Number,
    ParameterBytes,
    StageFootprint,
    StagePasses,
    Traffic,
)
from anabranch.cost.memory import (
    MOST_TERMS,
    DeviceMemory,
    OptimizerBytes,
    StageBytes,
    deal,
    device_memory,
)
from anabranch.cost.overheads import UNCALIBRATED, update_cost
from anabranch.errors import ProfileError
from anabranch.graph.opgraph import BATCH, OpGraph, Parameter, bits
from anabranch.profile.profile import Profile, UpdateCost, interpolated, interpolation_at, on_grid
from anabranch.remembered import remembered


@dataclass(frozen=True)
class CostModel:
    """Prices stages of one model on one cluster.

    Attributes:
        profile: seconds and bytes of the operators.
        cluster: links and memory.
        optimizer_factor: bytes of the optimizer's state per byte of trainable parameter (SGD with
            momentum 1), in place of the profile's, or of Adam's 2.
        updates: number of updates of the weights in one batch, each with its all-reduce; more than
            1 where a planner is asked for a row of mini-batches without a flush.
        shard_optimizer: whether replicas share the optimizer's state, see ``Pipeline``; in memory,
            and in the seconds of the simulator, not in planners' own estimates.
        sparse_embeddings: whether embedding tables have sparse gradients, see ``ComputeOptions``.
        batch_size: samples of a step, for the rows of sparse gradients; 0 if not known.
    """

    profile: Profile
    cluster: Cluster
    optimizer_factor: float | None = None
    updates: int = 1
    shard_optimizer: bool = False
    sparse_embeddings: bool = False
    batch_size: int = 0

    @property
    def graph(self) -> OpGraph:
        return self.profile.graph

    def covers(self, samples: float) -> bool:
        """Return whether the profile prices this sample count; a proportional one prices any."""
        measured = self.profile.samples
        return samples > 0 and (self.profile.proportional or measured[0] <= samples <= measured[-1])

    @remembered
    def op_seconds(self, samples: float) -> tuple[Floats, Floats]:
        """Forward and backward seconds of every operator for this many samples on one device.

        Sums are exact in any order, also with every forward twice.

        Raises:
            ProfileError: outside the measured range.
        """
        return on_grid(*self._interpolate(self.profile.seconds, samples))

    @remembered
    def op_weight_s(self, samples: float) -> Floats:
        """Return the seconds of every operator's backward that gradients of its weights take.

        Raises:
            ProfileError: outside the measured range.
        """
        return self._interpolate(self.profile.weight_seconds, samples)

    def _interpolate(self, seconds: Floats, samples: float) -> Floats:
        measured = self.profile.samples
        if not self.covers(samples):
            raise ProfileError(
                f"the profile ({self.profile.origin}) says nothing about {samples:g} samples on "
                f"one device; profile again with a range that includes it, or choose a micro-batch "
                f"size and a number of replicas that give between {measured[0]} and "
                f"{measured[-1]} samples"
            )
        if self.profile.proportional or len(measured) == 1:
            return seconds[..., 0] * (samples / measured[0])
        row, share = interpolation_at(samples, measured)
        result: Floats = interpolated(seconds[..., row], seconds[..., row + 1], share)
        return result

    @remembered
    def stage_s(self, mask: int, samples: float, *, recompute: bool = False) -> tuple[float, float]:
        """Return forward and backward seconds of a set of operators for ``samples`` on one device,
        the forward once more in the backward with recomputation; 0 for no samples.
        """
        if not samples:
            return 0.0, 0.0
        ops = list(bits(mask))
        forward, backward = (float(seconds[ops].sum()) for seconds in self.op_seconds(samples))
        return forward, backward + forward * recompute

    @remembered
    def weight_s(self, mask: int, samples: float) -> float:
        """Seconds of a set's backward that can wait for its inputs' gradients; 0 for no samples."""
        return float(self.op_weight_s(samples)[self._waiting(mask)].sum()) if samples else 0.0

    @remembered
    def split_passes(self, mask: int) -> tuple[StagePasses, float]:
        """Return the bytes of a split backward's first half besides kept bytes, which stay, with
        gradients that wait for those of weights; and the bytes per sample of these alone.
        """
        ops, waiting = list(bits(mask)), set(self._waiting(mask))
        costs = self.profile.costs
        held = np.array([costs[op].waiting_bytes * (op in waiting) for op in ops], np.float64)
        own = self._gradients(mask), self.working_bytes[ops]
        return StagePasses.of(*own, -held, np.zeros(len(ops))), float(held.sum())

    def _waiting(self, mask: int) -> list[int]:
        """Return the operators of a set whose gradients of weights can wait: operators on the way
        back to its inputs, whose parameters no other operator of the set reads.
        """
        waiting = self.graph.way_back(mask)
        for readers, _ in self.tied:
            if (readers & mask).bit_count() > 1:
                waiting &= ~readers
        return list(bits(waiting))

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Cache for results that other modules compute from these prices, under their own keys.
        Cost models of one profile with the same settings share it.
        """
        settings = (getattr(self, field.name) for field in fields(self))
        return self.profile.priced.setdefault((type(self), *islice(settings, 1, None)), {})

    @cached_property
    def kept_bytes(self) -> Floats:
        """Bytes that each operator keeps for its backward, per sample."""
        return np.array([cost.kept_bytes for cost in self.profile.costs], dtype=np.float64)

    @cached_property
    def kept_fixed_bytes(self) -> Floats:
        """Bytes that each operator keeps whatever the number of samples."""
        return np.array([cost.kept_fixed_bytes for cost in self.profile.costs], dtype=np.float64)

    @cached_property
    def value_readers(self) -> tuple[int, ...]:
        """Bit mask of the operators that read each value."""
        return tuple(sum(1 << consumer for consumer in v.consumers) for v in self.graph.values)

    def message_bytes(self, values: Sequence[int], samples: float) -> tuple[float, float]:
        """Return the bytes of these values for this many samples, and of their gradients."""
        sizes = [(self.graph.values[i].size(samples), self.graph.values[i].grad) for i in values]
        return sum(size for size, _ in sizes), sum(size for size, grad in sizes if grad)

    @remembered
    def route(self, source: int, target: int) -> Route:
        """Return the way of a message between two devices: the slowest link on it, every port."""
        link = self.cluster.link(source, target)
        return Route(1 / link.bandwidth, link.latency_s, self.cluster.ports(source, target))

    @remembered
    def border_price(self, devices: int) -> float:
        return border_price(self.cluster, devices)

    def all_reduce_price(self, devices: Sequence[int]) -> tuple[float, float]:
        """Seconds per byte and of latency of the all-reduces of a batch over ascending devices."""
        return self.ring_price(self.cluster.ring(devices), len(devices))

    def least_all_reduce_price(self, ranks: int, level: int) -> tuple[float, float]:
        """Lower bound of ``all_reduce_price`` over ``ranks`` devices that meet at a level."""
        return self.ring_price(self.cluster.fastest_ring(ranks, level), ranks)

    def ring_price(self, link: Link, ranks: int) -> tuple[float, float]:
        """Return the ``all_reduce_price`` over ``ranks`` ranks whose slowest link is ``link``."""
        return all_reduce_price(link.bandwidth, link.latency_s, ranks, self.updates)

    def all_reduce_s(self, nbytes: float, devices: Sequence[int]) -> float:
        """Return the seconds of the all-reduces of a batch over ascending devices, one per update,
        on the slowest link among them.
        """
        return float(all_reduce_s(nbytes, *self.all_reduce_price(devices)))

    @property
    def calibration(self) -> Calibration:
        """Processor seconds of messages, passes and so on."""
        return self.cluster.calibration or UNCALIBRATED

    @cached_property
    def update(self) -> UpdateCost:
        """Seconds and memory of an update on a device."""
        return update_cost(self.profile, self.cluster, self.optimizer_factor)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.graph.parameters}

    def has_rows(self, parameter: Parameter) -> bool:
        """Return whether a parameter has a sparse gradient: the rows that a batch looks up."""
        table = parameter.table
        asked = table is not None and (table.sparse or self.sparse_embeddings)
        return asked and parameter.trainable and self.batch_size > 0

    @cached_property
    def _rows(self) -> dict[str, int]:
        """Parameter -> bytes of its rows in a whole batch, where their exchange takes less than a
        ring of the whole gradient.
        """
        tables = [(p, p.table) for p in self.graph.parameters if self.has_rows(p)]
        rows = {p: sparse.message_bytes(table, self.batch_size) for p, table in tables if table}
        return {p.name: nbytes for p, nbytes in rows.items() if 0 < nbytes < 2 * p.nbytes}

    @cached_property
    def tied(self) -> tuple[tuple[int, Parameter], ...]:
        """Parameters that several operators read, each behind the bit mask of its readers."""
        readers = self.graph.readers.items()
        return tuple((m, self.parameters[name]) for name, m in readers if m.bit_count() > 1)

    @cached_property
    def tied_gradients(self) -> tuple[tuple[int, float], ...]:
        """Bytes of gradients of trained ``tied`` parameters, behind the same masks."""
        held = ((mask, self.parameter_bytes(parameter)) for mask, parameter in self.tied)
        return tuple((mask, h.gradient) for mask, h in held if h.trainable)

    def parameter_bytes(self, parameter: Parameter) -> ParameterBytes[float]:
        rows, nbytes = self._rows.get(parameter.name, 0), parameter.nbytes
        return ParameterBytes(nbytes, nbytes * parameter.trainable, nbytes * (rows > 0), rows)

    @cached_property
    def own_parameter_bytes(self) -> ParameterBytes[Floats]:
        """Bytes of the parameters that each operator alone reads."""
        own = ParameterBytes(*(np.zeros(len(self.graph)) for _ in ParameterBytes._fields))
        for name, mask in self.graph.readers.items():
            if not mask & (mask - 1):
                for kind, nbytes in zip(
                    own, self.parameter_bytes(self.parameters[name]), strict=True
                ):
                    kind[mask.bit_length() - 1] += nbytes
        return own

    def stage_parameter_bytes(self, ops: Iterable[int]) -> ParameterBytes[float]:
        """Return the bytes of the parameters that a set of operators reads, each counted once."""
        chosen = list(set(ops))
        held = [float(kind[chosen].sum()) for kind in self.own_parameter_bytes]
        mask = sum(1 << op for op in chosen)
        tied = (p for users, p in self.tied if users & mask)
        return ParameterBytes(*map(sum, zip(held, *map(self.parameter_bytes, tied), strict=True)))

    @cached_property
    def largest_gradients(self) -> Floats:
        """Bytes of the largest gradient of a parameter that each operator reads."""
        sizes = {name: self.parameter_bytes(p).gradient for name, p in self.parameters.items()}
        read = ([sizes[name] for name in op.parameters] for op in self.graph.ops)
        return np.array([max(gradients, default=0) for gradients in read], dtype=np.float64)

    def _gradients(self, mask: int) -> Floats:
        """Return the bytes of gradients of parameters in the backward of each operator of a set."""
        waiting = StagePasses.waiting(mask, self.tied_gradients)
        return self.largest_gradients[[*bits(mask)]] + waiting

    @cached_property
    def working_bytes(self) -> Floats:
        """Bytes per sample that a pass of each operator takes besides kept bytes."""
        return np.array([cost.working_bytes for cost in self.profile.costs], dtype=np.float64)

    def border(self, mask: int) -> Border:
        """Bytes that cross the border of a set of operators; the batch is at hand everywhere."""
        sums = [[0.0, 0.0] for _ in range(4)]
        enters, leaves, enters_back, leaves_back = sums
        for value, readers in zip(self.graph.values, self.value_readers, strict=True):
            is_made = value.producer != BATCH and mask >> value.producer & 1
            if is_made and readers & ~mask:
                leaves[not value.batched] += value.nbytes
                enters_back[not value.batched] += value.nbytes * value.grad
            elif not is_made and readers & mask and value.producer != BATCH:
                enters[not value.batched] += value.nbytes
                leaves_back[not value.batched] += value.nbytes * value.grad
        return Border(*(Traffic(per_sample, fixed) for per_sample, fixed in sums))

    @remembered
    def footprint(self, mask: int) -> StageFootprint:
        ops = list(bits(mask))
        kept, gradients = self.kept_bytes[ops], self.largest_gradients[ops]
        kept_fixed = self.kept_fixed_bytes[ops]
        return StageFootprint(
            self.stage_parameter_bytes(ops),
            float(kept.sum()),
            self.border(mask),
            float(gradients.max(initial=0.0)),
            StagePasses.of(self._gradients(mask), self.working_bytes[ops], kept, kept_fixed),
            float(kept_fixed.sum()),
        )

    def memory(
        self,
        footprint: StageFootprint,
        microbatch_size: Number,
        replicas: Number,
        *,
        recompute: Number = False,
        versions: int = 1,
        updated: Number | None = None,
        terms: int = MOST_TERMS,
    ) -> DeviceMemory:
        """Bytes on each device of a stage, or of many stages at once; see ``cost.memory``.

        Args:
            updated: trainable bytes that a replica updates; by default an equal part.
            terms: most terms of other replicas in memory, by default those of the fullest replica.
        """
        samples, held, update = -(-microbatch_size // replicas), footprint.held, self.update
        if updated is None:
            updated = held.trainable / (replicas if self.shard_optimizer else 1)
        stage = StageBytes(
            *held,
            updated=updated,
            largest_gradient=footprint.largest_gradient,
            entering=footprint.border.entering.at(samples),
            returning=footprint.border.entering_gradients.at(samples),
            kept=footprint.kept * samples + footprint.kept_fixed,
            passing=footprint.passes.at(samples),
        )
        optimizer = OptimizerBytes(update.state, update.all_temporary, update.largest_temporary)
        others = np.minimum(replicas - 1, terms)
        return device_memory(stage, optimizer, recompute, replicas, others, versions)

    def updated_bytes(self, mask: int, replicas: int) -> tuple[float, ...]:
        """Return the bytes of a stage's trainable parameters that each replica updates; parameters
        that it shares with other stages count as its own.
        """
        if replicas == 1 or not self.shard_optimizer:
            return (self.footprint(mask).held.trainable,) * replicas
        return tuple(float(sum(dealt.values())) for dealt in self.dealt(mask, replicas))

    @remembered
    def dealt(self, mask: int, replicas: int) -> list[dict[str, int]]:
        """Per replica, parameter -> bytes that it updates, where replicas share optimizer state."""
        readers, dealt = self.graph.readers, [dict[str, int]() for _ in range(replicas)]
        trained = (p for p in reversed(self.graph.parameters) if p.trainable)
        held = [p for p in trained if readers.get(p.name, 0) & mask]
        for p, pieces in zip(held, deal([p.nbytes for p in held], replicas), strict=True):
            for replica, nbytes in pieces:
                dealt[replica][p.name] = nbytes
        return dealt

    def device_bytes(
        self,
        ops: Iterable[int],
        *,
        microbatch_size: int,
        replicas: int,
        in_flight: int,
        recompute: bool = False,
        versions: int = 1,
    ) -> float:
        """Return the peak bytes on the fullest device of a stage, as ``cost.memory`` states them.

        Args:
            microbatch_size: samples of one micro-batch, over all replicas.
            in_flight: micro-batches between their forward and their backward.
            versions: versions of the trainable weights; gradients come on top.
        """
        mask = sum(1 << op for op in set(ops))
        held = self.memory(
            self.footprint(mask),
            microbatch_size,
            replicas,
            recompute=recompute,
            versions=versions,
            updated=max(self.updated_bytes(mask, replicas)),
        )
        return float(held.peak(in_flight))
