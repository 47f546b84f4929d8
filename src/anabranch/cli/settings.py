"""Settings of the verbs, one object per subject; ``spread`` makes an option of every field.

typer checks types and ranges, so these are dataclasses: pydantic would double ``--help``'s time.
"""

# Annotations are not left as text: spread would evaluate each of them for --help.
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anabranch.cli import torchrun
from anabranch.cli.clusters import cluster_of, require_own_devices
from anabranch.cli.output import file_to_write
from anabranch.cli.parsing import split_output
from anabranch.cli.source import ModelSource, Preset
from anabranch.cli.spread import Settings, options_set
from anabranch.cli.training.run_file import refuse_beside_plan
from anabranch.device.kinds import ACCELERATORS, CPU, GPU
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.planner import PLANNERS
from anabranch.plans.plan import Mode, Plan
from anabranch.remembered import remembered
from anabranch.schedule import SCHEDULES
from anabranch.weights import OPTIMIZERS, POLICIES

if TYPE_CHECKING:
    from anabranch.cluster import Cluster

    PlannerName = str
    ScheduleName = str
    PolicyName = str
    OptimizerName = str
    DeviceName = str
    PlannerNames = list[str]
    PolicyNames = list[str]
else:
    PlannerName = Literal[tuple(PLANNERS)]
    ScheduleName = Literal["auto", "published", *SCHEDULES]
    PolicyName = Literal["auto", *POLICIES]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    DeviceName = Literal[CPU, *ACCELERATORS]
    PlannerNames = list[StrEnum("Planner", list(PLANNERS))]
    PolicyNames = list[StrEnum("Policy", ["auto", *POLICIES])]

Shape = Literal["graph", "chain"]


def _writable_output(values: list[str] | None) -> list[str] | None:
    """Accept the values of ``-o`` if the file among them can be written."""
    file_to_write(split_output(values)[1])
    return values


def _options_alone(values: list[str] | None) -> list[str] | None:
    """Refuse a file of ``-o``, which the verb does not write."""
    if file := split_output(values)[1]:
        raise typer.BadParameter(
            f"{file} is no option of the model (NAME=VALUE), and this command writes no file of -o"
        )
    return values


Device = Annotated[
    str | None,
    typer.Option(
        help=f"cpu or {GPU}: measure here; v100, a100, h100, h200 or b200: estimate "
        "[default: the cluster's]."
    ),
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        help="An option of the model (-o layers=8); repeatable.",
        callback=_options_alone,
    ),
]
Output = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--output",
        "--option",
        help="A file to write, or an option of the model (-o layers=8); repeatable.",
        callback=_writable_output,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]


@dataclass(frozen=True)
class ModelSettings(Settings):
    """MODEL, and what it is built with.

    Attributes:
        model: Built-in name, package.module:function, or for planning a profile file.
        preset: Size of a built-in model: as published, or small enough for a CPU.
        granularity: How coarse operators are.
    """

    model: Annotated[str, typer.Argument(metavar="MODEL")]
    output: ModelOptions = None
    preset: Preset = "published"
    granularity: Granularity = "layer"

    @property
    def source(self) -> ModelSource:
        options = split_output(self.output)[0]
        return ModelSource(self.model, self.preset, options, self.granularity)


@dataclass(frozen=True)
class EstimatedModelSettings(ModelSettings):
    """As ``ModelSettings``, of a model whose capture may be kept; with a file to write."""

    output: Output = None
    no_cache: Annotated[bool, typer.Option("--no-cache")] = False
    precision: Precision | None = None

    @property
    def source(self) -> ModelSource:
        return replace(super().source, keep=not self.no_cache, precision=self.precision)

    @property
    def file(self) -> Path | None:
        return split_output(self.output)[1]


@dataclass(frozen=True)
class TrainedModelSettings(ModelSettings):
    """As ``ModelSettings``, of a model that runs here.

    Attributes:
        model: Built-in name, or package.module:function.
        preset: Size of a built-in model; small runs on any CPU.
    """

    preset: Preset = "small"


