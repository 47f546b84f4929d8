"""Reasons why there is no plan, and what would help: the text of ``InfeasiblePlanError``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from anabranch.errors import InfeasiblePlanError
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import memory_text
from anabranch.plans.stages import StageGraph

_MORE_MEMORY = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Multiples of the memory that is enough on some devices, to try on all of them."""

_MOST_DEVICES = 1024
"""Device counts beyond this are not suggested."""

_MOST_HEIGHTS = 64
"""Most heights that are told apart; all greater ones count as the greatest possible."""


def explained(problem: Problem, proposals: Iterator[StageGraph]) -> Iterator[StageGraph]:
    """Return proposals; the first is made at once, so that errors come at the call.

    Raises:
        InfeasiblePlanError: if there is none; the message says what would be enough.
    """
    first = next(proposals, None)
    if first is None:
        raise explain(replace(problem, any_degree=False))
    return chain([first], proposals)


def explain(problem: Problem) -> InfeasiblePlanError:
    """Return an error that says how much memory, or how many of these devices, would be enough for
    stages that are runs of the operators.
    """
    cost = problem.cost
    cluster, total = cost.cluster, problem.devices
    sizes = [size for size in problem.sizes if problem.prices(size).degrees]
    size = sizes[0]  # memory never falls with it, so the smallest needs least

    def enough(memory: float) -> bool:
        prices = replace(problem.prices(size), memory_bytes=memory)
        return bool(_runs_on_fewest_devices(problem, prices, total))

    memory = least_memory(enough, float(cluster.memory_bytes))
    # On all devices, pipelines are longer or micro-batches larger than on the fewest.
    tried = (memory * ratio for ratio in _MORE_MEMORY)
    memory = next((more for more in tried if fit_in_a_row(problem, sizes, more)), memory)
    few = _runs_on_fewest_devices(problem, problem.prices(size, _MOST_DEVICES), _MOST_DEVICES)
    count = sum(part.replicas for part in few)
    name = cost.graph.name or "the model"
    if memory <= cluster.memory_bytes:
        return InfeasiblePlanError(
            f"{name} fits the memory of {cluster.name} on {count} devices, but no plan uses all "
            f"{total} of them with at most {problem.most_replicas} replicas of a stage and "
            f"micro-batches of up to {problem.sizes[-1]} samples, and a search uses all; plan for "
            f"{count}, or allow more replicas or larger micro-batches"
        )
    more = f"; {count} devices would do" if count else ""
    return InfeasiblePlanError(
        f"{name} needs at least {memory_text(memory)} per device on {total} devices "
        f"(micro-batch {size}); {cluster.name} has {memory_text(cluster.memory_bytes)}{more}"
    )


def least_memory(enough: Callable[[float], bool], start: float) -> float:
    """Return bytes per device that are enough, at most 1 % above the least."""
    low, high = 0.0, start
    while not enough(high):
        low, high = high, high * 2
    while high > low * 1.01 and high > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def fit_in_a_row(problem: Problem, sizes: Sequence[int], memory: float) -> bool:
    """Return True if runs of the operators fit with the smallest or largest micro-batches."""
    for size in {sizes[0], sizes[-1]}:
        prices = replace(problem.prices(size), memory_bytes=memory)
        parts = _runs_on_fewest_devices(problem, prices, problem.devices)
        if parts and problem.assembler(prices).assemble(parts):
            return True
    return False


def _runs_on_fewest_devices(problem: Problem, prices: MicrobatchPrices, most: int) -> list[Part]:
    """Return stages that are runs of the operators in one order, on the fewest devices that have
    memory for them; none if these are more than ``most``. A dynamic programme over the cuts.

    From the sink backwards, with height h the distance to it in stages::

        devices[h, j]  =  min over i < j of  need[h, i, j] + devices[h + 1, i]
    """
    row, size, modes = problem.row, len(problem.order), prices.modes
    # The largest height at which each run fits: [start, stop].
    headroom = [
        prices.headroom(row.matrices, mode.replicas, recompute=mode.recompute) for mode in modes
    ]
    top = min(size, prices.num_microbatches, most)
    # The last height stands for all greater ones.
    levels = [*range(min(top, _MOST_HEIGHTS) - 1), top - 1]
    devices = np.full((len(levels), size + 1), np.inf)
    devices[:, 0] = 0.0
    starts = np.zeros(devices.shape, dtype=np.intp)
    for h, level in reversed(list(enumerate(levels))):
        need = np.full(headroom[0].shape, np.inf)
        for mode, room in zip(reversed(modes), reversed(headroom), strict=True):
            need[room >= level] = mode.replicas
        above = devices[min(h + 1, len(levels) - 1)]
        for cut in range(1, size + 1):
            totals = need[:cut, cut] + above[:cut]
            starts[h, cut] = totals.argmin()
            devices[h, cut] = totals[starts[h, cut]]
    if devices[0, -1] > most:
        return []
    parts, cut, h = [], size, 0
    while cut:
        start, above_h = int(starts[h, cut]), min(h + 1, len(levels) - 1)
        mode = next(
            mode
            for mode, room in zip(modes, headroom, strict=True)
            if mode.replicas == devices[h, cut] - devices[above_h, start]
            and room[start, cut] >= levels[h]
        )
        parts.append(Part(row.mask(start, cut), mode.replicas, mode.recompute))
        cut, h = start, above_h
    return parts
