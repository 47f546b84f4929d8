"""Loops: stages in a row that pass the devices several times, so that each device has several.

The work of each stage is a smaller part of the model, and the last devices begin sooner. Eight
stages on four devices, again and again or there and back::

    stage            0  1  2  3  4  5  6  7
    device, again    0  1  2  3  0  1  2  3
    and back         0  1  2  3  3  2  1  0

(Interleaved 1F1B of Narayanan et al., *Efficient Large-Scale Language Model Training*, 2021,
section 2.2; ZB-V of Qi et al., 2024.) Here the operators of any graph are put in the order that
takes branch after branch, and cut into parts of equal work. Edges of stages are those of values, so
a device may have stages of several branches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anabranch.graph.opgraph import bits
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.plans.edges import value_edges
from anabranch.plans.stages import Stage, StageGraph


def loops(space: Space, limit: float, *, recompute: bool) -> Iterator[StageGraph]:
    """Generate stage graphs whose devices compute less than so many seconds; ``recompute``: whether
    their stages recompute.
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


def _sizes(space: Space) -> Iterator[tuple[int, int]]:
    """Groups of devices, and samples of a micro-batch, at least one for each replica."""
    devices = space.cost.cluster.num_devices
    for groups in range(2, devices + 1):
        replicas = devices // groups
        if devices % groups == 0 and replicas <= space.most_replicas:
            sizes = (size for size in space.sizes if size >= replicas)
            yield from (
                (groups, size)
                for size in sizes
                if groups <= SETTINGS.fewest_each * -(-space.batch_size // size)
            )


def _loop(
    space: Space, groups: int, rounds: int, size: int, *, is_back: bool, recompute: bool
) -> StageGraph | None:
    """The stages of a loop; None where an operator is too large for that."""
    graph, replicas = space.cost.graph, space.cost.cluster.num_devices // groups
    across = _across_samples(space)
    parts = _parts(space, groups * rounds, max(1, size // replicas), across)
    if not all(parts):
        return None
    stages: list[Stage] = []
    for part, operators in enumerate(parts):
        turn, group = divmod(part, groups)
        first = replicas * (groups - 1 - group if is_back and turn % 2 else group)
        names = graph.names(sum(1 << op for op in operators))
        devices = tuple(range(first, first + replicas))
        stages.append(Stage(names, devices, size, recompute=recompute))
    if across:
        parts.append([*bits(across)])
        stages.append(Stage(graph.names(across), stages[-1].devices[:1], space.batch_size))
    home = [0] * len(graph)
    for part, operators in enumerate(parts):
        for op in operators:
            home[op] = part
    return StageGraph(tuple(stages), tuple(sorted(value_edges(home, graph))), space.batch_size)


def _across_samples(space: Space) -> int:
    """The operators that compute across samples and what comes behind them, as a bit mask: they
    have a stage of their own, of whole batches on one device.
    """
    graph = space.cost.graph
    result = graph.whole_batch
    for op in bits(result):
        result |= graph.descendants[op]
    return result


def _parts(space: Space, count: int, samples: int, without: int) -> list[list[int]]:
    """Operators of so many parts with equal work at so many samples; some may be empty."""
    order = np.array([op for op in np.argsort(space.place).tolist() if not without >> op & 1], int)
    if not len(order):
        return [[]]
    forward_s, backward_s = space.cost.op_seconds(samples)
    work_s = (forward_s + backward_s)[order]
    ends = np.cumsum(work_s)
    part = np.minimum((ends - work_s / 2) / ends[-1] * count, count - 1).astype(int)
    return [order[part == p].tolist() for p in range(count)]
