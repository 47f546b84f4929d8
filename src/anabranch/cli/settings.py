"""Settings of the verbs, one object per subject; ``spread`` makes an option of every field.

typer checks types and ranges, so these are plain dataclasses: pydantic would take half of the time
of ``--help``.
"""

# Annotations are not left as text: spread would evaluate each of them for --help.
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anabranch.cli.logs import loggers
from anabranch.cli.parsing import interval, named_values, split_output, usage
from anabranch.cli.run_file import model_or_file, require_trust
from anabranch.cli.source import ModelSource, Preset, cluster_of
from anabranch.cli.spread import given
from anabranch.cli.writable import file_to_write, folder_to_write
from anabranch.graph.opgraph import Granularity
from anabranch.planner import PLANNERS
from anabranch.plans.plan import Mode
from anabranch.schedule import SCHEDULES
from anabranch.weights import OPTIMIZERS, POLICIES, policy_named

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.training import Callback, SaveEvery
    from anabranch.weights import WeightPolicy

    PlannerName = str
    ScheduleName = str
    PolicyName = str
    OptimizerName = str
else:
    PlannerName = Literal[tuple(PLANNERS)]
    ScheduleName = Literal["auto", "published", *SCHEDULES]
    PolicyName = Literal["auto", *POLICIES]
    OptimizerName = Literal[tuple(OPTIMIZERS)]

_computing = partial(typer.Option, rich_help_panel="Computing")
_emulated = partial(typer.Option, rich_help_panel="Emulated devices")


def _writable_output(values: list[str] | None) -> list[str] | None:
    """Accept what ``-o`` has, if its file can be written."""
    file_to_write(split_output(values)[1])
    return values


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu or cuda: measure here; v100, a100 or h100: estimate [default: the cluster's]."
    ),
]
RunsOn = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(
        "--device",
        help="Where stages are computed. With cuda each rank takes the GPU of its LOCAL_RANK "
        "(torchrun sets it, local ranks have it too), in turn where ranks outnumber GPUs, and "
        "moves only its own stages there; without --plan, operators are measured on a GPU.",
    ),
]
Schedule = Annotated[
    ScheduleName,
    typer.Option(
        help="auto lets the simulator choose; published is what the planner's paper runs."
    ),
]
NoCalibration = Annotated[
    bool,
    typer.Option(
        "--no-calibration",
        help="Predict local:N without the kept calibration of this machine.",
    ),
]
MicrobatchSize = Annotated[
    int | None, typer.Option(min=1, help="Fix the micro-batch size; by default it is searched.")
]
MaxReplicas = Annotated[
    int | None, typer.Option(min=1, help="At most this many data-parallel replicas per stage.")
]
Policy = Annotated[
    PolicyName | None,
    typer.Option(
        help="With --mode async: which weights forwards and backwards read [default: auto]."
    ),
]
Optimizer = Annotated[
    OptimizerName | None,
    typer.Option(
        help="With --mode async: what the model will be trained with, which decides what auto "
        "chooses and how many copies of the weights a prediction takes [default: the model's own; "
        "a profile file has none].",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Capture the model even where an earlier capture is kept, and keep none.",
    ),
]
Output = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--output",
        "--option",
        help="A file to write, or, with an equals sign, an option of the model (-o layers=8); "
        "repeatable.",
        callback=_writable_output,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Where to keep figures and report [default: runs/MODEL-TIME]."),
]


@dataclass(frozen=True)
class ModelSettings:
    """MODEL, what it is built with, and the file that a verb writes."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Built-in name, package.module:function, or for planning a profile file.",
        ),
    ]
    output: Output = None
    preset: Annotated[
        Preset,
        typer.Option(help="Size of a built-in model: as published, or small enough for a CPU."),
    ] = "published"
    granularity: Annotated[Granularity, typer.Option(help="How coarse operators are.")] = "layer"
    no_cache: NoCache = False

    @property
    def source(self) -> ModelSource:
        """The model to read or build."""
        options = split_output(self.output)[0]
        return ModelSource(self.model, self.preset, options, self.granularity, not self.no_cache)

    @property
    def file(self) -> Path | None:
        """Where to write."""
        return split_output(self.output)[1]


@dataclass(frozen=True)
class TrainedModelSettings(ModelSettings):
    """As ``ModelSettings``, of a model that runs here."""

    preset: Annotated[
        Preset, typer.Option(help="Size of a built-in model; small runs on any CPU.")
    ] = "small"


@dataclass(frozen=True)
class RunSettings(TrainedModelSettings):
    """As ``TrainedModelSettings``, with a file that may say all that the command line can."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Built-in name, package.module:function, or a file run.toml with it and with "
            "options of this command, which go behind those that are written here.",
            callback=model_or_file,
            is_eager=True,
        ),
    ]
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Import the function that the run file names as its model; only the command line "
            "can say so.",
            callback=require_trust,
        ),
    ] = False


