"""The verb compare: every planner on the same profile, as a table that fits a terminal.

The figures of a plan fit 80 columns if headings have two lines. What does not fit a column (micro-
batches, schedule, notes, why there is no plan) is a line per planner below the table; what holds
for all plans is said once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.inputs import Source, note, options_by_planner, read_cluster, split_output, usage
from anabranch.cli.options import (
    AsJson,
    BatchSize,
    ClusterName,
    Device,
    Granularity,
    GranularityOption,
    ManyPlannerOptions,
    ManyPolicies,
    MaxReplicas,
    MicrobatchSize,
    Mode,
    Model,
    ModeOption,
    OptimizerOption,
    Output,
    Planner,
    Preset,
    PresetOption,
    Schedule,
    ScheduleOption,
)
from anabranch.cli.output import print_json, print_table, progress_of, say, say_written
from anabranch.errors import AnabranchError, BudgetError, InfeasiblePlanError, SearchStoppedError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan

Found = Mapping[str, "Plan | AnabranchError"]
"""{planner: its plan, or why there is none}"""


def compare(
    model: Model,
    cluster: ClusterName,
    batch_size: BatchSize,
    planner: Annotated[
        list[Planner] | None,
        typer.Option(
            help="Only this planner; repeatable [default: all, exhaustive only if the model is "
            "small enough for it]."
        ),
    ] = None,
    microbatch_size: MicrobatchSize = None,
    schedule: ScheduleOption = Schedule.auto,
    max_replicas: MaxReplicas = None,
    planner_option: ManyPlannerOptions = None,
    device: Device = None,
    output: Output = None,
    preset: PresetOption = Preset.published,
    granularity: GranularityOption = Granularity.layer,
    mode: ModeOption = Mode.sync,
    policy: ManyPolicies = None,
    optimizer: OptimizerOption = None,
    as_json: AsJson = False,
) -> None:
    """Every planner side by side on the same profile, judged by the same simulator.

    With --mode async the weight policies side by side: time per mini-batch of the full pipeline,
    memory, versions, and how old the weights are that are read; for the best plan of planner
    graphpipe, or of every --planner that is named.

    A planner that finds no plan has a row and a line that says why; exits with 1 if none has a
    plan. Ctrl-C ends the search of the planner under way, with the best plan it has so far or a
    row that says "stopped"; the others follow, and Ctrl-C ends each of those in turn.

    "slowest stage" is what the slowest stage computes in one step; a step cannot be shorter.
    "total" is the planner's search plus simulating its proposals and improving the best of them.

    Examples:

    - `anabranch compare dlrm --cluster summit:4x4 --batch-size 1024 --planner graphpipe --planner
      piper --planner sequential`
    - `anabranch compare graph.txt -o samples=32 --cluster dapple-c:16 --batch-size 2048`: a profile
      in the format of PipeDream, Piper or DAPPLE, measured with mini-batches of 32 samples
    - `anabranch compare mmt --cluster summit:8x4 --batch-size 512 --planner-option
      graphpipe.kfkb=true --planner-option recompute=false -o compare.json`
    - `anabranch compare mmt --cluster summit:2x4 --batch-size 8 --mode async --planner graphpipe
      --planner pipedream --policy stash --policy pipeoptim`
    """
    from anabranch.solve import comparable, options_of
    from anabranch.solve import compare as search

    options, file = split_output(output)
    machines = read_cluster(cluster)
    source = Source(model, preset, options, granularity)
    chosen = list(dict.fromkeys(each.value for each in planner or ()))
    if mode is not Mode.sync:
        from anabranch.cli.comparing_async import compare_policies

        costs, facts = source.profile_and_optimizer(
            device or machines.device, batch_size, optimizer
        )
        compare_policies(
            costs,
            machines,
            batch_size,
            chosen or ["graphpipe"],
            list(dict.fromkeys(each.value for each in policy or ())),
            title=f"{_short(model)} on {_short(cluster)}, mini-batches of {batch_size}",
            head={"model": model, "cluster": cluster, "batch_size": batch_size},
            planner_option=planner_option,
            microbatch_size=microbatch_size,
            schedule=schedule.value,
            max_replicas=max_replicas,
            optimizer=facts,
            model=model,
            file=file,
            as_json=as_json,
        )
        return
    if policy:
        raise typer.BadParameter("--policy is for --mode async; without it weights have no policy")
    if optimizer is not None:
        raise typer.BadParameter("--optimizer is for --mode async")
    costs = source.profile(device or machines.device, batch_size)
    chosen = chosen or comparable(costs, machines)
    results = usage(
        search,
        costs,
        machines,
        batch_size,
        chosen,
        planner_options=options_by_planner(
            planner_option, chosen, {name: options_of(name) for name in chosen}
        ),
        microbatch_size=microbatch_size,
        schedule=schedule.value,
        max_replicas=max_replicas,
        model=model,
    )
    found: dict[str, Plan | AnabranchError] = {}
    # An interrupt between two searches ends the comparison, not the table.
    with progress_of("planning") as progress, suppress(KeyboardInterrupt):
        for i, following in enumerate(chosen):
            progress(i, len(chosen), f"planner {following}; Ctrl-C ends its search")
            name, found[following] = usage(next, results)
            if interrupted(found[name]):
                note(f"{name} interrupted")
    missing = why_none(found)
    document = {
        "model": model,
        "cluster": cluster,
        "batch_size": batch_size,
        "profile": costs.origin,
        "plans": [plan_or_error(name, each) for name, each in found.items()],
    }
    if missing is not None:
        document |= {"error": type(missing).__name__, "message": str(missing)}
    if file is not None:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        print_table(f"{_short(model)} on {_short(cluster)}, batch {batch_size}", *comparison(found))
        for line in remarks(found, costs.origin):
            say(line)
        if len(found) < len(chosen):
            typer.echo(f"interrupted before {', '.join(chosen[len(found) :])}")
        say_written(file)
    if missing is not None:
        # Not raised: standard output has its document already.
        typer.secho(f"{type(missing).__name__}: {missing}", err=True, fg="red")
        raise typer.Exit(1)


def comparison(found: Found) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row per planner."""
    plans = [each for each in found.values() if not isinstance(each, AnabranchError)]
    fastest = min((each.figures.step_s for each in plans), default=0.0)
    peak = max((max(each.figures.device_peak_bytes) for each in plans), default=0)
    unit, size = ("GiB", 2**30) if peak > 2**29 else ("MiB", 2**20)
    headings = ["planner", "step\nms", "over\nbest", "samples\nper s", "slowest\nstage ms", "depth"]
    headings += ["bubble", f"peak\n{unit}", "search\ns", "total\ns"]
    rows = [
        [name, _LABELS.get(type(each), "no plan"), *["-"] * (len(headings) - 2)]
        if isinstance(each, AnabranchError)
        else [name, *_figures(each, fastest, size)]
        for name, each in found.items()
    ]
    return headings, rows


