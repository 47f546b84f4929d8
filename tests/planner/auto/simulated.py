"""What the simulator says of a draft: the yardstick of the evaluator."""

import math
from dataclasses import replace
from functools import partial

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, InvalidScheduleError, ProfileError
from anabranch.planner.auto.draft import Draft, stage_graph_of
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from anabranch.schedule import compute_order, rule_named
from anabranch.simulator.objective import ShortestStep
from anabranch.simulator.run import step_seconds


def simulated_s(cost: CostModel, batch_size: int, draft: Draft) -> float:
    """Seconds of the step, infinity where the draft cannot run."""
    cost = replace(cost, shard_optimizer=draft.sharded)
    schedule = "1f1b-deep" if draft.deep else "1f1b"
    try:
        graph = stage_graph_of(draft, cost, batch_size)
        graph = _warmed_up(graph, cost, schedule)
        if check(graph, cost):
            return math.inf
        order = compute_order(graph, schedule)
        return step_seconds(graph, order, cost)
    except (InvalidPlanError, InvalidScheduleError, ProfileError):
        return math.inf


def _warmed_up(graph: StageGraph, cost: CostModel, schedule: str) -> StageGraph:
    objective = ShortestStep(cost, (schedule,))
    room = partial(objective._room, objective.prices(graph))
    return rule_named(schedule).warm_up(graph, room)
