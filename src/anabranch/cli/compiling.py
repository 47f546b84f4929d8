"""Loops of a search, compiled in processes of their own while a model is captured."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module


def begin_compiling(planner: str) -> None:
    """Begin to compile the slowest loops of a search, as far as they are not kept."""
    if planner not in ("auto", "chain"):
        return
    from anabranch.cluster import Cluster
    from anabranch.compiled import compile_ahead
    from anabranch.cost import CostModel
    from anabranch.graph.opgraph import Op, OpGraph
    from anabranch.planner.auto.draft import draft_of
    from anabranch.planner.auto.evaluator import Evaluator
    from anabranch.planner.auto.stage_clock import step_s
    from anabranch.plans.stages import Stage, StageGraph
    from anabranch.profile.profile import OpCost, Profile
    from anabranch.schedule import rule_named
    from anabranch.schedule.list_scheduler import run
    from anabranch.simulator.events import play
    from anabranch.solve import plan

    graph, costs = OpGraph((Op("any"),), ()), (OpCost((1.0,), (1.0,), 0),)
    profile = Profile(graph, (1,), costs, device="any", source="estimated")
    cluster = Cluster.preset("local:1")

    def evaluate() -> None:
        cost, stage = CostModel(profile, cluster), Stage(("any",), (0,), 1)
        Evaluator(cost, 1)(draft_of(StageGraph((stage,), (), 1), cost))

    def order() -> None:
        import_module("numba")  # without which schedules are made in plain Python
        stages = tuple(Stage(("any",), (0,), 1) for _ in range(2))
        for rule in map(rule_named, ("zb-h1", "1f1b")):
            rule.order(rule.warm_up(StageGraph(stages, ((0, 1),), 1)))

    os.environ.setdefault("NUMBA_OPT", "1")  # compiles in four fifths of the time, as quick a code
    simulate = partial(plan, profile, cluster, 1, planner="graphpipe")
    compile_ahead({step_s: evaluate, play: simulate, run: order})
