"""Facts of an optimizer that a weight policy has to know, without torch.

Whoever has an optimizer asks ``runtime.optimizer_facts.facts_of``; whoever plans from a
profile names one of ``OPTIMIZERS``, or plans without knowing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Rule = Literal["momentum", "adam", "last update"]
"""Source of predictions: the momentum buffer, Adam's moments, or the last update itself,
which is then kept as one more copy of the weights."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An optimizer as far as policies care.

    Attributes:
        momentum: whether it remembers a direction, so that a prediction has something to go by.
        rule: where a prediction comes from.
        decay: weight of the past in that direction, where it is known.
    """

    name: str
    momentum: bool = True
    rule: Rule = "last update"
    decay: float | None = field(default=None, compare=False)

    @property
    def keeps_last_update(self) -> bool:
        """True if a policy that predicts keeps the last update, for want of a rule."""
        return self.rule == "last update"


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "sgd": OptimizerFacts("SGD", momentum=False, rule="momentum"),
    "sgd-momentum": OptimizerFacts("SGD", rule="momentum"),
    "adam": OptimizerFacts("Adam", rule="adam"),
    "adamw": OptimizerFacts("AdamW", rule="adam"),
    "nadam": OptimizerFacts("NAdam"),
    "muon": OptimizerFacts("Muon"),
    "other": OptimizerFacts("the optimizer"),
}
"""Name on the command line -> facts."""


def facts_named(optimizer: OptimizerFacts | str | None) -> OptimizerFacts | None:
    """Facts, of which a name on the command line will do."""
    if optimizer is None or isinstance(optimizer, OptimizerFacts):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; name one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]
