"""Weight policies of asynchronous training, and what they cost in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from anabranch.errors import PolicyError
from anabranch.schedule.asynchronous import units_in_flight
from anabranch.weights.base import Reading, Unit, WeightPolicy
from anabranch.weights.policies import (
    AsyncPP,
    Naive,
    PipeOptim,
    PredictStash,
    Rotation,
    SpecTrain,
    Stash,
    TwoBuffers,
    TwoBuffersFeedback,
    VerticalSync,
)
from anabranch.weights.requirements import (
    OPTIMIZERS,
    OptimizerFacts,
    facts_named,
    may_take_turns,
    optimizer_remark,
    recommend,
    require_fits,
    require_optimizer,
)
from anabranch.weights.version_tracker import (
    VersionTracker,
    keeps,
    predicts,
    versions_held,
)

__all__ = [
    "OPTIMIZERS",
    "POLICIES",
    "AsyncPP",
    "Naive",
    "OptimizerFacts",
    "PipeOptim",
    "PredictStash",
    "Reading",
    "Rotation",
    "SpecTrain",
    "Stash",
    "TwoBuffers",
    "TwoBuffersFeedback",
    "Unit",
    "VersionTracker",
    "VerticalSync",
    "WeightPolicy",
    "facts_named",
    "keeps",
    "may_take_turns",
    "optimizer_remark",
    "policy_named",
    "predicts",
    "recommend",
    "require_fits",
    "require_optimizer",
    "units_in_flight",
    "versions_held",
]

POLICIES: Mapping[str, Callable[[], WeightPolicy]] = {
    "naive": Naive,
    "stash": Stash,
    "vertical-sync": VerticalSync,
    "2bw": TwoBuffers,
    "spectrain": SpecTrain,
    "pipeoptim": PipeOptim,
    "predict-stash": PredictStash,
    "asyncpp": AsyncPP,
    "basis-rotation": Rotation,
    "2bw-ef": TwoBuffersFeedback,
}
"""Name -> policy."""


def policy_named(name: str, options: Mapping[str, object] | None = None) -> WeightPolicy:
    """The policy of that name.

    Args:
        options: values for its fields, all of them numbers.

    Raises:
        PolicyError: if there is none of that name.
        ValueError: if it has no such option, or that is no number.
    """
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(POLICIES)} and auto")
    policy: Any = POLICIES[name]()
    known = [field.name for field in fields(policy)]
    for option, value in (options or {}).items():
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {name} has no option {option}; {has}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"option {option} of policy {name} is a number, not {value!r}")
    made: WeightPolicy = replace(policy, **(options or {}))
    return made
