"""Hugging Face's ``Trainer`` -> a workload and the arguments of ``train``.

A thin adapter: model, collator and data sets make a ``Workload``, ``TrainingArguments`` (or any
object with the same attributes) the options of ``training.train``. Optimizer, weight decay and
scheduler are built by the rules of ``Trainer``.

::

    per_device_train_batch_size * devices         the plan's batch
    gradient_accumulation_steps                   accumulate
    num_train_epochs, max_steps                   epochs, steps (of batches, not of updates)
    save_strategy, save_steps, save_total_limit   SaveEvery, in updates
    eval_strategy, eval_steps                     evaluate_every
    bf16, fp16                                    ComputeOptions(precision=...)

One thing differs: an update of several batches goes on across the end of an epoch, where
``Trainer`` makes a smaller one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from anabranch.graph.capture import Captured, capture
from anabranch.graph.opgraph import Granularity
from anabranch.plans.plan import Plan
from anabranch.remembered import remembered
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.training import SaveEvery
from anabranch.workload import NamedParameters, Workload

_NOT_DONE: Mapping[str, Any] = {
    "deepspeed": None,
    "fsdp": "",
    "group_by_length": False,
    "label_smoothing_factor": 0.0,
    "load_best_model_at_end": False,
    "neftune_noise_alpha": None,
    "optim_target_modules": None,
    "torch_compile": False,
}
"""Arguments that are not taken over -> what they are when nobody asks for them."""

_NO_DECAY = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of parameters that ``Trainer`` gives no weight decay, besides those of ``LayerNorm``."""


def workload_of(
    model: nn.Module,
    args: Any,
    train_dataset: Any,
    *,
    devices: int,
    data_collator: Callable[[list[Any]], Any] | None = None,
    eval_dataset: Any = None,
    name: str = "",
) -> Workload:
    """Return what ``Trainer(model, args, data_collator, train_dataset, eval_dataset)`` would train.

    Args:
        model: returns its loss when it is given labels, as models of Hugging Face do.
        args: ``TrainingArguments``, or an object with those of its attributes that matter.
        train_dataset: samples; an item is what the collator takes.
        devices: of the plan. A batch is as large as that of ``Trainer`` on so many.
        data_collator: a list of samples -> a batch of tensors; by default ``default_collate``. All
            batches need one size beside their samples: let it pad to ``max_length``.

    Raises:
        ValueError: if the data set is smaller than one batch, or ``args`` name an optimizer that is
            not AdamW.
    """
    _warn_of_others(args)
    collate = partial(_as_dict, data_collator) if data_collator else default_collate
    size = batch_size(args, devices)
    data_seed = _get(args, "data_seed")
    seed = _get(args, "seed", 42) if data_seed is None else data_seed
    loader = DataLoader(
        train_dataset,
        batch_size=size,
        shuffle=True,
        drop_last=bool(_get(args, "dataloader_drop_last", False)),
        num_workers=int(_get(args, "dataloader_num_workers", 0)),
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )
    if len(train_dataset) < size:
        raise ValueError(
            f"the data set has {len(train_dataset)} samples, and a batch {size} "
            f"(per_device_train_batch_size times {devices} devices); take a smaller one"
        )
    evaluation = None
    if eval_dataset is not None:
        held_out = int(_get(args, "per_device_eval_batch_size", 8)) * devices
        evaluation = DataLoader(eval_dataset, batch_size=held_out, collate_fn=collate)
    updates = _updates(args, len(loader))
    norm = float(_get(args, "max_grad_norm", 1.0) or 0.0)
    return Workload(
        model,
        example=collate([train_dataset[i] for i in range(min(size, 4))]),
        data=loader,
        eval_data=evaluation,
        optimizer=partial(_optimizer, args, _decayed(model)),
        scheduler=partial(_scheduler, args, updates),
        clip_norm=norm or None,
        name=name or type(model).__name__,
    )


def batch_size(args: Any, devices: int) -> int:
    """Samples of a batch: those of ``Trainer`` on so many devices."""
    return int(_get(args, "per_device_train_batch_size", 8)) * devices


def training_options(args: Any, workload: Workload) -> dict[str, Any]:
    """Arguments of ``training.train`` for a workload of ``workload_of``."""
    accumulate = int(_get(args, "gradient_accumulation_steps", 1))
    loader: Any = workload.data
    per_epoch = len(loader.source)
    updates = _updates(args, per_epoch)

    def batches(strategy: str, every: float) -> int:
        """Batches between two events; ``every`` counts updates, and below 1 is a share of all."""
        between = math.ceil(every * updates) if every < 1 else int(every)
        return between * accumulate if strategy == "steps" else per_epoch

    options: dict[str, Any] = {
        "steps": updates * accumulate,
        "accumulate": accumulate,
        "compute": ComputeOptions(
            precision="bf16" if _get(args, "bf16") else "fp16" if _get(args, "fp16") else "fp32"
        ),
    }
    if int(_get(args, "max_steps", -1)) <= 0:
        options["steps"] = round(float(_get(args, "num_train_epochs", 3)) * per_epoch)
    evaluates = _strategy(args, "eval_strategy")
    if evaluates in ("steps", "epoch") and workload.eval_data is not None:
        every = _get(args, "eval_steps") or _get(args, "logging_steps", 500)
        options["evaluate_every"] = batches(evaluates, every)
    saves = _strategy(args, "save_strategy", "steps")
    if saves != "no" and _get(args, "output_dir"):
        every, keep = _get(args, "save_steps", 500), _get(args, "save_total_limit") or 10**6
        options["save"] = Path(args.output_dir)
        options["save_every"] = SaveEvery(batches(saves, every), keep=keep)
    if _get(args, "resume_from_checkpoint"):
        options["resume"] = Path(args.resume_from_checkpoint)
    return options