_LABELS = {BudgetError: "too big", SearchStoppedError: "stopped"}


def _figures(plan: Plan, fastest: float, unit: int) -> list[str]:
    p, batch_size = plan.figures, plan.stage_graph.batch_size
    over = ratio(p.step_s, fastest)
    return [
        digits(p.step_s * 1e3),
        "-" if over is None else digits(over),
        digits(batch_size / p.step_s) if p.step_s else "-",
        digits(p.bottleneck_s_per_sample * batch_size * 1e3),
        str(plan.stage_graph.depth),
        f"{p.bubble:.1%}",
        digits(max(p.device_peak_bytes) / unit),
        *(
            f"{seconds:.{3 if seconds < 10 else 1}f}"
            for seconds in (plan.search_s, plan.search_s + plan.simulate_s + plan.improve_s)
        ),
    ]


def remarks(found: Found, costs: str) -> list[str]:
    """The lines below the table: what holds for all, then how each planner's plan runs.

    Args:
        found: {planner: its plan, or why there is none}.
        costs: the origin of the costs.
    """
    plans = [each for each in found.values() if not isinstance(each, AnabranchError)]
    common = (
        [text for text in plans[0].notes if all(text in p.notes for p in plans)] if plans else []
    )
    # The origin says it in other words.
    said = [text for text in common if not ("proportional" in text and "proportional" in costs)]
    lines = [f"costs: {costs}", *said]
    for name, each in found.items():
        if isinstance(each, AnabranchError):
            lines.append(f"{name}: {each}")
        else:
            own = [text for text in each.notes if text not in common]
            lines.append(f"{name}: {'; '.join([_shape(each), *own])}")
    return lines


def _shape(plan: Plan) -> str:
    """Stages, micro-batches and what else a plan uses."""
    stages = plan.stage_graph.stages
    parts = [f"{len(stages)} stage{'s' * (len(stages) > 1)}"]
    for what, values in (
        ("micro-batch", sorted({stage.microbatch_size for stage in stages})),
        ("k", sorted({stage.k for stage in stages})),
        ("tensor", sorted({stage.tensor for stage in stages})),
    ):
        if what == "micro-batch" or values != [1]:
            parts.append(f"{what} {','.join(map(str, values))}")
    recomputing = sum(stage.recompute for stage in stages)
    if recomputing:
        parts.append("recompute" if recomputing == len(stages) else f"{recomputing} recompute")
    return ", ".join([*parts, plan.schedule])


def plan_or_error(name: str, found: Plan | AnabranchError | str) -> dict[str, Any]:
    """A plan's document, or that of the reason why there is none."""
    from anabranch.files import plan_to_dict

    if isinstance(found, AnabranchError):
        return {"planner": name, "error": str(found), "kind": type(found).__name__}
    return {"planner": name, "error": found} if isinstance(found, str) else plan_to_dict(found)


def ratio(step_s: float, ours_s: float) -> float | None:
    """How many times as long a step is as ours; None where ours takes no time."""
    return step_s / ours_s if ours_s else None


def digits(value: float) -> str:
    """At most six characters up to a million, and at least three digits."""
    if value and value < 0.1:
        return f"{value:.1e}" if value < 0.001 else f"{value:.3f}"
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _short(text: str) -> str:
    """A file by its name alone: paths would not fit a line."""
    return Path(text).name if Path(text).is_file() else text


def interrupted(found: Plan | AnabranchError) -> bool:
    """Whether a search was ended before it came to its end."""
    if isinstance(found, AnabranchError):
        return isinstance(found, SearchStoppedError)
    return any("interrupted" in text for text in found.notes)


def why_none(found: Mapping[Any, Plan | AnabranchError]) -> AnabranchError | None:
    """What to say where no planner has a plan."""
    if not all(isinstance(each, AnabranchError) for each in found.values()):
        return None
    if len(found) == 1:
        return next(each for each in found.values() if isinstance(each, AnabranchError))
    if any(isinstance(each, SearchStoppedError) for each in found.values()) or not found:
        return SearchStoppedError("interrupted before any planner had a plan")
    reasons = [each for each in found.values() if isinstance(each, InfeasiblePlanError)]
    # The lines above have them all; the plainest one says enough.
    why = min(map(str, reasons), key=len) if reasons else "every search would take too long"
    return InfeasiblePlanError(f"no planner compared has a plan: {why}")