@dataclass(frozen=True)
class OtherModelSettings(Settings):
    """Another model or cluster than those that a plan was made for.

    Attributes:
        cluster: Another cluster than the plan's: a preset or a JSON file.
        preset: Size of a built-in model [default: the plan's, or published].
        precision: Another autocast than the plan's, or fp32 for none.
    """

    cluster: str | None = None
    output: ModelOptions = None
    preset: Preset | None = None
    no_cache: Annotated[bool, typer.Option("--no-cache")] = False
    precision: Precision | None = None

    def source(self, model: str, plan: "Plan | None" = None) -> ModelSource:
        """Return the model that the user names, with the settings of a plan if there is one."""
        options, keep = split_output(self.output)[0], not self.no_cache
        if plan is None:
            source = ModelSource(model, self.preset or ModelSource.preset, options, keep=keep)
        else:
            source = ModelSource.of_plan(plan, model, self.preset, options, keep=keep)
        return replace(source, precision=self.precision or source.precision)


@dataclass(frozen=True)
class PlannedModelSettings(OtherModelSettings):
    """As ``OtherModelSettings``, with another device and optimizer."""

    no_calibration: Annotated[bool, typer.Option("--no-calibration")] = False
    device: Device = None
    optimizer: OptimizerName | None = None

    def cluster_of(self, plan: "Plan", file: Path) -> "Cluster":
        """Return the cluster that the user names, or the plan's."""
        return cluster_of(plan, file, self.cluster, calibrated=not self.no_calibration)

    def device_of(self, plan: "Plan", cluster: "Cluster") -> str:
        """Return the device whose times count."""
        return self.device or plan.device or cluster.device


@dataclass(frozen=True)
class PlanningSettings(Settings):
    """A search, but for its planner and weight policy.

    Attributes:
        cluster: The devices: local:2 for two ranks of this machine, another preset such as
            summit:8x4, or a JSON file.
        batch_size: Samples of one step.
        mode: sync: all stages update together after every step; async: no flush between
            mini-batches, each stage updates after its own backward.
        shard_optimizer: Replicas of a stage share its optimizer state [default: where nothing fits
            without, or the step is shorter].
        sparse_embeddings: Gradients of embedding tables are the rows that were looked up, in
            training by this plan as well; otherwise as the model says.
    """

    cluster: Annotated[str, typer.Option()]
    batch_size: Annotated[int, typer.Option(min=1)]
    no_calibration: Annotated[bool, typer.Option("--no-calibration")] = False
    microbatch_size: Annotated[int | None, typer.Option(min=1)] = None
    schedule: ScheduleName = "auto"
    max_replicas: Annotated[int | None, typer.Option(min=1)] = None
    device: Device = None
    mode: Mode = "sync"
    optimizer: OptimizerName | None = None
    shard_optimizer: Annotated[
        bool | None, typer.Option("--shard-optimizer/--no-shard-optimizer")
    ] = None
    sparse_embeddings: Annotated[
        bool, typer.Option("--sparse-embeddings/--no-sparse-embeddings")
    ] = False

    @property
    def search(self) -> dict[str, Any]:
        """Arguments of every search."""
        names = "microbatch_size schedule max_replicas shard_optimizer sparse_embeddings"
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True)
class LocalPlanSettings(Settings):
    """The plan of local ranks: a file, or what is needed to make one.

    Attributes:
        plan_file: A plan file [default: plan for --devices].
        devices: Local ranks, without --plan [default: 2].
        batch_size: Samples of one step, without --plan [default: the DataLoader's, or 32].
        device: Where stages are computed. On GPUs each rank takes that of its LOCAL_RANK (torchrun
            sets it, local ranks have it too), in turn where ranks outnumber GPUs, and moves only
            its own stages there; without --plan, operators are measured on a GPU.
    """

    plan_file: Annotated[Path | None, typer.Option("--plan", callback=refuse_beside_plan)] = None
    devices: Annotated[int | None, typer.Option(min=1)] = None
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    microbatch_size: Annotated[int | None, typer.Option(min=1)] = None
    schedule: ScheduleName = "auto"
    device: DeviceName = "cpu"

    @property
    def num_devices(self) -> int:
        """Local ranks, or all of torchrun's."""
        return self.devices or torchrun.num_ranks() or 2

    @remembered
    def plan(self) -> "Plan | None":
        """Return the plan of the file, if there is one; refuse options that it decides."""
        if self.plan_file is None:
            return None
        from anabranch.files import load_plan

        free = ("--plan", "--device")
        named = [option for option in options_set(self) if option not in free]
        if named:
            raise typer.BadParameter(
                f"{self.plan_file} decides what {', '.join(named)} would; leave out one of them"
            )
        plan = load_plan(self.plan_file)
        require_own_devices(plan, self.plan_file)
        return plan
