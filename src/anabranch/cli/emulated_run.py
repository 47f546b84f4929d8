"""A plan on emulated devices instead of a model on real ones: ``train --emulate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import note, print_json, print_rows, say_lines
from anabranch.cli.parsing import usage
from anabranch.cli.progress import progress_bar
from anabranch.cli.settings import EmulationSettings, TrainedPlanSettings
from anabranch.cli.source import ModelSource, cluster_of, read_cluster
from anabranch.plans.plan import time_text

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.rehearsal import Rehearsal


def rehearse(
    source: ModelSource,
    local: TrainedPlanSettings,
    emulation: EmulationSettings,
    steps: int,
    new_folder: Callable[[], Path],
    *,
    as_json: bool,
) -> None:
    """Emulate the plan of a file, or one that is found first, and say what came of it."""
    from anabranch.record import Origin, save_run
    from anabranch.rehearsal import rehearse as emulate
    from anabranch.solve import foreseen

    plan, profile, cluster = _plan(source, local, emulation.cluster)
    emulated = emulation.with_links(cluster)
    if not as_json:
        say_lines(foreseen(plan, profile, emulated)[0].summary())
    with progress_bar("emulated steps") as progress:
        result = usage(
            emulate,
            plan,
            profile,
            emulated,
            steps=steps,
            links=emulation.links,
            time_scale=emulation.time_scale,
            watch=progress,
        )
    folder = new_folder()
    save_run(replace(result.run, origin=Origin.here()), folder)
    if not result.keeps_up:
        note(
            f"this machine did not keep up: a rank was late by {result.late:.0%} of a step; "
            f"--time-scale {2 * result.time_scale:g} gives it more time"
        )
    page = folder / "report.html"
    if as_json:
        print_json({**result.figures(), "run": str(folder), "report": str(page)})
        return
    _say(result)
    typer.echo(f"report: {page}")


def _plan(
    source: ModelSource, local: TrainedPlanSettings, cluster_name: str | None
) -> tuple[Plan, Profile, Cluster]:
    """The plan of a file or of a search, with profile and cluster."""
    from anabranch.files import load_plan
    from anabranch.solve import plan as search

    if local.plan_file is None:
        if cluster_name is None:
            raise typer.BadParameter("--emulate needs a plan (--plan FILE) or a --cluster")
        # What is emulated does not compute, and takes nothing from its neighbours.
        cluster = read_cluster(cluster_name, calibrated=False)
        batch_size = local.batch_size or 32
        profile = source.profile(cluster.device, batch_size)
        found = usage(
            search,
            profile,
            cluster,
            batch_size,
            microbatch_size=local.microbatch_size,
            schedule=local.schedule,
            max_replicas=local.max_replicas,
            model=source.model,
        )
        return replace(found, options=source.recorded()), profile, cluster
    plan = load_plan(local.plan_file)
    cluster = cluster_of(plan, local.plan_file, cluster_name, calibrated=False)
    source = replace(source, granularity=plan.granularity)
    if source.model == plan.model:
        source = ModelSource.of_plan(plan, source.model, options=source.options, keep=source.keep)
    profile = source.profile(plan.device or cluster.device, plan.stage_graph.batch_size)
    return plan, profile, cluster


def _say(result: Rehearsal) -> None:
    from anabranch.record.figures import told

    rows = [(figure.name, figure.line) for figure in told(result.run.figures())]
    sent = f"{result.num_messages} with {result.message_bytes / 1e6:.1f} MB in a step"
    slower = (
        f"{time_text(result.with_runtime_s)} predicted: it takes {time_text(result.runtime_s)} for "
        "each forward or backward on this machine"
    )
    scale = f"{result.time_scale:g}, ranks late by {result.late:.1%} at most"
    more = [("with the runtime", slower), ("messages", sent), ("time scale", scale)]
    print_rows([*rows, *more])
