"""Modes and policies by name, and the policy that suits a plan."""

from __future__ import annotations

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule.asynchronous import ORDER
from anabranch.weights import OptimizerFacts, WeightPolicy, policy_named
from anabranch.weights.requirements import recommend

MODES = ("sync", "async")


def check_mode(mode: str, policy: str, schedule: str = "auto") -> None:
    """Refuse modes and policies that do not exist or do not go together.

    Raises:
        PolicyError: if there is no such policy.
        ValueError: for other names or combinations that do not exist; it lists those that do.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; there are {' and '.join(MODES)}")
    if mode == "sync":
        if policy:
            raise ValueError(
                f"policy {policy} is for mode async; in mode sync all passes of a step read the "
                "same weights"
            )
        return
    if policy not in ("", "auto"):
        policy_named(policy)
    if schedule not in ("auto", "published", ORDER):
        raise ValueError(
            f"schedule {schedule} is for mode sync; asynchronous training has one order, {ORDER}"
        )


def require_may_cut(policy: WeightPolicy, graph: OpGraph) -> None:
    """Refuse a policy that cuts mini-batches where an operator needs them whole, with an
    InfeasiblePlanError; ``recommended`` never names such a policy there.
    """
    coupled = next((op.name for op in graph.ops if op.whole_batch), None)
    if policy.microbatches and coupled is not None:
        raise InfeasiblePlanError(
            f"policy {policy.name} cuts mini-batches into micro-batches, and operator {coupled} "
            "needs all samples of a batch at once, as a loss does that compares them; choose "
            "pipeoptim, predict-stash or stash"
        )


def recommended(
    graph: StageGraph,
    cost: CostModel,
    optimizer: OptimizerFacts | None = None,
    *,
    may_cut: bool = True,
) -> tuple[str, str]:
    """Return the policy for ``auto`` and the reason, for stages with their in-flight counts."""
    unknown = OptimizerFacts("the optimizer", momentum=cost.update.state > 0, rule="momentum")
    batch_size = graph.batch_size if may_cut and not cost.graph.whole_batch else 1
    return recommend(
        graph.depth, optimizer or unknown, batch_size=batch_size, versions=_room(graph, cost)
    )


def auto_policy(
    plan_: Plan, profile: Profile, cluster: Cluster, optimizer: OptimizerFacts | None = None
) -> tuple[str, str]:
    """Return the policy that ``auto`` takes for the stages of an asynchronous plan, and why."""
    return recommended(plan_.stage_graph, CostModel(profile, cluster), optimizer)


def _room(graph: StageGraph, cost: CostModel) -> int | None:
    """Return how many versions of its weights the tightest stage can hold; None for any number."""
    room: list[int] = []
    for s, stage in enumerate(graph.stages):
        one, two = (
            stage_bytes(graph, cost, s, in_flight=stage.in_flight, versions=n) for n in (1, 2)
        )
        if two > one:
            room.append(1 + int((cost.cluster.memory_bytes - one) // (two - one)))
    return min(room, default=None)
