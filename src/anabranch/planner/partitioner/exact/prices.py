"""Periods and memory of every stage of a lattice at once: ``toolkit.prices`` has the formulas.

What adds up over operators is the difference of two downsets' sums. What does not is a value that
several operators read, or a parameter that several share. Per value, with the producer p and the
readers R, the stage between the downsets I and J

    reads it from outside    if p is in I, and more of R are in J than in I
    makes it for others      if p is in J but not in I, and not all of R are in J
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.opgraph import BATCH, bits
from anabranch.planner.partitioner.exact.lattice import Lattice
from anabranch.planner.toolkit.prices import Bound, Mode, Prices

NEVER = float(1 << 28)
"""More devices than there are."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Weights:
    """What the stages of a lattice weigh, whatever the micro-batch size.

    Args:
        cost: prices the operators.
        lattice: the stages.
        atoms: per operator of the lattice's graph, the operators of ``cost.graph``.
    """

    def __init__(self, cost: CostModel, lattice: Lattice, atoms: Sequence[int]) -> None:
        self.cost = cost
        self.lattice = lattice
        self.atoms = tuple(atoms)
        self._home = {op: atom for atom, mask in enumerate(atoms) for op in bits(mask)}
        self._holds = np.zeros((len(lattice.downsets), len(atoms)))
        for k, downset in enumerate(lattice.downsets):
            self._holds[k, list(bits(downset))] = 1

    def mask(self, pair: int) -> int:
        """Operators of ``cost.graph`` in a stage."""
        return sum(self.atoms[atom] for atom in bits(self.lattice.mask(pair)))

    def total(self, per_op: Floats) -> Floats:
        """What adds up over operators, per stage."""
        return self._difference(
            self._holds @ np.array([per_op[list(bits(mask))].sum() for mask in self.atoms])
        )

    def _difference(self, per_downset: Floats) -> Floats:
        return np.asarray(per_downset[self.lattice.above] - per_downset[self.lattice.below])

    def parameter_bytes(self, tensor: int, *, trainable: bool) -> Floats:
        """Bytes of parameters on each device, per stage."""
        if (tensor, trainable) not in self._parameters:
            self._parameters[tensor, trainable] = self._parameter_bytes(tensor, trainable)
        return self._parameters[tensor, trainable]

    @cached_property
    def _parameters(self) -> dict[tuple[int, bool], Floats]:
        return {}

    def _parameter_bytes(self, tensor: int, trainable: bool) -> Floats:
        ops = range(len(self.cost.graph))
        if tensor > 1:
            each = [
                self.cost.parameter_bytes([op], trainable=trainable, tensor=tensor) for op in ops
            ]
            return self.total(np.array(each, dtype=np.float64))
        readers: dict[str, set[int]] = {}
        for op in ops:
            for name in self.cost.graph.ops[op].parameters:
                readers.setdefault(name, set()).add(self._home[op])
        alone = np.zeros(len(self.atoms))
        shared = np.zeros(len(self.lattice.below))
        for name, who in readers.items():
            parameter = self.cost.parameters[name]
            if trainable and not parameter.trainable:
                continue
            if len(who) == 1:
                alone[min(who)] += parameter.nbytes
            else:
                shared += parameter.nbytes * (self._difference(self._count(who)) > 0)
        return self._difference(self._holds @ alone) + shared

    def _count(self, atoms: Iterable[int]) -> Floats:
        """How many of these atoms each downset holds."""
        return np.asarray(self._holds[:, sorted(atoms)].sum(axis=1))

    @cached_property
    def _traffic(self) -> Floats:
        """Bytes that enter and leave, their gradients likewise, per sample and fixed: [4, 2, p]."""
        flows: dict[tuple[int, frozenset[int]], Floats] = {}
        for value in self.cost.graph.values:
            made = self._home.get(value.producer, BATCH)
            read = frozenset(self._home[c] for c in value.consumers) - {made}
            if made != BATCH and read:
                flow = flows.setdefault((made, read), np.zeros((2, 2)))
                flow[0, 0 if value.batched else 1] += value.nbytes
                flow[1, 0 if value.batched else 1] += value.nbytes * value.grad
        sums = np.zeros((4, 2, len(self.lattice.below)))
        below, above = self.lattice.below, self.lattice.above
        for (made, read), flow in flows.items():
            has, count = self._holds[:, made] > 0, self._count(read)
            before = has[below]
            enters = before & (count[above] > count[below])
            leaves = has[above] & ~before & (count < len(read))[above]
            for way, kind in zip(*np.nonzero(flow), strict=True):
                sums[2 * way, kind] += flow[way, kind] * enters
                sums[2 * way + 1, kind] += flow[way, kind] * leaves
        return sums

    def traffic(self, samples: int) -> tuple[Floats, Floats, Floats]:
        """Bytes per micro-batch: what enters; and with gradients, what comes in and goes out."""
        enter, leave, enter_back, leave_back = self._traffic[:, 0] * samples + self._traffic[:, 1]
        return enter, enter + leave_back, leave + enter_back

    def read_bytes(self, samples: int) -> Floats:
        """Bytes per micro-batch of what enters and of its gradients."""
        enter, back = self._traffic[0], self._traffic[2]
        return np.asarray((enter + back)[0] * samples + (enter + back)[1])


