"""The verbs that plan and predict: profile, plan, check, simulate; ``comparing`` has compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.comparing import compare, plan_or_error, ratio
from anabranch.cli.comparing_async import ages, staleness_of
from anabranch.cli.inputs import (
    Source,
    cluster_of,
    note,
    parse_counts,
    planner_options,
    read_cluster,
    split_output,
    try_plan,
    usage,
)
from anabranch.cli.options import (
    AsJson,
    BatchSize,
    ClusterName,
    Device,
    Granularity,
    GranularityOption,
    MaxReplicas,
    MicrobatchSize,
    Mode,
    Model,
    ModeOption,
    Optimizer,
    OptimizerOption,
    Output,
    Planner,
    PlannerOptions,
    PlansCluster,
    PlansPreset,
    PolicyOption,
    Preset,
    PresetOption,
    Schedule,
    ScheduleOption,
)
from anabranch.cli.output import print_json, print_table, say_written
from anabranch.errors import SearchStoppedError

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.solve_async import Simulated
    from anabranch.timeline import Timeline
    from anabranch.weights import OptimizerFacts


def profile(
    model: Model,
    device: Device = "cpu",
    samples: Annotated[
        str | None,
        typer.Option(
            help="Sample counts, such as 1,2,4 [default: powers of two up to --batch-size]."
        ),
    ] = None,
    batch_size: BatchSize = 32,
    output: Output = None,
    preset: PresetOption = Preset.published,
    granularity: GranularityOption = Granularity.layer,
    as_json: AsJson = False,
) -> None:
    """Measure the operators of MODEL here, or estimate them for another device.

    Example: `anabranch profile mmt --device v100 --batch-size 512 -o mmt-v100.json`
    """
    options, file = split_output(output)
    source = Source(model, preset, options, granularity)
    result = source.profile(device or "cpu", batch_size, parse_counts(samples) if samples else None)
    if file is not None:
        from anabranch.files import save_profile

        save_profile(result, file)
    forward = sum(cost.forward_s[-1] for cost in result.costs)
    backward = sum(cost.backward_s[-1] for cost in result.costs)
    parameter_bytes = sum(result.graph.parameter_bytes.values())
    if as_json:
        print_json(
            {
                "model": model,
                "operators": len(result.graph),
                "samples": list(result.samples),
                "forward_s": forward,
                "backward_s": backward,
                "parameter_bytes": parameter_bytes,
                "source": result.source,
                "device": result.device,
                "file": str(file) if file else None,
            }
        )
        return
    rows = [
        [
            op.name,
            op.kind,
            f"{cost.forward_s[-1] * 1e3:.3f}",
            f"{cost.backward_s[-1] * 1e3:.3f}",
            f"{cost.kept_bytes / 1024:.1f}",
        ]
        for op, cost in zip(result.graph.ops, result.costs, strict=True)
    ]
    columns = ["operator", "kind", "forward ms", "backward ms", "kept KiB/sample"]
    print_table(f"{model}: {result.origin}", columns, rows)
    typer.echo(
        f"{len(rows)} operators, {parameter_bytes / 2**20:.1f} MiB of parameters; "
        f"with {result.samples[-1]} samples forward {forward * 1e3:.2f} ms, "
        f"backward {backward * 1e3:.2f} ms"
    )
    say_written(file)


def plan(
    model: Model,
    cluster: ClusterName,
    batch_size: BatchSize,
    planner: Annotated[Planner, typer.Option(help="How to search.")] = Planner.graphpipe,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    max_replicas: MaxReplicas = None,
    planner_option: PlannerOptions = None,
    device: Device = None,
    output: Output = None,
    preset: PresetOption = Preset.published,
    granularity: GranularityOption = Granularity.layer,
    mode: ModeOption = Mode.sync,
    policy: PolicyOption = None,
    optimizer: OptimizerOption = None,
    baselines: Annotated[
        bool, typer.Option(help="Also plan the sequential baselines, to compare with.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find stages, devices, micro-batches and a schedule for MODEL or a profile file.

    With --mode async for training without a flush: the plan with the least time per mini-batch,
    with the memory of all weight versions that the policy holds. Ctrl-C ends the search with the
    best plan so far.

    Examples:

    - `anabranch plan mmt --cluster summit:8x4 --batch-size 512 -o plan.json` and then
      `anabranch simulate plan.json --report page.html`
    - `anabranch plan graph.txt -o samples=32 --cluster dapple-c:16 --batch-size 2048`: a profile in
      the format of PipeDream, Piper or DAPPLE, measured with mini-batches of 32 samples
    - `anabranch plan mmt.json --cluster mine.json --batch-size 512 --planner piper
      --planner-option recompute=false`
    - `anabranch plan mmt --cluster summit:2x4 --batch-size 8 --mode async --policy pipeoptim`
    """
    from anabranch.files import plan_to_dict, save_plan
    from anabranch.solve import plan as search

    options, file = split_output(output)
    machines = read_cluster(cluster)
    source = Source(model, preset, options, granularity)
    costs, facts = _asked(source, device or machines.device, batch_size, mode, optimizer)
    try:
        found = usage(
            search,
            costs,
            machines,
            batch_size,
            planner=planner.value,
            microbatch_size=microbatch_size,
            schedule=schedule.value,
            max_replicas=max_replicas,
            planner_options=planner_options(planner_option),
            model=model,
            mode=mode.value,
            policy=policy.value if policy else "",
            optimizer=facts,
        )
    except KeyboardInterrupt:
        raise SearchStoppedError(
            f"interrupted before planner {planner.value} had proposed a plan; with a later Ctrl-C "
            "there is one, and with --planner sequential or data-parallel at once"
        ) from None
    found = replace(found, options=source.recorded())
    if file is not None:
        save_plan(found, file)
    others: dict[str, Plan | str] = {}
    if baselines and planner is Planner.graphpipe:
        if any("interrupted" in each for each in found.notes):
            note(
                "interrupted; planning the baselines to compare with: Ctrl-C again leaves them out"
            )
        with suppress(KeyboardInterrupt):
            others.update(
                find_baselines(
                    costs, machines, found, microbatch_size, schedule, max_replicas, facts
                )
            )
    if as_json:
        document = plan_to_dict(found)
        document["baselines"] = {name: plan_or_error(name, other) for name, other in others.items()}
        document["gain"] = {
            name: ratio(other.figures.step_s, found.figures.step_s)
            for name, other in others.items()
            if not isinstance(other, str)
        }
        print_json(document | _ages_document(found, facts))
        return
    typer.echo(found.summary())
    if found.mode == "async":
        print_table(*ages(found.policy, staleness_of(found, facts)))
    typer.echo(
        f"found in {found.search_s:.3f} s of search, {found.simulate_s:.3f} s of simulation and "
        f"{found.improve_s:.3f} s of improvement"
    )
    for name, other in others.items():
        typer.echo(against(name, other, found))
    if better := _faster(others, found):
        typer.echo(better)
    say_written(file)


