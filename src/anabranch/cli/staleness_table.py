"""Ages of weights without a flush: what forwards and backwards read, stage by stage.

``-3 +3`` is the version of three updates ago, extrapolated by three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.simulator.staleness import Staleness
    from anabranch.weights import OptimizerFacts


def staleness_of(plan: Plan, optimizer: OptimizerFacts | None = None) -> tuple[Staleness, ...]:
    """Per stage of an asynchronous plan, how old its weights are."""
    from anabranch.simulator.staleness import staleness
    from anabranch.weights import policy_named

    last_update = optimizer is not None and optimizer.keeps_last_update
    return staleness(plan.stage_graph, policy_named(plan.policy), last_update=last_update)


def staleness_table(
    policy: str, stages: Sequence[Staleness]
) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows."""
    headings = ["stage", "version difference", "forward reads", "backward reads", "versions held"]
    rows = [
        [str(s), str(stage.difference), *reads(stage), str(stage.versions)]
        for s, stage in enumerate(stages)
    ]
    return f"weights under policy {policy}, in updates", headings, rows


def reads(stage: Staleness) -> tuple[str, str]:
    """The versions that the forward and the backward of a stage read."""
    return (
        _version(stage.forward_delay, stage.forward_ahead),
        _version(stage.backward_delay, stage.backward_ahead),
    )


def _version(delay: int, ahead: int) -> str:
    version = f"-{delay}" if delay else "0"
    return f"{version} +{ahead}" if ahead else version