@dataclass(frozen=True)
class PricedStages:
    """The stages of a lattice at one micro-batch size; arrays are [mode, pair].

    Attributes:
        modes: fewest devices first.
        slowest_s: seconds of compute or transfers per micro-batch, whichever is more.
        path_share: what the stage adds to a way through it (compute, what it reads and the
            gradients of that, and the all-reduce spread over the micro-batches), divided by so much
            that the stages of a plan stay below 1.
        reduce_s: seconds of all-reduce per step.
        spread_s: the period, with the all-reduce spread over the micro-batches.
        headroom: the largest height at which the stage fits.
    """

    modes: tuple[Mode, ...]
    slowest_s: Floats
    path_share: Floats
    reduce_s: Floats
    spread_s: Floats
    headroom: Ints

    @staticmethod
    def of(weights: Weights, prices: Prices, heights: int) -> PricedStages:
        """Price all stages, with recomputation where one does not fit at all heights without."""
        columns = []
        modes: list[Mode] = []
        roomy: set[tuple[int, int]] = set()
        for mode in prices.modes:
            if mode.recompute and (mode.replicas, mode.tensor) in roomy:
                continue
            modes.append(mode)
            columns.append(_price(weights, prices, mode))
            if (columns[-1][-1] >= heights - 1).all():
                roomy.add((mode.replicas, mode.tensor))
        slowest, path, reduce_s, room = (np.stack(each) for each in zip(*columns, strict=True))
        path = path + reduce_s / prices.num_microbatches
        return PricedStages(
            tuple(modes),
            slowest_s=slowest,
            path_share=path / (2 * len(weights.atoms) * path.max(initial=1e-300)),
            reduce_s=reduce_s,
            spread_s=slowest + reduce_s / prices.num_microbatches,
            headroom=room,
        )

    def periods(self, bound: Bound) -> Floats:
        """Periods of stages within a bound, ascending; of those equal up to rounding the last."""
        periods = self.spread_s if bound.spread else self.slowest_s
        values = np.unique(periods[self.within(bound)])
        last = np.append(np.diff(values) > 1e-12 * values[1:], True)[: len(values)]
        return np.asarray(values[last])

    def within(self, bound: Bound) -> Bools:
        """Which stages keep a bound."""
        periods = self.spread_s if bound.spread else self.slowest_s
        return (periods <= bound.period_s) & (self.reduce_s <= bound.reduce_s)

    def need(self, within: Bools, heights: int) -> Floats:
        """Fewest devices per stage, and as a fraction its share of a path: [height, pair].

        One row where no height is too great.
        """
        fits = np.where(within, self.headroom, -1)
        rows = heights if ((fits >= 0) & (fits < heights - 1)).any() else 1
        result = np.full((rows, fits.shape[1]), NEVER)
        for k, mode in enumerate(self.modes):
            value = mode.devices + self.path_share[k]
            for h in range(rows):
                # Modes come with ever more devices, so what is there is not worse.
                better = (fits[k] >= (h if rows > 1 else heights - 1)) & (value < result[h])
                result[h, better] = value[better]
        return result

    def mode(self, within: Bools, pair: int, height: int, devices: int) -> Mode:
        """The mode of a stage with that many devices at that height: that of ``need``."""
        chosen = [
            (self.path_share[k, pair], k)
            for k, mode in enumerate(self.modes)
            if mode.devices == devices and within[k, pair] and self.headroom[k, pair] >= height
        ]
        return self.modes[min(chosen)[1]]


def _price(weights: Weights, prices: Prices, mode: Mode) -> tuple[Floats, Floats, Floats, Ints]:
    """Slowest and path seconds, those of the all-reduce, and the headroom of every stage."""
    n, share = prices.samples(mode.replicas), prices.share(mode.devices)
    forward, backward = weights.cost.op_seconds(n, mode.tensor)
    compute = weights.total(forward * (1 + mode.recompute) + backward)
    enter, comes, goes = weights.traffic(n)
    trainable = weights.parameter_bytes(mode.tensor, trainable=True)
    state = weights.parameter_bytes(mode.tensor, trainable=False)
    state = state + trainable * (1 + prices.cost.optimizer_factor)
    kept = weights.total(weights.cost.sharded_kept_bytes(mode.tensor)) * n
    fixed = state + prices.cost.receive_slots * comes + kept * mode.recompute
    return (
        np.maximum(compute, np.maximum(comes, goes) * share),
        compute + weights.read_bytes(n) * share,
        prices.allreduce_s(trainable, mode.replicas, mode.tensor),
        prices.headroom(fixed, enter + kept * (not mode.recompute)),
    )
