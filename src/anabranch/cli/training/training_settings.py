"""Settings of ``train``: its options, and keys that only a run file has.

Keys are what a run seldom needs; ``docs/command-line.md`` lists them.
"""

# Annotations are not left as text: spread would evaluate each of them for --help.
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from anabranch.cli import settings, torchrun
from anabranch.cli.output import file_to_write, folder_to_write
from anabranch.cli.parsing import interval, named_values, usage
from anabranch.cli.spread import Settings
from anabranch.cli.training.run_file import go_on, in_file, model_or_file, require_trust
from anabranch.errors import suggestion
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.plans.plan import Mode, Plan
from anabranch.weights import WeightPolicy, policy_named

if TYPE_CHECKING:
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.training import Callback, SaveEvery

SPARE_COPIES = 10
"""Steps between two copies in memory by default: copies cost time, and after a failure the steps
since the last one are done again.
"""


@dataclass(frozen=True)
class RunSettings(settings.TrainedModelSettings):
    """MODEL, or a run file, which has it and all options and keys.

    Attributes:
        model: Built-in name, package.module:function, or a file run.toml with it and with options
            of this command; options that are written here override those of the file.
        trust: Import the function that the run file names as its model; only the command line can
            say so.
    """

    model: Annotated[str, typer.Argument(metavar="MODEL", callback=model_or_file, is_eager=True)]
    granularity: Annotated[Granularity, in_file()] = "layer"
    trust: Annotated[bool, typer.Option("--trust", callback=require_trust)] = False


@dataclass(frozen=True)
class TrainedPlanSettings(settings.LocalPlanSettings):
    """The plan of a run: a file, or what is needed to make one."""

    microbatch_size: Annotated[int | None, in_file(min=1)] = None
    schedule: Annotated[settings.ScheduleName, in_file()] = "auto"
    max_replicas: Annotated[int | None, typer.Option(min=1)] = None


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Length of training, checkpoints, evaluation and logs.

    Attributes:
        steps: Steps to do, with --resume further ones; 0 evaluates the held-out data alone
            [default: 100, or what --epochs has].
        epochs: Passes through the data, with those before --resume.
        resume: A checkpoint to go on from, or the folder of several: the newest.
        weights: Weights to begin with: a safetensors file, or a folder with one.
        save: A new folder for a checkpoint.
        save_every: Also save during training, after so many steps or every 90s, 10m, 2h: the folder
            of --save then has the checkpoints step-N.
        keep: Checkpoints of ``save_every`` that are kept.
        seed: What the model's function draws from torch, the order of a data set and dropout follow
            from it [default: another one every time].
        evaluate_every: Evaluate the held-out data also during training.
        keep_best: Metric whose best checkpoint is kept as ``best``: loss, or NAME:max or NAME:min.
        log: Send figures to jsonl:FILE, csv:FILE, tensorboard:FOLDER, wandb:PROJECT or
            mlflow:EXPERIMENT; repeatable.
        timeout: End training if no rank makes progress for so long, and name the rank that holds it
            up [default: 60, or 100 predicted steps if that is more; 600 in start-up, the first
            step, evaluations and saves].
        max_restarts: Where a rank fails, start all again from the last checkpoint, at most so
            often. torchrun has an option of that name itself.
        survive: Where a rank dies, the others keep their processes: a new rank takes its place, and
            all go on from copies of the state in memory. Ranks of one host, with a flush.
        spare_copies: Steps between two of these copies; at most so many steps are done again.
        replace: --no-replace: no new rank takes the place of a dead one; training goes on under
            another plan for one device fewer.
        replan: Every 100 steps measure again, and go on under a better plan where its predicted
            gain repays the change. Nothing is started again.
        check_batches: Values of every batch that ranks compare: 32 of each tensor, or all.
        check_gradients: First compare the gradients of a micro-batch with one process.
    """

    steps: Annotated[int | None, typer.Option(min=0)] = None
    epochs: Annotated[int | None, typer.Option(min=1)] = None
    resume: Annotated[Path | None, typer.Option(callback=go_on)] = None
    weights: Path | None = None
    save: Annotated[Path | None, typer.Option(callback=folder_to_write)] = None
    save_every: Annotated[str | None, typer.Option(metavar="STEPS|TIME")] = None
    keep: Annotated[int | None, in_file(min=1)] = None
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1)] = None
    evaluate_every: Annotated[int | None, typer.Option(min=1, metavar="STEPS")] = None
    keep_best: Annotated[str | None, in_file()] = None
    log: Annotated[list[str] | None, typer.Option(metavar="KIND:WHERE")] = None
    timeout: Annotated[float | None, typer.Option(min=0.1, metavar="SECONDS")] = None
    max_restarts: Annotated[int, typer.Option(min=0)] = 0
    survive: Annotated[bool, typer.Option("--survive")] = False
    spare_copies: Annotated[int, typer.Option(min=1, metavar="STEPS")] = SPARE_COPIES
    replace: bool = True
    replan: Annotated[bool, typer.Option("--replan")] = False
    check_batches: Literal["sampled", "full"] = "sampled"
    check_gradients: bool = True

    def saves(self) -> "SaveEvery | None":
        """Return when checkpoints are written during training."""
        from anabranch.training import KEPT, SaveEvery

        if self.max_restarts and torchrun.is_rank():
            raise typer.BadParameter("--max-restarts: give it to torchrun, which starts the ranks")
        if self.resume is not None and self.weights is not None:
            raise typer.BadParameter("--resume and --weights: begin with one of them")
        if self.resume is not None and self.seed is not None:
            raise typer.BadParameter(
                "--seed: not with --resume; the checkpoint has that of the run"
            )
        if self.keep_best is not None and self.evaluate_every is None:
            raise typer.BadParameter("keep-best: only with --evaluate-every")
        if self.save_every is None and self.keep_best is None:
            if self.keep is not None:
                raise typer.BadParameter("keep: only with --save-every")
            return None
        if self.save is None:
            option = "--save-every" if self.save_every is not None else "keep-best"
            raise typer.BadParameter(f"{option} needs --save, the folder for the checkpoints")
        steps, seconds = None, None
        if self.save_every is not None:
            steps, seconds = interval(self.save_every, "--save-every")
        return usage(SaveEvery, steps, seconds, self.keep or KEPT, self.keep_best or "")

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that was written during training, if there is one."""
        from anabranch.checkpoint import newest

        return newest(self.save) if self.saves() is not None and self.save is not None else None

    def loggers(self) -> "tuple[Callback, ...]":
        """Return a callback for each --log, none of which has opened anything yet."""
        return tuple(map(_logger, self.log or ()))

    @property
    def last_step(self) -> int | None:
        """Steps to do; None where the epochs decide."""
        return self.steps if self.steps is not None or self.epochs else 100

    @property
    def length(self) -> str:
        """Text of the steps and epochs that are still to be done."""
        steps, epochs = self.last_step or 0, self.epochs or 0
        more = " more" * (self.resume is not None)
        if self.steps == 0:
            return "for an evaluation without a step"
        ends = [f"for {steps:,}{more} step{'s' * (steps > 1)}"] * bool(steps)
        ends += [f"until {epochs:,} epoch{'s are' if epochs > 1 else ' is'} done"] * bool(epochs)
        return " or ".join(ends)


