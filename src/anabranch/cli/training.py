"""The verbs that run a model: models, verify, train, report, demo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.inputs import Source, read_cluster, split_output
from anabranch.cli.options import (
    AsJson,
    Granularity,
    GranularityOption,
    MaxReplicas,
    MicrobatchSize,
    Model,
    Output,
    Planner,
    Preset,
    PresetOption,
    Schedule,
    ScheduleOption,
)
from anabranch.cli.output import TrainingProgress, print_json, print_table

if TYPE_CHECKING:
    from anabranch.planner.stages import Plan
    from anabranch.record import Run
    from anabranch.workload import Workload

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="A plan file [default: plan for --devices].")
]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, help="Local ranks [default: the plan's, or 2].")
]
LocalBatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Samples of one step [default: 32].")
]


def models(as_json: AsJson = False) -> None:
    """List the built-in models with their options."""
    from anabranch.models import describe

    rows = describe()
    if as_json:
        print_json({"models": rows})
        return
    columns = ["model", "what it is", "options (published; small)"]
    print_table("Built-in models", columns, [[r["name"], r["about"], r["options"]] for r in rows])


def verify(
    model: Model,
    plan_file: PlanFile = None,
    devices: Devices = None,
    batch_size: LocalBatchSize = None,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    output: Output = None,
    preset: PresetOption = Preset.small,
    granularity: GranularityOption = Granularity.layer,
    as_json: AsJson = False,
) -> None:
    """Train one step as a pipeline and in one process, and compare loss and every gradient.

    Both accumulate the same micro-batches in the same order; without replicas the gradients are
    equal bit for bit. Exits with 1 if they differ by more than rounding.
    """
    from anabranch.runtime.verify import verify as compare

    options, _ = split_output(output)
    source = Source(model, preset, options, granularity.value)
    workload = source.workload()
    plan = _plan(source, plan_file, devices, batch_size, microbatch_size, schedule, 1)
    result = compare(workload, plan)
    good = result.max_gradient_error < 1e-4
    if as_json:
        print_json(
            {
                "max_gradient_error": result.max_gradient_error,
                "bitwise": result.bitwise,
                "loss": result.loss,
                "reference_loss": result.reference_loss,
                "devices": len(plan.stage_graph.devices),
                "stages": len(plan.stage_graph),
            }
        )
    else:
        verdict = "equal bit for bit" if result.bitwise else "equal up to rounding"
        typer.echo(
            f"{len(plan.stage_graph)} stages on {len(plan.stage_graph.devices)} devices against "
            f"one process: loss {result.loss:.6g} and {result.reference_loss:.6g}; largest "
            f"relative gradient error {result.max_gradient_error:.2g}: "
            f"{verdict if good else 'NOT equal'}"
        )
    if not good:
        raise typer.Exit(1)