def _asked(
    source: Source, device: str, batch_size: int, mode: Mode, optimizer: Optimizer | None
) -> tuple[Profile, OptimizerFacts | None]:
    """The profile and, without a flush, what is known of the optimizer."""
    if mode is not Mode.sync:
        return source.profile_and_optimizer(device, batch_size, optimizer)
    if optimizer is not None:
        raise typer.BadParameter("--optimizer is for --mode async")
    return source.profile(device, batch_size), None


def _ages_document(plan: Plan, optimizer: OptimizerFacts | None) -> dict[str, Any]:
    """What an asynchronous plan's document says beyond the plan."""
    if plan.mode == "sync":
        return {}
    return {
        "optimizer": optimizer.name if optimizer is not None else None,
        "staleness": [asdict(each) for each in staleness_of(plan, optimizer)],
    }


def check(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    model: Annotated[
        str | None, typer.Argument(help="The model or profile that it is for.")
    ] = None,
    cluster: PlansCluster = None,
    device: Device = None,
    output: Output = None,
    preset: PlansPreset = None,
    optimizer: OptimizerOption = None,
    as_json: AsJson = False,
) -> None:
    """Is PLAN valid? Structure and schedule alone or, with MODEL, also conditions C1-C4 and memory.

    Exits with 1 if the plan has a problem.
    """
    from anabranch.files import load_plan
    from anabranch.solve import check_plan
    from anabranch.weights import OPTIMIZERS

    loaded = load_plan(plan_file)
    costs = machines = None
    facts = OPTIMIZERS[optimizer.value] if optimizer is not None else None
    if model is not None:
        options, _ = split_output(output)
        machines = cluster_of(loaded, plan_file, cluster)
        source = Source.of_plan(loaded, model, preset, options)
        costs, facts = _asked(
            source,
            device or loaded.device or machines.device,
            loaded.stage_graph.batch_size,
            Mode(loaded.mode),
            optimizer,
        )
    problems = check_plan(loaded, costs, machines, optimizer=facts)
    if as_json:
        print_json({"valid": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"{plan_file} is valid")
    if problems:
        raise typer.Exit(1)


def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    model: Annotated[
        str | None,
        typer.Argument(help="The model or profile that it is for [default: the plan's]."),
    ] = None,
    cluster: PlansCluster = None,
    schedule: Annotated[
        Schedule | None, typer.Option(help="Another schedule than the plan's.")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Another mode than the plan's.")
    ] = None,
    policy: PolicyOption = None,
    optimizer: OptimizerOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    device: Device = None,
    output: Output = None,
    preset: PlansPreset = None,
    as_json: AsJson = False,
) -> None:
    """Predict the timeline of one step of PLAN.

    Without a flush, with --mode async or for an asynchronous plan: the time per mini-batch of the
    full pipeline, and the timeline of some mini-batches from an empty pipeline to an empty one.
    """
    from anabranch.files import load_plan
    from anabranch.solve import simulate as predict
    from anabranch.solve_async import check_mode, synchronous
    from anabranch.solve_async import simulate as predict_async

    loaded = load_plan(plan_file)
    batch_size = loaded.stage_graph.batch_size
    options, _ = split_output(output)
    machines = cluster_of(loaded, plan_file, cluster)
    source = Source.of_plan(loaded, model, preset, options)
    chosen = mode.value if mode else loaded.mode
    usage(
        check_mode, chosen, policy.value if policy else "", schedule.value if schedule else "auto"
    )
    device = device or loaded.device or machines.device
    costs, facts = _asked(source, device, batch_size, Mode(chosen), optimizer)
    if chosen == "async":
        found = predict_async(
            loaded, costs, machines, policy=policy.value if policy else "", optimizer=facts
        )
        shown, timeline, graph = found.plan, found.timeline, found.graph
        what = f"predicted, {graph.batch_size // batch_size} mini-batches"
    else:
        shown = replace(synchronous(loaded), profile=costs.origin)
        other = schedule.value if schedule else None
        timeline = predict(shown, costs, machines, schedule=other)
        found, graph, what = None, shown.stage_graph, "predicted"
    if trace is not None:
        from anabranch.report.chrome import trace as to_trace

        trace.write_text(json.dumps(to_trace(timeline, graph)))
    if report is not None:
        from anabranch.report.html import page

        text = page(shown, [(what, timeline)], graphs=[graph])
        report.write_text(text, encoding="utf-8")
    _say_simulated(shown, timeline, found, as_json=as_json, trace=trace, report=report)


