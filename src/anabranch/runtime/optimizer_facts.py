"""Facts about a torch optimizer that weight policies and shared state need."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container
from enum import IntEnum

import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer

from anabranch.errors import TrainingError
from anabranch.graph.opgraph import OpGraph
from anabranch.graph.slices import whole_name
from anabranch.plans.plan import TAKE_ROWS
from anabranch.weights import OptimizerFacts, WeightPolicy, optimizer_remark, require_optimizer
from anabranch.weights.optimizers import Rule
from anabranch.workload import Workload


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule by which weights under an optimizer are predicted."""
    if type(optimizer) is SGD:
        return "momentum"
    return "adam" if type(optimizer) in (Adam, AdamW) else "last update"


def has_momentum(optimizer: Optimizer) -> bool:
    """Return True if the optimizer remembers a direction, as far as is known."""
    if rule_of(optimizer) == "momentum":
        return any(group["momentum"] for group in optimizer.param_groups)
    if rule_of(optimizer) == "adam":
        return any(group["betas"][0] for group in optimizer.param_groups)
    return True


def facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts of an optimizer that policies ask for."""
    betas = (group["betas"][0] for group in optimizer.param_groups if "betas" in group)
    return OptimizerFacts(
        type(optimizer).__name__,
        has_momentum(optimizer),
        rule_of(optimizer),
        min(betas, default=None),
    )


def require_rule(policy: WeightPolicy, optimizer: Optimizer) -> None:
    """Accept an optimizer under a policy that predicts; warns where a prediction says nothing.

    Raises:
        PolicyError: for SpecTrain with anything but SGD with momentum.
    """
    facts = facts_of(optimizer)
    require_optimizer(policy, facts)
    if remark := optimizer_remark(policy, facts):
        warnings.warn(remark, stacklevel=2)


def optimizer_of(workload: Workload) -> OptimizerFacts | None:
    """Facts of the workload's optimizer; None if nothing is trained or stand-ins are refused."""
    optimizer = stand_in(workload)
    return None if optimizer is None else facts_of(optimizer)


BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.SparseAdam),
    *(optim.Adadelta, optim.Adagrad, optim.ASGD, optim.RMSprop, optim.Rprop),
)
"""Optimizers that treat each element alone, or each row of a sparse gradient."""


_BY_PARAMETER = "torch.optim.", "anabranch."
"""Modules of optimizers that compute nothing over several parameters."""


def updates_by_element(workload: Workload, names: Collection[str]) -> bool:
    """Return True if the workload's optimizer is known to treat each element of these parameters
    alone, so that it takes sparse gradients; hooks on its steps are unknown.
    """
    optimizer = stand_in(workload, names)
    return type(optimizer) in BY_ELEMENT and not _has_hooks(optimizer)


def unlike_torchs(optimizer: Optimizer) -> str:
    """Return a sentence on an optimizer that may compute over several parameters, which those of
    ``torch.optim`` do not; nothing for these.
    """
    is_torchs = type(optimizer).__module__.startswith(_BY_PARAMETER)
    if is_torchs and not _has_hooks(optimizer):
        return ""
    lost = ""
    if inside := sorted(_with_own_state(optimizer)):
        lost = (
            f"; its state_dict lacks what it keeps in {' and '.join(inside)}, so whoever resumes "
            "from a checkpoint begins without that: have these share its state, as in "
            "docs/training.md"
        )
    return (
        f"{type(optimizer).__name__} {'has hooks' if is_torchs else 'is not of torch.optim'}: each "
        "rank has one for the parameters of its own stages, so what it computes over several, such "
        "as a norm of them all, is of those alone; what it does by parameter is as in one process, "
        f"and Workload(clip_norm=...) clips by the norm over all stages{lost}"
    )


def _with_own_state(optimizer: Optimizer) -> set[str]:
    """Names of optimizers that another one holds, alone or in lists and dicts, with other state."""
    held: list[object] = []
    for value in vars(optimizer).values():
        entries = list(value.values()) if isinstance(value, dict) else value
        held += entries if isinstance(entries, list | tuple | set) else [value]
    parts = (part for part in held if isinstance(part, Optimizer))
    return {type(part).__name__ for part in parts if part.state is not optimizer.state}


def _has_hooks(optimizer: Optimizer | None) -> bool:
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return any(getattr(optimizer, name, None) for name in hooks)


