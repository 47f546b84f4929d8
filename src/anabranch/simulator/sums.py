"""Sums of gradients while the last backwards go on: the pieces, and when each is final."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import StepCosts


class Sum(NamedTuple):
    """The all-reduce of a piece.

    Attributes:
        queue: index of the queue of its devices; their sums go one after the other.
        final: per stage, the operator whose backward is the last that adds to its gradients.
        waits_for: gradients that it needs, of one stage on one device each.
        nbytes: of gradients.
    """

    queue: int
    stages: tuple[int, ...]
    final: tuple[int, ...]
    devices: tuple[int, ...]
    waits_for: int
    nbytes: int
    seconds: float
    ports: tuple[int, ...]


class Mark(NamedTuple):
    """Seconds of a compute, from the mark before, after which gradients of these pieces are
    final.
    """

    seconds: float
    pieces: tuple[int, ...]


def plan_sums(costs: StepCosts) -> list[Sum]:
    """The pieces of all all-reduces; nobody is waited for yet."""
    sums: list[Sum] = []
    queues: dict[tuple[int, ...], int] = {}
    for work in costs.all_reduces():
        queue = queues.setdefault(work.devices, len(queues))
        for nbytes, seconds, final in work.pieces:
            sums.append(
                Sum(queue, work.stages, final, work.devices, 0, nbytes, seconds, work.ports)
            )
    return sums


def summing_s(costs: StepCosts) -> Mapping[int, float]:
    """Per stage, how much longer the last backward is for the sums that begin in it; those of
    several stages begin in the last one of them.
    """
    found: defaultdict[int, float] = defaultdict(float)
    for work in costs.all_reduces():
        found[work.stages[0]] += work.device_s
    return found


def gradient_marks(
    costs: StepCosts, sums: Sequence[Sum], stage: int, samples: int, backward_s: float
) -> tuple[tuple[Mark, ...], tuple[int, ...]]:
    """Where the last backward of a stage leaves final gradients, and those that are so at its end.

    Args:
        samples: on the device.
        backward_s: its seconds.
    """
    found: dict[float, list[int]] = defaultdict(list)
    for piece, work in enumerate(sums):
        if stage in work.stages:
            operator = work.final[work.stages.index(stage)]
            share = costs.gradient_share(stage, samples, operator)
            found[min(share * backward_s, backward_s)].append(piece)
    final = tuple(found.pop(backward_s, ()))
    marks, passed = [], 0.0
    for seconds, pieces in sorted(found.items()):
        marks.append(Mark(seconds - passed, tuple(pieces)))
        passed = seconds
    return tuple(marks), final


def least_sum_s(costs: StepCosts, work: AllReduce, stage: int, samples: Collection[int]) -> float:
    """A lower bound of the seconds from the end of a stage's last backward to the end of its sums.

    Args:
        samples: of the last backward, on each device.
    """
    at, bound = work.stages.index(stage), math.inf
    for n in set(samples):
        backward, left, longest = costs.compute_s(stage, n)[1], 0.0, 0.0
        for piece in reversed(work.pieces):
            left += piece.seconds
            share = costs.gradient_share(stage, n, piece.final[at])
            longest = max(longest, left - (1 - share) * backward)
        bound = min(bound, longest)
    return bound
