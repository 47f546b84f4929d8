"""Requirements of a policy on plan, model and optimizer, and the policy that suits them.

``runtime.state.optimizer_facts`` has the facts of a PyTorch optimizer. A plan from a profile names
one of ``OPTIMIZERS``, or is made without these facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anabranch.errors import PolicyError, warn
from anabranch.plans.stages import StageGraph
from anabranch.weights.base import WeightPolicy
from anabranch.weights.policies import VerticalSync
from anabranch.weights.version_tracker import predicts

Rule = Literal["momentum", "adam", "last update"]
"""Source of predictions: the momentum buffer, Adam's moments, or the last update itself,
which is then kept as one more copy of the weights."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Facts of an optimizer on which policies depend.

    Attributes:
        momentum: whether it remembers a direction, from which weights can be predicted.
        rule: source of a prediction.
        decay: weight of the past in that direction; None if not known.
    """

    name: str
    momentum: bool = True
    rule: Rule = "last update"
    decay: float | None = field(default=None, compare=False)

    @property
    def keeps_last_update(self) -> bool:
        """True if a policy that predicts has to keep the last update, for want of another rule."""
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
    """Return the facts of an optimizer, which may be given by its name on the command line."""
    if optimizer is None or isinstance(optimizer, OptimizerFacts):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; name one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


SHALLOW = 4
"""Up to this depth PipeOptim comes close to synchronous training; beyond, its backward, which reads
other weights than its forward, begins to cost."""

CLOSE = 2
"""Up to this depth a prediction of the weights costs less accuracy than a gradient that is one
update late, with error feedback (``benchmarks.convergence.depths``)."""

LONG_MOMENTUM = 0.99
"""The momentum of AsyncPP."""


def require_fits(
    policy: WeightPolicy,
    graph: StageGraph,
    *,
    microbatches: int,
    round_robin: bool = False,
    batch_norms: Sequence[str] = (),
) -> None:
    """Accept a plan under a policy; warns of batch statistics over one sample.

    Args:
        microbatches: M, micro-batches per mini-batch.
        round_robin: whether the replicas of a stage take mini-batches in turn.
        batch_norms: names of the model's layers with statistics over samples.

    Raises:
        PolicyError: if the policy is not defined for such a plan.
    """
    name = policy.name
    replicated = [s for s, stage in enumerate(graph.stages) if stage.replicas > 1]
    if round_robin and replicated and not may_take_turns(graph, policy):
        raise PolicyError(
            f"replicas of stage {replicated[0]} that take mini-batches in turn make updates from "
            f"whole ones and have versions of their own, but {name} takes every mini-batch to find "
            "one version at all stages, or updates to be made from parts of one: split each "
            "mini-batch over the replicas (without round_robin), or choose stash"
        )
    least = max(graph.depth, *(stage.in_flight - 1 for stage in graph.stages))
    if policy.microbatches and microbatches < least:
        raise PolicyError(
            f"{name} runs through a mini-batch's micro-batches while the weights of the mini-batch "
            "before are made, which takes at least as many micro-batches as the pipeline is deep, "
            f"or holds besides one: {microbatches} < {least}; choose {least} or more micro-batches "
            f"per mini-batch, as plan --mode async --policy {name} does, or another policy"
        )
    if not policy.microbatches and microbatches != 1:
        raise PolicyError(
            f"{name} makes an update after every pass, and the plan has {microbatches} "
            "micro-batches per mini-batch; choose one, or the policy 2bw"
        )
    _warn_of_statistics(graph, microbatches, batch_norms, round_robin=round_robin)


def may_take_turns(graph: StageGraph, policy: WeightPolicy) -> bool:
    """Return True if there are replicas, and the policy allows that they take mini-batches in turn.

    Vertical-sync does not, as it needs one version at all stages, nor 2bw, which needs all
    micro-batches of a mini-batch.
    """
    replicated = any(stage.replicas > 1 for stage in graph.stages)
    return replicated and not policy.microbatches and not isinstance(policy, VerticalSync)


def _warn_of_statistics(
    graph: StageGraph, microbatches: int, batch_norms: Sequence[str], *, round_robin: bool
) -> None:
    if not batch_norms:
        return
    slices = [1 if round_robin else stage.replicas for stage in graph.stages]
    samples = graph.batch_size // microbatches
    least, s = min((samples // count, s) for s, count in enumerate(slices))
    if least <= 1:
        warn(
            f"{batch_norms[0]} takes its statistics over the samples of one pass, and a pass of "
            f"stage {s} has {least}: a batch of {graph.batch_size} in {microbatches} micro-batches "
            f"over {slices[s]} replicas; take a larger batch, fewer micro-batches "
            "or replicas, or GroupNorm"
        )


def require_optimizer(policy: WeightPolicy, optimizer: OptimizerFacts) -> None:
    """Accept an optimizer under a policy, or raise a ``PolicyError``."""
    by_momentum, other = optimizer.rule == "momentum", optimizer.name
    if by_momentum and not optimizer.momentum:
        other += " without momentum"
    if policy.name == "spectrain" and not (by_momentum and optimizer.momentum):
        instead = "pipeoptim or predict-stash, which follow the optimizer's own rule"
        if not optimizer.momentum:
            instead = "2bw or stash, which need no prediction"
        raise PolicyError(
            f"spectrain predicts with the momentum of SGD, and the optimizer is {other}; choose "
            f"{instead}, or give SGD a momentum"
        )
    if policy.name == "asyncpp" and optimizer.name != "NAdam":
        raise PolicyError(
            f"asyncpp is stashing under NAdam, and the optimizer is {other}; take NAdam with "
            "betas=(0.99, 0.999), or choose stash"
        )
    if policy.name == "basis-rotation" and (by_momentum or optimizer.name.startswith("Muon")):
        raise PolicyError(
            "basis-rotation turns the coordinates in which Adam scales its step, and a step of "
            f"{other} is the same in all of them; take Adam, or choose stash or 2bw-ef"
        )


def optimizer_remark(policy: WeightPolicy, optimizer: OptimizerFacts) -> str:
    """Return a warning of predictions that are useless or a momentum that is short; or nothing."""
    if policy.name == "asyncpp" and optimizer.decay is not None and optimizer.decay < LONG_MOMENTUM:
        return (
            f"policy asyncpp: it counts on a momentum of {LONG_MOMENTUM:g}, and that of "
            f"{optimizer.name} is {optimizer.decay:g} here; take betas=({LONG_MOMENTUM:g}, 0.999)"
        )
    if optimizer.momentum or not predicts(policy):
        return ""
    nothing = "the current weights" if optimizer.rule == "momentum" else "one gradient"
    return (
        f"policy {policy.name}: it predicts from the momentum of the optimizer, and "
        f"{optimizer.name} has none here, so every prediction is {nothing}; give it a momentum of "
        "about 0.9, or choose 2bw or stash"
    )


def recommend(
    depth: int, facts: OptimizerFacts, *, batch_size: int = 1, versions: int | None = None
) -> tuple[str, str]:
    """Choose the policy for ``auto``.

    Args:
        depth: stages on the longest path.
        batch_size: samples of a mini-batch; 1 where it must not be cut.
        versions: copies of its weights for which the tightest stage has memory; None for enough.

    Returns:
        Key of ``POLICIES``, and the reason in one sentence.
    """
    optimizer, last_update = facts.name, facts.keeps_last_update
    more = int(last_update)
    room = depth + 1 + more if versions is None else versions
    if depth == 1:
        return "naive", "one stage is never stale, so its weights need no policy"
    if not facts.momentum:
        if batch_size >= 2 * depth and room >= 2:
            return "2bw", (
                f"{optimizer} has no momentum to predict with, and a batch of {batch_size} can be "
                "cut into micro-batches, so that weights are stale by one update at any stage"
            )
        if room >= depth:
            return "stash", (
                f"{optimizer} has no momentum to predict with; gradients of the weights that the "
                "forward read are stale but right"
            )
        return "naive", (
            f"{optimizer} has no momentum to predict with, and there is memory for {room} of the "
            f"{depth} copies of the weights that stashing keeps; with a momentum pipeoptim would do"
        )
    if (facts.decay or 0.0) >= LONG_MOMENTUM and optimizer == "NAdam" and room >= depth:
        return "asyncpp", (
            f"a step of NAdam with so long a momentum suits weights that are up to {depth - 1} "
            "updates old, which are kept"
        )
    if depth > CLOSE and batch_size >= 2 * depth and room >= 3:
        return "2bw-ef", (
            f"at depth {depth} predictions reach {depth - 1} updates ahead, and a batch of "
            f"{batch_size} can be cut into micro-batches, so that weights are stale by one update "
            "at any stage, which error feedback makes up for"
        )
    if depth <= SHALLOW and room >= 2 + more:
        rule = f"{optimizer}'s own rule"
        if last_update:
            rule = f"the last update of {optimizer}, which is kept,"
        return "pipeoptim", (
            f"at depth {depth} a prediction by {rule} looks at most "
            f"{depth - 1} update{'s' * (depth != 2)} ahead, and at most {2 + more} copies of the "
            "weights are held"
        )
    if room >= depth + 1 + more:
        return "predict-stash", (
            f"at depth {depth} a backward on other weights than its forward costs accuracy, and "
            f"there is memory for the {depth + 1 + more} copies that keep each mini-batch's "
            f"prediction{' and the last update' if last_update else ''}"
        )
    if room >= 2 + more:
        return "pipeoptim", (
            f"predict-stash would keep {depth + 1 + more} copies of the weights and there is "
            f"memory for {room}; pipeoptim holds at most {2 + more}"
        )
    return "naive", (
        f"there is memory for {room} of the {2 + more} copies of the weights that a prediction by "
        f"{optimizer} takes; expect worse results, or plan with more devices or recomputation"
    )
