"""Facts about a torch optimizer that weight policies and shared state need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum

import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer

from anabranch.errors import TrainingError
from anabranch.graph.opgraph import OpGraph
from anabranch.graph.slices import whole_name
from anabranch.plans.plan import TAKE_ROWS
from anabranch.weights import OptimizerFacts
from anabranch.weights.requirements import Rule
from anabranch.workload import Workload, has_hooks, stand_in_optimizer, stand_ins


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule by which weights under an optimizer are predicted."""
    if type(optimizer) is SGD:
        return "momentum"
    return "adam" if type(optimizer) in (Adam, AdamW) else "last update"


def facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts of an optimizer that policies ask for."""
    groups, rule = optimizer.param_groups, rule_of(optimizer)
    betas = [group["betas"][0] for group in groups if "betas" in group]
    directions = {"momentum": [group.get("momentum") for group in groups], "adam": betas}
    # Other optimizers are taken to have momentum.
    momentum = any(directions.get(rule, [True]))
    return OptimizerFacts(type(optimizer).__name__, momentum, rule, min(betas, default=None))


def optimizer_of(workload: Workload) -> OptimizerFacts | None:
    """Facts of the workload's optimizer; None if nothing is trained or stand-ins are refused."""
    optimizer = stand_in_optimizer(workload)
    return None if optimizer is None else facts_of(optimizer)


def _is_torchs(optimizer: Optimizer) -> bool:
    """True for optimizers of PyTorch and of ours, which compute nothing over several parameters."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "anabranch."))


def unlike_torchs(optimizer: Optimizer) -> str:
    """Return a sentence on an optimizer that may compute over several parameters; empty for those
    of ``torch.optim``, which do not.
    """
    is_torchs = _is_torchs(optimizer)
    if is_torchs and not has_hooks(optimizer):
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


class TakenGradients(IntEnum):
    """Gradients of embedding tables that an optimizer takes."""

    DENSE = 0
    EITHER = 1
    SPARSE = 2


def taken_gradients(
    optimizer: Optimizer | None,
    tables: Collection[nn.Parameter] | None = None,
    *,
    asks_for_rows: bool = False,
) -> TakenGradients:
    """Return the gradients that an optimizer takes; one that is not PyTorch's takes sparse ones.

    Args:
        tables: tables that the optimizer is to update, by default all its parameters.
        asks_for_rows: whether the user's own tables ask for sparse gradients. Otherwise momentum
            takes dense ones: as rows it would have more of them with every step.
    """
    if optimizer is None:
        return TakenGradients.EITHER
    if isinstance(optimizer, optim.SparseAdam) or not _is_torchs(optimizer):
        return TakenGradients.SPARSE
    ids = None if tables is None else {*map(id, tables)}
    groups = [g for g in optimizer.param_groups if ids is None or ids & {*map(id, g["params"])}]
    besides = ("weight_decay", "fused") if asks_for_rows else ("weight_decay", "fused", "momentum")
    takes_rows = not any(group.get(key) for group in groups for key in besides)
    is_known = isinstance(optimizer, optim.SGD | optim.Adagrad)
    return TakenGradients.EITHER if is_known and takes_rows else TakenGradients.DENSE


def refuse_unsupported(optimizer: object, scheduler: object) -> None:
    """Refuse, by a TrainingError, what a step of a pipeline cannot drive."""
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


def require_updates(
    graph: OpGraph,
    optimizer: Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    *,
    sparse_embeddings: bool | None = False,
) -> None:
    """Accept an optimizer that takes sparse gradients of the tables that have them, and dense ones
    of all other parameters.

    Args:
        parameters: name -> parameter, with all that the optimizer updates among them.
        sparse_embeddings: whether all tables have sparse gradients, also without asking for them.

    Raises:
        TrainingError: for Adam with such tables, or SparseAdam with anything else.
    """
    sparse = (p.name for p in graph.parameters if p.table and (sparse_embeddings or p.table.sparse))
    tables = {*map(whole_name, sparse)}
    groups = [] if optimizer is None else optimizer.param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {whole_name(name): p for name, p in parameters.items() if id(p) in updated}
    held = sorted(tables & trained.keys())
    own = [trained[name] for name in held]
    taken = taken_gradients(optimizer, own, asks_for_rows=not sparse_embeddings)
    takes_others = not isinstance(optimizer, optim.SparseAdam) or trained.keys() <= tables
    if takes_others and not (held and taken is TakenGradients.DENSE):
        return
    way_on = "leave sparse=True out"
    if sparse_embeddings:
        way_on = "train with --no-sparse-embeddings (sparse_embeddings=False), also by this plan"
    raise TrainingError(
        f"{type(optimizer).__name__}, as it is set, cannot update this model, which has sparse "
        f"gradients of {', '.join(held) or 'no table'} and dense ones of all else; {way_on}, or "
        f"have the Workload's optimizer be {TAKE_ROWS}; SparseAdam takes such tables alone, so it "
        "needs another one beside it for the rest, as in docs/training.md"
    )


def require_recipe_updates(
    workload: Workload, graph: OpGraph, *, sparse_embeddings: bool = False
) -> None:
    """Accept a recipe by ``require_updates``, as far as stand-ins tell, before there are ranks."""
    parameters = stand_ins(workload)
    optimizer = stand_in_optimizer(workload, parameters)
    require_updates(graph, optimizer, parameters, sparse_embeddings=sparse_embeddings)
