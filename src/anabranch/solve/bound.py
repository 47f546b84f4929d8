"""A lower bound of the step of any plan, by a relaxation.

The operators of a stage share its replicas and its micro-batch size. Here each operator takes those
that are cheapest for it alone. On r devices, each with x = B / r samples in slices of n, and with f
and b the seconds of its forward and backward, operator o takes of each device::

    busy(o, r)     min over n of  x / n * (f(n) + b(n))  +  update

A step of T seconds is at least the sum of ``busy`` over the operators of a stage, which a device
computes one after the other, and stages share the D devices::

    sum over o of  min over r of  r * busy(o, r)  <=  D * T

Only those r count that operator o allows. Before its first forward its inputs have come the longest
way from the beginning. Its gradients are final after its own last backward, so ``busy`` and the
all-reduce follow one another. The gradients of its last inputs go back the same way, while
gradients of weights may still be computed where backwards are split::

    before(o) + busy(o, r) + all-reduce  <=  T
    before(o) + min over n of  x / n * (f(n) + i(n))  +  behind(o)  <=  T

Here i is what gradients of inputs take of b, and ``behind`` the way back. (While the all-reduce was
left out, plans for the 60 cases of the map in ``benchmarks/planners`` were within 1.74 times the
bound in the median, and then 1.31.)

Operator h has most gradients to sum. With few replicas it computes long, with many its all-reduce
takes long, and either way its stage has little time for others. Of these all but one backward comes
before the gradients of h are final. Those of operators before h are final later, and all-reduces of
the same devices take turns. One forward may be on the way to h already::

    beside(o, r)   min over n of  x / n * (f(n) + b(n)) - b(n)  -  one forward
                   +  all-reduce, where o is before h

    before(h) + busy(h, r) + all-reduce of h + sum of beside(o, r)  <=  T

So for some r the operators that do not fit into that stage have devices enough in the sum above,
of which D - r are left to them. Which to take in is a knapsack, whose items may be cut here. (Plans
for candle-uno with 32,768 samples on 64 and 128 devices are within 1.96 and 1.94 times the bound in
place of 2.21 and 2.18, and on a slow network 2.50 in place of 2.83.)

Messages are left out of this, since any two operators may share a device. But the stage of o may
fill a group of devices, such as a node, and then every value comes in by the port of the group or
is made in the stage itself. The last device to begin has waited for the first micro-batch of all
values that come, and what the stage makes for o it computes and sums as well, all but one backward
before the gradients of o are final::

    came(v)        min of  micro-batch * bytes of v / bandwidth   and   inside(o')
    inside(o')     passes of o' but the last backward  +  all-reduce  +  came by all that o' reads

Here o' makes v, and a value or operator with several readers or values counts in equal parts. Such
an o allows steps that are no shorter than ``came`` by what it reads, all of its passes and its
all-reduce. Replicas in several groups have a slower one. (That took the 1.31 to 1.23.)

Large slices take less time per sample, small ones come sooner to the end of the model and back. A
step is at least the work over D devices, and as long as the way of the first micro-batch, so with
any weight m, each operator with the slice that suits it best::

    sum over o of  min over n of  B / n * (f(n) + b(n)) / D  +  m * (f(n) + i(n)) on the way
                                                                      <=  (1 + m) * T

(In 20 of the cases this is more, up to a sixth: mmt with 64 samples on 128 devices is within 1.62
times the bound in place of 1.91.)

The least T for which all of this holds is the bound. Devices that share cores do all of the work on
these, so that a step is at least as long as that. The bound holds for plans with one stage on each
device. A device with several stages may work at an early one while a late one has no inputs, and
sum up one while it computes another. For plans with such devices only the first sum is left, of
``busy`` alone, and the work with the way.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from anabranch.compiled import Floats, Ints
from anabranch.cost import CostModel
from anabranch.cost.communication import transfer_s
from anabranch.cost.overheads import computed_at_once
from anabranch.graph.digraph import longest_paths, path_before
from anabranch.graph.opgraph import BATCH
from anabranch.solve.settings import SETTINGS

LEAST = 1e-9
"""Share of the longest step that is looked at, down to which bounds are looked for."""

TINY = 1e-30
"""Seconds in place of none, to divide by."""


def step_bound(cost: CostModel, batch_size: int, *, several: bool = False) -> float:
    """Return the seconds that a step of any plan takes at least, if each device has one stage; of
    any plan at all with ``several``.
    """
    relaxed = _Relaxation.of(cost, batch_size, several=several)
    bound_s = _work_and_way_s(cost, batch_size)
    most_s = max(bound_s, float(relaxed.least[0].max() + relaxed.busy[0].sum()))
    if not most_s:
        return 0.0
    # Powers of one ratio, so that bounds with and without several stages are rounded alike.
    ratio = 1 + SETTINGS.bound_rounding
    low, high = (math.log(s, ratio) for s in (bound_s or most_s * LEAST, most_s))
    low, high = math.floor(low), math.ceil(high) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if relaxed.fits(ratio**middle, several=several):
            high = middle
        else:
            low, bound_s = middle, max(bound_s, ratio**middle)
    return bound_s


def _work_and_way_s(cost: CostModel, batch_size: int) -> float:
    """Return the largest of the means of all work over the devices and of the ways of the first
    micro-batch, those at least half as long as the longest, where each operator has the slice for
    which that mean is least.
    """
    samples, forward_s, backward_s, inputs_s = _least_seconds(cost, batch_size)
    edges, ends = _way_back(cost)
    inputs_s[:, ends] = backward_s[:, ends]
    rate_s = np.minimum.accumulate((forward_s + backward_s) / samples[:, None], axis=0)
    work_s = rate_s * batch_size / computed_at_once(cost.cluster)
    before_s, forwards = longest_paths(np.zeros(len(cost.graph)), forward_s[0], cost.graph.edges)
    back = ((consumer, producer) for producer, consumer in edges)
    returned_s, backwards = longest_paths(before_s + forward_s[0], inputs_s[0], back)
    ways_s = returned_s[ends] + inputs_s[0, ends]
    chosen = ends[ways_s >= ways_s.max() / 2]
    passed = np.zeros((2, len(cost.graph)))
    for op in chosen.tolist():
        for row, previous in ((1, backwards), (0, forwards)):
            passed[row, op] += 1 / len(chosen)
            while previous[op] >= 0:
                op = previous[op]
                passed[row, op] += 1 / len(chosen)
    # The fullest slice is larger than the count before, so the others are as large at least.
    first = np.maximum(np.arange(len(samples)) - 1, 0)
    way_s = forward_s[first] * passed[0] + inputs_s[first] * passed[1]
    weights = (0.0, *np.exp2(np.arange(-6.0, 2.0, 0.5)))
    return max(float((work_s + m * way_s).min(axis=0).sum() / (1 + m)) for m in weights)


def work_floor(cost: CostModel, batch_size: int) -> float:
    """Return the seconds of all operators, each at the slice with the least time per sample, over
    the devices, or over the compute that devices with shared cores do at once.
    """
    seconds = float(least_s_per_sample(cost, batch_size).sum())
    return seconds * batch_size / computed_at_once(cost.cluster)


def least_s_per_sample(cost: CostModel, batch_size: int) -> Floats:
    """Per operator; between measured counts seconds are linear, so these are enough to ask."""
    if cost.profile.proportional:
        counts = [1]
    else:
        counts = [n for n in cost.profile.samples if n <= batch_size]
        if not counts or (counts[-1] < batch_size and cost.covers(batch_size)):
            counts.append(max(batch_size, cost.profile.samples[0]))
    return np.asarray(np.min([np.add(*cost.op_seconds(n)) / n for n in counts], axis=0))


def longest_way_s(cost: CostModel, batch_size: int) -> float:
    """Seconds of the longest way of one slice through the model and back, each operator with the
    slice that is quickest: forwards, then gradients of inputs, or at its end a whole backward.
    """
    _, forward_s, backward_s, inputs_s = (s[0] for s in _least_seconds(cost, batch_size))
    way_back, ends = _way_back(cost)
    inputs_s[ends] = backward_s[ends]
    before_s = path_before(forward_s, cost.graph.edges)
    behind_s = path_before(inputs_s, way_back)
    return float((before_s + forward_s + np.maximum(backward_s, inputs_s + behind_s)).max())


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """Seconds of every operator alone: [replicas - 1, operator] of each device, or [operator].

    Attributes:
        least: the shortest step that an operator allows; infinite for too many replicas.
        heaviest: the operator with most gradients to sum.
        own_s: the longest path to it, its passes, all-reduce and update, by replicas.
        beside: what another operator of its stage takes before its gradients are final, and of an
            all-reduce that follows its own.
    """

    busy: Floats
    least: Floats
    heaviest: int
    own_s: Floats
    beside: Floats

    @staticmethod
    def of(cost: CostModel, batch_size: int, *, several: bool) -> _Relaxation:
        """Price the operators of a model; ``several``: where devices may have several stages, of
        which none fills a group alone.
        """
        samples, forward_s, backward_s, inputs_s = _least_seconds(cost, batch_size)
        before_s = path_before(forward_s[0], cost.graph.edges)
        way_back, ends = _way_back(cost)
        inputs_s[:, ends] = backward_s[:, ends]
        behind_s = path_before(inputs_s[0], way_back)
        held = cost.own_parameter_bytes
        update_s = cost.update.byte_s * _updated_bytes(cost, batch_size)
        shape = cost.cluster.num_devices, len(cost.graph)
        busy, least, beside = (np.full(shape, np.inf) for _ in range(3))
        heaviest, own_s = int(held.summed.argmax()), np.full(shape[0], np.inf)
        earlier = [cost.graph.ancestors[heaviest] >> op & 1 for op in range(shape[1])]
        for row in range(min(shape[0], batch_size)):
            replicas = row + 1
            fitting = samples <= max(-(-batch_size // replicas), samples[0])
            passes = batch_size / replicas / samples[fitting, None]
            compute_s = passes * (forward_s + backward_s)[fitting]
            returned_s = (passes * (forward_s + inputs_s)[fitting]).min(axis=0)
            level = cost.cluster.link(0, row).level
            byte_s, latency_s = cost.least_all_reduce_price(replicas, level)
            busy[row] = compute_s.min(axis=0) + update_s / replicas
            alone_s = busy[row] + transfer_s(held.summed, byte_s, latency_s)
            least[row] = before_s + np.maximum(alone_s, returned_s + behind_s)
            own_s[row] = (before_s + alone_s)[heaviest]
            # The latency is of a bucket, which may have gradients of other operators as well.
            rest_s = (compute_s - backward_s[fitting]).min(axis=0) - forward_s[0]
            beside[row] = np.maximum(rest_s, 0.0) + held.summed * byte_s * earlier
        for level, replicas in enumerate(() if several else cost.cluster.group_sizes[:-1]):
            if replicas <= min(shape[0] - 1, batch_size):
                apart_s = np.inf
                if replicas > 1:
                    outer = cost.cluster.link(0, replicas).level
                    price = cost.least_all_reduce_price(replicas, outer)
                    apart_s = before_s + busy[replicas - 1] + transfer_s(held.summed, *price)
                filled_s = _filled_s(cost, batch_size, level, samples, forward_s, backward_s)
                filled_s += update_s / replicas
                least[replicas - 1] = np.maximum(least[replicas - 1], np.minimum(filled_s, apart_s))
        return _Relaxation(busy, least, heaviest, own_s, beside)

    def fits(self, step_s: float, *, several: bool = False) -> bool:
        """Return whether the devices may be enough for a step of this length; ``several``: where
        they may have several stages.
        """
        possible, total = self.least <= step_s, len(self.busy)
        replicas = np.arange(1, total + 1)[:, None]
        most = total * (1 + LEAST)
        used = np.where(possible, replicas * self.busy, np.inf).min(axis=0) / step_s
        if several or used.sum() > most:
            return bool(used.sum() <= most)
        used[self.heaviest] = 0.0
        rows = np.flatnonzero(possible[:, self.heaviest])
        beside_s = np.maximum(self.beside[rows], TINY)
        room_s = step_s * (1 + LEAST) - self.own_s[rows, None]
        # A fractional knapsack: first those that save most devices in a second beside it.
        order = np.argsort(-used / beside_s, axis=1)
        beside_s = np.take_along_axis(beside_s, order, axis=1)
        taken_s = np.cumsum(beside_s, axis=1) - beside_s
        saved = np.clip((room_s - taken_s) / beside_s, 0.0, 1.0) * used[order]
        return bool((used.sum() - saved.sum(axis=1) + rows + 1 <= most).any())


def _filled_s(
    cost: CostModel,
    batch_size: int,
    level: int,
    samples: Floats,
    forward_s: Floats,
    backward_s: Floats,
) -> Floats:
    """Return per operator the shortest step of a stage that fills a group of devices, without its
    update.

    Args:
        level: of the group.
        samples: counts, and [count, operator] the seconds for them.
    """
    replicas = cost.cluster.group_sizes[level]
    summed = cost.own_parameter_bytes.summed
    byte_s, latency_s = cost.all_reduce_price(range(replicas))
    most = samples[samples <= max(-(-batch_size // replicas), samples[0])]
    forward_s, backward_s = (
        np.minimum.accumulate(seconds[: len(most)] / most[:, None], axis=0)
        for seconds in (forward_s, backward_s)
    )
    # A slice of the first micro-batch has one sample more than the count before, or more.
    sizes = np.append(replicas * most[0], replicas * most[:-1] + 1)
    # Of each micro-batch the last device to begin may have a sample less than others.
    fewest = batch_size / replicas - np.ceil(batch_size / sizes) * (1 - 1 / replicas)
    forwards_s = np.maximum(fewest, 0.0)[:, None] * forward_s
    inside_s = forwards_s + np.maximum(fewest - most, 0.0)[:, None] * backward_s + summed * byte_s
    # Of its cards one has as much as the mean or more, and the last device to begin waits for it.
    bandwidth = cost.cluster.level_link(level + 1).bandwidth * cost.cluster.cards[level + 1]
    came_s = np.zeros_like(inside_s)
    made = Counter(value.producer for value in cost.graph.values)
    for value in sorted(cost.graph.values, key=lambda value: value.producer):
        maker = value.producer
        if maker != BATCH:
            message_s = np.array([value.size(size) for size in sizes]) / bandwidth
            way_s = np.minimum(message_s, (inside_s + came_s)[:, maker] / made[maker])
            for reader in value.consumers:
                came_s[:, reader] += way_s / len(value.consumers)
    own_s = forwards_s + np.maximum(fewest, 0.0)[:, None] * backward_s
    return np.asarray((came_s + own_s + transfer_s(summed, byte_s, latency_s)).min(axis=0))


def _updated_bytes(cost: CostModel, batch_size: int) -> Floats:
    """Per operator, bytes of the parameters that it alone reads and that an update changes; of
    tables with sparse gradients the rows of the batch.
    """
    updated = cost.own_parameter_bytes.trainable.copy()
    for name, readers in cost.graph.readers.items():
        parameter = cost.parameters[name]
        if parameter.table and cost.has_rows(parameter) and readers.bit_count() == 1:
            rows_bytes = parameter.table.lookups * parameter.table.row_bytes * batch_size
            updated[readers.bit_length() - 1] -= max(parameter.nbytes - rows_bytes, 0)
    return updated


def _least_seconds(cost: CostModel, batch_size: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return sample counts up to a batch, and [count, operator] the seconds of forward, backward
    and gradients of inputs for so many samples or more. Between the counts seconds are linear, and
    the most that a replica can have of a batch is among them.
    """
    most = min(cost.cluster.num_devices, batch_size)
    whole = {-(-batch_size // replicas) for replicas in range(1, most + 1)}
    measured = (1,) if cost.profile.proportional else cost.profile.samples
    within = {n for n in measured if n <= batch_size} | {n for n in whole if cost.covers(n)}
    counts = sorted(within or {measured[0]})
    ways = np.array([cost.op_seconds(n) for n in counts])
    inputs_s = np.maximum(ways[:, 1] - [cost.op_weight_s(n) for n in counts], 0.0)
    seconds = np.concatenate([ways, inputs_s[:, None]], axis=1)
    forward_s, backward_s, inputs_s = np.moveaxis(
        np.minimum.accumulate(seconds[::-1], axis=0)[::-1], 1, 0
    )
    return np.array(counts, np.float64), forward_s, backward_s, inputs_s


def _way_back(cost: CostModel) -> tuple[set[tuple[int, int]], Ints]:
    """Return pairs of operators between which a value has a gradient; and operators where the way
    back ends: nobody waits for gradients of their inputs, so no backward of them is split.
    """
    values = (v for v in cost.graph.values if v.grad and v.producer != BATCH)
    edges = {(value.producer, consumer) for value in values for consumer in value.consumers}
    return edges, np.setdiff1d(np.arange(len(cost.graph)), [consumer for _, consumer in edges])
