"""Stage graphs with several stages on a device: rows that pass the devices several times (loops),
and branches whose join is on a device of one of them.

Each stage is a smaller part of the model, so the last devices begin sooner. Eight stages on four
devices, as a loop or there and back::

    stage             0  1  2  3  4  5  6  7
    loop              0  1  2  3  0  1  2  3
    there and back    0  1  2  3  3  2  1  0        stages 3 and 4 may be one

(Interleaved 1F1B of Narayanan et al., *Efficient Large-Scale Language Model Training*, 2021,
section 2.2; ZB-V of Qi et al., 2024.) Here the operators of any graph are put in one order, branch
after branch, and cut into parts of equal work. Stage edges are those of values, so a device may
have stages of several branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from anabranch.graph.digraph import strongly_connected
from anabranch.graph.opgraph import bits
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.plans.edges import value_edges
from anabranch.plans.stages import Stage, StageGraph


def loops(space: Space, limit: float, *, recompute: bool) -> Iterator[StageGraph]:
    """Generate loops whose devices compute for less than ``limit`` seconds.

    Args:
        recompute: whether their stages recompute.
    """
    for groups, size in _sizes(space):
        samples = max(1, size * groups // space.cost.cluster.num_devices)
        forward_s, backward_s = (float(s.sum()) for s in space.cost.op_seconds(samples))
        work_s = (forward_s * (1 + recompute) + backward_s) / groups
        if work_s * -(-space.batch_size // size) >= limit:
            continue
        for rounds in SETTINGS.rounds:
            for is_back in (False, True):
                graph = _loop(space, groups, rounds, size, is_back=is_back, recompute=recompute)
                if graph is not None:
                    yield graph
                    if is_back:
                        yield _joined(space, graph)


def branches(space: Space, limit: float) -> Iterator[StageGraph]:
    """Generate stage graphs with branches dealt out to all devices, one stage on each, and with a
    last stage, which joins them, on the device with the least work.

    The last stage has every operator behind a certain share of the model's work. In one stage with
    its join, a branch would wait for the other branches.
    """
    graph, work, count = space.cost.graph, space.work, space.cost.cluster.num_devices
    behind = work @ space.reaches
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for share in np.unique(behind)[::-1]:
        last = np.flatnonzero(behind >= share)
        if count < 2 or work[last].sum() * count > work.sum():
            break
        groups: list[list[int]] = [[] for _ in range(count)]
        components = _components(space, np.flatnonzero(behind < share).tolist())
        for component in sorted(components, key=lambda ops: -work[ops].sum()):
            min(groups, key=lambda ops: work[ops].sum()).extend(component)
        key = tuple(tuple(sorted(group)) for group in groups)
        if not all(groups) or key in seen:
            continue
        seen.add(key)
        device = min(range(count), key=lambda d: work[groups[d]].sum())
        for size in filter(space.cost.covers, space.sizes):
            forward_s, backward_s = space.cost.op_seconds(size)
            seconds = (forward_s + backward_s) * -(-space.batch_size // size)
            if max(seconds[group].sum() for group in groups) < limit:
                parts = [*groups, last.tolist()]
                sizes = [
                    space.batch_size if any(graph.whole_batch >> op & 1 for op in part) else size
                    for part in parts
                ]
                stages = [
                    Stage(("",), (d,), samples)
                    for d, samples in zip([*range(count), device], sizes, strict=True)
                ]
                if (dealt := _with_edges(space, parts, stages)) is not None:
                    yield dealt


def _components(space: Space, operators: Sequence[int]) -> list[list[int]]:
    """Return groups of operators that no edge connects, in the order of their first operators."""
    beside: dict[int, list[int]] = {op: [] for op in operators}
    for a, b in space.edges.T.tolist():
        if a in beside and b in beside:
            beside[a].append(b)
            beside[b].append(a)
    return sorted(map(sorted, strongly_connected(beside)))


def _sizes(space: Space) -> Iterator[tuple[int, int]]:
    """Generate (groups of devices, samples of a micro-batch) with a measured number of samples for
    each replica, at least one.
    """
    devices = space.cost.cluster.num_devices
    for groups in range(2, devices + 1):
        replicas = devices // groups
        if devices % groups == 0 and replicas <= space.most_replicas:
            for size in space.sizes:
                microbatches = -(-space.batch_size // size)
                measured = size >= replicas and space.cost.covers(size // replicas)
                if measured and groups <= SETTINGS.fewest_each * microbatches:
                    yield groups, size


def _loop(
    space: Space, groups: int, rounds: int, size: int, *, is_back: bool, recompute: bool
) -> StageGraph | None:
    """Return the stages of a loop; None if a large operator leaves a stage without operators."""
    replicas = space.cost.cluster.num_devices // groups
    across = _across_samples(space)
    parts = _parts(space, groups * rounds, max(1, size // replicas), across)
    if not all(parts):
        return None
    stages: list[Stage] = []
    for part in range(len(parts)):
        turn, group = divmod(part, groups)
        first = replicas * (groups - 1 - group if is_back and turn % 2 else group)
        devices = tuple(range(first, first + replicas))
        stages.append(Stage(("",), devices, size, recompute=recompute))
    if across:
        parts.append([*bits(across)])
        stages.append(Stage(("",), stages[-1].devices[:1], space.batch_size))
    return _with_edges(space, parts, stages)


def _joined(space: Space, graph: StageGraph) -> StageGraph:
    """Merge the two stages where a loop there and back turns: fewer passes, but longer ones."""
    parts: list[list[int]] = []
    stages: list[Stage] = []
    for stage in graph.stages:
        operators = [space.cost.graph.index[name] for name in stage.operators]
        if stages and stages[-1] == replace(stage, operators=stages[-1].operators):
            parts[-1] += operators
        else:
            parts.append(operators)
            stages.append(stage)
    joined = _with_edges(space, parts, stages)
    assert joined is not None  # parts in a row are in order
    return joined


def near_loops(graph: StageGraph, space: Space) -> Iterator[StageGraph]:
    """Generate neighbours of a stage graph: an operator moves to the next stage or the one before,
    two stages become one, or a stage moves to the devices of another.
    """
    index, stages = space.cost.graph.index, [*graph.stages]
    parts = [
        sorted((index[o] for o in s.operators), key=space.position.__getitem__) for s in stages
    ]
    changes: list[tuple[list[list[int]], list[Stage]]] = []
    for s, t in graph.edges:
        if stages[s].microbatch_size != stages[t].microbatch_size:
            continue
        later, earlier = [*parts], [*parts]
        later[s], later[t] = parts[s][:-1], [*parts[s][-1:], *parts[t]]
        earlier[s], earlier[t] = [*parts[s], *parts[t][:1]], parts[t][1:]
        changes += [(later, stages), (earlier, stages)]
        for at in (s, t):
            joined, placed = [*parts], [*stages]
            joined[at], joined[s + t - at] = [*parts[s], *parts[t]], []
            changes.append((joined, placed))
    for s, stage in enumerate(stages):
        for devices in dict.fromkeys(other.devices for other in stages):
            placed = [*stages]
            placed[s] = replace(stage, devices=devices)
            if devices != stage.devices and len(devices) <= stage.microbatch_size:
                changes.append((parts, placed))
    for some, placed in changes:
        kept = [(part, stage) for part, stage in zip(some, placed, strict=True) if part]
        changed = _with_edges(space, [part for part, _ in kept], [stage for _, stage in kept])
        if changed is not None and changed.devices == graph.devices:
            yield changed


def _with_edges(
    space: Space, parts: Sequence[Sequence[int]], stages: Sequence[Stage]
) -> StageGraph | None:
    """Return the stage graph with ``parts`` as operators; None if an edge leads back."""
    graph, op_stage = space.cost.graph, [0] * len(space.position)
    for part, operators in enumerate(parts):
        for op in operators:
            op_stage[op] = part
    edges = sorted(value_edges(op_stage, graph))
    if any(x > y for x, y in edges):
        return None
    named = (
        replace(stage, operators=graph.names(sum(1 << op for op in operators)))
        for stage, operators in zip(stages, parts, strict=True)
    )
    return StageGraph(tuple(named), tuple(edges), space.batch_size)


def _across_samples(space: Space) -> int:
    """Return the mask of operators that compute across samples and of all behind them. They have a
    stage of their own, of whole batches on one device.
    """
    graph = space.cost.graph
    result = graph.whole_batch
    for op in bits(result):
        result |= graph.descendants[op]
    return result


def _parts(space: Space, count: int, samples: int, without: int) -> list[list[int]]:
    """Return operators in ``count`` parts of equal work at ``samples``; some may be empty."""
    order = np.array(
        [op for op in np.argsort(space.position).tolist() if not without >> op & 1], int
    )
    if not len(order):
        return [[]]
    forward_s, backward_s = space.cost.op_seconds(samples)
    work_s = (forward_s + backward_s)[order]
    ends = np.cumsum(work_s)
    part = np.minimum((ends - work_s / 2) / ends[-1] * count, count - 1).astype(int)
    return [order[part == p].tolist() for p in range(count)]
