"""Plans by hand, and a step of ours under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.schedule import rule_named
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import step_seconds
from anabranch.workload import Batch, Workload
from benchmarks.runtime.race import Side, Step

sgd = partial(torch.optim.SGD, lr=1e-6)
"""An optimizer that costs next to nothing."""


def captured_model(module: nn.Module, example: Batch) -> Captured:
    """The model, once for all ranks and plans."""
    return capture(module, example)


def plan_of(
    captured: Captured,
    stage_of: Callable[[str], int],
    devices: Sequence[Sequence[int]],
    *,
    microbatches: int,
    microbatch_size: int = 1,
    schedule: str = "1f1b",
) -> Plan:
    """A plan from where each operator shall be.

    Args:
        captured: the model.
        stage_of: name of an operator -> its stage.
        devices: per stage, its replicas.
        microbatches: per step.
        microbatch_size: samples of one, over all replicas.
        schedule: key of ``schedule.SCHEDULES``.
    """
    graph = captured.graph
    where = {op.name: stage_of(op.name) for op in graph.ops}
    stages = tuple(
        Stage(
            tuple(op.name for op in graph.ops if where[op.name] == s),
            tuple(replicas),
            microbatch_size,
        )
        for s, replicas in enumerate(devices)
    )
    pairs = {(where[graph.ops[a].name], where[graph.ops[b].name]) for a, b in graph.edges}
    edges = tuple(sorted((x, y) for x, y in pairs if x != y))
    by_hand = StageGraph(stages, edges, microbatches * microbatch_size)
    ready = rule_named(schedule).warm_up(by_hand)
    nothing = Prediction(0.0, 0.0, 0.0, (0,) * len(ready.devices))
    return Plan(ready, schedule, "by hand", "", "", "", 0.0, 0.0, nothing)


def under(plan: Plan, schedule: str) -> Plan:
    """The same stages under another schedule."""
    graph = rule_named(schedule).warm_up(plan.stage_graph)
    return replace(plan, stage_graph=graph, schedule=schedule)


def ideal_s(plan: Plan, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """The simulated step where links cost nothing and stages take these seconds per micro-batch."""
    graph = plan.stage_graph
    sizes = [stage.microbatch_size for stage in graph.stages]
    times = StageTimes(
        [{n: seconds} for n, seconds in zip(sizes, forward_s, strict=True)],
        [{n: seconds} for n, seconds in zip(sizes, backward_s, strict=True)],
    )
    return step_seconds(graph, rule_named(plan.schedule).order(graph), times)


def our_side(captured: Captured, example: Batch, plan: Plan, batch: Batch, **options: Any) -> Side:
    """``Pipeline.step`` on one batch."""
    workload = Workload(captured.module, example, optimizer=sgd)
    prepare(captured, plan.stage_graph)

    def side() -> Step:
        pipeline = Pipeline(workload, plan, captured=captured, check_gradients=False, **options)
        return lambda: pipeline.step(batch)

    return side
