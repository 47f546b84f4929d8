"""The map of the benchmark of planners: which kind of plan has won a case, and by how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.planners.evaluator import population_steps
from benchmarks.planners.winners import BASE, CHANGED, behind, judged, verdict


def plan(step_s: float, stages: int, depth: int) -> dict[str, Any]:
    """The row of a plan."""
    return {"step_s": step_s, "stages": stages, "depth": depth}


NONE = {"error": "InfeasiblePlanError", "message": "needs 20 GiB"}


@pytest.mark.parametrize(
    ("data_parallel", "sequential", "graphpipe", "expected"),
    [
        (plan(3, 1, 1), plan(2, 4, 4), plan(1, 5, 3), "graph 2.00x"),
        # Both pipelines fell back to data parallelism.
        (plan(1, 1, 1), plan(1, 1, 1), plan(1, 1, 1), "data parallelism"),
        # A row of stages is a chain, whoever has found it.
        (plan(3, 1, 1), plan(2.5, 4, 4), plan(2, 6, 6), "chain 1.50x"),
        # 0.4 % count as equal, and the simpler plan wins.
        (plan(3, 1, 1), plan(1.004, 4, 4), plan(1, 5, 3), "chain 2.99x"),
        (NONE, plan(1, 4, 4), NONE, "chain, alone"),
        (NONE, NONE, NONE, "nothing fits"),
    ],
)
def test_the_winner_is_the_simplest_of_the_best(data_parallel, sequential, graphpipe, expected):
    """By the shape of the plan, over the best plan that is simpler."""
    plans = {"data-parallel": data_parallel, "sequential": sequential, "graphpipe": graphpipe}
    assert verdict(judged(plans)) == expected


def test_behind_is_said_of_graphpipe_alone():
    """More than 0.5 % longer than any other planner's step, or no plan where there is one."""
    chain = plan(1, 4, 4)
    assert behind({"sequential": chain, "graphpipe": plan(1.006, 5, 3)})
    assert behind({"sequential": chain, "graphpipe": NONE})
    assert not behind({"sequential": chain, "graphpipe": plan(1.004, 5, 3)})
    assert not behind({"sequential": plan(2, 4, 4), "graphpipe": chain})


def test_settings_change_one_thing():
    """The network between the nodes, or the memory of a device."""
    base = BASE.cluster(32)
    fast, slow, large = (setting.cluster(32) for setting in CHANGED)
    assert fast.levels[1].bandwidth == 16 * slow.levels[1].bandwidth
    assert fast.levels[0] == slow.levels[0] == base.levels[0]
    assert (large.levels, large.memory_bytes) == (base.levels, 80 * 10**9)
    assert {c.num_devices for c in (base, fast, slow, large)} == {32}


def test_a_population_steps_as_pipelines_do():
    """Two drafts at once, rows of two stages with forwards of 1 s and backwards of 2 s, four
    micro-batches: the second waits for the first on the way there and back, (4 + 1) * 3 s. Without
    an edge both stages work side by side.
    """
    forward, edges = np.ones((2, 2)), np.zeros((2, 2, 2), dtype=bool)
    edges[0, 0, 1] = True
    assert population_steps(forward, 2 * forward, edges, 0.0, 4).tolist() == [15.0, 12.0]