@dataclass(frozen=True)
class PlannedModelSettings:
    """Another model, cluster or device than those that a plan was made for."""

    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's: a preset or a JSON file.")
    ] = None
    no_calibration: NoCalibration = False
    device: Device = None
    output: Output = None
    preset: Annotated[
        Preset | None,
        typer.Option(help="Size of a built-in model [default: the plan's, or published]."),
    ] = None
    optimizer: Optimizer = None
    no_cache: NoCache = False

    def source(self, plan: "Plan", model: str) -> ModelSource:
        """The model that the user names."""
        options = split_output(self.output)[0]
        return ModelSource.of_plan(plan, model, self.preset, options, keep=not self.no_cache)

    def cluster_of(self, plan: "Plan", file: Path) -> "Cluster":
        """The cluster that the user names, or the plan's."""
        return cluster_of(plan, file, self.cluster, calibrated=not self.no_calibration)

    def device_of(self, plan: "Plan", cluster: "Cluster") -> str:
        """The device whose times count."""
        return self.device or plan.device or cluster.device


@dataclass(frozen=True)
class PlanningSettings:
    """A search, but for its planner and weight policy."""

    cluster: Annotated[
        str,
        typer.Option(
            help="The devices: local:2 for two ranks of this machine, another preset such as "
            "summit:8x4, or a JSON file."
        ),
    ]
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one step.")]
    no_calibration: NoCalibration = False
    microbatch_size: MicrobatchSize = None
    schedule: Schedule = "auto"
    max_replicas: MaxReplicas = None
    device: Device = None
    mode: Annotated[
        Mode,
        typer.Option(
            help="sync: all stages update together after every step; async: no flush between "
            "mini-batches, each stage updates after its own backward.",
        ),
    ] = "sync"
    optimizer: Optimizer = None
    shard_optimizer: Annotated[
        bool | None,
        typer.Option(
            "--shard-optimizer/--no-shard-optimizer",
            help="Replicas of a stage share its optimizer state [default: where nothing fits "
            "without, or the step is shorter].",
        ),
    ] = None

    sparse_embeddings: Annotated[
        bool,
        typer.Option(
            "--sparse-embeddings/--no-sparse-embeddings",
            help="Gradients of embedding tables are the rows that were looked up, in training by "
            "this plan as well; otherwise as the model says.",
        ),
    ] = False

    @property
    def search(self) -> dict[str, Any]:
        """What every search takes of it."""
        return {
            "microbatch_size": self.microbatch_size,
            "schedule": self.schedule,
            "max_replicas": self.max_replicas,
            "shard_optimizer": self.shard_optimizer,
            "sparse_embeddings": self.sparse_embeddings,
        }


@dataclass(frozen=True)
class LocalPlanSettings:
    """The plan of local ranks: a file, or what is needed to make one."""

    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan file [default: plan for --devices].")
    ] = None
    devices: Annotated[
        int | None, typer.Option(min=1, help="Local ranks, without --plan [default: 2].")
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples of one step, without --plan [default: the DataLoader's, or 32]."
        ),
    ] = None
    no_calibration: NoCalibration = False
    microbatch_size: MicrobatchSize = None
    schedule: Schedule = "auto"
    device: RunsOn = "cpu"

    @property
    def num_devices(self) -> int:
        """Local ranks, or all of torchrun's."""
        return self.devices or int(os.environ.get("WORLD_SIZE", "2"))

    def require_no_other(self) -> None:
        """Refuse what a plan file has decided."""
        free = ("--plan", "--device", "--no-calibration")
        named = [option for option in given(self) if option not in free]
        if self.plan_file is not None and named:
            raise typer.BadParameter(
                f"{self.plan_file} decides what {', '.join(named)} would; leave out one of them"
            )


