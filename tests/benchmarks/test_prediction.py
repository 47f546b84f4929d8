"""The benchmark of predicted steps: what stands beside each other."""

from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest

from anabranch.cluster import Cluster
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, UpdateCost
from anabranch.schedule.schedule import Action
from anabranch.timeline import Span, Timeline
from benchmarks.prediction import __main__ as prediction
from benchmarks.prediction.__main__ import Case, beside, mean_profile, row_of, sizes_of
from tests.simulator.helpers import cost_model


def timeline(step_s: float, *spans: tuple[float, float, str]) -> Timeline:
    found = tuple(Span(0, start, end, Action.parse(text)) for start, end, text in spans)
    return Timeline(found, (0,), "predicted", step_s, {})


def test_actions_stand_beside_each_other():
    """Forwards and backwards are added up; what follows the last action is the rest of the step. Of
    several recorded steps each has the median.
    """
    predicted = timeline(10.0, (0, 1, "0F0"), (1, 2, "0F1"), (2, 6, "0B0"), (6, 9, "0B1"))
    recorded = [
        timeline(11.0 + more, (0, forward, "0F0"), (4, 8, "0B0"), (8, 11, "0B1"))
        for forward, more in ((4.0, 3.0), (3.0, 1.0), (9.0, 0.0))
    ]
    assert beside(predicted, recorded) == {
        "0 after the last action": (1.0, 1.0),
        "0 backward": (7.0, 7.0),
        "0 forward": (2.0, 4.0),
    }


def test_a_row_is_the_mean_of_its_turns():
    """And says how much longer the longest step is than the shortest."""
    case = cast(Case, SimpleNamespace(model="glyphs", ranks=2, kind="1f1b"))
    turns = [
        {
            "step_s": step_s,
            "predicted_s": 2 * step_s,
            "planned_s": 3.0,
            "uncalibrated_s": 1.0,
            "others": 0.0,
            "actions": {"0 forward": (step_s, 1.0)},
        }
        for step_s in (4.0, 5.0)
    ]
    row = row_of(case, turns)
    assert (row["step_s"], row["predicted_s"], row["apart"]) == (4.5, 9.0, 0.25)
    assert row["actions"] == {"0 forward": (4.5, 1.0)}


def test_profiles_have_the_sample_counts_of_the_plan():
    """Two replicas with 3 samples of 6, and another one because a profile needs two."""
    graph = StageGraph((Stage(("a",), (0, 1), 6),), (), 12)
    plan = Plan(graph, "1f1b", "even", "model", "local:2", "", 0.0, 0.0, None)
    assert sizes_of(plan) == (3, 6)


def test_a_turn_beside_others_is_made_again(monkeypatch: pytest.MonkeyPatch):
    """Others have half a core, then a quarter, then next to nothing, which ends it; if they stay,
    the calmest of a few turns counts.
    """
    cores = iter([0.5, 0.25, 0.01, 0.5, 0.25, 0.75, 0.5])
    monkeypatch.setattr(prediction.OtherLoad, "cores", lambda self: next(cores))
    turns = count()
    assert prediction.calmest(lambda: next(turns)) == (2, 0.01)
    assert prediction.calmest(lambda: next(turns)) == (4, 0.25)


def test_ranks_are_measured_alike():
    """One rank's core is three times as quick as the other's; both do the work."""
    graph = cost_model((), [1.0], [2.0], Cluster.preset("local:1")).graph
    ranks = [
        Profile(
            graph,
            (1, 2),
            (OpCost((s, 2 * s), (2 * s, 4 * s), 0, weight_s=(1.5 * s, 3 * s)),),
            "cpu",
            "measured",
            update=UpdateCost(s, 0.0, s),
        )
        for s in (3.0, 1.0)
    ]
    found = mean_profile(ranks)
    assert (found.costs[0].forward_s, found.costs[0].backward_s) == ((2.0, 4.0), (4.0, 8.0))
    assert found.costs[0].weight_s == (3.0, 6.0)
    assert found.update == UpdateCost(2.0, 0.0, 2.0)