def _say_simulated(
    plan: Plan,
    timeline: Timeline,
    found: Simulated | None,
    *,
    as_json: bool,
    trace: Path | None,
    report: Path | None,
) -> None:
    """The figures of a simulated step or, where there is no flush, of the full pipeline."""
    from anabranch.plans.plan import headline

    batch_size = plan.stage_graph.batch_size
    step_s, bubble, peaks = timeline.step_s, timeline.bubble, [*timeline.peak_bytes.values()]
    more: dict[str, Any] = {}
    if found is not None:
        steady = found.steady
        step_s, bubble, peaks = steady.period_s, steady.bubble, [*steady.device_peak_bytes]
        more = {
            "mode": plan.mode,
            "policy": plan.policy,
            "periodic": steady.periodic,
            "staleness": [asdict(each) for each in found.staleness],
            "timeline_batches": found.graph.batch_size // batch_size,
            "timeline_s": timeline.step_s,
        }
    if as_json:
        print_json(
            {
                "step_s": step_s,
                "bubble": bubble,
                "device_peak_bytes": peaks,
                "samples_per_s": batch_size / step_s if step_s else 0.0,
                "profile": plan.profile,
                **more,
                "trace": str(trace) if trace else None,
                "report": str(report) if report else None,
            }
        )
        return
    typer.echo(headline(step_s, bubble, max(peaks), batch_size, plan.mode))
    typer.echo(f"costs: {plan.profile}")
    if found is not None:
        print_table(*ages(plan.policy, found.staleness))
    say_written(trace)
    say_written(report)


