"""DAPPLE's L of any row of stages, stage by stage as the paper has it, for comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.cost.communication import transfer_s
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.dapple import links
from anabranch.planner.dapple.links import Place
from anabranch.plans.stages import Stage, StageGraph


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of a pipeline.

    Attributes:
        warmup_s: T_w, seconds until the pivot has its first micro-batch.
        steady_s: T_s, seconds of the pivot's other micro-batches.
        ending_s: T_e, seconds from the pivot's last backward on.
        pivot: place of the pivot in the row of stages and transfers: even numbers compute.
    """

    warmup_s: float
    steady_s: float
    ending_s: float
    pivot: int

    @property
    def total_s(self) -> float:
        """L."""
        return self.warmup_s + self.steady_s + self.ending_s


def phases(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    reduce_s: Sequence[float],
    num_microbatches: int,
) -> Latency:
    """Formulas (1) and (2) for a row of stages and transfers, whose all-reduce is 0."""
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    q = pivot(both, num_microbatches)
    ends = [
        reduce_s[s] + (sum(backward_s[s : q + 1]) if s <= q else -sum(backward_s[q : s + 1]))
        for s in range(len(both))
    ]
    return Latency(sum(forward_s[: q + 1]), (num_microbatches - 1) * both[q], max(ends), q)


def pivot(both_s: Sequence[float], num_microbatches: int) -> int:
    """Algorithm 1: the pivot of a row of stages with these seconds forward and backward."""
    steady = num_microbatches - 1
    q = len(both_s) - 1
    for s in reversed(range(q)):
        if steady * both_s[s] > steady * both_s[q] + sum(both_s[s + 1 : q]):
            q = s
    return q


def counts(cluster: Cluster, devices: Sequence[int]) -> Place:
    """Devices per machine."""
    size = cluster.group_sizes[0]
    result = [0] * (cluster.num_devices // size)
    for device in devices:
        result[device // size] += 1
    return tuple(result)


def hop_price(cluster: Cluster, source: Place, target: Place) -> tuple[float, float]:
    """Seconds per byte of one micro-batch and seconds of latency between two stages."""
    price: Any = links.hop_price
    per_byte, latency_s = price(links.links(cluster), np.array([source, target]), 0, 1)
    return float(per_byte), float(latency_s)


def latency(graph: StageGraph, cost: CostModel, *, overlap_allreduce: bool = False) -> Latency:
    """L of any pipeline whose stages run one after the other.

    Args:
        graph: stages in order, one micro-batch size; edges do not matter. What a stage reads from
            any stage before it is taken to come from the one just before.
        cost: prices the operators of ``cost.graph`` on ``cost.cluster``.
        overlap_allreduce: count of an all-reduce only what sticks out of the backward, which goes
            through the operators branch after branch, as ``Dapple`` has them in a row.

    Raises:
        ValueError: if micro-batch sizes differ.
        ProfileError: if the profile does not cover the samples of a replica.
    """
    sizes = {stage.microbatch_size for stage in graph.stages}
    if len(sizes) > 1:
        raise ValueError(f"DAPPLE has one micro-batch size, the stages have {sorted(sizes)}")
    place = {op: i for i, op in enumerate(operators(decompose(cost.graph)))}
    priced = [_Priced(stage, cost, place, overlap_allreduce) for stage in graph.stages]
    forward: list[float] = []
    backward: list[float] = []
    reduce: list[float] = []
    for s, stage in enumerate(priced):
        if s:
            per_byte, latency_s = hop_price(cost.cluster, priced[s - 1].place, stage.place)
            for row, nbytes in ((forward, stage.entering), (backward, stage.gradients)):
                row.append(transfer_s(nbytes, per_byte, latency_s))
            reduce.append(0.0)
        forward.append(stage.forward_s)
        backward.append(stage.backward_s)
        reduce.append(stage.reduce_s)
    return phases(forward, backward, reduce, graph.num_microbatches(0))


class _Priced:
    """Seconds and bytes of one stage."""

    def __init__(
        self, stage: Stage, cost: CostModel, place: Mapping[int, int], overlap: bool
    ) -> None:
        ops = [cost.graph.index[name] for name in stage.operators]
        ops.sort(key=place.__getitem__)
        size, replicas = stage.microbatch_size, stage.replicas
        samples = -(-size // replicas)
        self.place = counts(cost.cluster, stage.devices)
        mask = cost.graph.mask(stage.operators)
        both = cost.stage_s(mask, samples, recompute=stage.recompute)
        self.forward_s, self.backward_s = both
        border = cost.border(mask)
        self.entering = border.entering.at(size)
        self.gradients = border.leaving_gradients.at(size)
        self.reduce_s = self._reduce_s(stage, cost, ops, samples if overlap else None)

    @staticmethod
    def _reduce_s(stage: Stage, cost: CostModel, ops: list[int], overlap: float | None) -> float:
        """Seconds of the all-reduce; with samples, what sticks out of their backward."""

        def reduced(count: int) -> float:
            return cost.stage_parameter_bytes(ops[:count]).summed

        per_byte, latency_s = cost.all_reduce_price(stage.devices)
        if not reduced(len(ops)):
            return 0.0
        if overlap is None:
            return float(transfer_s(reduced(len(ops)), per_byte, latency_s))
        late, after = 0.0, 0.0
        for k, op in enumerate(ops):
            late = max(late, reduced(k + 1) * per_byte - after)
            after += cost.stage_s(1 << op, overlap, recompute=stage.recompute)[1]
        return late + latency_s
