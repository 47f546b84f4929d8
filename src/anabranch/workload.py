"""Workload: everything that training needs besides a plan.

The module returns its loss, so labels and inputs are ordinary inputs that enter at whichever stage
needs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn, optim
from torch.utils._pytree import tree_map_only

from anabranch.data.loaders import Loader, loader_of
from anabranch.data.packed import PackedBatch, RowPacking
from anabranch.errors import WorkloadError, naming_line, some

Batch = Any
"""A tensor, or a tuple, list or dict (also nested) of tensors; dimension 0 of each is samples. A
dict is passed to the module as keyword arguments, a tuple or list as positional ones."""

Made = TypeVar("Made")

NamedParameters = list[tuple[str, nn.Parameter]]


def adamw(parameters: NamedParameters | Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the default optimizer: AdamW with a learning rate of 0.001."""
    entries: list[Any] = list(parameters)
    tensors = (entry[1] if isinstance(entry, tuple) else entry for entry in entries)
    # One pass over each parameter, without temporaries of its size; not for complex ones.
    fused = all(parameter.is_floating_point() for parameter in tensors)
    return torch.optim.AdamW(entries, lr=1e-3, fused=fused)


_REPLICAS = "pass the module inside; replicas, and what they share, are the plan's to say"
_WRAPPERS = {
    "DistributedDataParallel": _REPLICAS,
    "DataParallel": _REPLICAS,
    "FullyShardedDataParallel": _REPLICAS,
    "FSDPModule": "leave fully_shard out; --shard-optimizer shares the optimizer's state",
    "ScriptModule": "leave torch.jit out: capturing needs the module that was scripted or traced",
    "OptimizedModule": 'leave torch.compile out; --compile inductor (ComputeOptions(compile="induct'
    'or")) compiles each stage',
}
"""Classes of modules that are no plain ones for a plan to cut, and what to do instead."""


@dataclass(frozen=True)
class Workload:
    """A model with its data and optimizer recipe.

    It cannot be changed; ``dataclasses.replace(workload, clip_norm=1.0)`` makes another one, around
    the same module.

    Attributes:
        module: its forward returns the loss: a scalar tensor, or an object or mapping with a scalar
            ``loss`` (as Hugging Face models return); further scalars and numbers among its entries
            are metrics. Loss and metrics are means over samples.
        example: a batch of at least two samples, as the data yields them; sizes of further
            dimensions are fixed by it, unless there are ``buckets``.
        data: (batch size, epoch) -> training batches of one epoch, the same on every rank; or a
            ``DataLoader``, a data set of samples, or another iterable of batches, of which
            ``loaders`` makes such a function.
        eval_data: batch size -> held-out batches; or the same, read in order.
        optimizer: named parameters -> optimizer; any ``torch.optim`` class with its options bound
            serves. Each rank calls it with the parameters of its own stages. By default ``adamw``:
            AdamW with a learning rate of 0.001 and PyTorch's other defaults.
        scheduler: optimizer -> learning-rate scheduler, stepped once a step; by default the rate
            stays.
        clip_norm: largest global gradient norm, over all stages; by default nothing is clipped.
        chance: metric -> what guessing would give, for reports.
        name: what the user called it.
        buckets: further examples, of other sizes besides the samples, such as shorter sequences;
            every batch is computed in the sizes of one of them, or of ``example``, which has to be
            the largest.
        rows: tensors whose dimension 0 has the patches, images or frames of all samples one after
            the other: name -> rows per sample, the same for all, or the name of a tensor of the
            batch that counts them for each sample and is then checked. Batches are dicts then.
            Rows that the shapes of an example with ``labels`` show are taken, with a warning.
        samples_in: tensors with the samples in another dimension than 0, such as positions
            ``[3, samples, tokens]``: name -> that dimension.
        per_sample: names of operators (``mylib::op``) that work on each sample by itself, though
            the sizes of their results do not show it; a scalar of theirs is a mean over samples.
            For other operators two halves of the example are compared with the whole.
        save_frozen: checkpoints hold parameters that are not trained as well. False leaves them
            out, as for adapters of a large model; whoever resumes then has them in the module.

    Raises:
        TypeError: if ``module`` is no module (its class, say), or wrapped for data parallelism; a
            recipe is an object that it should make; or the data yields nothing.
        ValueError: if a ``DataLoader`` deals its samples out to replicas.
    """

    module: nn.Module = field(repr=False)  # this and batches would fill pages
    example: Batch = field(repr=False)
    data: Callable[[int, int], Iterable[Batch]] | Any | None = None
    eval_data: Callable[[int], Iterable[Batch]] | Any | None = None
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    clip_norm: float | None = None
    chance: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    buckets: Sequence[Batch] = field(default=(), repr=False)
    per_sample: Collection[str] = ()
    rows: Mapping[str, int | str] = field(default_factory=dict)
    samples_in: Mapping[str, int] = field(default_factory=dict)
    save_frozen: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            is_class = isinstance(self.module, type)
            raise TypeError(
                "the module of a Workload is a torch.nn.Module, not "
                f"{self.module.__name__ if is_class else with_article(type(self.module).__name__)}"
                f"{', which is a class: make one of it, with ()' if is_class else ''}"
            )
        for part in self.module.modules():
            for kind, instead in _WRAPPERS.items():
                if kind in {base.__name__ for base in type(part).__mro__}:
                    raise TypeError(
                        f"the module of a Workload is the plain one, not in {kind}; {instead}"
                    )
        if isinstance(self.per_sample, str):
            raise TypeError(f"per_sample of a Workload is a list of names: [{self.per_sample!r}]")
        for name, recipe, needs in (
            ("optimizer", self.optimizer, "named parameters"),
            ("scheduler", self.scheduler, "an optimizer"),
        ):
            if not callable(recipe) and (recipe is not None or name == "optimizer"):
                made = type(recipe).__name__
                raise TypeError(
                    f"the {name} of a Workload is a function that makes one of {needs}, in every "
                    f"rank for its own stages, not {with_article(made)}; write "
                    f"{name}=functools.partial({made}, ...) or another function, or leave it out"
                )
        packing = RowPacking()
        if not isinstance(self.example, PackedBatch):
            packing = RowPacking.of(self.example, self.rows, self.samples_in)
            object.__setattr__(self, "example", packing.packed(self.example))
        elif isinstance(self.example.packing, RowPacking):  # of the Workload that this one replaces
            packing = self.example.packing
        object.__setattr__(self, "buckets", [*map(packing.packed, self.buckets)])
        object.__setattr__(self, "data", loader_of(self.data, shuffle=True, packing=packing))
        eval_data = loader_of(self.eval_data, shuffle=False, packing=packing)
        object.__setattr__(self, "eval_data", eval_data)

    def make_optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Make the optimizer of the recipe for some parameters; WorkloadError if that fails."""
        names = [name for name, _ in parameters]
        with patch.object(torch.optim.Optimizer, "add_param_group", _add_param_group):
            try:
                return _made(self.optimizer, parameters, "optimizer", torch.optim.Optimizer)
            except WorkloadError as error:
                if "empty parameter list" not in str(error):
                    raise
                raise WorkloadError(
                    f"{error}; of {some(names)}, which are the parameters of one rank, it takes "
                    "none: freeze those that are not trained (requires_grad_(False)), or give them "
                    "a group of their own"
                ) from error.__cause__

    def make_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Make the scheduler of the recipe, if there is one; raises as ``make_optimizer``."""
        if self.scheduler is None:
            return None
        return _made(self.scheduler, optimizer, "scheduler", torch.optim.lr_scheduler.LRScheduler)

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, where the data decides that."""
        return self.data.batch_size if isinstance(self.data, Loader) else None


_add = torch.optim.Optimizer.add_param_group


def _add_param_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Add a group, which may be empty beside groups with names: of the parameters of one stage a
    recipe may have none for a group, and torch takes those for a group without names.
    """
    if not isinstance(group["params"], torch.Tensor | set):
        group["params"] = list(group["params"])
    groups = [group, *optimizer.param_groups]
    if any("param_names" in g or isinstance(next(iter(g["params"]), 0), tuple) for g in groups):
        for empty in (g for g in groups if not len(g["params"])):
            empty["param_names"] = []
    _add(optimizer, group)


