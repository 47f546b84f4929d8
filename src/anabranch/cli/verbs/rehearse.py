"""The verb ``rehearse``: a plan on emulated devices instead of a model on real ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anabranch.cli.clusters import cluster_of, cluster_to_plan_for
from anabranch.cli.output import note, say
from anabranch.cli.parsing import usage
from anabranch.cli.progress import progress_bar
from anabranch.cli.settings import OtherModelSettings
from anabranch.cli.source import ModelSource
from anabranch.cli.spread import Settings, spread
from anabranch.cli.training.preflight import require_new_run
from anabranch.cli.training.run_results import say_run
from anabranch.errors import InvalidPlanError
from anabranch.plans.plan import Plan, memory_text, time_text

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.profile.profile import Profile

STEPS = 5
"""Emulated steps: three are recorded after one that connects the ranks."""


@dataclass(frozen=True)
class LinkSettings(Settings):
    """Links of emulated devices, and the scale of their time.

    Attributes:
        links: host: messages take as long as on this machine.
        bandwidth: GB/s of every link, instead of the cluster's.
        latency: Microseconds of every link, likewise.
        time_scale: Wall seconds per second of the devices [default: what this machine can do].
    """

    links: Literal["modelled", "host"] = "modelled"
    bandwidth: float | None = None
    latency: float | None = None
    time_scale: float | None = None

    def changed(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the links that the user asks for."""
        changed: dict[str, Any] = {}
        if self.bandwidth is not None:
            changed["bandwidth"] = self.bandwidth * 1e9
        if self.latency is not None:
            changed["latency_s"] = self.latency * 1e-6
        levels = tuple(usage(replace, level, **changed) for level in cluster.levels)
        return replace(cluster, levels=levels)


@spread
def rehearse(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    links: LinkSettings,
    other: OtherModelSettings,
    plan_file: Annotated[Path | None, typer.Option("--plan")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    steps: Annotated[int, typer.Option(min=1)] = STEPS,
    run: Annotated[Path | None, typer.Option("--out")] = None,
) -> None:
    """Run a plan for any cluster here, on emulated devices. Nothing is trained.

    Local ranks wait as long as the plan's devices compute, and messages take as long as on its
    cluster.

    Example: `anabranch rehearse mmt --plan plan.json`, or
    `anabranch rehearse mmt.json --cluster summit:2x4 --batch-size 64`

    Args:
        model: Built-in name, package.module:function, or a profile file.
        plan_file: A plan file [default: plan for --cluster].
        batch_size: Samples of one step, without --plan [default: 32].
        steps: Steps to do.
    """
    require_new_run(run)
    if plan_file is not None:
        if batch_size is not None:
            raise typer.BadParameter(f"--batch-size: {plan_file} decides it; leave it out")
        planned = planned_in_file(plan_file, model, other)
    elif other.cluster is not None:
        planned = _searched(other.source(model), other.cluster, batch_size or 32)
    else:
        raise typer.BadParameter("there is no plan to rehearse; give --plan FILE or --cluster")
    emulate(*planned, links, steps, run, model)


def _searched(source: ModelSource, named: str, batch_size: int) -> tuple[Plan, Profile, Cluster]:
    """Return a plan for the cluster of that name, with its costs."""
    from anabranch.solve import plan as search

    # Emulated devices do not compute, and take nothing from their neighbours.
    cluster = cluster_to_plan_for(named, calibrated=False)
    profile = source.profile(cluster.device, batch_size)
    plan = usage(search, profile, cluster, batch_size, model=source.model)
    return replace(plan, options=source.recorded()), profile, cluster


def planned_in_file(
    file: Path, model: str, other: OtherModelSettings
) -> tuple[Plan, Profile, Cluster]:
    """The plan of a file, the costs of its model, and the cluster it is for or the one named."""
    from anabranch.files import load_plan

    plan = load_plan(file)
    if plan.mode == "async":
        raise InvalidPlanError(
            f"{file} is for mode async, and emulated devices run steps with a flush; "
            "anabranch simulate says how long its mini-batches take"
        )
    machines = cluster_of(plan, file, other.cluster, calibrated=False)
    device, batch_size = plan.device or machines.device, plan.stage_graph.batch_size
    return plan, other.source(model, plan).profile(device, batch_size), machines


def emulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    links: LinkSettings,
    steps: int,
    run: Path | None,
    model: str,
) -> None:
    """Emulate a plan, keep its run in a folder and print its figures."""
    from anabranch.emulation.rehearsal import rehearse as emulated_run
    from anabranch.record import Origin, new_folder, save_run
    from anabranch.solve import foreseen

    began, emulated = time.time(), links.changed(cluster)
    say(foreseen(plan, profile, emulated)[0].summary())
    with progress_bar("emulated steps") as progress:
        result = usage(
            emulated_run,
            plan,
            profile,
            emulated,
            steps=steps,
            links=links.links,
            time_scale=links.time_scale,
            watch=progress,
        )
    folder = run or new_folder(model, began)
    save_run(replace(result.run, origin=Origin.here()), folder)
    if not result.keeps_up:
        note(
            f"this machine did not keep up: a rank was late by {result.late:.0%} of a step; "
            f"--time-scale {2 * result.time_scale:g} gives it more time"
        )
    sent = f"{result.num_messages} with {memory_text(result.message_bytes)} in a step"
    slower = (
        f"{time_text(result.with_runtime_s)} predicted: it takes {time_text(result.runtime_s)} for "
        "each forward or backward on this machine"
    )
    scale = f"{result.time_scale:g}, ranks late by {result.late:.1%} at most"
    rows = [("with the runtime", slower), ("messages", sent), ("time scale", scale)]
    say_run(result.run, folder, result.figures(), rows)
