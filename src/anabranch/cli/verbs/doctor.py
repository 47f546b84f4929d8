"""The verb ``doctor``: examination of a model before it is planned and trained."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.clusters import read_cluster
from anabranch.cli.compiling import begin_compiling
from anabranch.cli.output import print_json, say
from anabranch.cli.parsing import usage
from anabranch.cli.settings import TrainedModelSettings
from anabranch.cli.spread import spread
from anabranch.graph.opgraph import Precision


@spread
def doctor(
    model: TrainedModelSettings,
    cluster: str = "summit:1x4",
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    device: str = "v100",
    precision: Precision | None = None,
) -> None:
    """Examine MODEL, and say what a graph of stages can gain.

    Can it be captured, and which line stops it; its loss, tied and frozen weights, batch
    normalisation; whether its optimizer can be made; the first plan to try. The output can be
    pasted into a report of a fault. Exits with 1 if the model cannot be captured.

    Example: `anabranch doctor mypackage.mymodel:workload`

    Args:
        cluster: Cluster of the first plan: a preset, local:2 for two ranks here, or a file. The
            default is an example, with times from a data sheet.
        batch_size: Samples of one step [default: the DataLoader's, or 32].
        device: v100, a100, h100, h200 or b200: device whose data sheet gives the seconds.
    """
    from anabranch.files import plan_to_dict

    source = model.source
    machines = usage(read_cluster, cluster)
    begin_compiling("auto")  # beside the capture, in processes forked before torch has threads
    from anabranch.training.doctor import examine, report

    workload = source.workload()
    examination = usage(
        examine,
        workload,
        machines,
        batch_size or workload.batch_size or 32,
        model=source.model,
        device=device,
        granularity=source.granularity,
        precision=precision,
    )
    branches = examination.branches
    print_json(
        {
            "model": examination.model,
            "capturable": examination.capturable,
            "error": examination.error or None,
            "loss": examination.loss,
            "findings": list(examination.findings),
            "operators": branches and branches.operators,
            "depth": branches and branches.depth,
            "width": branches and branches.width,
            "plan": examination.plan and plan_to_dict(examination.plan),
            "device_bytes": [
                {"device": device, "stage": stage, "weights_bytes": weights, "peak_bytes": peak}
                for device, stage, weights, peak in examination.peaks
            ],
            "versions": examination.versions,
        }
    )
    say(report(examination))
    if not examination.capturable:
        raise typer.Exit(1)
