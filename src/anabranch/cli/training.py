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
from anabranch.cli.inputs import (
    Source,
    planner_options,
    powers_of_two,
    split_output,
    usage,
)
from anabranch.cli.options import (
    AsJson,
    Granularity,
    GranularityOption,
    MaxReplicas,
    MicrobatchSize,
    Mode,
    Model,
    Output,
    Policy,
    PolicyOption,
    PolicyOptions,
    Preset,
    Schedule,
    ScheduleOption,
    SmallPresetOption,
)
from anabranch.cli.output import TrainingProgress, print_json, progress_bar
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
    run_folder,
)
from anabranch.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.planner.stages import Plan
    from anabranch.profile.profile import Profile
    from anabranch.record import Run
    from anabranch.workload import Workload

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
    """
    options, _ = split_output(output)
    asked = {
        "--devices": devices,
        "--batch-size": batch_size,
        "--microbatch-size": microbatch_size,
        "--max-replicas": max_replicas,
    }
    source = Source(model, preset, options, granularity)
    wishes = Wishes(links, cluster, bandwidth, latency, time_scale)
    if emulate:
        _refuse({**asked, "--epochs": epochs, "--resume": resume, "--save": save}, plan_file)
        _refuse_emulation(mode, policy, plan_file)
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
    _refuse_mode(is_async, policy or policy_option, accumulate)

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

    job.plan = job.plan or (_agreed(search) if "RANK" in os.environ else search())
    first = os.environ.get("RANK", "0") == "0"
    if first and not as_json:
        typer.echo(job.plan.summary())
    wanted = None if epochs else steps or 100
    special: dict[str, Any] = {"accumulate": accumulate}
    if is_async:
        # A plan of the search has the policy, also where it was to choose one.
        named = policy is not None and plan_file is not None
        special = {"policy": policy.value if policy is not None and named else None}
        if policy_option:
            from anabranch.weights import policy_named

            name = special["policy"] or job.plan.policy
            given = planner_options(policy_option, "--policy-option")
            special = {"policy": usage(policy_named, name, given)}
    result = job.train(
        steps or wanted,
        epochs,
        resume,
        save,
        is_async=is_async,
        check_gradients=check_gradients,
        compute=compute,
        **special,
    )
    if not first:
        return
    folder = run_folder(run, _slug(model))
    job.keep(result, folder)
    if as_json:
        print_json({**result.figures(), "run": str(folder), "report": str(folder / "report.html")})
        return
    _say_result(result)
    typer.echo(f"report: {folder / 'report.html'}")


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

    folder = run or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    show(model, devices, batch_size, steps, folder, as_json=as_json)


VERBS: tuple[Callable[..., None], ...] = (models, verify, train, report, demo)


class Job:
    """A model that is about to run: workload, captured graph, measured profile, plan."""

    def __init__(self, source: Source, plan: Plan | None) -> None:
        self.source = source
        self.plan = plan
        self.workload: Workload = source.workload()
        self.captured: Captured = source.capture(self.workload)
        self.profile: Profile | None = None

    @staticmethod
    def of(source: Source, plan_file: Path | None, asked: Mapping[str, int | None]) -> Job:
        """The job for a model, by a plan file if there is one; then nothing else is asked."""
        if plan_file is None:
            return Job(source, None)
        given = [option for option, value in asked.items() if value is not None]
        if given:
            raise typer.BadParameter(
                f"{plan_file} decides what {', '.join(given)} would; leave out one of them"
            )
        from anabranch.files import load_plan

        plan = load_plan(plan_file)
        return Job(replace(source, granularity=Granularity(plan.granularity)), plan)

    def measure(self, batch_size: int) -> Profile:
        """Time the operators here, on one thread each, as ranks do."""
        from anabranch.profile.measure import measure

        with progress_bar(f"measuring {self.source.model}") as progress:
            self.profile = measure(self.captured, powers_of_two(batch_size), progress=progress)
        return self.profile

    def search(
        self,
        devices: int,
        batch_size: int,
        microbatch_size: int | None,
        schedule: str,
        max_replicas: int | None,
        *,
        planner: str = "graphpipe",
        own_cores: bool = False,
        mode: str = "sync",
        policy: str = "",
    ) -> Plan:
        """Plan for local ranks; ``own_cores`` as if each had a core of its own."""
        from anabranch.cluster import Cluster
        from anabranch.solve import plan

        cluster = Cluster.preset(f"local:{devices}")
        found = usage(
            plan,
            self.profile or self.measure(batch_size),
            replace(cluster, cores=0) if own_cores else cluster,
            batch_size,
            planner=planner,
            microbatch_size=microbatch_size,
            schedule=schedule,
            max_replicas=max_replicas,
            model=self.source.model,
            mode=mode,
            policy=policy,
        )
        return replace(found, options=self.source.recorded())

    def train(
        self,
        steps: int | None,
        epochs: int | None,
        resume: Path | None = None,
        save: Path | None = None,
        *,
        is_async: bool = False,
        **options: Any,
    ) -> Run:
        """Train on local ranks, or as this rank of torchrun; with the options of ``Pipeline``, or
        of ``AsyncPipeline``.
        """
        from anabranch import launch
        from anabranch.runtime.steps import prepare
        from anabranch.train import train, train_async

        plan = self.plan
        assert plan is not None
        is_planned = is_async == (plan.mode == "async")
        # Once here rather than in every rank: forked ranks inherit it.
        prepare(self.captured, plan.stage_graph)
        evaluation = self.captured.evaluation() if self.workload.eval_data is not None else None

        def rank() -> Run:
            return (train_async if is_async else train)(
                self.workload,
                plan,
                steps=steps,
                epochs=epochs,
                captured=self.captured,
                evaluation=evaluation,
                resume=resume,
                save=save,
                **options,
                # In the other mode than the plan's its prediction says nothing.
                watch=TrainingProgress(plan.predicted.step_s if is_planned else 0.0),
            )

        return (
            rank() if "RANK" in os.environ else launch.run(rank, len(plan.stage_graph.devices))[0]
        )

    def keep(self, run: Run, folder: Path) -> Run:
        """Put the predicted timeline beside the measured one and write the run's folder."""
        from anabranch.cluster import Cluster
        from anabranch.record import save_run
        from anabranch.solve import simulate

        assert self.plan is not None
        if self.profile is not None:
            devices = len(self.plan.stage_graph.devices)
            predicted = simulate(self.plan, self.profile, Cluster.preset(f"local:{devices}"))
            run = replace(run, timelines=(("predicted", predicted), *run.timelines))
        save_run(run, folder)
        return run


