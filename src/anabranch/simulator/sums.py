"""Sums of gradients beside the last backwards: the pieces, and when each is final."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import StepCosts


class Sum(NamedTuple):
    """The all-reduce of a piece.

    Attributes:
        queue: index of the queue of its devices; their sums go one after the other.
        final: per stage, the operator whose backward is the last that adds to its gradients.
        waits_for: number of gradients that it needs, one per stage and device.
        nbytes: bytes of the gradients.
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
    """A part of a compute; when it ends, gradients of these pieces are final."""

    seconds: float
    pieces: tuple[int, ...]


def plan_sums(costs: StepCosts, finishing: Mapping[int, int]) -> list[Sum]:
    """Return the pieces of all all-reduces.

    Args:
        finishing: stage -> number of devices with a last backward of it.
    """
    sums: list[Sum] = []
    queues: dict[tuple[int, ...], int] = {}
    for work in costs.all_reduces():
        queue = queues.setdefault(work.devices, len(queues))
        waits_for = sum(finishing[s] for s in work.stages)
        for nbytes, seconds, final in work.pieces:
            sums.append(
                Sum(queue, work.stages, final, work.devices, waits_for, nbytes, seconds, work.ports)
            )
    return sums


def summing_s(costs: StepCosts) -> Mapping[int, float]:
    """Return stage -> seconds by which the sums that begin in its last backward prolong it. A sum
    of several stages begins in the first of these, whose backward comes last.
    """
    seconds: defaultdict[int, float] = defaultdict(float)
    for work in costs.all_reduces():
        seconds[work.stages[0]] += work.device_s
    return seconds


def final_pieces(sums: Iterable[Sum]) -> Mapping[int, Mapping[int, list[int]]]:
    """Return stage -> operator -> pieces whose gradients are final behind its backward."""
    pieces: dict[int, dict[int, list[int]]] = {}
    for piece, work in enumerate(sums):
        for stage, operator in zip(work.stages, work.final, strict=True):
            pieces.setdefault(stage, {}).setdefault(operator, []).append(piece)
    return pieces


def gradient_marks(
    costs: StepCosts,
    pieces: Mapping[int, Sequence[int]],
    stage: int,
    samples: int,
    backward_s: float,
) -> tuple[Mark, ...]:
    """Return the parts of the last backward of a stage. Gradients are final at the end of each
    part, and the last part ends with the backward.

    Args:
        pieces: pieces by operator of the stage, see ``final_pieces``.
        samples: samples of the device's slice.
        backward_s: seconds of the backward.
    """
    final_at: dict[float, list[int]] = defaultdict(list)
    for operator, final in pieces.items():
        share = costs.gradient_share(stage, samples, operator)
        final_at[min(share * backward_s, backward_s)] += final
    at_end = tuple(sorted(final_at.pop(backward_s, ())))
    marks, passed = [], 0.0
    for seconds, final in sorted(final_at.items()):
        marks.append(Mark(seconds - passed, tuple(sorted(final))))
        passed = seconds
    rest_s = backward_s - sum(mark.seconds for mark in marks)
    return (*marks, Mark(rest_s, at_end))


def least_sum_s(costs: StepCosts, work: AllReduce, stage: int, samples: Collection[int]) -> float:
    """Return a lower bound of the seconds from a stage's last backward to the end of its sums.

    Args:
        samples: samples of the last backward on each device.
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
