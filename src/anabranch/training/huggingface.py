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

For a collator that pads to the longest sequence of a batch, length buckets are made
(``data.length_buckets``). Arguments that would change training and are not taken over are refused
before anything is planned. An update of several batches goes on across the end of an epoch, where
``Trainer`` makes a smaller one.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from anabranch import launch
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.cluster import Cluster
from anabranch.data.length_buckets import LengthBuckets
from anabranch.data.packed import PackedBatch, call_module
from anabranch.errors import TrainingError
from anabranch.graph.capture import Captured, capture_to_plan
from anabranch.graph.module_state import evaluated
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.plans.plan import Plan
from anabranch.remembered import remembered
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.training import SaveEvery, train
from anabranch.training.planning import plan_workload
from anabranch.training.trainer_arguments import TrainerArguments, require_supported
from anabranch.workload import NamedParameters, Workload, with_article

_INSTEAD = {
    "callbacks": "callbacks are functions of training.events, not TrainerCallback objects",
    "compute_loss_func": "let the module return that loss",
    "model_init": "make the model first",
    "optimizer_cls_and_kwargs": "give optimizer=, a function of named parameters",
    "optimizers": "give optimizer=, a function of named parameters that every rank calls",
    "tokenizer": "give processing_class",
}
"""Refused arguments of ``Trainer`` -> what to do instead."""

_FILL = {
    **dict.fromkeys(("attention_mask", "decoder_attention_mask", "position_ids"), 0),
    **{"labels": -100, "special_tokens_mask": 1},
}
"""Hugging Face's padding of tensors, besides tokens and their types."""

