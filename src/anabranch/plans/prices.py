"""Cost model for the training options of a plan, and the price of its slowest stage."""

from __future__ import annotations

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile


def prices_of(
    plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_factor: float | None = None
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


def bottleneck_s_per_sample(graph: StageGraph, cost: CostModel) -> float:
    """Compute seconds per sample of the slowest stage, GraphPipe's TPS without communication."""

    def seconds(s: int) -> float:
        stage = graph.stages[s]
        samples, mask = stage.microbatch_size / stage.replicas, cost.graph.mask(stage.operators)
        return sum(cost.stage_s(mask, samples, recompute=stage.recompute)) / stage.microbatch_size

    return max(seconds(s) for s in range(len(graph)))
