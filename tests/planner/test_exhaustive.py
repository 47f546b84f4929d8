"""The planner that tries every partition: its plans, its options and its limits."""

from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.planner.exhaustive import Exhaustive
from tests.planner import shapes
from tests.planner.helpers import cluster, cost_model, linked_model


def test_two_short_pieces_share_a_device():
    """Two chains of 3 s and 1 s, and of 1 s and 3 s, on three devices.

    The two short ones share a device although one ends its chain and the other begins its own.
    """
    cost = linked_model(4, [(0, 1), (2, 3)], [3, 1, 1, 3])
    cost = CostModel(cost.profile, cluster(3))
    found = [
        sorted(stage.operators for stage in graph.stages)
        for graph in Exhaustive(1)(cost, batch_size=16, microbatch_size=1)
    ]
    assert [("op0",), ("op1", "op2"), ("op3",)] in found


def shapes_of(cost: CostModel, planner: Exhaustive, size: int) -> set[str]:
    """What is proposed: operators x replicas of each stage, r where it recomputes."""
    return {
        " ".join(
            f"{''.join(name[2:] for name in s.operators)}x{s.replicas}{'r' * s.recompute}"
            for s in graph.stages
        )
        for graph in planner(cost, batch_size=8, microbatch_size=size)
    }


def test_every_number_of_replicas():
    """A chain of two on four devices: all ways to give them out, those in no power of two too."""
    cost = CostModel(linked_model(2, [(0, 1)]).profile, cluster(4))
    everything = Exhaustive(candidates=None, every=True)
    assert shapes_of(cost, everything, 4) == {"01x4", "0x1 1x3", "0x2 1x2", "0x3 1x1"}
    assert shapes_of(cost, everything, 2) == {"0x2 1x2"}
    assert shapes_of(cost, replace(everything, max_replicas=3), 4) == {
        "0x1 1x3",
        "0x2 1x2",
        "0x3 1x1",
    }
    assert shapes_of(cost, Exhaustive(candidates=None), 4) == {"01x4", "0x2 1x2"}


def test_every_stage_may_recompute():
    """Both ways where memory is short of a deep warm-up; where it is not, there is no reason to.

    Each operator keeps 10 bytes per micro-batch of 2: the first of two stages needs 20 bytes at
    least and 30 for a deep warm-up, the last one 10.
    """
    profile = linked_model(2, [(0, 1)]).profile
    kept = replace(profile, costs=tuple(replace(cost, kept_bytes=5) for cost in profile.costs))
    everything = Exhaustive(candidates=None, every=True, recompute=True)
    short, enough = CostModel(kept, cluster(2, memory=25)), CostModel(kept, cluster(2))
    assert shapes_of(short, everything, 2) == {"01x2", "0x1 1x1", "0x1r 1x1"}
    assert shapes_of(enough, everything, 2) == {"01x2", "0x1 1x1"}


def test_says_how_many_there_would_be():
    """8 independent operators: sum over stages s of S(8, s) * C(7, s - 1) assignments."""
    cost = CostModel(linked_model(8, []).profile, cluster(8))
    with pytest.raises(BudgetError, match=r"up to 123,244 stage graphs, more than the 100,000"):
        list(Exhaustive(every=True)(cost, batch_size=8, microbatch_size=8))


def test_refuses_large_models():
    """The limit and the model's size are named."""
    cost = cost_model(shapes.mmt(parts=1), 4)
    with pytest.raises(BudgetError, match=r"up to 8 operators .* mmt has 35 operators"):
        list(Exhaustive()(cost, batch_size=8))
