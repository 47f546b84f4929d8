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
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.run import collector_paused, simulate
from anabranch.simulator.step import Step

TOLERANCE = 1e-11
"""How much increases may differ between devices, as a share of the longer run: rounding."""

DIFFERENCE = 12
"""Repetitions that a run has more: messages that take turns on a port are where they were after 1,
2, 3 or 4 of them as a rule."""

MOST_TIMES = 4
"""Times that short steps are simulated, each twice as long as the one before."""

OrderFor = Callable[[StageGraph], Schedule]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds by which a run with more repetitions is longer; whether it is so on all devices,
    otherwise it is the slowest device's.
    """

    seconds: float
    is_common: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step; ``periodic``: all devices go on at one pace, so they are exact."""

    seconds: float
    periodic: bool


def pace(*steps: Step) -> Pace:
    """Compare three runs of the same stages, each with as many repetitions more."""
    increases = np.diff([step.last_ends for step in steps], axis=0)
    increases = increases[increases > 0]  # a replica without samples is done at once
    slowest = float(increases.max(initial=0.0))
    return Pace(slowest, bool((slowest - increases <= TOLERANCE * steps[-1].end).all()))


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
    units = 3 * (graph.depth if is_flushed_first else -(-max(held) // unit)) + 4
    estimate = None
    with collector_paused():
        for _ in range(MOST_TIMES):
            units += (total - units) % DIFFERENCE  # what is missing are whole differences
            if 3 * (units + DIFFERENCE) > total:
                break
            steps = []
            for more in range(3):
                size = (units + more * DIFFERENCE) * unit + left
                short = replace(graph, batch_size=size)
                steps.append(simulate(short, order_for(short), costs))
            increase = pace(*steps)
            missing = (total - units) // DIFFERENCE - 2
            seconds = steps[-1].end + missing * increase.seconds
            estimate = Estimate(seconds, increase.is_common)
            if estimate.periodic:
                break
            units *= 2
    return estimate
