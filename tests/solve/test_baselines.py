"""Baselines: what a plan is compared with."""

import math

import pytest

from anabranch.simulator.judge import Judge
from anabranch.solve import BASELINES, Baseline, baselines, plan
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
    assert set(others) == set(BASELINES)
    chains = [others["sequential"], others["straight sequential"]]
    for other in chains:
        assert isinstance(other, Baseline)
        assert other.step_s == pytest.approx(other.plan().figures.step_s)
    assert chains[0].step_s == pytest.approx(found.figures.step_s)


def test_an_interrupt_before_any_simulation_leaves_a_step(problem, monkeypatch):
    """The first proposal that fits is simulated all the same, so that no step is endless."""
    found = plan(*problem, 8, planner="sequential", optimizer_factor=0.0, improve=False)
    interrupted = []

    def consider(judge, candidate):
        interrupted.append(candidate)
        raise KeyboardInterrupt

    monkeypatch.setattr(Judge, "_consider", consider)
    other = dict(baselines(found, *problem, optimizer_factor=0.0))["straight sequential"]
    assert interrupted
    assert math.isfinite(other.step_s)
    assert other.step_s == other.plan().figures.step_s
