"""The verb ``compare``: every planner, or every weight policy, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import comparison, output, settings
from anabranch.cli.clusters import cluster_to_plan_for
from anabranch.cli.parsing import options_by_planner, usage
from anabranch.cli.progress import progress_bar
from anabranch.cli.rewriting import required_rewrites
from anabranch.cli.spread import spread
from anabranch.errors import AnabranchError, SearchStoppedError
from anabranch.plans.baselines import BASELINES
from anabranch.plans.plan import Plan

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.stages import StageGraph
    from anabranch.profile.profile import Profile
    from anabranch.report.timeline_layout import ShownTimeline
    from anabranch.weights import OptimizerFacts


@spread
def compare(
    model: settings.EstimatedModelSettings,
    planning: settings.PlanningSettings,
    planner: settings.PlannerNames | None = None,
    planner_option: Annotated[
        list[str] | None, typer.Option(metavar="[PLANNER.]NAME=VALUE")
    ] = None,
    shape: settings.Shape | None = None,
    rewrite: Annotated[str | None, typer.Option(metavar="none|NAME[,NAME]")] = None,
    policy: settings.PolicyNames | None = None,
    report: Annotated[Path | None, typer.Option(callback=output.file_to_write)] = None,
) -> None:
    """Compare all planners on one profile, by one simulator.

    With --mode async the weight policies side by side: time per mini-batch of the full pipeline,
    memory, versions, and how old the weights are that are read; for the best plan of planner
    auto, or of every --planner that is named.

    A planner that finds no plan has a row and a line that says why; exits with 1 if none has a
    plan. Ctrl-C ends the search of the planner under way, with the best plan it has so far or a row
    that says "stopped"; the others follow. A second Ctrl-C ends the comparison with what there is.

    "slowest stage" is what the slowest stage computes in one step; a step cannot be shorter.
    "total" is the planner's search plus simulating its proposals and improving the best of them.

    Examples:

    - `anabranch compare dlrm --cluster summit:4x4 --batch-size 1024 --planner graphpipe --planner
      piper --planner sequential`
    - `anabranch compare graph.txt -o samples=32 --cluster dapple-c:16 --batch-size 2048`: a profile
      in the format of PipeDream, Piper or DAPPLE, measured with mini-batches of 32 samples
    - `anabranch compare mmt --cluster summit:2x4 --batch-size 8 --mode async --planner graphpipe
      --planner pipedream --policy stash --policy pipeoptim`

    Args:
        planner: Only this planner; repeatable [default: all, exhaustive only if the model is small
            enough for it].
        planner_option: An option of one planner (piper.recompute=false) or of every planner
            compared that has it (recompute=false); repeatable.
        policy: With --mode async: only this policy; repeatable [default: all].
        report: Write a self-contained HTML page with all figures, and the stages and timelines of
            the best plans.
    """
    from anabranch import solve
    from anabranch.weights import POLICIES

    is_async = planning.mode == "async"
    if policy and not is_async:
        raise typer.BadParameter("--policy is for --mode async; without it weights have no policy")
    cluster = cluster_to_plan_for(planning.cluster, calibrated=not planning.no_calibration)
    source = model.source
    named = required_rewrites(rewrite or "none", source, planning.mode)
    source = replace(source, rewrites=named)
    costs, optimizer = source.profile_and_optimizer(
        planning.device or cluster.device, planning.batch_size, planning.mode, planning.optimizer
    )
    planners = list(dict.fromkeys(planner or ()))
    planners = planners or (["auto"] if is_async else solve.comparable(costs, cluster))
    known = {name: solve.options_of(name) for name in planners}
    if shape is not None:
        planner_option = [*(planner_option or ()), f"auto.shape={shape}"]
    options = {
        **planning.search,
        "planner_options": options_by_planner(planner_option, planners, known),
        "model": model.model,
    }
    where = costs, cluster, planning.batch_size
    results: Iterator[tuple[Any, ...]]
    if is_async:
        usage(solve.check_mode, "async", "", options.pop("schedule"))
        for option in ("shard-optimizer", "sparse-embeddings"):
            if options.pop(option.replace("-", "_")):
                raise typer.BadParameter(f"--{option} is for --mode sync; leave it out")
        policies = list(dict.fromkeys(policy or POLICIES))
        results = usage(
            solve.compare_policies, *where, planners, policies, optimizer=optimizer, **options
        )
        contenders = [comparison.Contender(n, policy) for n in planners for policy in policies]
    else:
        results = usage(solve.compare, *where, planners, **options)
        contenders = [comparison.Contender(name) for name in planners]
    plans = _search(contenders, results)

    error = comparison.why_none(plans)
    best = None if error is not None else comparison.taken(plans, costs, cluster, optimizer)
    document = {
        "model": model.model,
        "cluster": planning.cluster,
        "batch_size": planning.batch_size,
        "profile": costs.origin,
        **source.facts,
        "plans": [
            ({"policy": contender.policy} if is_async else {})
            | comparison.plan_or_error(contender.planner, plan)
            | comparison.staleness_document(plan, optimizer)
            for contender, plan in plans.items()
        ],
    }
    if is_async:
        document |= {"mode": "async", "optimizer": optimizer.name if optimizer else None}
        document |= {"auto_policy": best.policy} if best is not None else {}
    if error is not None:
        document |= {"error": type(error).__name__, "message": str(error)}
    if model.file is not None:
        from anabranch.files.jsonfile import write_text

        write_text(model.file, output.json_text(document))
    if report is not None and best is not None:
        _write_page(report, plans, costs, cluster, optimizer, best)
    output.print_json(document)
    batches = "mini-batches of" if is_async else "batch"
    title = f"{_short(model.model)} on {_short(planning.cluster)}, {batches}"
    output.print_table(f"{title} {planning.batch_size}", *comparison.side_by_side(plans, optimizer))
    for line in (
        *(best.lines() if best is not None else ()),
        *comparison.remarks(plans, costs.origin),
    ):
        output.say(line)
    can_rewrite = rewrite is None and not (is_async or source.is_file)
    can_rewrite &= not costs.graph.whole_parameters
    if can_rewrite and (names := ",".join(costs.graph.rewritable)):
        output.say(
            f"the model as it is written; plan tries {names} too, and --rewrite {names} compares it"
        )
    if left := contenders[len(plans) :]:
        output.say(f"interrupted before {', '.join(contender.name for contender in left)}")
    output.say_written(model.file)
    output.say_written(report if error is None else None)
    if error is not None:
        # Not raised: standard output has its document already.
        output.say_error(f"{type(error).__name__}: {error}")
        raise typer.Exit(output.exit_code(error))


def _search(
    contenders: list[comparison.Contender], results: Iterator[tuple[Any, ...]]
) -> dict[comparison.Contender, Plan | AnabranchError]:
    """Plan for every contender, until a second Ctrl-C or one between two searches."""
    plans: dict[comparison.Contender, Plan | AnabranchError] = {}
    ended = 0
    with progress_bar("planning") as progress, suppress(KeyboardInterrupt):
        for i, contender in enumerate(contenders):
            progress(i, len(contenders), f"planner {contender.name}; Ctrl-C ends its search")
            plans[contender] = plan = usage(next, results)[-1]
            if isinstance(plan, SearchStoppedError) or (
                isinstance(plan, Plan) and plan.interrupted
            ):
                ended += 1
                if ended == 2:
                    output.note(f"{contender.name} interrupted, and the comparison with it")
                    break
                output.note(f"{contender.name} interrupted; Ctrl-C again ends the comparison")
    return plans


def _write_page(
    file: Path,
    results: comparison.Results,
    costs: Profile,
    cluster: Cluster,
    optimizer: OptimizerFacts | None,
    best: comparison.BestPlan,
) -> None:
    """Write the page of the best plan, beside the others: stages and timelines of three plans."""
    from anabranch import solve
    from anabranch.files.jsonfile import write_text
    from anabranch.record import shown_timeline
    from anabranch.report.html import ReportTable, page

    plans = comparison.plans_among(results)
    first = best.contender
    others = [c for c in sorted(plans, key=lambda c: plans[c].figures.step_s) if c != first]
    headings, rows = comparison.side_by_side(results, optimizer)
    table = ReportTable("Plans side by side", [" ".join(text.split()) for text in headings], rows)
    has_planner = comparison.names_planner(results)
    drawn: dict[StageGraph, ShownTimeline] = {}
    for contender in (first, *others):
        plan, graph = plans[contender], plans[contender].stage_graph
        if graph in drawn or len(drawn) == 3:
            continue
        title = contender.name if has_planner else contender.policy
        if plan.mode == "sync":
            shown = solve.foreseen(plan, costs, cluster)[1], graph
        else:
            simulated = solve.simulate_async(plan, costs, cluster, optimizer=optimizer)
            shown = simulated.timeline, simulated.graph
        drawn[graph] = shown_timeline(title, *shown, plan.mode)
    plan = plans[first]
    if plan.mode == "sync":
        # The best chain is not compared with the best chain.
        names = {"data-parallel"} if first.planner == "chain" else BASELINES.keys()
        beside = {c.planner: plans[c] for c in others if c.planner in names}
        plan = comparison.noting_baselines(plan, beside)
    notes = [*best.lines(), *comparison.remarks(results, costs.origin)]
    write_text(file, page(plan, [*drawn.values()], tables=[table], notes=notes))


def _short(text: str) -> str:
    """Shorten a file to its name, as paths would not fit a line."""
    return Path(text).name if Path(text).is_file() else text
