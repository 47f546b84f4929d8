"""A chain of equal operators, and its plans without a flush."""

from __future__ import annotations

from anabranch import solve
from anabranch.cost import CostModel
from anabranch.plans.plan import Plan
from tests.simulator.helpers import chain, cluster, cost_model


def on_chain(count: int = 4, **options) -> CostModel:
    """Equal operators in a row, 1 s forward and 2 s backward per sample, 100 bytes of weights."""
    return cost_model(
        chain(count), [1.0] * count, [2.0] * count, cluster(count, **options), parameter_bytes=100
    )


def asynchronous(cost: CostModel, batch_size: int, **options) -> Plan:
    """A plan without a flush."""
    return solve.plan(cost.profile, cost.cluster, batch_size, mode="async", **options)