@dataclass(frozen=True)
class TrainedPlanSettings(LocalPlanSettings):
    """As ``LocalPlanSettings``, with replicas."""

    max_replicas: MaxReplicas = None


@dataclass(frozen=True)
class TrainingSettings:
    """How long to train, and what to read and keep."""

    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to do [default: 100, or what --epochs has].")
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes through the data.")] = None
    resume: Annotated[
        Path | None,
        typer.Option(help="A checkpoint to go on from, or the folder of several: the newest."),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights to begin with: a safetensors file, or a folder with one."),
    ] = None
    save: Annotated[
        Path | None, typer.Option(help="A new folder for a checkpoint.", callback=folder_to_write)
    ] = None
    save_every: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|TIME",
            help="Also save during training, after so many steps or every 90s, 10m, 2h: the folder "
            "of --save then has the checkpoints step-N.",
        ),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --save-every: so many checkpoints, the newest [default: 2]."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="What the model's function draws from torch, the order of a data set and dropout "
            "follow from it [default: another one every time].",
        ),
    ] = None
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="STEPS", help="Evaluate the held-out data also during training."
        ),
    ] = None
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="With --evaluate-every and --save: the checkpoint whose held-out data did best is "
            "kept as best: loss, or NAME:max or NAME:min.",
        ),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:WHERE",
            help="Send figures to jsonl:FILE, csv:FILE, tensorboard:FOLDER, wandb:PROJECT or "
            "mlflow:EXPERIMENT; repeatable.",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="End training in which no rank goes on for so long, with the rank that holds it "
            "up [default: 60, or 100 predicted steps if that is more].",
        ),
    ] = None
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Where a rank fails, start all again from the last checkpoint, so often at most. "
            "torchrun has an option of that name itself.",
        ),
    ] = 0
    replan: Annotated[
        bool,
        typer.Option(
            "--replan",
            help="Every 100 steps measure again, and go on under a better plan where its predicted "
            "gain repays the change. Nothing is started again.",
        ),
    ] = False
    check_gradients: Annotated[
        bool, typer.Option(help="First compare the gradients of a micro-batch with one process.")
    ] = True

    def saves(self) -> "SaveEvery | None":
        """When there are checkpoints during training.

        Raises:
            typer.BadParameter: if options do not go together.
        """
        from anabranch.training import KEPT, SaveEvery

        if self.max_restarts and "RANK" in os.environ:
            raise typer.BadParameter("--max-restarts: give it to torchrun, which starts the ranks")
        if self.resume is not None and self.weights is not None:
            raise typer.BadParameter("--resume and --weights: begin with one of them")
        if self.resume is not None and self.seed is not None:
            raise typer.BadParameter(
                "--seed: not with --resume; the checkpoint has that of the run"
            )
        if self.keep_best is not None and self.evaluate_every is None:
            raise typer.BadParameter("--keep-best: only with --evaluate-every")
        if self.save_every is None and self.keep_best is None:
            if self.keep is not None:
                raise typer.BadParameter("--keep: only with --save-every")
            return None
        if self.save is None:
            option = "--save-every" if self.save_every is not None else "--keep-best"
            raise typer.BadParameter(f"{option} needs --save, the folder for the checkpoints")
        steps, seconds = None, None
        if self.save_every is not None:
            steps, seconds = interval(self.save_every, "--save-every")
        return usage(SaveEvery, steps, seconds, self.keep or KEPT, self.keep_best or "")

    def loggers(self) -> "tuple[Callback, ...]":
        """What is told of training.

        Raises:
            typer.BadParameter: if there is no such log.
            TrainingError: if one could not be written.
        """
        return loggers(self.log or ())

    @property
    def last_step(self) -> int | None:
        """Steps to do; None where the epochs decide."""
        return self.steps or (None if self.epochs else 100)


