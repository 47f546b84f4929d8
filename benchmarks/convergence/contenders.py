"""What runs beside each other: a weight policy with its options, and what replaces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from anabranch.weights import (
    Naive,
    PipeOptim,
    PredictStash,
    SpecTrain,
    Stash,
    TwoBuffers,
    VerticalSync,
    WeightPolicy,
)
from anabranch.workload import NamedParameters

Recipe = Callable[[NamedParameters, float], Optimizer]
"""Parameters and learning rate -> optimizer."""

OPTIMIZERS: dict[str, Recipe] = {
    "sgdm": lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: Adam(parameters, lr=lr, fused=True),
    "adamw": lambda parameters, lr: AdamW(parameters, lr=lr, fused=True),
}
"""Name -> recipe; other options are the defaults of torch."""

NADAM: dict[str, Recipe] = {
    "adam": lambda parameters, lr: NAdam(parameters, lr=lr, betas=(0.99, 0.999), foreach=True),
    "adamw": lambda parameters, lr: NAdam(
        parameters,
        lr=lr,
        betas=(0.99, 0.999),
        weight_decay=0.01,
        decoupled_weight_decay=True,
        foreach=True,
    ),
}
"""In place of which optimizer, with the same weight decay."""

RAMP, CLIP = 500, 3.0
"""The options of predict-stash: updates until all stages learn at the full rate, and the largest
gradient norm as a multiple of its own mean."""


@dataclass(frozen=True)
class Contender:
    """One row of a table.

    Attributes:
        policy: what passes read.
        whole: the model as one stage. Where all stages read one version, whose age does not depend
            on the cut, it gives the same weights, but for rounding, in a fraction of the time.
        nadam: NAdam with a beta of 0.99 in place of Adam and AdamW.
        needs: the only optimizer that it works with.
    """

    policy: Callable[[], WeightPolicy]
    whole: bool = False
    nadam: bool = False
    needs: str = ""

    def recipe(self, optimizer: str) -> Recipe | None:
        """How its optimizer is made; None where it has none."""
        if self.nadam:
            return NADAM.get(optimizer)
        return OPTIMIZERS[optimizer] if self.needs in ("", optimizer) else None


CONTENDERS: dict[str, Contender] = {
    "synchronous": Contender(Naive, whole=True),
    "naive": Contender(Naive),
    "stash": Contender(Stash),
    "stash, NAdam": Contender(Stash, nadam=True),
    "vertical-sync": Contender(VerticalSync),
    "2bw": Contender(TwoBuffers, whole=True),
    "spectrain": Contender(SpecTrain, needs="sgdm"),
    "pipeoptim": Contender(PipeOptim),
    "predict-stash": Contender(PredictStash),
    "predict-stash, options": Contender(partial(PredictStash, ramp=RAMP, clip=CLIP)),
}
"""Name -> contender. One stage without a policy is synchronous training: a flush after every
mini-batch, whose gradient does not depend on the cut either."""
