"""Stage and StageGraph: proposals of planners, executed by simulator and runtime.

Micro-batch i of a stage with micro-batch size b holds samples i*b up to (i+1)*b of the batch, the
last one the samples that are left. Each of its d replicas holds an equal slice. All dependencies
between stages follow: a micro-batch needs every micro-batch of its predecessors that it overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

Number = Any
"""An int, or a NumPy array of them."""

MOST_MICROBATCHES = 2**13
"""Most micro-batches of one stage in a step: thousands make no step faster, and each takes memory
and time wherever a plan is searched, read or simulated.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        operators: names of its operators, in topological order.
        devices: devices with one replica each; a micro-batch is split evenly over them.
        microbatch_size: samples of one micro-batch, over all replicas.
        k: forwards and backwards alternate in groups of k micro-batches (kFkB).
        in_flight: most micro-batches between forward and backward (the warm-up of the schedule); 0
            until a schedule rule has decided.
        recompute: keep only the inputs of the stage and run the forward again in the backward.
        load: seconds of compute per sample, relative to the slowest stage. List schedules of split
            backwards use this field and the next three.
        backward_factor: seconds of a backward relative to its forward.
        weight_share: share of a backward that gradients of weights take.
        message: seconds of the slowest message to a next stage per sample, relative to the compute
            of the slowest stage.
    """

    operators: tuple[str, ...]
    devices: tuple[int, ...]
    microbatch_size: int
    k: int = 1
    in_flight: int = 0
    recompute: bool = False
    load: float = 1.0
    backward_factor: float = 2.0
    weight_share: float = 0.5
    message: float = 0.0

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError("a stage needs at least one operator")
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a stage needs devices, each once; it has {self.devices}")
        if not 0 <= self.weight_share <= 1:
            raise ValueError(f"weight_share {self.weight_share} is no share of a backward")
        if min(self.load, self.backward_factor, self.message) < 0:
            raise ValueError(
                f"load {self.load}, backward_factor {self.backward_factor} and message "
                f"{self.message} must be at least 0"
            )
        if self.microbatch_size < 1 or self.k < 1 or self.in_flight < 0:
            raise ValueError(
                f"micro-batch size {self.microbatch_size}, k {self.k} and in flight "
                f"{self.in_flight} must be at least 1, 1 and 0"
            )

    @property
    def replicas(self) -> int:
        """Number of slices of each micro-batch."""
        return len(self.devices)


@dataclass(frozen=True)
class StageGraph:
    """Stages in topological order and the edges between them.

    Attributes:
        edges: pairs of stage indices, sorted, each from a lower to a higher index.
        batch_size: samples of one step.
    """

    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.stages or self.batch_size < 1:
            raise ValueError("a stage graph needs a stage and a batch of at least one sample")
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError("stage edges are not sorted, or one occurs twice")
        for x, y in self.edges:
            if not 0 <= x < y < len(self.stages):
                raise ValueError(
                    f"stage edge {x} -> {y} does not run from a lower to a higher stage"
                )

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Predecessors of each stage."""
        before = successors(len(self), ((y, x) for x, y in self.edges))
        return tuple(map(tuple, before.values()))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Successors of each stage."""
        return tuple(map(tuple, successors(len(self), self.edges).values()))

    @cached_property
    def height(self) -> tuple[int, ...]:
        """Longest distance from each stage to a sink, in edges."""
        return tuple(heights(len(self), self.edges))

    @cached_property
    def depth(self) -> int:
        """Stages on the longest path."""
        return max(self.height) + 1

    @property
    def shape(self) -> Literal["graph", "chain"]:
        """``chain`` if one path of edges goes through all stages."""
        return "chain" if self.depth == len(self) else "graph"

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices, ascending."""
        return tuple(sorted({device for stage in self.stages for device in stage.devices}))

    @cached_property
    def stages_of(self) -> Mapping[int, tuple[int, ...]]:
        """Device -> its stages, ascending."""
        result: dict[int, list[int]] = {device: [] for device in self.devices}
        for s, stage in enumerate(self.stages):
            for device in stage.devices:
                result[device].append(s)
        return {device: tuple(stages) for device, stages in result.items()}

    @cached_property
    def shares_devices(self) -> bool:
        """True if a device has several stages."""
        return sum(stage.replicas for stage in self.stages) > len(self.devices)

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Device -> rank of its process: its index in ``devices``."""
        return {device: rank for rank, device in enumerate(self.devices)}

    def without_recompute(self) -> StageGraph:
        """Return the same stages without recomputation."""
        stages = tuple(replace(stage, recompute=False) for stage in self.stages)
        return replace(self, stages=stages)

    def num_microbatches(self, stage: int) -> int:
        """Return the micro-batches of a stage in one step, the short last one included."""
        return -(-self.batch_size // self.stages[stage].microbatch_size)

    def group_size(self, stage: int) -> int:
        """Return how many forwards or backwards a stage runs in a row: k, at most all of them."""
        return min(self.stages[stage].k, self.num_microbatches(stage))

    def interval(self, stage: int, microbatch: int) -> tuple[int, int]:
        """Return the samples [start, stop) of one micro-batch."""
        size = self.stages[stage].microbatch_size
        return microbatch * size, min((microbatch + 1) * size, self.batch_size)

    def slice(self, stage: int, microbatch: int, replica: int) -> tuple[int, int]:
        """Return the samples [start, stop) of one micro-batch on one replica; may be empty."""
        start, stop = self.interval(stage, microbatch)
        return part_of(start, stop, self.stages[stage].replicas, replica)

    def slices(self, stage: int) -> list[tuple[int, int]]:
        """Return the samples [start, stop) of each slice of a stage that has some, ascending."""
        slices = (
            self.slice(stage, microbatch, replica)
            for microbatch in range(self.num_microbatches(stage))
            for replica in range(self.stages[stage].replicas)
        )
        return [(start, stop) for start, stop in slices if start < stop]

    def slice_sizes(self, stage: int) -> set[int]:
        """Return the sizes of non-empty slices, of full micro-batches and the last one."""
        size, replicas = self.stages[stage].microbatch_size, self.stages[stage].replicas
        sizes = {min(size, self.batch_size), self.batch_size % size or size}
        return {samples for size in sizes for samples in slice_sizes(size, replicas)}


def successors(count: int, edges: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Map each stage to its successors, in the order of the edges."""
    result: dict[int, list[int]] = {s: [] for s in range(count)}
    for x, y in edges:
        result[x].append(y)
    return result


def slice_sizes(microbatch_size: int, replicas: int) -> tuple[int, int]:
    """Return the fewest and most samples among the non-empty slices of a micro-batch: 1 and 2 of 6
    samples on 4 replicas, 1 and 1 of 3.
    """
    return max(1, microbatch_size // replicas), -(-microbatch_size // replicas)


def heights(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the longest distance of each stage to a sink; edges lead from lower to higher ones."""
    result = [0] * count
    for x, y in sorted(edges, reverse=True):
        result[x] = max(result[x], result[y] + 1)
    return result


def split_evenly(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into intervals whose lengths differ by at most one."""
    return [part_of(start, stop, parts, i) for i in range(parts)]


def part_of(start: Number, stop: Number, parts: int, i: Number) -> tuple[Number, Number]:
    """Return part i of an interval that is split evenly."""
    size = stop - start
    return start + size * i // parts, start + size * (i + 1) // parts
