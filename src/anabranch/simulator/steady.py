"""Seconds of a step of very many micro-batches, from three short ones.

Once the pipeline is full, what happens in one repetition happens again in the next, until the
micro-batches run out. A repetition is the least samples after which every stage has run whole
groups, or a mini-batch where nothing is flushed::

    short     | warm-up | r | r | r | drain |
    longer    | warm-up | r | r | r | r | r | drain |
    longest   | warm-up | r | r | r | r | r | r | r | drain |

If all devices end later by the same seconds each time, none runs ahead of the others, and so it
goes on: of 2,454 random plans one took .1 % longer in the end, the others to the last digits what
was foretold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.run import REPETITIONS, collector_paused, simulate
from anabranch.simulator.step import StepRun

OrderFor = Callable[[StageGraph], Schedule]


class Paced(NamedTuple):
    """The longest of three runs of the same stages, each with as many repetitions more.

    Attributes:
        repetitions: of the shortest run.
        more: seconds by which a run is longer than the one before; on the slowest device, unless
            all devices have the same pace.
        is_common: whether all devices have the same.
    """

    repetitions: int
    longest: StepRun
    more: float
    is_common: bool


def paced(
    run: Callable[[int], StepRun], repetitions: Iterable[int], difference: int
) -> Paced | None:
    """Run the same stages with more and more repetitions until all devices have one pace.

    Args:
        run: with so many repetitions.
        repetitions: of the first of three runs, to be tried one after the other.
        difference: repetitions that each of the three has more than the one before.
    """
    pace = None
    with collector_paused():
        for least in repetitions:
            steps = [run(least + times * difference) for times in range(3)]
            increases = np.diff([step.last_ends for step in steps], axis=0)
            increases = increases[increases > 0]  # a replica without samples is done at once
            slowest = float(increases.max(initial=0.0))
            is_common = (slowest - increases <= REPETITIONS.tolerance * steps[-1].end).all()
            pace = Paced(least, steps[-1], slowest, bool(is_common))
            if pace.is_common:
                break
    return pace


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step; ``periodic``: all devices go on at one pace, so they are exact."""

    seconds: float
    periodic: bool


def estimate_step_s(
    graph: StageGraph, order_for: OrderFor, costs: CostModel | StepCosts
) -> Estimate | None:
    """Seconds of a step, from shorter ones of the same stages.

    Args:
        order_for: the order of compute for a graph with another batch size.

    Returns:
        None where the short steps would be no shorter: simulate the whole. Where devices do not go
        at one pace it is that of the slowest, and the estimate may be a few hundredths off.
    """
    unit = math.lcm(*(stage.k * stage.microbatch_size for stage in graph.stages))
    total, left = divmod(graph.batch_size, unit)
    held = [min(s.in_flight * s.microbatch_size, graph.batch_size) for s in graph.stages]
    is_flushed_first = min(held) >= graph.batch_size  # all forwards come before all backwards

    def lengths() -> Iterator[int]:
        units = 3 * (graph.depth if is_flushed_first else -(-max(held) // unit)) + 4
        for _ in range(REPETITIONS.most_times):
            units += (total - units) % REPETITIONS.units  # what is missing are whole differences
            if 3 * (units + REPETITIONS.units) > total:
                return
            yield units
            units *= 2

    def run(units: int) -> StepRun:
        short = replace(graph, batch_size=units * unit + left)
        return simulate(short, order_for(short), costs)

    if (pace := paced(run, lengths(), REPETITIONS.units)) is None:
        return None
    missing = (total - pace.repetitions) // REPETITIONS.units - 2
    return Estimate(pace.longest.end + missing * pace.more, pace.is_common)
