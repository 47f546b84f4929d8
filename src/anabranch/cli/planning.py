"""The verbs that plan and predict: profile, plan, compare, check, simulate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.inputs import (
    Source,
    parse_counts,
    read_cluster,
    split_output,
    try_plan,
    usage,
    usage_errors,
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
    Model,
    Output,
    Planner,
    PlannerOptions,
    Preset,
    PresetOption,
    Schedule,
    ScheduleOption,
)
from anabranch.cli.output import print_json, print_table, progress_bar
from anabranch.errors import AnabranchError, BudgetError

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.planner.stages import Plan
    from anabranch.profile.profile import Profile


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
    _say_written(file)


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
    baselines: Annotated[
        bool, typer.Option(help="Also plan the sequential baselines, to compare with.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find stages, devices, micro-batches and a schedule for MODEL or a profile file.

    Example: `anabranch plan mmt --cluster summit:8x4 --batch-size 512 --device v100 -o plan.json`
    """
    from anabranch.files import plan_to_dict, save_plan
    from anabranch.solve import plan as search

    options, file = split_output(output)
    machines = read_cluster(cluster)
    source = Source(model, preset, options, granularity)
    costs = source.profile(device or machines.device, batch_size)
    found = usage(
        search,
        costs,
        machines,
        batch_size,
        planner=planner.value,
        microbatch_size=microbatch_size,
        schedule=schedule.value,
        max_replicas=max_replicas,
        planner_options=_planner_options(planner_option),
        model=model,
    )
    found = replace(found, options=source.recorded())
    if file is not None:
        save_plan(found, file)
    others: dict[str, Plan | str] = {}
    stopped = any("interrupted" in note for note in found.notes)
    if baselines and planner is Planner.graphpipe and not stopped:
        with suppress(KeyboardInterrupt):
            others = find_baselines(costs, machines, found, microbatch_size, schedule, max_replicas)
    if as_json:
        document = plan_to_dict(found)
        document["baselines"] = {
            name: _plan_or_error(name, other) for name, other in others.items()
        }
        document["gain"] = {
            name: other.predicted.step_s / found.predicted.step_s
            for name, other in others.items()
            if not isinstance(other, str)
        }
        print_json(document)
        return
    typer.echo(found.summary())
    typer.echo(
        f"found in {found.search_s:.3f} s of search, {found.simulate_s:.3f} s of simulation and "
        f"{found.improve_s:.3f} s of improvement"
    )
    for name, other in others.items():
        typer.echo(against(name, other, found))
    _say_written(file)


def compare(
    model: Model,
    cluster: ClusterName,
    batch_size: BatchSize,
    planner: Annotated[
        list[Planner] | None, typer.Option(help="Only this planner; repeatable [default: all].")
    ] = None,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    max_replicas: MaxReplicas = None,
    device: Device = None,
    output: Output = None,
    preset: PresetOption = Preset.published,
    granularity: GranularityOption = Granularity.layer,
    as_json: AsJson = False,
) -> None:
    """Every planner side by side on the same profile, judged by the same simulator.

    A planner that finds no plan has a row that says why. Ctrl-C ends the search of one planner with
    the best of what it has proposed.

    Example: `anabranch compare dlrm --cluster summit:4x4 --batch-size 1024`
    """
    from anabranch.solve import compare as search

    options, file = split_output(output)
    machines = read_cluster(cluster)
    source = Source(model, preset, options, granularity)
    costs = source.profile(device or machines.device, batch_size)
    chosen = [each.value for each in planner or Planner]
    found: dict[str, Plan | AnabranchError] = {}
    # An interrupt that meets a planner without any proposal ends the comparison, not the table.
    with progress_bar("planning") as progress, suppress(KeyboardInterrupt), usage_errors():
        progress(0, len(chosen))
        for name, each in search(
            costs,
            machines,
            batch_size,
            chosen,
            microbatch_size=microbatch_size,
            schedule=schedule.value,
            max_replicas=max_replicas,
            model=model,
        ):
            found[name] = each
            progress(len(found), len(chosen))
    document = {
        "model": model,
        "cluster": cluster,
        "batch_size": batch_size,
        "profile": costs.origin,
        "plans": [_plan_or_error(name, each) for name, each in found.items()],
    }
    if file is not None:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
        return
    title = f"{model} on {cluster}, batch {batch_size} ({costs.origin})"
    print_table(title, list(_COLUMNS), comparison(found))
    for name, each in found.items():
        if isinstance(each, AnabranchError):
            typer.echo(f"{name}: {each}")
        elif each.notes:
            typer.echo(f"{name}: {'; '.join(each.notes)}")
    if len(found) < len(chosen):
        typer.echo(f"interrupted before {', '.join(chosen[len(found) :])}")
    _say_written(file)


