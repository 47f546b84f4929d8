"""The verb ``verify``: the gradients of a pipeline against those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from anabranch.cli.output import print_json, say, say_error
from anabranch.cli.rewriting import required_rewrites
from anabranch.cli.settings import LocalPlanSettings, TrainedModelSettings
from anabranch.cli.spread import spread
from anabranch.cli.training.job import Job


@spread
def verify(
    model: TrainedModelSettings,
    local: LocalPlanSettings,
    dropout: Literal["off", "sample", "stage"] = "off",
    rewrite: Annotated[str | None, typer.Option(metavar="none|NAME[,NAME]")] = None,
) -> None:
    """Compare loss and gradients of a pipeline with one process.

    Both accumulate the same micro-batches of one step in the same order. Without --plan, stages
    have no replicas, so that everything is equal bit for bit. The whole batch at once is compared
    as well, which shows what micro-batches change. With --rewrite, or by a plan that has rewrites,
    slices of parameters are compared with those of the module as it is written. Exits with 1 if a
    difference is more than rounding. Everything is in fp32, whatever the precision of the plan.

    Examples:

    - `anabranch verify mypackage.mymodel:workload --devices 4`
    - `anabranch verify dlrm --devices 4 --rewrite join-split,table-split`

    Args:
        dropout: off: nothing is dropped, on both sides. sample: random numbers are the same under
            any plan, so that a model can be compared with itself as captured on one device. stage:
            as training draws them, which one process cannot.
    """
    from anabranch.schedule import glossary
    from anabranch.verification import verify as compare

    source = model.source
    named = required_rewrites(rewrite or "none", source)
    if local.plan_file is not None and rewrite is not None:
        raise typer.BadParameter(
            f"{local.plan_file} decides what --rewrite would; leave out one of them"
        )
    if named:
        source = replace(source, rewrites=named)
    job = Job.of(source, local)
    plan = job.plan or job.search(local, max_replicas=1)
    result = compare(
        job.workload, plan, captured=job.captured, device=local.device, dropout=dropout
    )
    names = (
        *("max_gradient_error", "bitwise", "loss", "reference_loss", "worst", "exact"),
        *("loss_kind", "whole_batch_error", "against", "tolerance"),
    )
    graph = plan.stage_graph
    print_json(
        {
            **{name: getattr(result, name) for name in names},
            "devices": result.num_devices,
            "stages": len(graph),
            "edges": [list(edge) for edge in graph.edges],
        }
    )
    say(plan.summary())
    say(glossary(plan))
    say(result.summary())
    if plan.precision != "fp32":
        say("compared in fp32, as train does before its first step")
    if not result.is_good:
        say_error(result.why())
        raise typer.Exit(1)