_NO_DECAY = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of parameters without weight decay in ``Trainer``, besides those of ``LayerNorm``."""


class Trainer:
    """Trains as Hugging Face's ``Trainer(model, args, data_collator, ...)`` does, as a pipeline on
    local ranks. Ranks that are started otherwise, as by torchrun, train by themselves::

        training.train(trainer.workload, plan, **trainer.training_options())

    Args:
        model: a model that returns its loss if it gets labels, as models of Hugging Face do.
        args: ``TrainingArguments``, or an object that has some of their attributes.
        data_collator: a list of samples -> a batch of tensors; by default that of the
            ``processing_class`` (a tokenizer), or ``default_data_collator`` of transformers. It may
            pad to the longest of a batch: then the workload has length buckets. For a
            vision-language model it ends with ``multimodal_batch``, and pads to one length.
        train_dataset: samples as the collator takes them.
        devices: devices of the plan. A batch is as large as that of ``Trainer`` on as many.
        compute_metrics: called by ``evaluate``; during training there is the held-out loss.
        fill: name of a tensor with sequences in dimension 1 -> its padding, if that is not known.
        optimizer: a recipe as in ``Workload``, in place of the one that ``args`` describe.
        options: options of ``training.train``, such as ``callbacks``.

    Raises:
        ValueError: if the data set is smaller than one batch, or ``args`` has arguments that are
            not taken over, such as an optimizer other than AdamW.
        TypeError: for further arguments that ``training.train`` does not take.
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
        processing_class: Any = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        fill: Mapping[str, float] | None = None,
        optimizer: Callable[[NamedParameters], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        _require_known(options)
        self.args, self.devices, self._options = args, devices, options
        self.model, self.eval_dataset = model, eval_dataset
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self._preprocess, self._data_collator = preprocess_logits_for_metrics, data_collator
        self._train_dataset, self._fill, self._optimizer = train_dataset, fill, optimizer
        taken = TrainerArguments.of(args)
        self._made = taken, self._workload_by(taken)

    @property
    def workload(self) -> Workload:
        """Model, data and recipes by the present ``args``."""
        taken = TrainerArguments.of(self.args)
        if self._made[0] != taken:
            self._made = taken, self._workload_by(taken)
        return self._made[1]

    def _workload_by(self, taken: TrainerArguments) -> Workload:
        require_supported(self.args, has_optimizer=self._optimizer is not None)
        model, devices, train_dataset = self.model, self.devices, self._train_dataset
        eval_dataset, processing_class = self.eval_dataset, self.processing_class
        collate = _collator(model, taken, self._data_collator, processing_class)
        self._collate = collate
        data_sets = [train_dataset, *([] if eval_dataset is None else [eval_dataset])]
        for data in data_sets:
            if isinstance(data, Mapping | IterableDataset) or not hasattr(data, "__len__"):
                raise TypeError(
                    "train_dataset, and eval_dataset if there is one, has to be a data set with a "
                    f"length and an index, not {with_article(type(data).__name__)}; evaluate "
                    "several by evaluate(eval_dataset)"
                )
        size = taken.per_device_train_batch_size * devices
        seed = taken.seed if taken.data_seed is None else taken.data_seed
        if len(train_dataset) < size:
            raise ValueError(
                f"the data set has {len(train_dataset)} samples, and a batch {size} "
                f"(per_device_train_batch_size times {devices} devices); take a smaller one"
            )
        with torch.random.fork_rng(devices=[]):
            example = collate([train_dataset[i] for i in range(min(size, 4))])
            padding = _padding(model, processing_class) | dict(self._fill or {})
            buckets = LengthBuckets.of(data_sets, collate, size, padding)
        examples = [example]
        if buckets is not None:
            examples, collate = buckets.examples(example), partial(_in_bucket, buckets, collate)
        loader = DataLoader(
            train_dataset,
            batch_size=size,
            shuffle=True,
            drop_last=taken.dataloader_drop_last,
            num_workers=taken.dataloader_num_workers,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
        )
        evaluation = None
        if eval_dataset is not None:
            held_out = taken.per_device_eval_batch_size * devices
            evaluation = DataLoader(eval_dataset, batch_size=held_out, collate_fn=collate)
        return Workload(
            model,
            example=examples[0],
            buckets=examples[1:],
            data=loader,
            eval_data=evaluation,
            optimizer=self._optimizer or partial(taken.optimizer, _decayed(model)),
            scheduler=partial(taken.scheduler, taken.updates(len(loader))),
            clip_norm=taken.max_grad_norm or None,
            name=type(model).__name__,
        )

    def training_options(self, resume: str | Path | bool | None = None) -> dict[str, Any]:
        """Return arguments of ``training.train``, after ``resume`` (see ``train``)."""
        taken, loader = TrainerArguments.of(self.args), cast("Any", self.workload.data)
        accumulate, per_epoch = taken.gradient_accumulation_steps, len(loader.source)
        steps, updates = taken.steps(per_epoch), taken.updates(per_epoch)

        def batches(strategy: str, every: float) -> int:
            """Batches between two events; ``every`` counts updates, below 1 as a share of all."""
            between = math.ceil(every * updates) if every < 1 else int(every)
            return between * accumulate if strategy == "steps" else per_epoch

        precision: Precision = "fp16" if taken.fp16 else "fp32"
        options: dict[str, Any] = {
            "steps": steps,
            "accumulate": accumulate,
            "compute": ComputeOptions(precision="bf16" if taken.bf16 else precision),
        }
        if taken.eval_strategy in ("steps", "epoch") and self.workload.eval_data is not None:
            every = taken.eval_steps or taken.logging_steps
            options["evaluate_every"] = batches(taken.eval_strategy, every)
        if taken.save_strategy != "no" and taken.output_dir:
            every, keep = taken.save_steps, taken.save_total_limit or 10**6
            options["save"] = Path(taken.output_dir)
            options["save_every"] = SaveEvery(batches(taken.save_strategy, every), keep=keep)
        if resume := resume or taken.resume_from_checkpoint:
            options["resume"] = Path((taken.output_dir or ".") if resume is True else resume)
            options["steps"] -= (done := Checkpoint(options["resume"]).manifest.step)
            if options["steps"] <= 0:
                raise TrainingError(
                    f"nothing is left to do: {options['resume']} has {done} of {steps} steps"
                )
        return options

    def plan(self, **options: Any) -> Plan:
        """Measure the model and plan it for local ranks; options are those of ``plan_workload``."""
        precision = self.training_options()["compute"].precision
        captured = self._captured(options.get("granularity", "layer"), ())
        cluster = Cluster.preset(f"local:{self.devices}")
        defaults: dict[str, Any] = {"captured": captured, "precision": precision}
        return plan_workload(self.workload, cluster, **defaults | options)

    def train(
        self, plan: Plan | None = None, resume_from_checkpoint: str | Path | bool | None = None
    ) -> Any:
        """Train on local ranks by a plan, by default one that is made here.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the newest in ``output_dir``; by
                default what ``args`` has.

        Returns:
            The ``Run``. The model has the trained weights, and ``save_model`` writes them; the
            checkpoints of ``output_dir`` have them too.
        """
        options = self.training_options(resume_from_checkpoint) | self._options
        chosen = plan or self.plan()
        # Once here rather than in every rank: forked ranks inherit it.
        captured = self._captured(chosen.granularity, chosen.rewrites)
        precision = options["compute"].precision
        prepare(captured, chosen.stage_graph, self.workload, precision)
        ranks = len(chosen.stage_graph.devices)
        with tempfile.TemporaryDirectory() as folder:
            options = {"captured": captured, "save": Path(folder) / "last", **options}
            run = launch.run(lambda: train(self.workload, chosen, **options), ranks)[0]
            self.model.load_state_dict(load_state_dict(options["save"]), strict=False)
        return run

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Compute the held-out loss and ``compute_metrics`` of the present model in this process.

        Raises:
            ValueError: if there is no held-out data.
        """
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_concat, nested_numpify
        from transformers.utils.generic import find_labels

        concat, numpify = cast("Any", nested_concat), cast("Any", nested_numpify)
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise ValueError("there is nothing to evaluate: give an eval_dataset")
        taken = TrainerArguments.of(self.args)
        size = taken.per_device_eval_batch_size * self.devices
        total, predictions, labels = 0.0, None, None
        names = taken.label_names or cast("Any", find_labels)(type(_plain(self.model)))
        with evaluated(self.model), torch.no_grad():
            for batch in DataLoader(data, batch_size=size, collate_fn=self._collate):
                tensors = batch.tensors if isinstance(batch, PackedBatch) else batch
                loss, logits = _outputs(call_module(self.model, batch))
                total += float(loss) * len(next(iter(tensors.values())))
                label = tuple(tensors[name] for name in names if name in tensors)
                if self.compute_metrics is None or not len(label) == len(names) > 0:
                    continue
                label = label if len(label) > 1 else label[0]
                logits = self._preprocess(logits, label) if self._preprocess else logits
                predictions = logits if predictions is None else concat(predictions, logits)
                labels = label if labels is None else concat(labels, label)
        metrics = {"loss": total / len(data)}
        if self.compute_metrics is not None and labels is not None:
            metrics |= self.compute_metrics(EvalPrediction(numpify(predictions), numpify(labels)))
        start = f"{metric_key_prefix}_"
        return {k if k.startswith(start) else start + k: value for k, value in metrics.items()}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model as ``from_pretrained`` reads it, and the ``processing_class``."""
        folder, model = Path(output_dir or self.args.output_dir), cast("Any", self.model)
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
        else:
            save_model(model, str(folder / "model.safetensors"))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    @remembered
    def _captured(self, granularity: Granularity, rewrites: tuple[str, ...]) -> Captured:
        return capture_to_plan(self.workload, granularity=granularity, rewrites=rewrites)


def _as_batch(
    collate: Callable[[list[Any]], Any], taken: set[str] | None, samples: list[Any]
) -> dict[str, Any] | PackedBatch:
    """Collate samples to a batch of ``multimodal_batch``, or to a plain mapping instead of Hugging
    Face's own class.
    """
    if taken is not None and isinstance(samples[0], Mapping):
        samples = [{key: v for key, v in sample.items() if key in taken} for sample in samples]
    batch = collate(samples)
    return batch if isinstance(batch, PackedBatch) else dict(batch)


def _in_bucket(buckets: LengthBuckets, collate: Any, samples: list[Any]) -> dict[str, Any]:
    return buckets(collate(samples))


def _collator(
    model: nn.Module, args: TrainerArguments, collator: Any, processing_class: Any
) -> Any:
    """Return a function from a list of samples to a batch of tensors, which first leaves out the
    columns that the model does not take, as ``Trainer`` does.
    """
    if collator is None:
        from transformers import DataCollatorWithPadding, default_data_collator

        has_pad = hasattr(processing_class, "pad")
        collator = DataCollatorWithPadding(processing_class) if has_pad else default_data_collator
    taken = None
    if args.remove_unused_columns:
        taken = {*inspect.signature(_plain(model).forward).parameters, "label", "label_ids"}
        taken |= {*(args.label_names or ("labels",))}
    return partial(_as_batch, collator, taken)


def _plain(model: nn.Module) -> Any:
    """Return the model itself if peft has wrapped it with adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def _padding(model: nn.Module, processing_class: Any) -> dict[str, float]:
    config = getattr(model, "config", None)
    pad = getattr(processing_class, "pad_token_id", None)
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    types = getattr(processing_class, "pad_token_type_id", 0)
    tokens = dict.fromkeys(("input_ids", "decoder_input_ids"), pad or 0)
    return {**_FILL, **tokens, "token_type_ids": types}


def _outputs(made: Any) -> tuple[Any, Any]:
    """Return the loss of a model's result, and its logits: one tensor, or several."""
    if isinstance(made, torch.Tensor):
        return made, ()
    items = dict(made.items() if hasattr(made, "items") else enumerate(made))
    loss = items.pop("loss" if "loss" in items else 0)
    logits = tuple(value for value in items.values() if isinstance(value, torch.Tensor))
    return loss, logits[0] if len(logits) == 1 else logits


def _require_known(options: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that neither this ``Trainer`` nor ``training.train`` takes."""
    known = {*inspect.signature(train).parameters, *inspect.signature(Pipeline).parameters}
    asked = [name for name in options if name not in known - {"options", "workload", "plan"}]
    if any(hasattr(call, "on_train_begin") for call in options.get("callbacks", ())):
        asked.append("callbacks")
    if asked:
        ways = "; ".join(f"{n}: {_INSTEAD.get(n, 'there is no such argument')}" for n in asked)
        raise TypeError(f"arguments that the pipeline's Trainer does not take: {ways}")


def _decayed(model: nn.Module) -> frozenset[str]:
    """Return the parameters with weight decay; called before there are ranks, which would otherwise
    all import the modules of ``Trainer``.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    names: Any = get_parameter_names
    return frozenset(names(model, [nn.LayerNorm], list(_NO_DECAY)))