VERBS: tuple[Callable[..., None], ...] = (profile, plan, compare, check, simulate)


def find_baselines(
    costs: Profile,
    cluster: Cluster,
    found: Plan,
    microbatch_size: int | None,
    schedule: Schedule,
    max_replicas: int | None,
    optimizer: OptimizerFacts | None = None,
) -> Iterator[tuple[str, Plan | str]]:
    """The best sequential plan of the search (as free as ours), and the straight one without
    replicas; neither is improved afterwards, which takes longer than to find it.
    """
    for name, most in (("sequential", max_replicas), ("straight sequential", 1)):
        yield (
            name,
            try_plan(
                costs,
                cluster,
                found.stage_graph.batch_size,
                planner="sequential",
                microbatch_size=microbatch_size,
                schedule=schedule.value,
                max_replicas=most,
                model=found.model,
                improve=False,
                mode=found.mode,
                policy=found.policy,
                optimizer=optimizer,
            ),
        )


def against(name: str, other: Plan | str, ours: Plan) -> str:
    """One line that compares a baseline with our plan."""
    if isinstance(other, str):
        return f"against {name}: none, {other}"
    step_s, graph = other.figures.step_s, other.stage_graph
    gain = ratio(step_s, ours.figures.step_s)
    return (
        f"against {name} ({step_s * 1e3:.2f} ms, depth {graph.depth}, "
        f"micro-batch {graph.stages[0].microbatch_size}, {other.schedule}): "
        f"{'our plan takes no time' if gain is None else f'{gain:.2f}x'}"
    )


_ASKED_WITH = {
    "sequential": "--planner sequential",
    "straight sequential": "--planner sequential --max-replicas 1",
}


def _faster(others: Mapping[str, Plan | str], ours: Plan) -> str:
    """A line on the best baseline, if that is better than our plan."""
    steps = {n: o.figures.step_s for n, o in others.items() if not isinstance(o, str)}
    name = min(steps, key=lambda each: steps[each], default="")
    if not name or steps[name] >= ours.figures.step_s * (1 - 1e-9):
        return ""
    if ours.mode == "async":
        best = others[name]
        assert not isinstance(best, str)
        return (
            f"the {name} pipeline is faster than this plan, at depth {best.stage_graph.depth} "
            f"instead of {ours.stage_graph.depth}, which decides how stale weights are: "
            f"{_ASKED_WITH[name]} plans it"
        )
    return (
        f"the {name} pipeline is faster than this plan: {_ASKED_WITH[name]} plans it, or let the "
        "search of this planner come to its end"
    )
