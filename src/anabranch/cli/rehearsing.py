"""``train --emulate``: a plan on emulated devices instead of a model on real ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli.inputs import Source, cluster_of, note, read_cluster, usage
from anabranch.cli.options import Granularity
from anabranch.cli.output import print_json, progress_bar
from anabranch.errors import TrainingError

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.rehearsal import Rehearsal

_PANEL = "Emulated devices"

LinkKind = StrEnum("LinkKind", ["modelled", "host"])
Emulate = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="No training: local ranks wait as long as the plan's devices compute, and messages "
        "take as long as on its cluster. MODEL may be a profile file.",
        rich_help_panel=_PANEL,
    ),
]
EmulatedCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Emulate another cluster than the plan's, or plan for this one.",
        rich_help_panel=_PANEL,
    ),
]
LinksOption = Annotated[
    LinkKind,
    typer.Option(
        "--links", help="host: messages take as long as on this machine.", rich_help_panel=_PANEL
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(help="GB/s of every link, instead of the cluster's.", rich_help_panel=_PANEL),
]
Latency = Annotated[
    float | None,
    typer.Option(help="Microseconds of every link, likewise.", rich_help_panel=_PANEL),
]
TimeScale = Annotated[
    float | None,
    typer.Option(
        help="Wall seconds per second of the devices [default: what this machine can do].",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class Wishes:
    """What the user asked of the emulation."""

    links: LinkKind
    cluster: str | None
    bandwidth: float | None
    latency: float | None
    time_scale: float | None

    def given(self) -> dict[str, object]:
        """Option -> value, of those that are not at their defaults."""
        values = {
            "--links": None if self.links is LinkKind.modelled else self.links,
            "--cluster": self.cluster,
            "--bandwidth": self.bandwidth,
            "--latency": self.latency,
            "--time-scale": self.time_scale,
        }
        return {option: value for option, value in values.items() if value is not None}


def rehearse(
    source: Source,
    plan_file: Path | None,
    wishes: Wishes,
    steps: int,
    asked: Mapping[str, int | None],
    schedule: str,
    run: Path,
    *,
    as_json: bool,
) -> None:
    """Emulate the plan of a file, or one that is found first, and say what came of it."""
    from anabranch.record import save_run
    from anabranch.rehearsal import rehearse as emulate

    plan, profile, cluster = _job(source, plan_file, wishes, asked, schedule)
    cluster = _with_links(cluster, wishes)
    if not as_json:
        typer.echo(plan.summary())
    with progress_bar("emulated steps") as progress:
        result = usage(
            emulate,
            plan,
            profile,
            cluster,
            steps=steps,
            links=wishes.links.value,
            time_scale=wishes.time_scale,
            watch=progress,
        )
    save_run(result.run, run)
    if not result.keeps_up:
        note(
            f"this machine did not keep up: a rank was late by {result.late:.0%} of a step; "
            f"--time-scale {2 * result.time_scale:g} gives it more time"
        )
    page = run / "report.html"
    if as_json:
        print_json({**result.figures(), "run": str(run), "report": str(page)})
        return
    _say(result)
    typer.echo(f"report: {page}")


def _job(
    source: Source,
    plan_file: Path | None,
    wishes: Wishes,
    asked: Mapping[str, int | None],
    schedule: str,
) -> tuple[Plan, Profile, Cluster]:
    from anabranch.files import load_plan
    from anabranch.solve import plan as search

    if plan_file is None:
        if wishes.cluster is None:
            raise typer.BadParameter("--emulate needs a plan (--plan FILE) or a --cluster")
        cluster = read_cluster(wishes.cluster)
        batch_size = asked["--batch-size"] or 32
        profile = source.profile(cluster.device, batch_size)
        found = usage(
            search,
            profile,
            cluster,
            batch_size,
            microbatch_size=asked["--microbatch-size"],
            schedule=schedule,
            max_replicas=asked["--max-replicas"],
            model=source.model,
        )
        return replace(found, options=source.recorded()), profile, cluster
    plan = load_plan(plan_file)
    cluster = cluster_of(plan, plan_file, wishes.cluster)
    source = replace(source, granularity=Granularity(plan.granularity))
    if source.model == plan.model:
        source = _as_planned(source, plan)
    profile = source.profile(plan.device or cluster.device, plan.stage_graph.batch_size)
    return plan, profile, cluster


def _as_planned(source: Source, plan: Plan) -> Source:
    """The model as the plan's was built; what the user says besides goes before."""
    planned = Source.of_plan(plan)
    return replace(planned, options={**planned.options, **source.options})


def _with_links(cluster: Cluster, wishes: Wishes) -> Cluster:
    def changed(bandwidth: float, latency_s: float) -> dict[str, float]:
        return {
            "bandwidth": bandwidth if wishes.bandwidth is None else wishes.bandwidth * 1e9,
            "latency_s": latency_s if wishes.latency is None else wishes.latency * 1e-6,
        }

    levels = tuple(
        usage(replace, level, **changed(level.bandwidth, level.latency_s))
        for level in cluster.levels
    )
    return replace(cluster, levels=levels)


def _say(result: Rehearsal) -> None:
    step, run = result.step_s, result.run
    predicted = run.plan.figures.step_s
    rows = [
        ("step", f"{step * 1e3:.2f} ms, {run.plan.stage_graph.batch_size / step:.0f} samples/s"),
        ("predicted step", f"{predicted * 1e3:.2f} ms, off by {step / predicted - 1:+.1%}"),
        ("ideal step", f"{run.ideal_step_s * 1e3:.2f} ms with links that cost nothing"),
        ("messages", f"{result.num_messages} with {result.message_bytes / 1e6:.1f} MB in a step"),
        ("time scale", f"{result.time_scale:g}, ranks late by {result.late:.1%} at most"),
    ]
    for name, text in rows:
        typer.echo(f"  {name:20s} {text}")


def require_new_run(run: Path | None) -> None:
    """Accept a folder for figures and report, if the user has named one.

    Raises:
        TrainingError: if an earlier run is in it.
    """
    if run is not None and (run / "run.json").exists():
        raise TrainingError(
            f"{run} has the figures of an earlier run (run.json), which are never written over; "
            "name a new folder with --out, or leave --out away: then every run gets a folder of "
            "its own in runs"
        )


def run_folder(run: Path | None, slug: str) -> Path:
    """Where to keep figures and report."""
    return run or Path("runs") / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
