"""How long a step takes, roughly and in a millisecond: what candidates are ranked by.

    s, y      a stage and one that follows it;   M micro-batches
    F, B      forward and backward seconds of a micro-batch on the fullest replica
    f, b      seconds of a transfer of a micro-batch along an edge, forward and back
    h         height: longest distance to a sink

    load      busiest port (a device's link or a node's network card, in one direction), with
              everything that crosses it
    round(s)  F + B + max over y of (f + b + round(y)): from a forward to its backward
    held(s)   micro-batches in flight: 2h + 1, less where memory ends, never less than h + 1
    period    max over s of max(F + B, load, round(s) / held(s))
    start(s)  longest way from a source, of F and f
    end(s)    max(start + (M - 1) * period + F + B,   max over y of (end(y) + b) + B)
    step      max over s of (end + all-reduce)

That is ``(M - 1) * bottleneck + critical path`` with the all-reduce of a stage hidden behind
stages that finish later. Where devices are processes that share few cores, the period is at least
all compute divided by the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from anabranch.cost import Port
from anabranch.planner.partitioner.parts import Part, PartPrices, heights
from anabranch.planner.stages import split_evenly


def step_s(
    prices: PartPrices,
    parts: Sequence[Part],
    devices: Sequence[Sequence[int]],
    pairs: set[tuple[int, int]],
) -> float:
    """Seconds of one step.

    Args:
        prices: prices the parts.
        parts: in topological order.
        devices: of each part.
        pairs: stage edges. Along one without values its ends wait for each other all the same.
    """
    count = prices.prices.num_microbatches
    compute = [prices.compute_s(part) for part in parts]
    successors: list[list[tuple[int, float, float]]] = [[] for _ in parts]
    load: dict[Port, float] = {}
    for x, y in sorted(pairs):
        there, back = _transfers(prices, (parts[x], parts[y]), (devices[x], devices[y]), load)
        successors[x].append((y, there, back))
    period = _period(prices, parts, compute, successors, heights(len(parts), pairs))
    period = max(period, max(load.values(), default=0.0))

    start = [0.0] * len(parts)
    for s, (forward, _) in enumerate(compute):
        for y, there, _ in successors[s]:
            start[y] = max(start[y], start[s] + forward + there)
    end = [0.0] * len(parts)
    step = 0.0
    for s in reversed(range(len(parts))):
        forward, backward = compute[s]
        end[s] = start[s] + (count - 1) * period + forward + backward
        for y, _, back in successors[s]:
            end[s] = max(end[s], end[y] + back + backward)
        step = max(step, end[s] + prices.allreduce_s(parts[s], devices[s]))
    return step


def _period(
    prices: PartPrices,
    parts: Sequence[Part],
    compute: Sequence[tuple[float, float]],
    successors: Sequence[Sequence[tuple[int, float, float]]],
    height: Sequence[int],
) -> float:
    count = prices.prices.num_microbatches
    cluster = prices.cost.cluster
    work = sum(part.devices * sum(compute[s]) for s, part in enumerate(parts))
    shared = 0 < cluster.cores < cluster.num_devices
    period = work / cluster.cores if shared else 0.0
    around = [0.0] * len(parts)
    for s in reversed(range(len(parts))):
        own = sum(compute[s])
        around[s] = own + max(
            (there + back + around[y] for y, there, back in successors[s]), default=0
        )
        held = max(min(2 * height[s], prices.headroom(parts[s])), height[s]) + 1
        period = max(period, own, around[s] / held if held < count else 0.0)
    return period


def _transfers(
    prices: PartPrices,
    ends: tuple[Part, Part],
    devices: tuple[Sequence[int], Sequence[int]],
    load: dict[Port, float],
) -> tuple[float, float]:
    """Seconds of a micro-batch along an edge, forward and back; adds to ``load`` per port."""
    per_sample, fixed, grad_per_sample, grad_fixed = prices.flow(ends[0].mask, ends[1].mask)
    if per_sample + fixed == 0:
        delay = prices.cost.way(devices[0][0], devices[1][0])[3]
        return delay, delay
    shape = ends[0].replicas, ends[0].tensor, ends[1].replicas, ends[1].tensor
    there: dict[Port, float] = {}
    back: dict[Port, float] = {}
    latency = 0.0
    for i, j, samples in _overlapping_devices(prices.prices.microbatch_size, *shape):
        way, home, per_byte, delay = prices.cost.way(devices[0][i], devices[1][j])
        if delay > latency:
            latency = delay
        seconds = (per_sample * samples + fixed) * per_byte
        for port in way:
            there[port] = there.get(port, 0.0) + seconds
        seconds = (grad_per_sample * samples + grad_fixed) * per_byte
        for port in home:
            back[port] = back.get(port, 0.0) + seconds
    for busy in (there, back):
        for port, seconds in busy.items():
            load[port] = load.get(port, 0.0) + seconds
    grad = grad_per_sample + grad_fixed > 0
    return latency + max(there.values()), (latency + max(back.values())) * grad


@lru_cache(maxsize=4096)
def _overlapping_devices(
    size: int, sources: int, source_tensor: int, targets: int, target_tensor: int
) -> tuple[tuple[int, int, int], ...]:
    """Devices of two stages that exchange samples of a micro-batch, and how many.

    Each device of the target's replicas gets its whole slice, from one device of the source's.
    """
    return tuple(
        (i * source_tensor + each % source_tensor, j * target_tensor + each, samples)
        for i, j, samples in _overlaps(size, sources, targets)
        for each in range(target_tensor)
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
