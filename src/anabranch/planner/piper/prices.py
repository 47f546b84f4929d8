"""What Piper takes a stage to cost: its load, and how much it can keep in flight.

For a stage on d replicas of t devices each, n = ceil(b / d) samples of a micro-batch on each
replica, M micro-batches:

    load    compute                     forward and backward at n samples and tensor degree t,
                                        the forward once more with recomputation
          + (in + out) * share(d * t)   all that crosses its border: values and gradients, both ways
          + allreduce(d) / M            of its trainable parameters, once per step

Nothing is taken to overlap: a load is a sum, as in Piper, where ``toolkit.prices`` takes the
larger of compute and communication. ``share`` and ``allreduce`` are those of
``toolkit.prices``, which knows that devices of a node share its network card; Piper's own
formula has one bandwidth. Memory is ``CostModel.device_bytes``.

For every pair of downsets a bound from below is taken first, which costs one subtraction and knows
the traffic; the rest only where the bound says that the stage may be of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.piper.search import ROUNDING
from anabranch.planner.piper.states import Borders, Floats, Ints, Pairs, States
from anabranch.planner.piper.walk import NEVER, Options
from anabranch.planner.toolkit.prices import UNBOUNDED, Prices

_AT_ONCE = 1 << 20
"""Pairs that are priced at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a stage may run.

    Attributes:
        replicas: slices of each micro-batch.
        tensor: devices of each replica.
        recompute: run the forward again in the backward.
    """

    replicas: int
    tensor: int = 1
    recompute: bool = False

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.replicas * self.tensor


@dataclass(frozen=True)
class _Sums:
    """Per downset, what one choice costs for its operators on each device."""

    forward_s: Floats
    backward_s: Floats
    kept_bytes: Floats
    parameter_bytes: Floats
    trainable_bytes: Floats


class StagePrices:
    """Prices the stages between nested downsets at one micro-batch size."""

    def __init__(self, prices: Prices, states: States, choices: Sequence[Choice]) -> None:
        self.prices = prices
        self.states = states
        self.choices = choices
        self._known: dict[tuple[int, int], _Sums] = {}

    @cached_property
    def least_s(self) -> float:
        """A load that would be the least if the model could be cut as one likes."""
        limit = self.prices.cost.cluster.num_devices
        return min(float(self._bound(each)[-1]) * each.devices / limit for each in self._plain)

    @cached_property
    def floor_s(self) -> float:
        """No plan has a lesser load: all work, each operator run as is cheapest, shared evenly."""
        work = [self._each(choice) * choice.devices for choice in self._plain]
        return float(np.min(work, axis=0).sum()) / self.prices.cost.cluster.num_devices

    @cached_property
    def most_s(self) -> float:
        """A load that no stage exceeds."""
        whole = Pairs(np.zeros(1, dtype=np.int32), np.full(1, len(self.states) - 1, dtype=np.int32))
        n = max(self.prices.samples(each.replicas) for each in self.choices)
        values = self.prices.cost.graph.values
        crossing = 4 * sum(value.size(n) for value in values)
        borders = self.states.borders(whole)
        return max(
            float(self._load_s(whole, borders, each)[0])
            + crossing * self.prices.share(each.devices)
            for each in self.choices
        )

    @property
    def _plain(self) -> list[Choice]:
        return [each for each in self.choices if not each.recompute]

    def _sums(self, choice: Choice) -> _Sums:
        n, tensor = self.prices.samples(choice.replicas), choice.tensor
        if (n, tensor) not in self._known:
            cost, sums = self.prices.cost, self.states.sums
            forward, backward = cost.op_seconds(n, tensor)
            parameters, trainable = map(sums, self._own_bytes(tensor))
            kept = sums(cost.sharded_kept_bytes(tensor)) * n
            self._known[n, tensor] = _Sums(
                sums(forward), sums(backward), kept, parameters, trainable
            )
        return self._known[n, tensor]

    def _own_bytes(self, tensor: int) -> tuple[Floats, Floats]:
        """Per operator, bytes of parameters on each device that only it reads; of the trainable."""
        if tensor == 1:
            return self.states.own_bytes
        cost = self.prices.cost
        each = [cost.parameter_bytes([op], tensor=tensor) for op in range(len(cost.graph))]
        nbytes = np.array(each, dtype=np.float64)
        return nbytes, nbytes

    def _each(self, choice: Choice) -> Floats:
        """Per operator what it adds to the load of its stage at least."""
        n, tensor = self.prices.samples(choice.replicas), choice.tensor
        forward, backward = self.prices.cost.op_seconds(n, tensor)
        trainable = self._own_bytes(tensor)[1]
        reduce_s = self.prices.allreduce_s(trainable, choice.replicas, tensor, latency=False)
        result: Floats = forward + backward + reduce_s / self.prices.num_microbatches
        return result

    def _bound(self, choice: Choice) -> Floats:
        """Per downset; the difference of two is at most the load of the stage between them."""
        sums = self._sums(choice)
        reduce_s = self.prices.allreduce_s(
            sums.trainable_bytes, choice.replicas, choice.tensor, latency=False
        )
        result: Floats = sums.forward_s + sums.backward_s + reduce_s / self.prices.num_microbatches
        return result

    def _least_bytes(self, choice: Choice) -> Floats:
        """Per downset; the difference of two is at most what the stage between them needs."""
        sums = self._sums(choice)
        optimizer = 1 + self.prices.cost.optimizer_factor
        return sums.parameter_bytes + sums.trainable_bytes * optimizer + sums.kept_bytes

    def possible(
        self, pairs: Pairs, traffic: NDArray[np.float32], bound_s: float
    ) -> NDArray[np.int64]:
        """Indices of the pairs whose stage may be within a bound, however it runs.

        One look at each pair leaves few for all the ways to run a stage.
        """
        floor = self._floor
        crossing = min(
            self.prices.share(each.devices) * self.prices.samples(each.replicas)
            for each in self._plain
        )
        found = []
        for start in range(0, len(pairs), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            least = floor[pairs.hi[some]] - floor[pairs.lo[some]] + traffic[some] * crossing
            found.append(start + np.flatnonzero(least <= bound_s * ROUNDING))
        return np.concatenate(found)

    @cached_property
    def _floor(self) -> Floats:
        """Per downset; the difference of two is at most the load of the stage between them."""
        return self.states.sums(np.min([self._each(choice) for choice in self._plain], axis=0))

    def fewest_devices(self, pairs: Pairs, traffic: NDArray[np.float32], bound_s: float) -> Ints:
        """Per pair, devices that a stage needs at least; ``NEVER`` if no number will do.

        Args:
            pairs: of downsets.
            traffic: bytes per sample that cross the border of each stage, rounded downwards.
            bound_s: no load may be larger.
        """
        result = np.full(len(pairs), NEVER, dtype=np.int32)
        for choice in sorted(self._plain, key=lambda each: -each.devices):
            for start in range(0, len(pairs), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                enough = self._within(choice, pairs.take(some), traffic[some], bound_s)
                result[some][enough] = choice.devices
        return result

    def _within(
        self, choice: Choice, pairs: Pairs, traffic: NDArray[np.float32], bound_s: float
    ) -> NDArray[np.bool_]:
        """Which stages are within a bound on the load and in memory, as far as one sees at once."""
        load, nbytes = self._bound(choice), self._least_bytes(choice)
        crossing = self.prices.share(choice.devices) * self.prices.samples(choice.replicas)
        least = load[pairs.hi] - load[pairs.lo] + traffic * crossing
        enough = least <= bound_s * ROUNDING
        memory = self.prices.memory_bytes * ROUNDING
        if nbytes[-1] > memory:
            enough &= nbytes[pairs.hi] - nbytes[pairs.lo] <= memory
        return np.asarray(enough)

    def options(self, pairs: Pairs, room: Ints, bound_s: float) -> Options:
        """The stages between these pairs whose load is within a bound and that fit somewhere.

        Recomputation is an option only where memory might ask for it.

        Args:
            pairs: of downsets.
            room: per pair, the most devices that its stage may take.
            bound_s: no load may be larger.
        """
        kept = []
        for start in range(0, len(pairs), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            block = pairs.take(some)
            borders = self.states.known_borders(block)
            kept.append(self._block(block, borders, room[some], bound_s))
        return Options.joined(kept)

    def _block(self, pairs: Pairs, borders: Borders, room: Ints, bound_s: float) -> Options:
        kept: list[Options] = []
        for index, choice in enumerate(self.choices):
            if not choice.recompute:
                some = np.flatnonzero(room >= choice.devices)
                chosen, crossing = pairs.take(some), borders.take(some)
            load = self._load_s(chosen, crossing, choice)
            some = np.flatnonzero(load <= bound_s)
            chosen, crossing, load = chosen.take(some), crossing.take(some), load[some]
            held = self._held(chosen, crossing, choice)
            # Whoever can hold all micro-batches is over UNBOUNDED, however few they are.
            keep = held >= np.where(chosen.hi == len(self.states) - 1, 1, 2)
            kept.append(
                Options(
                    chosen.lo[keep],
                    chosen.hi[keep],
                    np.full(keep.sum(), choice.devices, dtype=np.int32),
                    load[keep],
                    held[keep],
                    np.full(keep.sum(), index, dtype=np.int32),
                )
            )
            # Recomputation follows: never quicker, of use only to what cannot hold everything.
            some = np.flatnonzero(held <= UNBOUNDED)
            chosen, crossing = chosen.take(some), crossing.take(some)
        return Options.joined(kept).sorted()

    def _load_s(self, pairs: Pairs, borders: Borders, choice: Choice) -> Floats:
        """Seconds per micro-batch."""
        sums, prices = self._sums(choice), self.prices
        compute = sums.forward_s + sums.backward_s + sums.forward_s * choice.recompute
        trainable = _between(sums.trainable_bytes, pairs)
        if choice.tensor == 1:
            trainable = trainable + borders.tied_trainable
        traffic = borders.traffic * prices.samples(choice.replicas) + borders.traffic_fixed
        reduce_s = prices.allreduce_s(trainable, choice.replicas, choice.tensor)
        load = _between(compute, pairs) + traffic * prices.share(choice.devices)
        return np.asarray(load + reduce_s / prices.num_microbatches)

    def _held(self, pairs: Pairs, borders: Borders, choice: Choice) -> Ints:
        """Micro-batches that can be in flight: 0 if none, over ``UNBOUNDED`` if all."""
        sums, prices = self._sums(choice), self.prices
        n = prices.samples(choice.replicas)
        optimizer = 1 + prices.cost.optimizer_factor
        state = _between(sums.parameter_bytes + sums.trainable_bytes * optimizer, pairs)
        if choice.tensor == 1:
            state = state + borders.tied + borders.tied_trainable * optimizer
        kept = _between(sums.kept_bytes, pairs)
        enter = borders.enter * n + borders.enter_fixed
        gradients = borders.gradients * n + borders.gradients_fixed
        fixed = state + kept * choice.recompute + prices.cost.receive_slots * (enter + gradients)
        each = enter + kept * (not choice.recompute)
        held: Ints = prices.headroom(fixed, each) + np.int32(1)
        return held


def _between(of: Floats, pairs: Pairs) -> Floats:
    """What the stage between each two downsets adds to a sum per downset."""
    result: Floats = of[pairs.hi] - of[pairs.lo]
    return result
