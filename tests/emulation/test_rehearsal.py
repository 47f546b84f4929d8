"""A plan rehearsed from start to end: figures, time scale, timeline."""

from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.emulation.rehearsal import REHEARSING, Rehearsal, _WithRuntime, rehearse
from anabranch.errors import InvalidPlanError
from anabranch.solve import simulate
from tests.emulation.models import chain, job, machines


@pytest.mark.dist
def test_a_rehearsal_has_prediction_and_emulation_side_by_side() -> None:
    """The prediction is the simulator's for the cluster that is emulated; a report shows both."""
    on = machines(2)
    plan, profile = job(chain(2), [(0,), (1,)], on)
    slow = machines(2, bandwidth=1e5)
    steps: list[tuple[int, int]] = []
    found = rehearse(plan, profile, slow, steps=3, watch=lambda *each: steps.append(each))
    predicted = simulate(plan, profile, slow)
    assert found.run.plan.predicted.step_s == predicted.step_s
    assert found.run.plan.machines == slow
    # Of the two stages' passes, two of each lie one behind the other.
    longer_s = found.with_runtime_s - predicted.step_s
    assert 0 < 4 * found.runtime_s <= longer_s + 1e-12
    assert found.run.ideal_step_s == pytest.approx(30e-3)
    titles = [(title, timeline.source) for title, timeline in found.run.timelines]
    assert titles == [("predicted", "predicted"), ("emulated", "measured")]
    assert len(found.run.step_s) == len(found.device_step_s) == len(found.late_s) == 3
    assert min(found.run.step_s) >= found.run.ideal_step_s
    assert found.num_messages == 8
    assert found.message_bytes == 2 * 8 * 1000
    assert found.keeps_up == (found.late <= REHEARSING.late)
    assert 1 <= found.time_scale <= REHEARSING.most_time_scale
    assert found.figures()["losses"] == []


def test_the_runtime_takes_no_time_for_no_samples() -> None:
    """A replica that has none of a short micro-batch runs no pass of it."""
    on = machines(2)
    plan, profile = job((), [(0, 1)], on, batch_size=3)
    costs = _WithRuntime(plan.stage_graph, CostModel(profile, on), runtime_s=0.5)
    assert costs.compute_s(0, 1) == pytest.approx((0.501, 0.502))
    assert costs.compute_s(0, 0) == (0.0, 0.0)


def test_more_is_late_than_a_step_can_bear() -> None:
    """A rank that is late by more than 3 % of a step, in most steps."""
    on = machines(1)
    plan, _ = job((), [(0,)], on)
    run = _run(plan, (1.0, 1.0, 2.0))

    def late(*late_s: float) -> Rehearsal:
        return Rehearsal(run, (1.0, 1.0, 1.0), late_s, 0.0, 1.0, 1.0, "modelled", 0, 0)

    assert late(0.0, 0.029, 0.9).keeps_up
    assert not late(0.0, 0.031, 0.9).keeps_up


def _run(plan, step_s):
    from anabranch.record import Run

    return Run(plan=plan, losses=(), step_s=step_s, ideal_step_s=1.0)


def test_wrong_arguments_are_refused_before_a_rank_starts() -> None:
    """Numbers, and a plan that does not say what its cluster has."""
    on = machines(1)
    plan, profile = job((), [(0,)], on)
    with pytest.raises(ValueError, match="at least 1"):
        rehearse(plan, profile, steps=0)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time scale"):
            rehearse(plan, profile, time_scale=scale)
    with pytest.raises(ValueError, match="time scale"):
        rehearse(plan, profile, links="host", time_scale=2.0)
    with pytest.raises(InvalidPlanError, match="name the cluster"):
        rehearse(replace(plan, machines=None, cluster="mine"), profile)
