"""DAPPLE's objective: the latency of one synchronous step, by its pivot stage (section 4.1).

The pipeline is a row of stages in which every transfer is a stage of its own, with F and B the
seconds of the transfer there and of the gradients back, and nothing to reduce::

    stage    0        (0 to 1)   1        (1 to 2)   2
    F, B     compute  transfer   compute  transfer   compute

The pivot Q is the stage with the fewest bubbles. Forwards reach it (T_w), it does M - 1 further
micro-batches (T_s), and then the last backward runs back to the front while the stages reduce
their gradients as they finish (T_e)::

    T_w = sum of F_s for s <= Q                     T_s = (M - 1) (F_Q + B_Q)
    T_e = max over s of  AR_s + (sum of B_a for s <= a <= Q)       where s <= Q
                         AR_s - (sum of B_a for Q <= a <= s)       where s >  Q
    L   = T_w + T_s + T_e

The pivot is found from the last stage to the first (Algorithm 1): stage s takes over from Q if
``(M - 1) (F_s + B_s)  >  (M - 1) (F_Q + B_Q) + sum of F_a + B_a for s < a < Q``.

So L grows stage by stage from the back, and six numbers say all about the stages behind
(``Suffix``). Two bounds hold for every L (M micro-batches, x_s = F_s + B_s):

- L >= M * x_s for every stage s. Up to Q: L holds the x of Q and of all up to s, and (M - 1) x_Q
  plus what lies between is at least (M - 1) x_s. Behind Q: x_s is less than x_Q.
- L >= (M - 1) x_Q + (x of what lies before Q), for the pivot Q of any suffix: whatever takes over
  has more.

The paper leaves out what an overlapped all-reduce costs in T_e (section 6.3, "DP Overlap"). Decided
here: the gradients of operator o join one ring once the last micro-batch has gone back through o,
beside the backward of what comes before o. What sticks out at the end of the stage counts::

    AR = max over its operators o of  ring(parameters up to o) - (backward seconds before o)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.cost import CostModel
from anabranch.cost.communication import transfer_s
from anabranch.cost.stage_weights import Number
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.dapple.links import counts, hop_price, ring_price
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


@dataclass(frozen=True, slots=True)
class Suffix:
    """What the last stages of a pipeline mean for its latency; numbers or arrays of them.

    Attributes:
        pivot_s: F + B of the pivot among them.
        between_s: F + B of all of them before the pivot.
        warm_s: F of all of them up to the pivot.
        back_s: B of all of them up to the pivot.
        ending_s: T_e.
        behind_s: what T_e would be at least if the pivot were before them: the largest AR less the
            B of its stage and of all before it.
    """

    pivot_s: Number
    between_s: Number
    warm_s: Number
    back_s: Number
    ending_s: Number
    behind_s: Number

    def prepend(
        self, forward_s: Number, backward_s: Number, reduce_s: Number, num_microbatches: int
    ) -> Suffix:
        """The same with one more stage in front."""
        steady = num_microbatches - 1
        both = forward_s + backward_s
        takes_over = steady * both > steady * self.pivot_s + self.between_s
        back = self.back_s + backward_s
        behind = np.maximum(reduce_s, self.behind_s) - backward_s
        first = np.maximum(reduce_s + backward_s, self.behind_s - backward_s)
        later = np.maximum(reduce_s + back, self.ending_s)
        return Suffix(
            np.where(takes_over, both, self.pivot_s),
            np.where(takes_over, 0.0, self.between_s + both),
            np.where(takes_over, forward_s, self.warm_s + forward_s),
            np.where(takes_over, backward_s, back),
            np.where(takes_over, first, later),
            behind,
        )

    def latency_s(self, num_microbatches: int) -> Number:
        """L, if nothing comes before."""
        return self.warm_s + (num_microbatches - 1) * self.pivot_s + self.ending_s


NOTHING = Suffix(0.0, -1.0, 0.0, 0.0, 0.0, -np.inf)
"""No stages yet: the first that is prepended becomes the pivot."""


def latency(
    graph: StageGraph,
    cost: CostModel,
    *,
    overlap_allreduce: bool = False,
) -> Latency:
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
        self,
        stage: Stage,
        cost: CostModel,
        place: Mapping[int, int],
        overlap: bool,
    ) -> None:
        ops = [cost.graph.index[name] for name in stage.operators]
        ops.sort(key=place.__getitem__)
        size, replicas = stage.microbatch_size, stage.replicas
        samples = -(-size // replicas)
        self.place = counts(cost.cluster, stage.devices)
        self.forward_s = cost.forward_s(ops, samples, tensor=stage.tensor)
        self.backward_s = cost.backward_s(
            ops, samples, recompute=stage.recompute, tensor=stage.tensor
        )
        border = cost.border(cost.graph.mask(stage.operators))
        self.entering = border.entering.at(size)
        self.gradients = border.leaving_gradients.at(size)
        self.reduce_s = self._reduce_s(stage, cost, ops, samples if overlap else None)

    @staticmethod
    def _reduce_s(stage: Stage, cost: CostModel, ops: list[int], overlap: float | None) -> float:
        """Seconds of the all-reduce; with samples, what sticks out of their backward."""

        def reduced(count: int) -> float:
            return cost.stage_held_bytes(ops[:count], stage.tensor).summed

        ranks = stage.devices[:: stage.tensor]
        per_byte, latency_s = ring_price(cost, counts(cost.cluster, ranks))
        if not reduced(len(ops)):
            return 0.0
        if overlap is None:
            return float(transfer_s(reduced(len(ops)), per_byte, latency_s))
        late, after = 0.0, 0.0
        for k, op in enumerate(ops):
            late = max(late, reduced(k + 1) * per_byte - after)
            after += cost.backward_s([op], overlap, recompute=stage.recompute, tensor=stage.tensor)
        return late + latency_s
