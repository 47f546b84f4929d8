"""Prices of a model as a plan trains it."""

from dataclasses import replace

from anabranch.plans.prices import prices_of
from tests.emulation.models import job, machines


def test_what_a_plan_says_of_its_replicas_is_priced():
    """Whether they share the optimizer's state, and tables have sparse gradients, by the rows of a
    batch; the rest is as it was asked for.
    """
    on = machines(2)
    plan, profile = job((), [(0, 1)], on)
    cost = prices_of(plan, profile, on, optimizer_factor=1.0)
    assert (cost.profile, cost.cluster) == (profile, on)
    assert (cost.optimizer_factor, cost.batch_size) == (1.0, plan.stage_graph.batch_size)
    assert (cost.shard_optimizer, cost.sparse_embeddings) == (False, False)
    assert prices_of(replace(plan, sparse_embeddings=True), profile, on).sparse_embeddings
    assert prices_of(replace(plan, shard_optimizer=True), profile, on).shard_optimizer
