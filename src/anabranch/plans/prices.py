"""The prices of a model as a plan trains it."""

from __future__ import annotations

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile


def prices_of(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    optimizer_factor: float = 2.0,
) -> CostModel:
    """A cost model for the stages of a plan, whose replicas may share the optimizer's state, and
    whose tables may have sparse gradients.

    Args:
        cluster: may be another one than the plan was made for.
        optimizer_factor: see ``CostModel``.
    """
    return CostModel(
        profile,
        cluster,
        optimizer_factor=optimizer_factor,
        shard_optimizer=plan.shard_optimizer,
        sparse_embeddings=plan.sparse_embeddings,
        batch_size=plan.stage_graph.batch_size if plan.mode == "sync" else 0,
    )
