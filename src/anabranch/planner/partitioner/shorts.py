"""Plans of two or three stages, each of any number of devices, in small models on few devices.

Where messages cost more than compute, the best plan has few stages, however long its period is, and
a search under a bound on the period passes it by. Such plans are few: the model in one order, two
or three stages, all ways to share out the devices; ``partitioner.recut`` has the best cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from anabranch.planner.partitioner.chain_cut import Recut
from anabranch.planner.partitioner.problem import Problem
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.prices import Mode, microbatch_sizes

MOST_OPERATORS = 24
MOST_DEVICES = 8
STAGES = (2, 3)

HOPELESS = 1.2
"""None that computes for longer than this multiple of a step that is known."""


def shorts(
    problem: Problem,
    microbatch_size: int | None,
    found: Sequence[Candidate] = (),
    *,
    known_s: float = float("inf"),
) -> Iterator[Candidate]:
    """Candidates; none for larger models or more devices.

    Args:
        problem: what is to be planned.
        microbatch_size: only this size; None for all.
        found: candidates so far.
        known_s: a step that is known to be possible.
    """
    cost, total = problem.cost, problem.cost.cluster.num_devices
    if len(cost.graph) > MOST_OPERATORS or total > MOST_DEVICES:
        return
    known_s = min((each.step_s for each in found), default=known_s)
    recut = Recut(cost, problem.batch_size, problem.order)
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    for size in sizes:
        assembler = problem.assembler(problem.prices(size))
        prices = assembler.prices
        for modes in _modes(problem, size, total):
            for parts in recut.cut(size, modes):
                longest = max(sum(prices.compute_s(part)) for part in parts)
                if longest * prices.prices.num_microbatches > HOPELESS * known_s:
                    continue
                candidate = assembler.assemble(parts)
                if candidate is not None:
                    known_s = min(known_s, candidate.step_s)
                    yield candidate


def _modes(problem: Problem, size: int, total: int) -> Iterator[list[Mode]]:
    """Devices of the stages: all ways that add up to all devices."""
    prices = problem.prices(size)
    allowed = {
        replicas
        for replicas in range(1, min(total, problem.max_replicas) + 1)
        if prices.may(replicas)
    }
    for count in STAGES:
        for ends in combinations(range(1, total), count - 1):
            replicas = [b - a for a, b in zip((0, *ends), (*ends, total), strict=True)]
            if allowed.issuperset(replicas):
                yield [Mode(each) for each in replicas]
