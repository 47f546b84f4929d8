"""Moves: from a draft to one that differs little from it.

Every move is a function of a draft, the space of drafts and a source of random numbers. It returns
a new draft, or None if it has nothing to do. It need not check whether the new draft can run: the
evaluator does. To add a move, write a function and a line of ``MOVES``.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.space import Space

Move = Callable[[Draft, Space, Random], Draft | None]
Item = TypeVar("Item")


# Operators and borders


def shift_operator(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Move an operator at a border to the other side.

    ::

        a b | c d   ->   a b c | d
    """
    edge = _crossing(draft, space, rng)
    if edge is None:
        return None
    there, here = edge if rng.random() < 0.5 else edge[::-1]
    return _shifted(draft, here, draft.op_stage.item(here), draft.op_stage.item(there))


def shift_run(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Move an operator and all of its stage that lies between it and a border across the border.

    ::

        a b | c d e   ->   a b c d | e
    """
    edge = _crossing(draft, space, rng)
    if edge is None:
        return None
    forward = rng.random() < 0.5
    here, there = map(draft.op_stage.item, edge if forward else edge[::-1])
    inside = draft.op_stage == here
    members = _where(inside)
    near = int(len(members) * rng.random() ** 2)  # mostly close to the border
    if forward:
        inside &= space.reaches[members.item(-1 - near)]
    else:
        inside &= space.reaches[:, members.item(near)]
    return _shifted(draft, inside, here, there)


def shift_tails(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Move the last operators of the branches before a join into its stage, or out of it.

    ::

        b1 b2 | join                       b1 | b2 c2 join
        c1 c2 |            <->             c1 |
    """
    if not space.joins:
        return None
    op, ends = _choice(space.joins, rng)
    op_stage = draft.op_stage.copy()
    here = op_stage[op]
    enter = rng.random() < 0.5
    beyond = space.cost.graph.predecessors
    for end in ends:
        if enter:
            op_stage[end] = here
        elif op_stage[end] == here and beyond[end]:
            op_stage[end] = draft.op_stage[beyond[end].bit_length() - 1]
    stages = op_stage.tolist()
    if stages == draft.op_stage.tolist() or len(set(stages)) < draft.num_stages:
        return None
    return draft._replace(op_stage=op_stage)


def merge(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Merge two stages into one, on the devices of both.

    ::

        a b | c | d   ->   a b c | d
    """
    count = draft.num_stages
    if count == 1:
        return None
    edge = _crossing(draft, space, rng) if rng.random() < 0.75 else None
    s, t = map(draft.op_stage.item, edge) if edge else _two(count, rng)
    number = np.arange(count, dtype=np.int32)
    number[-1], number[t] = t, s if s < count - 1 else t  # the last stage takes the free number
    op_stage, device_stage = number.take(draft.op_stage), number.take(draft.device_stage)
    rest = [*range(count)]
    rest[t] = rest[-1]
    microbatch, k, recompute = (tuple(map(values.__getitem__, rest[:-1])) for values in draft[2:5])
    merged = Draft(op_stage, device_stage, microbatch, k, recompute, *draft[5:])
    return _keep_slices(draft, s, merged, (number.item(t),), space, rng)


def split(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Split a stage in two, whose shares of the work are about their shares of the devices.

    ::

        a b c d | e   ->   a b | c d | e
    """
    s = _below(draft.num_stages, rng)
    members = _where(draft.op_stage == s)
    devices = _where(draft.device_stage == s)
    if len(members) < 2 or len(devices) < 2:
        return None
    if rng.random() < 0.75:
        members = members[space.position.take(members).argsort()]
    taken = 1 + _below(len(devices) - 1, rng)
    work = space.work.take(members).cumsum()
    point = (1 - taken / len(devices)) * work[-1]
    cut = int(work.searchsorted(point)) + _below(3, rng)
    cut = min(max(cut, 1), len(members) - 1)
    new = draft.num_stages
    op_stage, device_stage = draft.op_stage.copy(), draft.device_stage.copy()
    op_stage[members[cut:]] = new
    device_stage[devices[-taken:]] = new
    microbatch, k, recompute = (values + values[s : s + 1] for values in draft[2:5])
    parted = Draft(op_stage, device_stage, microbatch, k, recompute, *draft[5:])
    return _keep_slices(draft, s, parted, (s, new), space, rng)


def give_devices(draft: Draft, space: Space, rng: Random, *, half: bool = False) -> Draft | None:
    """Give a device of a stage, or half of its devices, to another stage: devices in a row, half
    the time the ones nearest to that stage.
    """
    if draft.num_stages == 1:
        return None
    s, t = _two(draft.num_stages, rng)
    devices = _where(draft.device_stage == s)
    count = len(devices) // 2 if half else 1
    if not 0 < count < len(devices):
        return None
    first = _below(len(devices) - count + 1, rng)
    if rng.random() < 0.5:
        near = _where(draft.device_stage == t)
        first = 0 if near[0] < devices[0] else len(devices) - count
    device_stage = draft.device_stage.copy()
    device_stage[devices[first : first + count]] = t
    return Draft(draft.op_stage, device_stage, *draft[2:])


def swap_devices(draft: Draft, space: Space, rng: Random) -> Draft | None:
    a, b = _below(len(draft.device_stage), rng), _below(len(draft.device_stage), rng)
    if draft.device_stage[a] == draft.device_stage[b]:
        return None
    device_stage = draft.device_stage.copy()
    device_stage[a], device_stage[b] = device_stage[b], device_stage[a]
    return draft._replace(device_stage=device_stage)


def swap_stages(draft: Draft, space: Space, rng: Random) -> Draft | None:
    count = draft.num_stages
    if count == 1:
        return None
    s, t = _two(count, rng)
    swapped = np.arange(count, dtype=draft.device_stage.dtype)
    swapped[s], swapped[t] = t, s
    return draft._replace(device_stage=swapped.take(draft.device_stage))


def gather_stage(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Exchange devices of a stage outside of one node for devices of other stages inside."""
    node, count = space.cost.cluster.group_sizes[0], len(draft.device_stage)
    if count == node:
        return None
    s = _below(draft.num_stages, rng)
    first = node * _below(count // node, rng)
    held = [d for d in _where(draft.device_stage == s).tolist() if not first <= d < first + node]
    others = first + _where(draft.device_stage[first : first + node] != s)
    some = min(len(held), len(others))
    if not some:
        return None
    device_stage = draft.device_stage.copy()
    device_stage[held[:some]], device_stage[others[:some]] = draft.device_stage[others[:some]], s
    return draft._replace(device_stage=device_stage)


def gather(draft: Draft, space: Space, rng: Random, *, scattered: bool = False) -> Draft | None:
    """Put every stage on devices in a row, in the order of the model or the largest stage first.
    If ``scattered``, the row takes the first device of each node or larger group, then each second.
    """
    group = _choice(space.cost.cluster.group_sizes, rng) if scattered else 1
    count = draft.num_stages
    if scattered and group >= len(draft.device_stage):
        return None
    sizes = np.bincount(draft.device_stage, minlength=count)
    sums = np.bincount(draft.op_stage, weights=space.position, minlength=count)
    mean = sums / np.bincount(draft.op_stage, minlength=count)
    order = np.lexsort((mean, -sizes)) if rng.random() < 0.5 else mean.argsort()
    row = order.astype(draft.device_stage.dtype).repeat(sizes.take(order))
    device_stage = row.reshape(group, -1).T.ravel()
    is_same = np.array_equal(device_stage, draft.device_stage)
    return None if is_same else draft._replace(device_stage=device_stage)


# How stages run


def resize(draft: Draft, space: Space, rng: Random, *, one: bool = False) -> Draft | None:
    """Double or halve the micro-batches of all stages, or of one."""
    if one and not space.flush:
        return None
    stages = [_below(draft.num_stages, rng)] if one else range(draft.num_stages)
    step = 1 if rng.random() < 0.5 else -1
    sizes = [*draft.microbatch]
    for s in stages:
        i = bisect_left(space.sizes, sizes[s]) + step
        if not 0 <= i < len(space.sizes):
            return None
        sizes[s] = space.sizes[i]
    return _unless_same(draft, draft._replace(microbatch=tuple(sizes)))


def regroup(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Double or halve k of kFkB in one stage or in all."""
    if not space.flush:
        return None
    count, groups = draft.num_stages, [*draft.k]
    stages = range(count) if rng.random() < 0.5 else [_below(count, rng)]
    larger = rng.random() < 0.5
    for s in stages:
        groups[s] = groups[s] * 2 if larger else max(groups[s] // 2, 1)
    most = (-(-space.batch_size // size) for size in draft.microbatch)
    return _unless_same(draft, draft._replace(k=tuple(map(min, groups, most))))


def recompute(draft: Draft, space: Space, rng: Random, *, one: bool = False) -> Draft | None:
    """Make one stage, or all, recompute; if any of them does, make none of them recompute."""
    if not space.recompute:
        return None
    stages = [_below(draft.num_stages, rng)] if one else range(draft.num_stages)
    recomputing = [*draft.recompute]
    begin = not any(recomputing[s] for s in stages)
    for s in stages:
        recomputing[s] = int(begin)
    return _unless_same(draft, draft._replace(recompute=tuple(recomputing)))


def warm_up(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Make a minimal warm-up deep, or a deep one minimal."""
    return draft._replace(deep=not draft.deep) if space.flush else None


def chain(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Chain all stages, so that each waits for the one before it, or undo that."""
    return draft._replace(chained=not draft.chained)


def share_state(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Share the optimizer's state among replicas, or stop sharing it."""
    return draft._replace(sharded=not draft.sharded) if space.shared else None


def split_backwards(draft: Draft, space: Space, rng: Random) -> Draft | None:
    """Split backwards, or make them whole."""
    return draft._replace(split=not draft.split) if space.split else None


MOVES: Mapping[str, tuple[Move, int]] = {
    "shift operator": (shift_operator, 10),
    "shift run": (shift_run, 10),
    "shift tails": (shift_tails, 2),
    "merge": (merge, 6),
    "split": (split, 8),
    "move device": (give_devices, 6),
    "give half": (partial(give_devices, half=True), 1),
    "swap devices": (swap_devices, 2),
    "swap stages": (swap_stages, 3),
    "gather stage": (gather_stage, 2),
    "gather": (gather, 1),
    "scatter": (partial(gather, scattered=True), 1),
    "resize all": (resize, 4),
    "resize stage": (partial(resize, one=True), 10),
    "regroup": (regroup, 8),
    "recompute stage": (partial(recompute, one=True), 1),
    "recompute all": (recompute, 1),
    "warm-up": (warm_up, 1),
    "chain": (chain, 1),
    "share state": (share_state, 2),
    "split backwards": (split_backwards, 2),
}
"""Name -> a move, and its weight when moves are drawn."""

_ALL = [move for move, _ in MOVES.values()]
_BOUNDS = list(accumulate(weight for _, weight in MOVES.values()))


def draw(draft: Draft, space: Space, rng: Random) -> Draft:
    """Make a random move by the weights of ``MOVES``; return the same draft if many do nothing."""
    for _ in MOVES:
        move = _ALL[bisect(_BOUNDS, rng.random() * _BOUNDS[-1])]
        if made := move(draft, space, rng):
            return made
    return draft


def _where(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    return mask.nonzero()[0]


def _below(count: int, rng: Random) -> int:
    return int(rng.random() * count)


def _choice(items: Sequence[Item], rng: Random) -> Item:
    return items[int(rng.random() * len(items))]


def _two(count: int, rng: Random) -> tuple[int, int]:
    s, t = _below(count, rng), _below(count - 1, rng)
    return s, t + (t >= s)


def _crossing(draft: Draft, space: Space, rng: Random) -> tuple[int, int] | None:
    """Return a random edge of the model between two stages, if there is one."""
    if draft.num_stages == 1:
        return None
    sources, targets = draft.op_stage.take(space.edges)
    crossing = _where(sources != targets)
    if not len(crossing):
        return None
    return space.cost.graph.edges[crossing.item(_below(len(crossing), rng))]


def _shifted(
    draft: Draft, operators: int | NDArray[np.bool_], here: int, there: int
) -> Draft | None:
    """Move operators of stage ``here`` to another, unless these are all it has."""
    op_stage = draft.op_stage.copy()
    op_stage[operators] = there
    return Draft(op_stage, *draft[1:]) if here in op_stage.tolist() else None


def _keep_slices(
    before: Draft, s: int, after: Draft, stages: Sequence[int], space: Space, rng: Random
) -> Draft:
    """Half the time, keep the samples per replica of stage ``s`` in the stages made of it."""
    if not space.flush or rng.random() >= 0.5:
        return after
    sizes, device_stages = [*after.microbatch], after.device_stage.tolist()
    devices = before.device_stage.tolist().count(s)
    for stage in stages:
        size = sizes[stage] * device_stages.count(stage) // devices
        sizes[stage] = size if size in space.sizes else sizes[stage]
    return after._replace(microbatch=tuple(sizes))


def _unless_same(before: Draft, after: Draft) -> Draft | None:
    """Return a draft unless its stages have the settings that they had before."""
    return None if after[2:5] == before[2:5] else after
