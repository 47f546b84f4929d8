"""Samples that a stage must hold: GraphPipe, appendix A.1, Table 2 (``ComputeInFlight``).

Stage x runs forward in groups of ``k_x`` micro-batches of ``b_x`` samples; stage y follows it and
holds ``i_y`` samples between their forward and their backward. So that y never starves, x holds
more samples than y. This table has the difference::

    x = k_x b_x,  y = k_y b_y,  m = max(b_x, b_y)         i_x - i_y
    m < x < y                                             2 m
    m = x < y                                             m
    b_x <= b_y < y < x                                    x - y + 2 b_y
    b_x <= b_y = y < x                                    x
    b_y <= b_x < y < x                                    x - y + 2 b_x
    b_y <= b_x = y < x                                    x
    m = y = x                                             y
    m < y = x                                             2 m
    b_x <= x < b_y <= y                                   b_y
    b_y <= y < b_x <= x                                   x - y + b_x

With one micro-batch size b and k = 1 only one row is possible, and the increase is b: one
micro-batch more per stage on the way to the sink. With several successors the largest counts.
Table 2 assumes numbers that divide one another, as powers of two do.

With fewer than ``i_y + x - gcd(x, y)`` samples in x both stages wait for each other forever
(``waited_for_samples``): x goes on after the gradients of x samples, and y returns gradients of y
samples at a time, each time after y more samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from anabranch.plans.stages import StageGraph


def waited_for_samples(k_x: int, b_x: int, k_y: int, b_y: int) -> int:
    """Return how many samples more than its successor y stage x must hold to avoid a deadlock."""
    return k_x * b_x - gcd(k_x * b_x, k_y * b_y)


def in_flight_samples(k_x: int, b_x: int, k_y: int, b_y: int, held: int) -> int:
    """Return the samples x must hold so that its successor y, holding ``held``, never starves."""
    x, y, largest = k_x * b_x, k_y * b_y, max(b_x, b_y)
    if x < b_y:
        return held + b_y
    if y < b_x:
        return held + x - y + b_x
    if x < y:
        return held + (largest if largest == x else 2 * largest)
    if x == y:
        return held + (y if largest == y else 2 * largest)
    return held + (x if largest == y else x - y + 2 * largest)


def least_in_flight(graph: StageGraph, *, per_hop: int = 1) -> list[int]:
    """Return the fewest micro-batches in flight of each stage under kFkB, at most all it has.

    A sink holds one group. With one micro-batch size and k = 1 a stage holds one micro-batch more
    than its longest distance to a sink. Numbers that do not divide one another are rounded up to
    whole micro-batches.

    Args:
        per_hop: how many times the increase of Table 2 is taken along each stage edge.
    """
    held = [0] * len(graph)  # samples
    result = [0] * len(graph)
    for s in reversed(range(len(graph))):
        stage = graph.stages[s]
        b, k = stage.microbatch_size, stage.k
        samples = k * b
        for y in graph.successors[s]:
            after = graph.stages[y]
            both = k, b, after.k, after.microbatch_size
            more = max(in_flight_samples(*both, 0), waited_for_samples(*both))
            samples = max(samples, held[y] + per_hop * more)
        result[s] = min(-(-samples // b), graph.num_microbatches(s))
        held[s] = result[s] * b
    return result


def with_in_flight(graph: StageGraph, counts: Iterable[int]) -> StageGraph:
    """Set the micro-batches in flight of every stage, one count per stage."""
    stages = zip(graph.stages, counts, strict=True)
    return replace(graph, stages=tuple(replace(stage, in_flight=n) for stage, n in stages))
