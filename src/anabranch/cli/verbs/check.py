"""The verb ``check``: what is wrong with a plan file."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from anabranch.cli.clusters import note_other_model, require_own_devices
from anabranch.cli.output import print_json, say
from anabranch.cli.settings import PlanFile, PlannedModelSettings
from anabranch.cli.spread import spread
from anabranch.weights import OPTIMIZERS


@spread
def check(
    plan_file: PlanFile,
    other: PlannedModelSettings,
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
) -> None:
    """Check PLAN alone, or its operators and memory with MODEL.

    The conditions of a valid plan, with MODEL all four, and that it fits into memory:

    - C1: stages hold every operator once, and no path leaves a stage and comes back to it
    - C2: a value that another stage needs runs along a stage edge, and the edges form no cycle
    - C3: stages lie on devices of the cluster, without a flush each on its own
    - C4: each stage goes through its micro-batches in order, forward before backward

    Exits with 1 if the plan has a problem.

    Args:
        model: The model or profile that it is for.
    """
    from anabranch.errors import InvalidPlanError
    from anabranch.files import load_plan
    from anabranch.solve import check_plan

    plan = load_plan(plan_file)
    costs = cluster = None
    optimizer = OPTIMIZERS[other.optimizer] if other.optimizer is not None else None
    if model is not None:
        cluster = other.cluster_of(plan, plan_file)
        costs, optimizer = other.source(model, plan).profile_and_optimizer(
            other.device_of(plan, cluster),
            plan.stage_graph.batch_size,
            plan.mode,
            other.optimizer,
            times=False,
        )
    problems = check_plan(plan, costs, cluster, optimizer=optimizer)
    if costs is not None and not problems:
        note_other_model(plan, costs.graph)
    if model is None:
        try:
            require_own_devices(plan, plan_file)
        except InvalidPlanError as error:
            problems.insert(0, str(error))
    print_json({"valid": not problems, "problems": problems})
    with_model = shlex.join(["anabranch", "check", str(plan_file), plan.model or "MODEL"])
    rest = (
        ": its structure and schedule; whether its stages hold all operators of the model and fit "
        f"into memory, {with_model} says"
    )
    say("\n".join(problems) or f"{plan_file} is valid{rest if model is None else ''}")
    if problems:
        raise typer.Exit(1)