class Trainer:
    """Trains as Hugging Face's ``Trainer`` does, as a pipeline on local ranks.

    Args: see ``workload_of``; further ones are those of ``training.train``, such as ``callbacks``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        devices: int,
        **options: Any,
    ) -> None:
        self.args, self.devices, self._options = args, devices, options
        self.workload = workload_of(
            model,
            args,
            train_dataset,
            devices=devices,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
        )

    def plan(self, **options: Any) -> Plan:
        """Measure the model here and plan it for local ranks; options are those of ``plan``."""
        from anabranch.cluster import Cluster
        from anabranch.profile.measure import measure
        from anabranch.solve import plan

        size = batch_size(self.args, self.devices)
        counts = sorted({1, max(size // 4, 1), max(size // 2, 1), size})
        return plan(
            measure(self._captured("layer"), counts),
            Cluster.preset(f"local:{self.devices}"),
            size,
            **options,
        )

    def train(self, plan: Plan | None = None) -> Any:
        """Train on local ranks by a plan, by default one that is made here.

        Returns:
            The ``Run``. Its weights are in the checkpoints of ``output_dir``, which
            ``anabranch.export`` turns into what ``from_pretrained`` reads.
        """
        from anabranch import launch
        from anabranch.runtime.plan_parts import prepare
        from anabranch.training import train

        chosen = plan or self.plan()
        options = training_options(self.args, self.workload) | self._options
        # Once here rather than in every rank: forked ranks have it.
        captured = self._captured(cast("Granularity", chosen.granularity))
        prepare(captured, chosen.stage_graph, self.workload)
        options = {"captured": captured} | options
        ranks = len(chosen.stage_graph.devices)
        return launch.run(lambda: train(self.workload, chosen, **options), ranks)[0]

    @remembered
    def _captured(self, granularity: Granularity) -> Captured:
        return capture(self.workload.module, self.workload.example, granularity=granularity)


def _as_dict(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """A batch as a plain mapping; collators of Hugging Face make a class of their own."""
    return dict(collate(samples))


def _get(args: Any, name: str, default: Any = None) -> Any:
    return getattr(args, name, default)


def _strategy(args: Any, name: str, default: str = "no") -> str:
    strategy = _get(args, name, default)
    return str(getattr(strategy, "value", strategy))


def _updates(args: Any, batches: int) -> int:
    """Updates of the whole training, as ``Trainer`` counts its steps."""
    if (steps := int(_get(args, "max_steps", -1))) > 0:
        return steps
    per_epoch = math.ceil(batches / int(_get(args, "gradient_accumulation_steps", 1)))
    return math.ceil(float(_get(args, "num_train_epochs", 3)) * per_epoch)


def _decayed(model: nn.Module) -> frozenset[str]:
    """Parameters with weight decay. Asked before there are ranks, each of which would otherwise
    import the modules of ``Trainer``.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    names: Any = get_parameter_names
    return frozenset(names(model, [nn.LayerNorm], list(_NO_DECAY)))


def _optimizer(
    args: Any, decayed: frozenset[str], parameters: NamedParameters
) -> torch.optim.Optimizer:
    """AdamW with weight decay for all but biases and norms."""
    kind = _strategy(args, "optim", "adamw_torch")
    if not kind.startswith("adamw_torch"):
        raise ValueError(
            f"the optimizer {kind} is not taken over; leave optim at adamw_torch, or give a "
            "Workload an optimizer of your own: dataclasses.replace(workload, optimizer=...)"
        )
    groups = [
        {
            "params": [(n, p) for n, p in parameters if (n in decayed) is decays],
            "weight_decay": float(_get(args, "weight_decay", 0.0)) if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=float(_get(args, "learning_rate", 5e-5)),
        betas=(float(_get(args, "adam_beta1", 0.9)), float(_get(args, "adam_beta2", 0.999))),
        eps=float(_get(args, "adam_epsilon", 1e-8)),
        fused=True,
    )


def _scheduler(
    args: Any, updates: int, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    from transformers import get_scheduler

    # A warmup below 1 is a share of all updates, in warmup_steps or in the older warmup_ratio.
    warmup = float(_get(args, "warmup_steps", 0) or _get(args, "warmup_ratio", 0.0) or 0.0)
    made: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        _strategy(args, "lr_scheduler_type", "linear"),
        optimizer=optimizer,
        num_warmup_steps=math.ceil(updates * warmup) if warmup < 1 else int(warmup),
        num_training_steps=updates,
        scheduler_specific_kwargs=_get(args, "lr_scheduler_kwargs") or {},
    )
    return made


def _warn_of_others(args: Any) -> None:
    """Name what is asked for and not taken over."""
    named = [
        name
        for name, plain in _NOT_DONE.items()
        if _get(args, name, plain) not in (plain, None, [], "", False)
    ]
    if named:
        warnings.warn(
            f"{', '.join(named)}: arguments of Trainer that are not taken over; training goes on "
            "without them",
            stacklevel=3,
        )
