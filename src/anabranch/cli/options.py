"""The arguments and options that several verbs share, each declared once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

# The tables of planners and schedules, spelled out so that --help needs no import; a test holds
# them together.
Planner = StrEnum(
    "Planner",
    [
        "graphpipe",
        "pipedream",
        "dapple",
        "piper",
        "sequential",
        "data-parallel",
        "even",
        "exhaustive",
    ],
)
Schedule = StrEnum("Schedule", ["auto", "published", "gpipe", "1f1b", "1f1b-deep"])
Granularity = StrEnum("Granularity", ["operator", "layer", "block"])
Preset = StrEnum("Preset", ["published", "small"])
Mode = StrEnum("Mode", ["sync", "async"])
Policy = StrEnum(
    "Policy",
    ["auto", "naive", "stash", "vertical-sync", "2bw", "spectrain", "pipeoptim", "predict-stash"],
)
Optimizer = StrEnum("Optimizer", ["sgd", "sgd-momentum", "adam", "adamw", "other"])

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Built-in name, package.module:function, or for planning a profile file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Output = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--output",
        "--option",
        help="A file to write, or, with an equals sign, an option of the model (-o layers=8); "
        "repeatable.",
    ),
]
PlansCluster = Annotated[
    str | None,
    typer.Option("--cluster", help="Another cluster than the plan's: a preset or a JSON file."),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="Preset such as local:4 or summit:8x4, or a JSON file.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples of one step.")]
MicrobatchSize = Annotated[
    int | None, typer.Option(min=1, help="Fix the micro-batch size; by default it is searched.")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu or cuda: measure here; v100, a100 or h100: estimate [default: the cluster's]."
    ),
]
GranularityOption = Annotated[
    Granularity, typer.Option("--granularity", help="How coarse operators are.")
]
ScheduleOption = Annotated[
    Schedule,
    typer.Option(
        "--schedule",
        help="auto lets the simulator choose; published is what the planner's paper runs.",
    ),
]
ModeOption = Annotated[
    Mode,
    typer.Option(
        "--mode",
        help="sync: all stages update together after every step; async: no flush between "
        "mini-batches, each stage updates after its own backward.",
    ),
]
PolicyOption = Annotated[
    Policy | None,
    typer.Option(
        "--policy",
        help="With --mode async: which weights forwards and backwards read [default: auto].",
    ),
]
OptimizerOption = Annotated[
    Optimizer | None,
    typer.Option(
        "--optimizer",
        help="With --mode async: what the model will be trained with, which decides what auto "
        "chooses and how many copies of the weights a prediction takes [default: the model's own; "
        "a profile file has none].",
    ),
]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--policy-option",
        metavar="NAME=VALUE",
        help="An option of the policy, such as clip=3 of predict-stash; repeatable. A wrong name "
        "lists all.",
    ),
]
ManyPolicies = Annotated[
    list[Policy] | None,
    typer.Option(
        "--policy", help="With --mode async: only this policy; repeatable [default: all]."
    ),
]
PlannerOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--planner-option",
        metavar="NAME=VALUE",
        help="An option of the planner, such as kfkb=true; repeatable. A wrong name lists all.",
    ),
]
ManyPlannerOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--planner-option",
        metavar="[PLANNER.]NAME=VALUE",
        help="An option of one planner (piper.recompute=false) or of every planner compared that "
        "has it (recompute=false); repeatable.",
    ),
]
PresetOption = Annotated[
    Preset,
    typer.Option(
        "--preset", help="Size of a built-in model: as published, or small enough for a CPU."
    ),
]
PlansPreset = Annotated[
    Preset | None,
    typer.Option("--preset", help="Size of a built-in model [default: the plan's, or published]."),
]
SmallPresetOption = Annotated[
    Preset, typer.Option("--preset", help="Size of a built-in model; small runs on any CPU.")
]
MaxReplicas = Annotated[
    int | None, typer.Option(min=1, help="At most this many data-parallel replicas per stage.")
]
