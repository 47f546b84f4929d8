"""The verbs that run a model: models, verify, train, report, demo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.computing import (
    Accumulate,
    Compile,
    Computing,
    DropoutKind,
    DropoutOption,
    OffloadOption,
    Precision,
    PrecisionOption,
)
from anabranch.cli.header import as_run
from anabranch.cli.inputs import (
    Source,
    planner_options,
    split_output,
    usage,
)
from anabranch.cli.job import Job, agreed
from anabranch.cli.options import (
    AsJson,
    Granularity,
    GranularityOption,
    MaxReplicas,
    MicrobatchSize,
    Mode,
    Model,
    Output,
    PolicyOption,
    PolicyOptions,
    Preset,
    Schedule,
    ScheduleOption,
    SmallPresetOption,
)
from anabranch.cli.output import (
    INTERRUPTED,
    interrupted,
    print_json,
    say_stopped,
    say_stopping,
)
from anabranch.cli.preflight import (
    refuse_emulation,
    refuse_mode,
    require_runs,
    require_trainable,
)
from anabranch.cli.rehearsing import (
    Bandwidth,
    Emulate,
    EmulatedCluster,
    Latency,
    LinkKind,
    LinksOption,
    TimeScale,
    Wishes,
    rehearse,
    require_new_run,
    run_folder,
)
from anabranch.cli.trained import say_run

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.weights import WeightPolicy

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="A plan file [default: plan for --devices].")
]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, help="Local ranks [default: the plan's, or 2].")
]
LocalBatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Samples of one step [default: the plan's, or 32]."),
]
TrainingMode = Annotated[
    Mode | None,
    typer.Option(
        "--mode",
        help="sync: all stages update together after every step; async: without a flush, each "
        "stage updates after its own backward [default: the plan's, or sync].",
    ),
]
RoundRobin = Annotated[
    bool,
    typer.Option(
        "--round-robin",
        help="With --mode async: the replicas of a stage take mini-batches in turn, instead of "
        "splitting each.",
    ),
]
ClipStageNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-stage-norm",
        metavar="NORM",
        help="With --mode async: clip the gradients of each stage to this norm.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Where to keep figures and report [default: runs/MODEL-TIME]."),
]


def models(as_json: AsJson = False) -> None:
    """List the built-in models with their options."""
    from anabranch.models import MODELS, options_of

    options = {name: options_of(name) for name in MODELS}
    if as_json:
        listed = [{"name": n, "about": a, "options": options[n]} for n, a in MODELS.items()]
        print_json({"models": listed})
        return
    for name, about in MODELS.items():
        typer.echo(f"{name}: {about}")
        for option, defaults in options[name].items():
            shown = ", ".join(f"{preset} {value}" for preset, value in defaults.items())
            typer.echo(f"    -o {option}=...   [{shown}]")


def verify(
    model: Model,
    plan_file: PlanFile = None,
    devices: Devices = None,
    batch_size: LocalBatchSize = None,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    output: Output = None,
    preset: SmallPresetOption = Preset.small,
    granularity: GranularityOption = Granularity.layer,
    as_json: AsJson = False,
) -> None:
    """Train one step as a pipeline and in one process; compare loss and every gradient.

    Both accumulate the same micro-batches in the same order. Without --plan, stages have no
    replicas, so that everything is equal bit for bit. Exits with 1 if the difference is more than
    rounding.

    Example: `anabranch verify mypackage.mymodel:workload --devices 4`
    """
    from anabranch.verification import verify as compare

    options, _ = split_output(output)
    asked = {"--devices": devices, "--batch-size": batch_size, "--microbatch-size": microbatch_size}
    job = Job.of(Source(model, preset, options, granularity), plan_file, asked)
    plan = job.plan or job.search(
        devices or 2, batch_size or 32, microbatch_size, schedule.value, 1
    )
    result = compare(job.workload, plan, captured=job.captured)
    good = result.max_gradient_error < 1e-4
    if as_json:
        print_json(
            {
                "max_gradient_error": result.max_gradient_error,
                "bitwise": result.bitwise,
                "loss": result.loss,
                "reference_loss": result.reference_loss,
                "worst": result.worst,
                "exact": result.exact,
                "devices": result.num_devices,
                "stages": len(plan.stage_graph),
                "edges": [list(edge) for edge in plan.stage_graph.edges],
            }
        )
    else:
        typer.echo(plan.summary())
        typer.echo(result.summary())
    if not good:
        typer.secho("the gradients differ by more than rounding", err=True, fg="red")
        raise typer.Exit(1)


def train(
    model: Model,
    plan_file: PlanFile = None,
    devices: Devices = None,
    batch_size: LocalBatchSize = None,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    max_replicas: MaxReplicas = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to do [default: 100, or what --epochs has].")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes through the data.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint to go on from.")] = None,
    save: Annotated[Path | None, typer.Option(help="A new folder for a checkpoint.")] = None,
    run: RunFolder = None,
    check_gradients: Annotated[
        bool, typer.Option(help="First compare the gradients of a micro-batch with one process.")
    ] = True,
    output: Output = None,
    preset: SmallPresetOption = Preset.small,
    granularity: GranularityOption = Granularity.layer,
    precision: PrecisionOption = Precision.fp32,
    backend: Compile = None,
    offload: OffloadOption = False,
    dropout: DropoutOption = DropoutKind.stage,
    accumulate: Accumulate = 1,
    mode: TrainingMode = None,
    policy: PolicyOption = None,
    policy_option: PolicyOptions = None,
    round_robin: RoundRobin = False,
    clip_stage_norm: ClipStageNorm = None,
    emulate: Emulate = False,
    cluster: EmulatedCluster = None,
    links: LinksOption = LinkKind.modelled,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    time_scale: TimeScale = None,
    as_json: AsJson = False,
) -> None:
    """Train MODEL as a pipeline on local ranks, or as one rank of torchrun.

    Where plain data parallelism is predicted to be faster, the plan is that: one stage with
    replicas. --max-replicas 1 asks for a pipeline.

    Example: `anabranch train two-branch --devices 4 --steps 50`, or
    `torchrun --nproc-per-node 2 -m anabranch train two-branch --steps 50`

    With --mode async there is no flush between mini-batches, and --policy says which weights
    forwards and backwards read: `anabranch train two-branch --devices 4 --mode async`

    With --emulate a plan for any cluster runs here on emulated devices:
    `anabranch train mmt --plan plan.json --emulate`

    Ctrl-C ends training after the step under way: the checkpoint of --save, the figures and the
    report are written as far as it came, and the exit code is 130. A second Ctrl-C stops at once.
    """
    options, _ = split_output(output)
    require_new_run(run)
    asked = {
        "--devices": devices,
        "--batch-size": batch_size,
        "--microbatch-size": microbatch_size,
        "--max-replicas": max_replicas,
    }
    source = Source(model, preset, options, granularity)
    wishes = Wishes(links, cluster, bandwidth, latency, time_scale)
    if emulate:
        given = {
            **asked,
            "--epochs": epochs,
            "--resume": resume,
            "--save": save,
            "--mode": mode and mode.value,
            "--policy": policy,
            "--policy-option": policy_option,
            "--round-robin": round_robin,
            "--clip-stage-norm": clip_stage_norm,
        }
        refuse_emulation(given, plan_file)
        folder = run_folder(run, _slug(model))
        chosen = schedule.value
        rehearse(source, plan_file, wishes, steps or 5, asked, chosen, folder, as_json=as_json)
        return
    if wishes.given():
        raise typer.BadParameter(f"{', '.join(wishes.given())}: only with --emulate")
    compute = Computing(precision, backend, offload, dropout).options()
    job = Job.of(source, plan_file, asked)

    planned = Mode(job.plan.mode) if job.plan is not None else Mode.sync
    is_async = (mode or planned) is Mode["async"]
    refuse_mode(
        is_async,
        policy or policy_option,
        accumulate,
        round_robin=round_robin,
        clip_stage_norm=clip_stage_norm,
    )
    wishes_of_policy = planner_options(policy_option, "--policy-option")
    name = policy.value if policy is not None else job.plan.policy if job.plan is not None else ""
    known = _policy(name, wishes_of_policy) if name not in ("", "auto") and is_async else None
    require_trainable(job.workload, compute, known, is_async=is_async, resume=resume, save=save)
    job.capture()

    def search() -> Plan:
        count = devices or int(os.environ.get("WORLD_SIZE", "2"))
        size = batch_size or 32
        return job.search(
            count,
            size,
            microbatch_size,
            schedule.value,
            max_replicas,
            mode="async" if is_async else "sync",
            policy=policy.value if policy is not None else "",
        )

    job.plan = job.plan or (agreed(search) if "RANK" in os.environ else search())
    first = os.environ.get("RANK", "0") == "0"
    wanted = None if epochs else steps or 100
    special: dict[str, Any] = {"accumulate": accumulate}
    if is_async:
        # A plan of the search has the policy, also where it was to choose one.
        named = policy is not None and plan_file is not None
        special = {"policy": policy.value if policy is not None and named else None}
        if wishes_of_policy:
            special = {"policy": _policy(special["policy"] or job.plan.policy, wishes_of_policy)}
        special |= {"round_robin": round_robin, "clip_stage_norm": clip_stage_norm}
    if plan_file is not None:
        require_runs(
            job.captured,
            job.plan,
            job.workload,
            compute,
            special.get("policy"),
            is_async=is_async,
            round_robin=round_robin,
        )
    shown = as_run(
        job.plan,
        job.workload,
        special.get("policy"),
        is_async=is_async,
        round_robin=round_robin,
    )
    if first and not as_json:
        typer.echo(shown.summary())
    try:
        result = job.train(
            steps or wanted,
            epochs,
            resume,
            save,
            is_async=is_async,
            on_interrupt=say_stopping,
            check_gradients=check_gradients,
            compute=compute,
            **special,
        )
    except KeyboardInterrupt:
        say_stopped(save)
        raise typer.Exit(INTERRUPTED) from None
    if first:
        folder = run_folder(run, _slug(model))
        if not round_robin:  # whose counts in flight are none of a plan
            result = replace(result, plan=shown)
        result = job.keep(result, folder)
        ended = (
            interrupted(result, steps or wanted, epochs, save, run) if result.interrupted else ""
        )
        say_run(result, folder, ended, as_json=as_json)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _policy(name: str, options: Mapping[str, object]) -> WeightPolicy:
    from anabranch.weights import policy_named

    return usage(policy_named, name, options)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that train wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page [default: RUN/report.html].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a run."""
    from anabranch.record import load_run, write_report

    path = output or run / "report.html"
    write_report(load_run(run), path)
    if as_json:
        print_json({"path": str(path)})
    else:
        typer.echo(f"written to {path}")


def demo(
    model: Annotated[str, typer.Option(help="Which model to show.")] = "glyphs",
    devices: Annotated[int, typer.Option(min=1, help="Local ranks.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 1500,
    run: RunFolder = None,
    as_json: AsJson = False,
) -> None:
    """The main job from start to end: capture, measure, plan, verify, train, show."""
    from anabranch.cli.demo import show

    require_new_run(run)
    folder = run or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    show(model, devices, batch_size, steps, folder, as_json=as_json)


VERBS: tuple[Callable[..., None], ...] = (models, verify, train, report, demo)


def _slug(model: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in model)