def _refuse_emulation(mode: Mode | None, policy: Policy | None, plan_file: Path | None) -> None:
    """Refuse what emulated devices do not do: they run steps with a flush."""
    from anabranch.files import load_plan

    if mode is Mode["async"] or policy is not None:
        raise typer.BadParameter(
            "--mode async, --policy: not with --emulate, whose devices run steps with a flush"
        )
    if plan_file is not None and load_plan(plan_file).mode == "async":
        raise typer.BadParameter(
            f"{plan_file} is for mode async, and emulated devices run steps with a flush; "
            "anabranch simulate says how long its mini-batches take"
        )


def _refuse_mode(is_async: bool, policy: object, accumulate: int) -> None:
    """Refuse options of the other mode."""
    if not is_async and policy:
        raise typer.BadParameter(
            "--policy and its options are for --mode async; without it all passes read the same "
            "weights"
        )
    if is_async and accumulate > 1:
        raise typer.BadParameter(
            f"--accumulate {accumulate}: not with --mode async, where every mini-batch makes an "
            "update; take a larger --batch-size"
        )


def _refuse(given: Mapping[str, object], plan_file: Path | None) -> None:
    """Refuse what means nothing with ``--emulate``: the plan decides, and nothing is trained."""
    plans = () if plan_file is None else ("--batch-size", "--microbatch-size", "--max-replicas")
    useless = ("--devices", "--epochs", "--resume", "--save", *plans)
    named = [option for option in useless if given[option] is not None]
    if named:
        why = f"{plan_file} decides" if plan_file is not None else "nothing is trained"
        raise typer.BadParameter(f"{', '.join(named)}: not with --emulate; {why}")


def _agreed(search: Callable[[], Plan]) -> Plan:
    """Under torchrun: the first rank plans, the others take its plan (measurements differ)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [search()]
        except AnabranchError as error:
            found = [error]
    dist.broadcast_object_list(found, 0)
    if isinstance(found[0], AnabranchError):
        # The first rank says why; the others just end.
        raise found[0] if dist.get_rank() == 0 else typer.Exit(1)
    plan: Plan = found[0]
    return plan


def _say_result(run: Run) -> None:
    first, last = run.losses[0], sum(run.losses[-10:]) / len(run.losses[-10:])
    rows = [["loss", f"{first:.4f} at first, {last:.4f} over the last steps"]]
    held_out = "held-out " if "loss" in run.metrics else ""
    for name, value in run.metrics.items():
        chance = f" (chance {run.chance[name]:.4g})" if name in run.chance else ""
        rows.append([held_out + name, f"{value:.4f}{chance}"])
    rows += _asynchronous_rows(run) if run.policy else _step_rows(run)
    for name, text in rows:
        typer.echo(f"  {name:20s} {text}")


def _asynchronous_rows(run: Run) -> list[list[str]]:
    predicted = run.plan.predicted.step_s
    said = f", predicted {predicted * 1e3:.2f} ms" if run.plan.mode == "async" else ""
    rows = [["policy", run.policy]]
    if run.period_s:
        rows.append(["mini-batch", f"{run.period_s * 1e3:.2f} ms one after the other{said}"])
    behind = ", ".join(map(str, run.version_difference))
    rows.append(["version difference", f"{behind} updates, by stage"])
    mib = max(run.weight_bytes) / 2**20
    versions = ", ".join(map(str, run.peak_versions))
    rows.append(["versions of weights", f"{versions}, by device; {mib:.1f} MiB at most"])
    return rows


def _step_rows(run: Run) -> list[list[str]]:
    predicted, rows = run.plan.predicted.step_s, []
    said = f", predicted {predicted * 1e3:.2f} ms" if run.plan.mode == "sync" else ""
    rows.append(["step", f"{run.median_step_s * 1e3:.2f} ms{said}"])
    if run.period_s:
        rows.append(["step after step", f"{run.period_s * 1e3:.2f} ms without a barrier between"])
    if run.ideal_step_s:
        rows.append(["ideal step", f"{run.ideal_step_s * 1e3:.2f} ms for the measured stage times"])
    if run.device_peak_bytes:
        # Of the rank that took most.
        expected = run.plan.predicted.device_peak_bytes
        peak, planned = max(zip(run.device_peak_bytes, expected, strict=True))
        mib = f"{peak / 2**20:.1f} MiB, predicted {planned / 2**20:.1f} MiB"
        rows.append(["peak memory", mib])
    return rows


def _slug(model: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in model)
