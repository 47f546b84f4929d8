"""Comparison: what a plan is compared with."""

import pytest

from anabranch.plans.baselines import BASELINES
from anabranch.plans.plan import Plan
from anabranch.simulator.judge import Judge
from anabranch.solve import baselines, plan
from tests.simulator.helpers import chain, cluster, cost_model


@pytest.fixture
def problem():
    """Two operators with 100 bytes of weights each, on two devices that hold 350 bytes."""
    cost = cost_model(
        chain(2), [1.0] * 2, [2.0] * 2, cluster(2, memory_bytes=350), parameter_bytes=100
    )
    return cost.profile, cost.cluster


def test_steps_are_those_of_the_plans(problem):
    """Each baseline is priced as its plan is, also without state of the optimizer: with it nothing
    would fit.
    """
    found = plan(*problem, 8, planner="sequential", optimizer_factor=0.0, improve=False)
    others = dict(baselines(found, *problem, optimizer_factor=0.0))
    assert set(others) == set(BASELINES) - {"from"}
    chains = [others["sequential"], others["straight sequential"]]
    for other in chains:
        assert isinstance(other, Plan)
    assert chains[0].figures.step_s == pytest.approx(found.figures.step_s)


def test_one_device_does_all_of_the_work():
    """Three seconds a sample for each of two operators; none where the cluster has only one."""
    cost = cost_model(chain(2), [1.0] * 2, [2.0] * 2, cluster(2))
    best = plan(cost.profile, cost.cluster, 8, planner="sequential", improve=False)
    others = dict(baselines(best, cost.profile, cost.cluster, names=["one device"]))
    assert isinstance(alone := others["one device"], Plan)
    assert alone.figures.step_s == pytest.approx(8 * 2 * 3.0)
    assert alone.stage_graph.devices == (0,)
    assert not dict(baselines(best, cost.profile, cluster(1), names=["one device"]))


@pytest.mark.parametrize(("seen", "left"), [(0, 1), (1, 1), (2, 2)])
def test_an_interrupt_leaves_out_the_rest(problem, monkeypatch, seen, left):
    """Ctrl-C in the search for one of them ended that search alone. Data parallelism, which comes
    first, does not fit; each other search judges twice, with replicas that share state at last.
    """
    found = plan(*problem, 8, planner="sequential", optimizer_factor=0.0, improve=False)
    considered = []
    judge_all = Judge.consider

    def consider(judge, proposals, *args, **options):
        considered.append(judge)
        if len(considered) > seen:
            raise KeyboardInterrupt
        return judge_all(judge, proposals, *args, **options)

    monkeypatch.setattr(Judge, "consider", consider)
    others = {}
    with pytest.raises(KeyboardInterrupt):
        others.update(baselines(found, *problem, optimizer_factor=0.0))
    assert list(others) == [name for name in BASELINES if name != "from"][:left]


def test_a_chain_may_have_several_stages_on_a_device_as_the_plan_has():
    """Of a row of operators every plan is a chain, so that none is quicker than the best one; sums
    of replicas take for ever.
    """
    machines = cluster(2, bandwidth=1e3)
    cost = cost_model(chain(4), [1.0] * 4, [2.0] * 4, machines, parameter_bytes=1 << 20)
    found = plan(cost.profile, machines, 2, microbatch_size=1)
    assert found.stage_graph.shares_devices
    others = dict(baselines(found, cost.profile, machines, microbatch_size=1))
    assert others["chain"].figures.step_s == pytest.approx(found.figures.step_s)
    assert others["sequential"].figures.step_s > found.figures.step_s
