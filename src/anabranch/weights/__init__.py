"""Weight policies of asynchronous training, and what they cost in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.weights.alive import Alive, versions_held
from anabranch.weights.base import Reading, Unit, WeightPolicy
from anabranch.weights.drawing import draw
from anabranch.weights.policies import (
    Naive,
    PipeOptim,
    PredictStash,
    SpecTrain,
    Stash,
    TwoBuffers,
    VerticalSync,
)
from anabranch.weights.requirements import recommend, require_fits

__all__ = [
    "POLICIES",
    "Alive",
    "Naive",
    "PipeOptim",
    "PredictStash",
    "Reading",
    "SpecTrain",
    "Stash",
    "TwoBuffers",
    "Unit",
    "VerticalSync",
    "WeightPolicy",
    "draw",
    "policy_named",
    "recommend",
    "require_fits",
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
}
"""Name -> policy."""


def policy_named(name: str) -> WeightPolicy:
    """The policy of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)} and auto")
    return POLICIES[name]()
