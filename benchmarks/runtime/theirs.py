"""``torch.distributed.pipelining`` as its documentation has it, and the ideal of its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from anabranch import launch
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import step_seconds
from benchmarks.runtime.ours import sgd
from benchmarks.runtime.race import Side, Step

SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
SEVERAL = ("interleaved", "zbv")
"""Schedules with two stages per rank, each of half the work."""

Loss = Callable[[Any, Tensor], Tensor]


def stages_of(schedule: str, rank: int, num_ranks: int) -> tuple[int, ...]:
    """The stages of one rank."""
    if schedule == "zbv":
        return rank, 2 * num_ranks - 1 - rank
    return (rank, num_ranks + rank) if schedule in SEVERAL else (rank,)


def their_side(
    schedule: str,
    num_ranks: int,
    parts: Callable[[], Sequence[nn.Module]],
    loss: Loss,
    batch: Tensor | tuple[Tensor, ...],
    target: Tensor,
    *,
    microbatches: int,
) -> Side:
    """``schedule.step`` and the same optimizer as ours.

    Args:
        schedule: key of ``SCHEDULES``.
        num_ranks: ranks of the run.
        parts: makes the modules of all stages, in their order.
        loss: (output of the last stage, target) -> scalar.
        batch: positional arguments of the first stage.
        target: for the loss, as many samples, where the modules are.
        microbatches: per step.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)

    def side() -> Step:
        rank = dist.get_rank()
        modules = parts()
        mine = stages_of(schedule, rank, num_ranks)
        stages = [PipelineStage(modules[s], s, len(modules), target.device) for s in mine]
        runner = SCHEDULES[schedule](
            stages if schedule in SEVERAL else stages[0], microbatches, loss_fn=loss
        )
        parameters = [p for s in mine for p in modules[s].parameters()]
        optimizer = sgd(parameters)
        first, last = 0 in mine, len(modules) - 1 in mine

        def step() -> None:
            optimizer.zero_grad()
            given = arguments if first else ()
            if last:
                runner.step(*given, target=target, losses=[], return_outputs=False)
            else:
                runner.step(*given, return_outputs=False)
            optimizer.step()

        return step

    return side


def ideal_s(
    schedule: str, num_ranks: int, microbatches: int, forward_s: float, backward_s: float
) -> float:
    """The step of a schedule with several stages per rank where messages cost nothing.

    Taken from the order that the schedule itself has made, simulated as ours are. Seconds are those
    of a whole rank; a stage has half of them.
    """
    orders = launch.run(lambda: _order(schedule, num_ranks, microbatches), num_ranks)[0]
    count = 2 * num_ranks
    device_of = {s: rank for rank in range(num_ranks) for s in stages_of(schedule, rank, num_ranks)}
    stages = tuple(Stage((str(s),), (device_of[s],), 1, in_flight=1) for s in range(count))
    graph = StageGraph(stages, tuple((s, s + 1) for s in range(count - 1)), microbatches)
    actions = {
        rank: tuple(Action(s, Kind(kind), i) for s, kind, i in order)
        for rank, order in enumerate(orders)
    }
    half = StageTimes([{1: forward_s / 2}] * count, [{1: backward_s / 2}] * count)
    return step_seconds(graph, Schedule(actions), half)


def _order(schedule: str, num_ranks: int, microbatches: int) -> list[list[tuple[int, str, int]]]:
    modules = [nn.Linear(1, 1) for _ in range(2 * num_ranks)]
    stages = [
        PipelineStage(modules[s], s, len(modules), torch.device("cpu"))
        for s in stages_of(schedule, dist.get_rank(), num_ranks)
    ]
    runner = SCHEDULES[schedule](stages, microbatches, loss_fn=lambda out, _: out.mean())
    orders = runner.pipeline_order
    return [
        [
            (a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in orders[rank]
            if a is not None
        ]
        for rank in range(num_ranks)
    ]