@dataclass(frozen=True)
class ComputeSettings(Settings):
    """Arithmetic of stages and updates; ``ComputeOptions`` documents the keys.

    Attributes:
        precision: bf16 and fp16 run forwards under autocast; fp16 scales the loss [default: the
            plan's, or fp32].
        backend: Compile each stage with torch.compile: inductor, aot_eager, ...
        shard_optimizer: Replicas of a stage share its optimizer state instead of each holding it
            [default: the plan's].
    """

    precision: Precision | None = None
    backend: Annotated[str | None, typer.Option("--compile", metavar="BACKEND")] = None
    shard_optimizer: bool | None = None
    offload: Annotated[bool, in_file("--offload")] = False
    dropout: Annotated[Literal["stage", "sample"], in_file()] = "stage"
    sparse_embeddings: Annotated[bool | None, in_file("--sparse-embeddings")] = None
    accumulate: Annotated[int, in_file(min=1)] = 1

    def options(self) -> "ComputeOptions":
        """Return the options of the runtime."""
        from anabranch.runtime.compute.options import ComputeOptions

        names = "precision offload dropout sparse_embeddings"
        alike = {name: getattr(self, name) for name in names.split()}
        return usage(ComputeOptions, compile=self.backend or False, **alike)


@dataclass(frozen=True)
class FlushSettings(Settings):
    """Training with or without a flush, and which weights are read without.

    Attributes:
        mode: sync: all stages update together after every step; async: without a flush, each stage
            updates after its own backward [default: the plan's, or sync].
        policy_option: Options of the policy, such as ``clip=3`` of predict-stash.
        round_robin: Replicas of a stage take mini-batches in turn, or split each; else as planned.
        clip_stage_norm: Clip the gradients of each stage to this norm.
    """

    mode: Mode | None = None
    policy: settings.PolicyName | None = None
    policy_option: Annotated[list[str] | None, in_file()] = None
    round_robin: Annotated[bool | None, in_file("--round-robin")] = None
    clip_stage_norm: Annotated[float | None, in_file()] = None

    def is_async(self, plan: "Plan | None") -> bool:
        """Return True if the user or the plan file asks for no flush."""
        return (self.mode or (plan.mode if plan is not None else "sync")) == "async"

    def with_options(self, name: str) -> "WeightPolicy":
        """Return the policy of that name, with the user's options."""
        return usage(policy_named, name, named_values(self.policy_option, "policy-option"))


_LOGS = {
    "jsonl": ("FILE", "JsonLines"),
    "csv": ("FILE", "Csv"),
    "tensorboard": ("FOLDER", "TensorBoard"),
    "wandb": ("PROJECT", "WeightsAndBiases"),
    "mlflow": ("EXPERIMENT", "MLflow"),
}
"""Kind of a log -> what follows its colon, and its class in ``training``."""


def _logger(text: str) -> "Callback":
    kind, _, where = text.partition(":")
    if kind not in _LOGS:
        *most, last = (f"{known}:{what}" for known, (what, _) in _LOGS.items())
        raise typer.BadParameter(
            f"--log {text}: there is no log {kind!r}{suggestion(kind, _LOGS)}; write "
            f"{', '.join(most)} or {last}"
        )
    what, maker = _LOGS[kind]
    if not where:
        raise typer.BadParameter(f"--log {text}: say where, {kind}:{what}")
    if check := {"FILE": file_to_write, "FOLDER": folder_to_write}.get(what):
        check(Path(where))
    from anabranch import training

    make: Callable[..., Callback] = getattr(training, maker)
    return make(project=where) if kind == "wandb" else make(where)
