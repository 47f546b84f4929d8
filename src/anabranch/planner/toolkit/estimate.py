"""Seconds of a step, roughly and in a millisecond: what candidates are ranked by.

    s, x, y   a stage, one before it and one after it;   M micro-batches
    F, B      forward and backward seconds of a micro-batch on the fullest replica
    f, b      seconds of a transfer of a micro-batch along an edge, forward and back
    h         height: longest distance to a sink

    load(s)   busiest port (a device's link or a node's network card, in one direction) that
              transfers of s use, with everything that crosses it
    round(s)  F + B + max over y of (f + b + round(y)): from a forward to its backward
    w(s)      micro-batches in flight: 2h + 1, less where memory ends, never less than h + 1
    pace(s)   max(F + B, load, round / w): seconds from one micro-batch to the next
    start(s)  longest way from a source, of F and f
    last(s)   start of the last forward: after w - 1 forwards and M - w of both, or
              max over x of (last(x) + F(x) + f), or M - 1 - w paces after the first backward
    end(s)    max(start + (M - 1) * pace + F + B,   last + F + B,   max over y of (end(y) + b) + B)
    step      max over s of (end + what is left of the all-reduce, ``cost.period.left_s``)

With M much larger than w that is ``(M - 1) * bottleneck + critical path``. The all-reduce of a
parameter tied across stages begins when the last of them has ended, and goes over the devices of
all of them. Where devices share few cores, no pace is less than all compute divided by the cores,
and no step less than M times that. Where an edge brings no gradient back, there is no f, b and
round(y) in round(s), and end(s) does not wait for end(y).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from anabranch.cost.buckets import last_share
from anabranch.cost.communication import Port
from anabranch.cost.period import left_s
from anabranch.planner.toolkit.parts import MessagePorts, Part, PartPrices, heights
from anabranch.plans.stages import split_evenly


def step_s(
    prices: PartPrices,
    parts: Sequence[Part],
    devices: Sequence[Sequence[int]],
    pairs: set[tuple[int, int]],
) -> float:
    """Seconds of one step.

    Args:
        parts: in topological order.
        pairs: stage edges. Along one without values its ends wait for each other all the same.
    """
    compute = [prices.compute_s(part) for part in parts]
    successors: list[list[tuple[int, float, float]]] = [[] for _ in parts]
    load: dict[Port, float] = {}
    used: list[set[Port]] = [set() for _ in parts]
    for x, y in sorted(pairs):
        there, back, ports = _transfers(
            prices, (parts[x], parts[y]), (devices[x], devices[y]), load
        )
        successors[x].append((y, there, back))
        used[x] |= ports
        used[y] |= ports
    loads = [max((load[port] for port in ports), default=0.0) for ports in used]
    pipeline = _Pipeline(prices, parts, compute, successors, heights(len(parts), pairs), loads)
    ends = pipeline.ends()
    done = list(ends)
    for stages, nbytes, reduce_s in prices.all_reduces(parts, devices):
        if len(stages) == 1:
            (s,) = stages
            done[s] = ends[s] + left_s(reduce_s, compute[s][1], last_share(nbytes))
            continue
        # Those of one stage share its links, so that one follows the other.
        ready = max(done[s] for s in stages)
        for s in stages:
            done[s] = ready + reduce_s
    return max(done)


class _Pipeline:
    """The recurrences at the head of this file."""

    def __init__(
        self,
        prices: PartPrices,
        parts: Sequence[Part],
        compute: Sequence[tuple[float, float]],
        successors: Sequence[Sequence[tuple[int, float, float]]],
        height: Sequence[int],
        loads: Sequence[float],
    ) -> None:
        self._count = prices.microbatch.num_microbatches
        self._compute = compute
        self._successors = successors
        cluster = prices.cost.cluster
        work = sum(part.devices * sum(compute[s]) for s, part in enumerate(parts))
        shared = cluster.shared_cores
        least = self._least = work / shared if shared else 0.0
        self._round = [0.0] * len(parts)
        self._pace = [0.0] * len(parts)
        self._held = [0] * len(parts)
        for s in reversed(range(len(parts))):
            own = sum(compute[s])
            self._round[s] = own + max(
                (0.0, *(there + back + self._round[y] for y, there, back in successors[s]))
            )
            h = height[s]
            held = min(max(min(2 * h, prices.headroom(parts[s])), h) + 1, self._count)
            waits = self._round[s] / held if held < self._count else 0.0
            self._held[s] = held
            self._pace[s] = max(own, loads[s], least, waits)

    def ends(self) -> list[float]:
        """When each stage has run its last backward."""
        count, pace, held = self._count, self._pace, self._held
        start = [0.0] * len(pace)
        last = [0.0] * len(pace)
        for s, (forward, _) in enumerate(self._compute):
            ahead = start[s] + (count - held[s]) * pace[s] + (held[s] - 1) * forward
            waits = start[s] + self._round[s] + (count - 1 - held[s]) * pace[s]
            last[s] = max(last[s], ahead, waits if held[s] < count else 0.0)
            for y, there, _ in self._successors[s]:
                start[y] = max(start[y], start[s] + forward + there)
                last[y] = max(last[y], last[s] + forward + there)
        end = [0.0] * len(pace)
        for s in reversed(range(len(pace))):
            forward, backward = self._compute[s]
            own = max(start[s] + (count - 1) * pace[s], last[s]) + forward + backward
            others = (end[y] + back + backward for y, _, back in self._successors[s])
            end[s] = max(own, *others, 0.0)
        # Few cores are slow from the first micro-batch on, and for all stages alike.
        slower = count * self._least
        return [seconds * max(1.0, slower / max(end)) for seconds in end] if slower else end


def _transfers(
    prices: PartPrices,
    ends: tuple[Part, Part],
    devices: tuple[Sequence[int], Sequence[int]],
    load: dict[Port, float],
) -> tuple[float, float, set[Port]]:
    """Seconds of a micro-batch along an edge, forward and back, and the ports on the way; adds to
    ``load`` per port. Where no gradient comes back, nothing waits: minus infinity.
    """
    waits = 0.0 if prices.sets.waits_back(ends[0].mask, ends[1].mask) else float("-inf")
    per_sample, fixed, grad_per_sample, grad_fixed = prices.flow(ends[0].mask, ends[1].mask)
    if per_sample + fixed == 0:
        delay = prices.cost.route(devices[0][0], devices[1][0]).latency_s
        return delay, delay + waits, set()
    shape = ends[0].replicas, ends[0].tensor, ends[1].replicas, ends[1].tensor
    key = shape, tuple(devices[0]), tuple(devices[1])
    ways = prices.ways.get(key)
    if ways is None:
        ways = prices.ways[key] = _ways(prices, shape, devices)
    there = back = 0.0
    for port, samples, once in ways.there:
        seconds = per_sample * samples + fixed * once
        load[port] = load.get(port, 0.0) + seconds
        if seconds > there:
            there = seconds
    for port, samples, once in ways.back:
        seconds = grad_per_sample * samples + grad_fixed * once
        load[port] = load.get(port, 0.0) + seconds
        if seconds > back:
            back = seconds
    return ways.latency + there, ways.latency + back + waits, ways.ports


def _ways(
    prices: PartPrices,
    shape: tuple[int, int, int, int],
    devices: tuple[Sequence[int], Sequence[int]],
) -> MessagePorts:
    """The ports between two stages, whatever is sent."""
    there: dict[Port, tuple[float, float]] = {}
    back: dict[Port, tuple[float, float]] = {}
    latency = 0.0
    for i, j, samples in _overlapping_devices(prices.microbatch.microbatch_size, *shape):
        forward = prices.cost.route(devices[0][i], devices[1][j])
        latency = max(latency, forward.latency_s)
        for route, sums in (
            (forward, there),
            (prices.cost.route(devices[1][j], devices[0][i]), back),
        ):
            for port in route.ports:
                before = sums.get(port, (0.0, 0.0))
                per_byte_s = route.per_byte_s
                sums[port] = before[0] + samples * per_byte_s, before[1] + per_byte_s
    return MessagePorts(
        latency,
        tuple((port, *sums) for port, sums in there.items()),
        tuple((port, *sums) for port, sums in back.items()),
        there.keys() | back.keys(),
    )


@lru_cache(maxsize=4096)
def _overlapping_devices(
    size: int, sources: int, source_tensor: int, targets: int, target_tensor: int
) -> tuple[tuple[int, int, int], ...]:
    """Devices of two stages that exchange samples of a micro-batch, and how many.

    Each device of the target's replicas gets its whole slice, from one device of the source's.
    """
    return tuple(
        (i * source_tensor + shard % source_tensor, j * target_tensor + shard, samples)
        for i, j, samples in _overlaps(size, sources, targets)
        for shard in range(target_tensor)
    )


def _overlaps(size: int, sources: int, targets: int) -> Iterator[tuple[int, int, int]]:
    """Replicas of two stages that share samples of a micro-batch, and how many."""
    made, read = split_evenly(0, size, sources), split_evenly(0, size, targets)
    j = 0
    for i, (start, stop) in enumerate(made):
        while j and read[j][0] > start:
            j -= 1
        while j < targets and read[j][0] < stop:
            samples = min(stop, read[j][1]) - max(start, read[j][0])
            if samples > 0:
                yield i, j, samples
            j += 1
        j = min(j, targets - 1)
