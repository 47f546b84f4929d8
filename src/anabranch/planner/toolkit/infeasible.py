"""Reasons why there is no plan, and what would help: the text of ``InfeasiblePlanError``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import GIB
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import MicrobatchPrices, Mode, degrees
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph

_MORE_MEMORY = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Multiples of the memory that some devices need which are tried for all of them."""

_MOST_DEVICES = 1024
"""Device counts beyond this are not suggested."""

_MOST_HEIGHTS = 64
"""Greater heights are taken for the greatest."""

Fewest = Callable[[MicrobatchPrices], Sequence[Part]]
"""Stages on as few devices as memory allows at these prices; none if all are too few."""


def require_sizes(problem: Problem) -> None:
    """Check the arguments that every planner takes.

    Raises:
        ValueError: for a batch or micro-batch that cannot be.
        InfeasiblePlanError: if the profile covers no micro-batch size, or there are more devices
            than operators, replicas and samples can use.
    """
    cost, limit, total = problem.cost, problem.most_replicas, problem.devices
    batch_size, microbatch_size = problem.batch_size, problem.microbatch_size
    if batch_size < 1:
        raise ValueError(f"the batch has {batch_size} samples; at least 1 is needed")
    if microbatch_size is not None and not 1 <= microbatch_size <= batch_size:
        raise ValueError(
            f"a micro-batch of {microbatch_size} samples does not fit a batch of {batch_size}"
        )
    if not any(degrees(cost, size, limit, batch_size=batch_size) for size in problem.sizes):
        raise InfeasiblePlanError(
            f"the profile ({cost.profile.origin}) covers no way to run micro-batches of "
            f"{microbatch_size or f'1 to {batch_size}'} samples on up to "
            f"{limit} replicas per stage; profile again at more sample counts"
        )
    node = cost.cluster.group_sizes[0]
    tensor = max(t for t in cost.tensor_degrees if node % t == 0)
    replicas = min(limit, problem.sizes[-1])
    usable = len(cost.graph) * replicas * tensor
    if usable < total:
        wide = f" of {tensor} devices" if tensor > 1 else ""
        raise InfeasiblePlanError(
            f"{cost.graph.name or 'the model'} has {len(cost.graph)} operators with at most "
            f"{replicas} replicas{wide} each, so at most {usable} of the {total} devices of "
            f"{cost.cluster.name} can be used, and a plan leaves no device without a stage; use "
            f"{usable} devices or fewer, capture the model in finer operators, or allow more "
            "replicas or larger micro-batches"
        )


def explained(problem: Problem, proposals: Iterator[StageGraph]) -> Iterator[StageGraph]:
    """Proposals, the first of which is made at once.

    Raises:
        InfeasiblePlanError: if there is none; the message says what would do.
    """
    first = next(proposals, None)
    if first is None:
        raise explain(replace(problem, any_degree=False))
    return chain([first], proposals)


def explain(problem: Problem) -> InfeasiblePlanError:
    """What would make the problem feasible with stages that are runs of the operators: memory on
    these devices, or more of these devices.
    """
    cost, fewest = problem.cost, runs_on_fewest_devices(problem)
    cluster, total = cost.cluster, problem.devices
    covered = [size for size in problem.sizes if problem.prices(size).degrees]

    def enough(memory: float) -> bool:
        return bool(fewest(replace(problem.prices(size), memory_bytes=memory)))

    def fills(memory: float) -> bool:
        return uses_all_devices(problem, covered, memory, fewest)

    # Memory never falls with the micro-batch size, so the smallest that is covered needs least.
    size = covered[0]
    memory = least_memory(enough, float(cluster.memory_bytes))
    # On all devices, pipelines are longer or micro-batches larger than on as few as will do.
    memory = next(filter(fills, (memory * ratio for ratio in _MORE_MEMORY)), memory)
    count = sum(part.devices for part in fewest(problem.prices(size, _MOST_DEVICES)))
    name = cost.graph.name or "the model"
    if memory <= cluster.memory_bytes:
        return InfeasiblePlanError(
            f"{name} fits the memory of {cluster.name} on {count} devices, but no plan uses all "
            f"{total} of them with at most {problem.most_replicas} replicas of a stage and "
            f"micro-batches of up to {problem.sizes[-1]} samples, and a plan "
            f"leaves no device without a stage; use {count} devices, or allow more replicas or "
            "larger micro-batches"
        )
    more = f"; {count} devices would do" if count else ""
    return InfeasiblePlanError(
        f"{name} needs at least {memory / GIB:.1f} GiB per device on {total} devices "
        f"(micro-batch {size}); {cluster.name} has {cluster.memory_bytes / GIB:.1f} GiB{more}"
    )


def least_memory(enough: Callable[[float], bool], start: float) -> float:
    """Bytes per device that are enough, to a hundredth above the least."""
    low, high = 0.0, start
    while not enough(high):
        low, high = high, high * 2
    while high > low * 1.01 and high > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def uses_all_devices(
    problem: Problem, sizes: Sequence[int], memory_bytes: float, fewest: Fewest
) -> bool:
    """Whether so much memory suffices for a plan on all devices, at the least or most of some
    micro-batch sizes that the profile covers.
    """
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        prices = replace(problem.prices(size), memory_bytes=memory_bytes)
        parts = fewest(prices)
        if parts and problem.assembler(prices).assemble(parts) is not None:
            return True
    return False


def runs_on_fewest_devices(problem: Problem) -> Fewest:
    """Stages that are runs of the operators in one order: a dynamic programme over the cuts.

    From the sink backwards, with height h the distance to it in stages::

        devices[h, j]  =  min over i < j of  need[h, i, j] + devices[h + 1, i]
    """
    row, size = problem.row, len(problem.order)

    def headroom_in(prices: MicrobatchPrices, mode: Mode) -> NDArray[np.int32]:
        """The largest height at which each run fits: [start, stop]."""
        weights = row.matrices(mode.tensor)
        return prices.headroom(weights, mode.replicas, recompute=mode.recompute)

    def fewest(prices: MicrobatchPrices) -> list[Part]:
        modes = prices.modes
        headroom = [headroom_in(prices, mode) for mode in modes]
        top = min(size, prices.num_microbatches, prices.max_devices)
        # The last height stands for all greater ones.
        levels = [*range(min(top, _MOST_HEIGHTS) - 1), top - 1]
        devices = np.full((len(levels), size + 1), np.inf)
        devices[:, 0] = 0.0
        starts = np.zeros(devices.shape, dtype=np.intp)
        for h, level in reversed(list(enumerate(levels))):
            need = np.full(headroom[0].shape, np.inf)
            for mode, room in zip(reversed(modes), reversed(headroom), strict=True):
                need[room >= level] = mode.devices
            above = devices[min(h + 1, len(levels) - 1)]
            for cut in range(1, size + 1):
                totals = need[:cut, cut] + above[:cut]
                starts[h, cut] = totals.argmin()
                devices[h, cut] = totals[starts[h, cut]]
        if devices[0, -1] > prices.max_devices:
            return []
        parts, cut, h = [], size, 0
        while cut:
            start, above_h = int(starts[h, cut]), min(h + 1, len(levels) - 1)
            mode = next(
                mode
                for mode, room in zip(modes, headroom, strict=True)
                if mode.devices == devices[h, cut] - devices[above_h, start]
                and room[start, cut] >= levels[h]
            )
            parts.append(Part.in_mode(row.mask(start, cut), mode))
            cut, h = start, above_h
        return parts

    return fewest