def check(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    model: Annotated[
        str | None, typer.Argument(help="The model or profile that it is for.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Where it shall run [default: the plan's cluster].")
    ] = None,
    device: Device = None,
    output: Output = None,
    preset: PresetOption = Preset.published,
    as_json: AsJson = False,
) -> None:
    """Is PLAN valid? Structure and schedule alone or, with MODEL, also conditions C1-C4 and memory.

    Exits with 1 if the plan has a problem.
    """
    from anabranch.files import load_plan
    from anabranch.solve import check_plan

    loaded = load_plan(plan_file)
    costs = machines = None
    if model is not None:
        options, _ = split_output(output)
        machines = read_cluster(cluster or loaded.cluster)
        source = Source(model, preset, options, Granularity(loaded.granularity))
        costs = source.profile(
            device or loaded.device or machines.device, loaded.stage_graph.batch_size
        )
    problems = check_plan(loaded, costs, machines)
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
    cluster: Annotated[str | None, typer.Option(help="Another cluster than the plan's.")] = None,
    schedule: Annotated[
        Schedule | None, typer.Option(help="Another schedule than the plan's.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    device: Device = None,
    output: Output = None,
    preset: PresetOption = Preset.published,
    as_json: AsJson = False,
) -> None:
    """Predict the timeline of one step of PLAN."""
    from anabranch.files import load_plan
    from anabranch.solve import simulate as predict

    loaded = load_plan(plan_file)
    batch_size = loaded.stage_graph.batch_size
    options, _ = split_output(output)
    machines = read_cluster(cluster or loaded.cluster)
    source = Source.of_plan(loaded)
    if model is not None:
        source = Source(model, preset, options, Granularity(loaded.granularity))
    costs = source.profile(device or loaded.device or machines.device, batch_size)
    timeline = predict(loaded, costs, machines, schedule=schedule.value if schedule else None)
    if trace is not None:
        from anabranch.report.chrome import trace as to_trace

        trace.write_text(json.dumps(to_trace(timeline, loaded.stage_graph)))
    if report is not None:
        from anabranch.report.html import page

        report.write_text(page(loaded, [("predicted", timeline)]), encoding="utf-8")
    if as_json:
        print_json(
            {
                "step_s": timeline.step_s,
                "bubble": timeline.bubble,
                "device_peak_bytes": [timeline.peak_bytes[d] for d in timeline.devices],
                "samples_per_s": batch_size / timeline.step_s,
                "profile": costs.origin,
                "trace": str(trace) if trace else None,
                "report": str(report) if report else None,
            }
        )
        return
    typer.echo(
        f"step {timeline.step_s * 1e3:.2f} ms, {batch_size / timeline.step_s:.4g} samples/s, "
        f"bubble {timeline.bubble:.1%}, peak {max(timeline.peak_bytes.values()) / 2**30:.3f} GiB "
        f"({costs.origin})"
    )
    _say_written(trace)
    _say_written(report)


VERBS: tuple[Callable[..., None], ...] = (profile, plan, compare, check, simulate)


def find_baselines(
    costs: Profile,
    cluster: Cluster,
    found: Plan,
    microbatch_size: int | None,
    schedule: Schedule,
    max_replicas: int | None,
) -> dict[str, Plan | str]:
    """The strongest sequential plan (as free as ours), and the straight one without replicas."""

    def sequential(most: int | None) -> Plan | str:
        return try_plan(
            costs,
            cluster,
            found.stage_graph.batch_size,
            planner="sequential",
            microbatch_size=microbatch_size,
            schedule=schedule.value,
            max_replicas=most,
            model=found.model,
        )

    return {"sequential": sequential(max_replicas), "straight sequential": sequential(1)}


def against(name: str, other: Plan | str, ours: Plan) -> str:
    """One line that compares a baseline with our plan."""
    if isinstance(other, str):
        return f"against {name}: none, {other}"
    gain = other.predicted.step_s / ours.predicted.step_s
    return (
        f"against {name} ({other.predicted.step_s * 1e3:.2f} ms, depth {other.stage_graph.depth}, "
        f"micro-batch {other.stage_graph.stages[0].microbatch_size}, {other.schedule}): {gain:.2f}x"
    )


def _planner_options(values: list[str] | None) -> dict[str, object]:
    """``name=value`` pairs; true, false, none and numbers are what they look like."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    options: dict[str, object] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--planner-option {text}: write NAME=VALUE")
        options[name.replace("-", "_")] = words.get(value.lower(), _number(value))
    return options


def _number(text: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


_COLUMNS = (
    "planner",
    "step ms",
    "over best",
    "samples/s",
    "us/sample",
    "bubble",
    "depth",
    "micro-batch",
    "peak GiB",
    "schedule",
    "search s",
)


def comparison(found: Mapping[str, Plan | AnabranchError]) -> list[list[str]]:
    """One row per planner, in the order of ``_COLUMNS``; where there is no plan, why."""
    plans = [each for each in found.values() if not isinstance(each, AnabranchError)]
    fastest = min((each.predicted.step_s for each in plans), default=0.0)
    return [_compare_row(name, each, fastest) for name, each in found.items()]


def _compare_row(name: str, found: Plan | AnabranchError, fastest: float) -> list[str]:
    if isinstance(found, AnabranchError):
        why = "over budget" if isinstance(found, BudgetError) else "no plan"
        return [name, why, *["-"] * (len(_COLUMNS) - 2)]
    p = found.predicted
    sizes = sorted({stage.microbatch_size for stage in found.stage_graph.stages})
    return [
        name,
        f"{p.step_s * 1e3:.2f}",
        f"{p.step_s / fastest:.2f}",
        f"{found.stage_graph.batch_size / p.step_s:.1f}",
        f"{p.bottleneck_s_per_sample * 1e6:.1f}",
        f"{p.bubble:.1%}",
        str(found.stage_graph.depth),
        ",".join(map(str, sizes)),
        f"{max(p.device_peak_bytes) / 2**30:.2f}",
        found.schedule,
        f"{found.search_s:.3f}",
    ]


def _plan_or_error(name: str, found: Plan | AnabranchError | str) -> dict[str, Any]:
    from anabranch.files import plan_to_dict

    if isinstance(found, AnabranchError):
        return {"planner": name, "error": str(found), "kind": type(found).__name__}
    return {"planner": name, "error": found} if isinstance(found, str) else plan_to_dict(found)


def _say_written(path: Path | None) -> None:
    if path is not None:
        typer.echo(f"written to {path}")