@dataclass(frozen=True)
class ComputeSettings:
    """How stages are computed."""

    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        _computing(help="bf16 and fp16 run forwards under autocast; fp16 scales the loss."),
    ] = "fp32"
    backend: Annotated[
        str | None,
        _computing(
            "--compile",
            metavar="BACKEND",
            help="Compile each stage with torch.compile: inductor, aot_eager, ...",
        ),
    ] = None
    offload: Annotated[
        bool,
        _computing(
            "--offload", help="Keep activations on the host between forward and backward (GPUs)."
        ),
    ] = False
    dropout: Annotated[
        Literal["stage", "sample"],
        _computing(help="sample: random numbers are the same under any plan."),
    ] = "stage"
    sparse_embeddings: Annotated[
        bool | None,
        _computing(
            "--sparse-embeddings/--no-sparse-embeddings",
            help="Gradients of embedding tables are the rows that were looked up [default: the "
            "plan's, or as the model says].",
        ),
    ] = None
    accumulate: Annotated[
        int,
        _computing(min=1, help="Batches that make one update."),
    ] = 1
    shard_optimizer: Annotated[
        bool | None,
        _computing(
            "--shard-optimizer/--no-shard-optimizer",
            help="Replicas of a stage share its optimizer state instead of each holding it "
            "[default: the plan's].",
        ),
    ] = None

    def options(self) -> "ComputeOptions":
        """As the runtime takes it.

        Raises:
            typer.BadParameter: if there is no such backend.
        """
        from anabranch.runtime.compute.options import ComputeOptions

        return usage(
            ComputeOptions,
            precision=self.precision,
            compile=self.backend or False,
            offload=self.offload,
            dropout=self.dropout,
            sparse_embeddings=self.sparse_embeddings,
        )


@dataclass(frozen=True)
class FlushSettings:
    """Training with or without a flush, and which weights are read without."""

    mode: Annotated[
        Mode | None,
        typer.Option(
            help="sync: all stages update together after every step; async: without a flush, each "
            "stage updates after its own backward [default: the plan's, or sync].",
        ),
    ] = None
    policy: Policy = None
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the policy, such as clip=3 of predict-stash; repeatable. A wrong "
            "name lists all.",
        ),
    ] = None
    round_robin: Annotated[
        bool,
        typer.Option(
            "--round-robin",
            help="With --mode async: the replicas of a stage take mini-batches in turn, instead of "
            "splitting each.",
        ),
    ] = False
    clip_stage_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="With --mode async: clip the gradients of each stage to this norm.",
        ),
    ] = None

    def is_async(self, plan: "Plan | None") -> bool:
        """Whether there is no flush, by the user or by the plan file."""
        return (self.mode or (plan.mode if plan is not None else "sync")) == "async"

    def with_options(self, name: str) -> "WeightPolicy":
        """The policy of that name, with the user's options."""
        return usage(policy_named, name, named_values(self.policy_option, "--policy-option"))

    def other_policy(self, plan: "Plan", *, is_file: bool) -> "WeightPolicy | str | None":
        """The policy of a run, where that is not just the plan's.

        A plan of the search has the policy already, also where the search was to choose one.
        """
        name = self.policy if is_file else None
        return self.with_options(name or plan.policy) if self.policy_option else name


@dataclass(frozen=True)
class EmulationSettings:
    """Devices that are emulated, and their links."""

    emulate: Annotated[
        bool,
        _emulated(
            "--emulate",
            help="No training: local ranks wait as long as the plan's devices compute, and "
            "messages take as long as on its cluster. MODEL may be a profile file.",
        ),
    ] = False
    cluster: Annotated[
        str | None,
        _emulated(help="Emulate another cluster than the plan's, or plan for this one."),
    ] = None
    links: Annotated[
        Literal["modelled", "host"],
        _emulated(help="host: messages take as long as on this machine."),
    ] = "modelled"
    bandwidth: Annotated[
        float | None,
        _emulated(help="GB/s of every link, instead of the cluster's."),
    ] = None
    latency: Annotated[
        float | None,
        _emulated(help="Microseconds of every link, likewise."),
    ] = None
    time_scale: Annotated[
        float | None,
        _emulated(
            help="Wall seconds per second of the devices [default: what this machine can do]."
        ),
    ] = None

    def with_links(self, cluster: "Cluster") -> "Cluster":
        """The cluster with the links that the user asks for."""
        changed: dict[str, Any] = {}
        if self.bandwidth is not None:
            changed["bandwidth"] = self.bandwidth * 1e9
        if self.latency is not None:
            changed["latency_s"] = self.latency * 1e-6
        levels = tuple(usage(replace, level, **changed) for level in cluster.levels)
        return replace(cluster, levels=levels)
