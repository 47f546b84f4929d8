"""Cost model for the training options of a plan."""

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
    """Return a cost model with the plan's sharded optimizer state and sparse gradients.

    Args:
        cluster: cluster to price for; may differ from that of the plan.
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
