"""Interleaving: the orders of several stages on one device, merged into one list per device.

A schedule rule orders the micro-batches of a stage, but not the turns of two stages on one device.
The merge simulates the orders once; each device picks the action that can start first. A forward
takes time in proportion to its samples, a backward twice that, and each half of a split backward as
long as a forward. Two devices with two stages each, in a chain 0, 1, 2, 3, two micro-batches::

    device 0: stages 0, 2     0F0 0F1 2F0 2F1 .   .       2B0    2B1       0B0   0B1
    device 1: stages 1, 3     .   1F0 1F1 3F0 3B0    3F1  3B1     1B0    1B1

Among actions that can start at the same time backwards come first, because they free memory, then
earlier samples, then stages further down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anabranch.compiled import Floats, Ints, affordable, compiled
from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph, part_of
from anabranch.schedule.lower import directions, transfer_table
from anabranch.schedule.schedule import Action, Kind, Order


def interleave(graph: StageGraph, orders: Sequence[tuple[Action, ...]]) -> dict[int, Order]:
    """Merge the orders of stages into one list of compute actions per device; those that are equal
    are one object.

    Raises:
        InvalidScheduleError: if the orders cannot be executed at all.
    """
    lanes = _lanes(graph, [order if isinstance(order, Order) else Order(order) for order in orders])
    actions, count = len(lanes.seconds), len(lanes.stage)
    turns = np.zeros(actions, np.int64)
    state = lanes.first[:-1].copy(), lanes.sources.copy(), np.zeros(actions)
    merge = affordable(_merge, actions * count)
    if merge(lanes, *state, np.zeros(len(graph.devices)), turns) < actions:
        raise InvalidScheduleError(
            "the stages' orders wait for each other; in-flight counts must not rise along a "
            "stage edge"
        )
    device, stage = lanes.device[turns], lanes.stage[turns]
    known, result = dict[bytes, Order](), dict[int, Order]()
    for at, name in enumerate(graph.devices):
        own = stage[device == at]
        if (key := own.tobytes()) not in known:
            rows = [iter(order) for order in orders]
            known[key] = Order(next(rows[s]) for s in own.tolist())
        result[name] = known[key]
    return result


class Lanes(NamedTuple):
    """Replicas of stages, each with the actions of its stage in order, all by number.

    Attributes:
        first: number of the first action of a lane, and the end.
        stage: of a lane.
        device: of a lane, by position.
        is_forward: per action.
        sample: its first sample.
        seconds: its length.
        sources: number of actions that it waits for.
        first_target: where the actions begin that wait for it, and the end.
        target: numbers of these.
    """

    first: Ints
    stage: Ints
    device: Ints
    is_forward: Ints
    sample: Ints
    seconds: Floats
    sources: Ints
    first_target: Ints
    target: Ints


def _lanes(graph: StageGraph, orders: Sequence[Order]) -> Lanes:
    """Number the actions of all replicas."""
    stages, counts = [*enumerate(graph.stages)], np.array([*map(len, orders)])
    replicas = [stage.replicas for _, stage in stages]
    stage = np.repeat(np.arange(len(stages)), replicas)
    first = np.cumsum([0, *counts[stage]])
    begin = first[np.cumsum([0, *replicas])[:-1]]  # of each stage's first lane
    parts: list[tuple[Ints, Ints, Floats]] = []
    for s, order in enumerate(orders):
        _, kind, microbatch = np.array(order.columns)
        forward = (kind == Kind.FORWARD.number).astype(np.int64)
        times = 1.0 + (kind == Kind.BACKWARD.number)
        size = graph.stages[s].microbatch_size
        start = microbatch * size
        stop = np.minimum(start + size, graph.batch_size)
        for replica in range(replicas[s]):
            begun, ended = part_of(start, stop, replicas[s], replica)
            parts.append((forward, start, (ended - begun) * times))
    is_forward, sample, seconds = (np.concatenate([part[x] for part in parts]) for x in range(3))

    def numbers(s: int, forward: bool, devices: Ints, microbatches: Ints) -> Ints:
        """Numbers of the actions of a stage's micro-batches on these devices."""
        where = np.zeros(graph.devices[-1] + 1, np.int64)
        where[[*graph.stages[s].devices]] = np.arange(replicas[s])
        first: Ints = begin[s] + where[devices] * counts[s]
        return first + orders[s].passes[s, forward][microbatches]

    links = [np.zeros((2, 0), np.int64)]
    for x, y, forward in directions(graph):
        i, a, j, b, *_ = transfer_table(graph, x, y, forward=forward)
        links.append(np.array([numbers(y, forward, b, j), numbers(x, forward, a, i)]))
    target, source = np.concatenate(links, axis=1)
    by_source = np.argsort(source, kind="stable")
    return Lanes(
        first,
        stage,
        np.array([graph.rank_of[d] for _, x in stages for d in x.devices]),
        is_forward,
        sample,
        seconds,
        np.bincount(target, minlength=len(seconds)),
        np.searchsorted(source[by_source], np.arange(len(seconds) + 1)),
        target[by_source],
    )


@compiled
def _merge(
    lanes: Lanes, following: Ints, missing: Ints, ready: Floats, free: Floats, turns: Ints
) -> int:
    """Go through all orders; return the number of actions that could be executed.

    Args:
        following: per lane, its next action.
        missing: per action, those that it waits for and that have not ended.
        ready: per action, when the last of the others ended.
        free: per device, when it has nothing to do.
        turns: lanes in the order of their turns, to be filled.
    """
    total = len(lanes.seconds)
    for done in range(total):
        best, start = -1, 0.0
        for lane in range(len(lanes.stage)):
            x = following[lane]
            if x < lanes.first[lane + 1] and missing[x] == 0:
                begins = max(float(free[lanes.device[lane]]), float(ready[x]))
                is_first = best < 0 or begins < start
                if is_first or (begins == start and _goes_first(lane, best, lanes, following)):
                    best, start = lane, begins
        if best < 0:
            return done
        x = following[best]
        following[best] = x + 1
        turns[done] = best
        end = start + lanes.seconds[x]
        free[lanes.device[best]] = end
        for i in range(lanes.first_target[x], lanes.first_target[x + 1]):
            target = lanes.target[i]
            missing[target] -= 1
            ready[target] = max(ready[target], end)
    return total


def _goes_first(a: int, b: int, lanes: Lanes, following: Ints) -> bool:
    """Return True if of two lanes that can start together the first one has its turn."""
    x, y = following[a], following[b]
    if lanes.is_forward[x] != lanes.is_forward[y]:
        return bool(lanes.is_forward[x] < lanes.is_forward[y])
    if lanes.sample[x] != lanes.sample[y]:
        return bool(lanes.sample[x] < lanes.sample[y])
    return bool(lanes.stage[a] > lanes.stage[b])