def _made(recipe: Callable[[Any], Made], argument: Any, name: str, kind: type[Made]) -> Made:
    """Call a recipe of the user's and check the class of its result."""
    pairs = "given (name, parameter) pairs, " if name == "optimizer" else ""
    with naming_line(f"{pairs}the {name} recipe of the Workload raised", otherwise=repr(recipe)):
        made = recipe(argument)
    if not isinstance(made, kind):
        raise WorkloadError(
            f"the {name} recipe of the Workload returned {with_article(type(made).__name__)}; it "
            f"has to return {with_article(name)} of torch.optim"
        )
    return made


def stand_ins(workload: Workload, names: Collection[str] | None = None) -> dict[str, nn.Parameter]:
    """Return parameters of one element each in the place of the trainable ones of a workload: all,
    or those of some names.
    """
    return {
        name: nn.Parameter(torch.zeros([1] * p.dim(), dtype=p.dtype))
        for name, p in workload.module.named_parameters()
        if p.requires_grad and (names is None or name in names)
    }


def stand_in_optimizer(
    workload: Workload, parameters: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer | None:
    """Return the optimizer that the recipe makes for stand-ins of all trainable parameters, or for
    those given; None if there are none, or the recipe takes only the model's own.
    """
    parameters = stand_ins(workload) if parameters is None else parameters
    if not parameters:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever trains will see them
            return workload.make_optimizer(list(parameters.items()))
    except Exception:  # the user's own code, written for other parameters; training will say why
        return None


BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.SparseAdam),
    *(optim.Adadelta, optim.Adagrad, optim.ASGD, optim.RMSprop, optim.Rprop),
)
"""Optimizers that treat each element alone, or each row of a sparse gradient."""


def has_hooks(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return True if functions are called around the steps of an optimizer."""
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return any(getattr(optimizer, name, None) for name in hooks)


def updates_by_element(workload: Workload, names: Collection[str]) -> bool:
    """Return True if the workload's optimizer is known to treat each element of these parameters
    alone, so that it takes sparse gradients; hooks on its steps are unknown.
    """
    optimizer = stand_in_optimizer(workload, stand_ins(workload, names))
    return type(optimizer) in BY_ELEMENT and not has_hooks(optimizer)


def to_meta(batch: Batch) -> Batch:
    """Return a batch without values, nested alike."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)


def with_article(word: str) -> str:
    """Return a word with its article, such as ``an int``."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"
