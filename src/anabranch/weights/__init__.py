"""Weight policies of asynchronous training, and what they cost in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from anabranch.errors import PolicyError
from anabranch.weights.base import Reading as Reading
from anabranch.weights.base import Unit as Unit
from anabranch.weights.base import WeightPolicy as WeightPolicy
from anabranch.weights.policies import POLICIES as POLICIES
from anabranch.weights.policies import Naive as Naive
from anabranch.weights.policies import PipeOptim as PipeOptim
from anabranch.weights.policies import PredictStash as PredictStash
from anabranch.weights.policies import Rotation as Rotation
from anabranch.weights.policies import SpecTrain as SpecTrain
from anabranch.weights.policies import Stash as Stash
from anabranch.weights.policies import TwoBuffers as TwoBuffers
from anabranch.weights.policies import TwoBuffersFeedback as TwoBuffersFeedback
from anabranch.weights.policies import VerticalSync as VerticalSync
from anabranch.weights.requirements import OPTIMIZERS as OPTIMIZERS
from anabranch.weights.requirements import OptimizerFacts as OptimizerFacts
from anabranch.weights.requirements import facts_named as facts_named
from anabranch.weights.requirements import may_take_turns as may_take_turns
from anabranch.weights.requirements import optimizer_remark as optimizer_remark
from anabranch.weights.requirements import recommend as recommend
from anabranch.weights.requirements import require_fits as require_fits
from anabranch.weights.requirements import require_optimizer as require_optimizer
from anabranch.weights.version_tracker import VersionTracker as VersionTracker
from anabranch.weights.version_tracker import keeps as keeps
from anabranch.weights.version_tracker import versions_held as versions_held


def policy_named(name: str, options: Mapping[str, object] | None = None) -> WeightPolicy:
    """Return the policy of a name.

    Args:
        options: values for its fields, all of them numbers.

    Raises:
        PolicyError: if there is no policy of that name.
        ValueError: for an option that the policy does not have, or a value that is no number.
    """
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(POLICIES)} and auto")
    make: Any = POLICIES[name]
    known, options = [field.name for field in fields(make)], options or {}
    for option, value in options.items():
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {name} has no option {option}; {has}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"option {option} of policy {name} is a number, not {value!r}")
    policy: WeightPolicy = make(**options)
    return policy
