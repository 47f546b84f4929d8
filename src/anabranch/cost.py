"""What a stage, a transfer, an all-reduce and a device's memory cost. No search in here.

Everything is in seconds, bytes and samples. With n = b / d samples on each of d replicas:

    forward    sum over operators of forward_s(n)           (linear between measured sample counts)
    backward   sum over operators of backward_s(n)          (+ the forward again with recomputation)
    transfer   latency + bytes / bandwidth                  of the slowest link on the way
    allreduce  2 (d-1)/d * bytes / bandwidth + 2 (d-1) * latency        (ring)
    memory     parameters + trainable parameters * (versions + optimizer)
               + in flight * n * kept bytes + what enters, for as long as it is held
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Cluster
from anabranch.errors import ProfileError
from anabranch.graph.opgraph import BATCH, OpGraph, Parameter, bits
from anabranch.profile.profile import OpCost, Profile, Sharded

Port = tuple[str, int, int]
"""What a transfer occupies; ``Cluster.ports`` says how it is written."""

Way = tuple[tuple[Port, ...], tuple[Port, ...], float, float]
"""Ports from one device to another and back, seconds per byte, seconds of latency."""


@dataclass(frozen=True)
class CostModel:
    """Prices stages of one model on one cluster.

    Attributes:
        profile: seconds and bytes of the operators.
        cluster: links and memory.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter (Adam 2, SGD with
            momentum 1).
        receive_slots: receives posted ahead per channel, beyond the micro-batches in flight.
        updates: of the weights in one batch, each with its all-reduce; more than 1 where a planner
            is asked for a row of mini-batches without a flush.
    """

    profile: Profile
    cluster: Cluster
    optimizer_factor: float = 2.0
    receive_slots: int = 1
    updates: int = 1
    _tables: dict[tuple[float, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _ways: dict[tuple[int, int], Way] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def graph(self) -> OpGraph:
        """The operators that are priced."""
        return self.profile.graph

    def covers(self, samples: float) -> bool:
        """Whether the profile can price this sample count (a proportional one prices any)."""
        measured = self.profile.samples
        return samples > 0 and (self.profile.proportional or measured[0] <= samples <= measured[-1])

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Devices that may hold one replica of a stage together; 1 alone for most profiles."""
        return (1, *self._sharded)

    @cached_property
    def _sharded(self) -> dict[int, Sharded]:
        return {each.degree: each for each in self.profile.sharded}

    def costs(self, tensor: int = 1) -> tuple[OpCost, ...]:
        """Costs of the operators under tensor parallelism over so many devices.

        Raises:
            ProfileError: if the profile does not have them.
        """
        if tensor == 1:
            return self.profile.costs
        if tensor not in self._sharded:
            raise ProfileError(
                f"the profile ({self.profile.origin}) has no costs for tensor parallelism over "
                f"{tensor} devices, only over {', '.join(map(str, self.tensor_degrees))}"
            )
        return self._sharded[tensor].costs

    def op_seconds(
        self, samples: float, tensor: int = 1
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Forward and backward seconds of every operator for this many samples on one device.

        Args:
            samples: in the slice of a micro-batch.
            tensor: devices that work on this slice together.

        Raises:
            ProfileError: outside the measured range.
        """
        if (samples, tensor) not in self._tables:
            self._tables[samples, tensor] = self._interpolate(samples, tensor)
        return self._tables[samples, tensor]

    def _interpolate(
        self, samples: float, tensor: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        measured = self.profile.samples
        if not self.covers(samples):
            raise ProfileError(
                f"the profile ({self.profile.origin}) says nothing about {samples:g} samples on "
                f"one device; profile again with a range that includes it, or choose a micro-batch "
                f"size and a number of replicas that give between {measured[0]} and "
                f"{measured[-1]} samples"
            )
        forward, backward = self._measured_s(tensor)
        if self.profile.proportional:
            scale = samples / measured[0]
            return forward[:, 0] * scale, backward[:, 0] * scale
        right = bisect_left(measured, samples)
        if measured[right] == samples:
            return forward[:, right], backward[:, right]
        low, high = measured[right - 1], measured[right]
        t = (samples - low) / (high - low)
        return (
            forward[:, right - 1] * (1 - t) + forward[:, right] * t,
            backward[:, right - 1] * (1 - t) + backward[:, right] * t,
        )

    def forward_s(self, ops: Iterable[int], samples: float, *, tensor: int = 1) -> float:
        """Forward seconds of a set of operators for ``samples`` on one device; 0 for no samples."""
        return float(self.op_seconds(samples, tensor)[0][list(ops)].sum()) if samples else 0.0

    def backward_s(
        self, ops: Iterable[int], samples: float, *, recompute: bool = False, tensor: int = 1
    ) -> float:
        """Backward seconds, likewise; recomputation adds the forward once more."""
        if not samples:
            return 0.0
        chosen = list(ops)
        seconds = float(self.op_seconds(samples, tensor)[1][chosen].sum())
        return seconds + self.forward_s(chosen, samples, tensor=tensor) if recompute else seconds

    def _measured_s(self, tensor: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        forward = np.array([cost.forward_s for cost in self.costs(tensor)])
        backward = np.array([cost.backward_s for cost in self.costs(tensor)])
        return forward, backward

    @cached_property
    def kept_bytes(self) -> NDArray[np.float64]:
        """Bytes that each operator keeps for its backward, per sample."""
        return self.sharded_kept_bytes(1)

    def sharded_kept_bytes(self, tensor: int) -> NDArray[np.float64]:
        """``kept_bytes`` on each of ``tensor`` devices that share a slice."""
        return np.array([cost.kept_bytes for cost in self.costs(tensor)], dtype=np.float64)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Per value, the bit mask of the operators that read it."""
        return tuple(sum(1 << consumer for consumer in v.consumers) for v in self.graph.values)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Per operator, the values that it makes and another reads."""
        result: list[list[int]] = [[] for _ in self.graph.ops]
        for i, value in enumerate(self.graph.values):
            if value.producer != BATCH and value.consumers:
                result[value.producer].append(i)
        return tuple(map(tuple, result))

    @cached_property
    def read(self) -> tuple[tuple[int, ...], ...]:
        """Per operator, the values that it reads from another; the batch is at hand everywhere."""
        result: list[list[int]] = [[] for _ in self.graph.ops]
        for i, value in enumerate(self.graph.values):
            if value.producer != BATCH:
                for consumer in value.consumers:
                    result[consumer].append(i)
        return tuple(map(tuple, result))

    def crossing(self, source: int, target: int) -> tuple[int, ...]:
        """Indices of the values made in one set of operators and read in another (bit masks)."""
        return tuple(
            sorted(i for op in bits(source) for i in self.made[op] if self.readers[i] & target)
        )

    def forward_bytes(self, values: Iterable[int], samples: float) -> float:
        """Bytes that flow forward for this many samples."""
        return sum(self.graph.values[i].size(samples) for i in values)

    def backward_bytes(self, values: Iterable[int], samples: float) -> float:
        """Bytes of gradient that flow back for this many samples."""
        return sum(self.graph.values[i].size(samples) for i in values if self.graph.values[i].grad)

    def way(self, source: int, target: int) -> Way:
        """What a transfer between two devices occupies and how long."""
        if (source, target) not in self._ways:
            link = self.cluster.link(source, target)
            self._ways[source, target] = (
                self.cluster.ports(source, target),
                self.cluster.ports(target, source),
                1 / link.bandwidth,
                link.latency_s,
            )
        return self._ways[source, target]

    def allreduce_s(self, nbytes: float, devices: Sequence[int]) -> float:
        """Seconds of a ring all-reduce over these devices, on the slowest link among them, as often
        as the weights are updated.
        """
        d = len(devices)
        if d == 1 or nbytes == 0:
            return 0.0
        link = self.cluster.slowest_link(devices)
        once = 2 * (d - 1) / d * nbytes / link.bandwidth + 2 * (d - 1) * link.latency_s
        return once * self.updates

    def parameter_bytes(
        self, ops: Iterable[int], *, trainable: bool = False, tensor: int = 1
    ) -> int:
        """Bytes of the parameters that a set of operators reads, each counted once.

        Under tensor parallelism what each device holds; all of it counts as trainable there.
        """
        parameters = self.parameters
        if tensor > 1:
            self.costs(tensor)
            return sum(self._sharded[tensor].parameter_bytes[i] for i in ops)
        return sum(
            parameters[name].nbytes
            for name in {name for i in ops for name in self.graph.ops[i].parameters}
            if parameters[name].trainable or not trainable
        )

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {parameter.name: parameter for parameter in self.graph.parameters}

    def device_bytes(
        self,
        ops: Iterable[int],
        *,
        microbatch_size: int,
        replicas: int,
        in_flight: int,
        recompute: bool = False,
        versions: int = 1,
        tensor: int = 1,
    ) -> float:
        """Peak bytes on each device of a stage.

        Args:
            ops: the stage's operators.
            microbatch_size: samples of one micro-batch, over all replicas.
            replicas: slices of each micro-batch.
            in_flight: micro-batches between their forward and their backward.
            recompute: keep only what enters the stage, and the inside of one micro-batch at a time.
            versions: of the trainable weights, that the policy keeps; the gradients come on top.
            tensor: devices of each replica.
        """
        chosen = sorted(ops)
        samples = microbatch_size / replicas
        weights = self.parameter_bytes(chosen, tensor=tensor)
        trainable = self.parameter_bytes(chosen, trainable=True, tensor=tensor)
        state = weights + trainable * (versions + self.optimizer_factor)
        of = self.kept_bytes if tensor == 1 else self.sharded_kept_bytes(tensor)
        kept = float(of[chosen].sum()) * samples
        entering, _, gradients = self.boundary_bytes(chosen, samples)
        inside = kept if recompute else in_flight * kept
        # In flight: what entered is held until the backward. Posted ahead: further receives of each
        # kind.
        return state + inside + in_flight * entering + self.receive_slots * (entering + gradients)

    def boundary_bytes(self, ops: Iterable[int], samples: float) -> tuple[float, float, float]:
        """Bytes that enter a set of operators, leave it, and come back to it as gradients of what
        left.
        """
        chosen = list(ops)
        mask = 0
        for i in chosen:
            mask |= 1 << i
        values = self.graph.values
        entering = leaving = gradients = 0.0
        for i in {i for op in chosen for i in self.read[op]}:
            if not mask >> values[i].producer & 1:
                entering += values[i].size(samples)
        for i in (i for op in chosen for i in self.made[op]):
            if self.readers[i] & ~mask:
                leaving += values[i].size(samples)
                gradients += values[i].size(samples) if values[i].grad else 0.0
        return entering, leaving, gradients
