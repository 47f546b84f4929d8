"""Hugging Face's ``TrainingArguments``: arguments that are taken over or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from anabranch.workload import NamedParameters

_NOT_DONE: Mapping[str, str] = {
    **dict.fromkeys(("deepspeed", "fsdp", "neftune_noise_alpha", "optim_target_modules"), "None"),
    **dict.fromkeys(("group_by_length", "load_best_model_at_end", "torch_compile"), "False"),
    **{"label_smoothing_factor": "0.0", "train_sampling_strategy": "random"},
    **{"use_liger_kernel": "False"},
}
"""Arguments that are not taken over -> their default, as text."""


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """Arguments that are taken over, with the names and defaults of Hugging Face."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    bf16: bool = False
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    eval_steps: float | None = None
    eval_strategy: str = "no"
    fp16: bool = False
    gradient_accumulation_steps: int = 1
    label_names: Sequence[str] | None = None
    learning_rate: float = 5e-5
    logging_steps: float = 500
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    lr_scheduler_type: str = "linear"
    max_grad_norm: float | None = 1.0
    max_steps: int = -1
    num_train_epochs: float = 3.0
    optim: str = "adamw_torch"
    output_dir: str | None = None
    per_device_eval_batch_size: int = 8
    per_device_train_batch_size: int = 8
    remove_unused_columns: bool = True
    resume_from_checkpoint: str | None = None
    save_steps: float = 500
    save_strategy: str = "steps"
    save_total_limit: int | None = None
    seed: int = 42
    warmup_ratio: float | None = 0.0
    warmup_steps: float | None = 0
    weight_decay: float = 0.0

    @staticmethod
    def of(args: Any) -> TrainerArguments:
        """Read ``TrainingArguments``, or an object that has some of their attributes."""
        values = {
            f.name: getattr(args, f.name) for f in fields(TrainerArguments) if hasattr(args, f.name)
        }
        # Strategies and names are members of enumerations.
        return TrainerArguments(**{name: getattr(v, "value", v) for name, v in values.items()})

    def steps(self, per_epoch: int) -> int:
        """Return the batches of the whole training, given the batches of an epoch."""
        if self.max_steps > 0:
            return self.max_steps * self.gradient_accumulation_steps
        return math.ceil(self.num_train_epochs * per_epoch)

    def updates(self, per_epoch: int) -> int:
        """Return the updates of the whole training, given the batches of an epoch."""
        return math.ceil(self.steps(per_epoch) / self.gradient_accumulation_steps)

    def optimizer(
        self, decayed: frozenset[str], parameters: NamedParameters
    ) -> torch.optim.Optimizer:
        """Make AdamW with weight decay for the parameters named ``decayed``."""
        groups = [
            {
                "params": [(n, p) for n, p in parameters if (n in decayed) is decays],
                "weight_decay": self.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_epsilon,
            fused=True,
        )

    def scheduler(
        self, updates: int, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler

        # A warmup below 1 is a share of all updates, in warmup_steps or in the older warmup_ratio.
        warmup = float(self.warmup_steps or self.warmup_ratio or 0.0)
        made: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            self.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=math.ceil(updates * warmup) if warmup < 1 else int(warmup),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(self.lr_scheduler_kwargs or {}),
        )
        return made


def require_supported(args: Any, *, has_optimizer: bool) -> None:
    """Raise ValueError for arguments that are set and not taken over."""
    off, taken = ("None", "[]", "", "False"), TrainerArguments.of(args)
    asked = {name: getattr(args, name, plain) for name, plain in _NOT_DONE.items()}
    texts = {name: str(getattr(value, "value", value)) for name, value in asked.items()}
    if named := sorted(n for n, text in texts.items() if text not in (_NOT_DONE[n], *off)):
        raise ValueError(
            f"{', '.join(named)}: arguments of Trainer that are not taken over and would change "
            "training; leave them as they are by default"
        )
    if taken.optim not in ("adamw_torch", "adamw_torch_fused") and not has_optimizer:
        raise ValueError(
            f"the optimizer {taken.optim} is not taken over; leave optim at adamw_torch, or give "
            "an optimizer of your own: optimizer=functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if taken.save_strategy == "best":
        raise ValueError(
            "save_strategy best is not taken over; leave it out, and give "
            'save_every=SaveEvery(best="loss") besides'
        )
    if taken.lr_scheduler_type == "reduce_lr_on_plateau":
        raise ValueError("reduce_lr_on_plateau needs a metric in every step: take another schedule")