def require_updates(workload: Workload, graph: OpGraph, made: Optimizer | None = None) -> None:
    """Accept an optimizer that takes sparse gradients of the tables that ask for them, and others
    of all other parameters; those that are not PyTorch's are not tried.

    Args:
        made: what the recipe has made of the model's own parameters, if it was asked; it is asked
            again only for a model and an optimizer that may not go together.

    Raises:
        TrainingError: for Adam with such tables, or SparseAdam with anything else.
    """
    names = (p.name for p in graph.parameters if p.table is not None and p.table.sparse)
    tables = sorted({whole_name(name) for name in names})

    def may_fail(optimizer: Optimizer) -> bool:
        is_torchs = type(optimizer).__module__.startswith(_BY_PARAMETER)
        return is_torchs and (bool(tables) or isinstance(optimizer, optim.SparseAdam))

    if made is not None and not may_fail(made):
        return
    optimizer = stand_in(workload, tables=tables)
    if optimizer is None or not may_fail(optimizer):
        return
    try:
        optimizer.step()
    except Exception as error:
        if "sparse" not in str(error).lower():  # it is for a GPU, or needs a closure
            return
        gradients = f"sparse gradients (sparse=True) of {', '.join(tables) or 'no table'}"
        raise TrainingError(
            f"{type(optimizer).__name__} cannot update this model, which has {gradients} and "
            f"dense ones of all else: {error}; leave sparse=True out, or have the Workload's "
            f"optimizer be {TAKE_ROWS}; SparseAdam takes such tables alone, so it needs another "
            "one beside it for the rest, as in docs/training.md"
        ) from error


def stand_in(
    workload: Workload, names: Collection[str] | None = None, tables: Collection[str] = ()
) -> Optimizer | None:
    """The optimizer that the recipe makes for parameters (all) of one element each, which have
    gradients, those of tables sparse ones; None if there are none, or the recipe takes no others
    than the model's.
    """
    stand_ins = [
        (name, nn.Parameter(torch.zeros([1] * p.dim(), dtype=p.dtype)))
        for name, p in workload.module.named_parameters()
        if p.requires_grad and (names is None or name in names)
    ]
    for name, parameter in stand_ins:
        gradient = torch.ones_like(parameter)
        parameter.grad = gradient.to_sparse(1) if name in tables else gradient
    if not stand_ins:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever trains will see them
            return workload.make_optimizer(stand_ins)
    except Exception:  # the user's own code, written for other parameters; training will say why
        return None


class TakenGradients(IntEnum):
    """Gradients of embedding tables that an optimizer takes."""

    DENSE = 0
    EITHER = 1
    SPARSE = 2


def taken_gradients(optimizer: Optimizer | None) -> TakenGradients:
    """Return the gradients that an optimizer takes; one that is not PyTorch's takes sparse ones."""
    if optimizer is None:
        return TakenGradients.EITHER
    if isinstance(optimizer, optim.SparseAdam) or not (
        type(optimizer).__module__.startswith(_BY_PARAMETER)
    ):
        return TakenGradients.SPARSE
    if not isinstance(optimizer, optim.SGD | optim.Adagrad):
        return TakenGradients.DENSE
    # Momentum would be kept as rows, more of them with every step. The others are refused.
    besides = ("momentum", "weight_decay", "fused")
    takes_sparse = not any(group.get(key) for group in optimizer.param_groups for key in besides)
    return TakenGradients.EITHER if takes_sparse else TakenGradients.DENSE


def refuse_unsupported(optimizer: object, scheduler: object) -> None:
    """Raises TrainingError for what a step of a pipeline cannot drive."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            "LBFGS evaluates the loss several times per step, which a pipeline's step does not; "
            "take an optimizer whose step needs no closure"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TrainingError(
            "ReduceLROnPlateau needs a metric at every step; leave Workload.scheduler out and call "
            "it yourself with what Pipeline.evaluate returns (Pipeline.optimizer is this rank's)"
        )


def require_sparse_updates(
    optimizer: Optimizer | None, graph: OpGraph, held: Container[str]
) -> None:
    """Raise a TrainingError where an optimizer takes no sparse gradients of the tables held."""
    tables = [p.name for p in graph.parameters if p.table and p.name in held]
    if tables and taken_gradients(optimizer) is TakenGradients.DENSE:
        raise TrainingError(
            f"{type(optimizer).__name__}, as it is set, takes no sparse gradients, "
            f"which sparse_embeddings gives {', '.join(tables)}; have the Workload's optimizer "
            f"be {TAKE_ROWS}, or train with --no-sparse-embeddings "
            "(sparse_embeddings=False), also by this plan"
        )
