"""The verb ``plan``: stages, devices, micro-batches and a schedule for a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import settings
from anabranch.cli.clusters import cluster_to_plan_for, note_other_model
from anabranch.cli.comparison import (
    STALENESS_WORDS,
    interrupted,
    noting_baselines,
    plan_or_error,
    plans_among,
    ratio,
    staleness_document,
    staleness_of,
    staleness_table,
)
from anabranch.cli.output import in_json, note, print_json, print_table, say, say_written
from anabranch.cli.parsing import named_values, usage
from anabranch.cli.progress import announce, begin_compiling
from anabranch.cli.rewriting import named_rewrites
from anabranch.cli.source import ModelSource
from anabranch.cli.spread import spread
from anabranch.errors import AnabranchError, InvalidPlanError, SearchStoppedError
from anabranch.plans.plan import BASELINE_NAMES, Plan, gain_text, is_as_fast, time_text

if TYPE_CHECKING:
    from anabranch.profile.profile import Profile
    from anabranch.weights import OptimizerFacts


@spread
def plan(
    model: settings.EstimatedModelSettings,
    planning: settings.PlanningSettings,
    planner: settings.PlannerName = "auto",
    planner_option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    shape: settings.Shape | None = None,
    rewrite: Annotated[str, typer.Option(metavar="auto|none|NAME[,NAME]")] = "auto",
    policy: settings.PolicyName | None = None,
    start: Annotated[Path | None, typer.Option("--from")] = None,
    baselines: bool = True,
) -> None:
    """Find stages, devices, micro-batches and a schedule for MODEL.

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
    - `anabranch plan mmt --cluster summit:8x4 --batch-size 512 --from mine.json -o plan.json`: what
      the search finds from a plan of yours
    - `anabranch plan mmt --cluster summit:2x4 --batch-size 8 --mode async --policy pipeoptim`

    Args:
        planner: How to search.
        planner_option: An option of the planner, like seed=1; repeatable. A wrong name lists all.
        rewrite: Cut products or tables of the model into branches that a plan can put apart:
            join-split, tensor-split, table-split, table-row-split (=PARTS, @PARAMETER). auto: those
            that make the step shorter by 2 %.
        policy: With --mode async: which weights forwards and backwards read [default: auto].
        start: A plan file to improve, also one made by hand.
        baselines: Also plan the baselines, to compare with: data parallelism, sequential plans and
            a chain. The plan of --from is one of them.
    """
    from anabranch import solve
    from anabranch.files import load_plan, plan_to_dict, save_plan
    from anabranch.graph.loss_kinds import loss_notes
    from anabranch.schedule import glossary
    from anabranch.solve.planner_options import planner_with

    options = named_values([*(planner_option or ()), *([f"shape={shape}"] if shape else ())])
    usage(planner_with, planner, planning.search["max_replicas"], options)  # before a long capture
    start_plan = load_plan(start) if start is not None else None
    cluster = cluster_to_plan_for(planning.cluster, calibrated=not planning.no_calibration)
    device, source = planning.device or cluster.device, model.source
    asked = named_rewrites(rewrite, source, planning.mode)
    fixed = start_plan.rewrites if start_plan is not None and asked is None else asked
    source = replace(source, rewrites=fixed or (), batch_size=planning.batch_size)
    is_timed = source.is_timed(device)
    if not is_timed:  # beside a capture, but not beside operators that are timed
        begin_compiling(planner)

    def costs_of(source: ModelSource) -> tuple[Profile, OptimizerFacts | None]:
        return source.profile_and_optimizer(
            device, planning.batch_size, planning.mode, planning.optimizer, policy=policy
        )

    def searched(costs: Profile) -> Plan:
        return usage(
            solve.plan,
            costs,
            cluster,
            planning.batch_size,
            planner=planner,
            **planning.search,
            planner_options=options,
            model=model.model,
            mode=planning.mode,
            policy=policy or "",
            optimizer=optimizer,
            start=start_plan,
        )

    costs, optimizer = costs_of(source)
    if is_timed:
        begin_compiling(planner)
    began = time.monotonic()
    announce(f"planning for {cluster.num_devices} device{'s' * (cluster.num_devices > 1)}")
    try:
        tried = solve.plan_with_rewrites(
            costs,
            lambda names: costs_of(replace(source, rewrites=names, batch_size=None))[0],
            searched,
            tries=fixed is None,
            announce=announce,
        )
    except InvalidPlanError as error:
        if start_plan is None:
            raise
        raise InvalidPlanError(f"--from {start}: {error}") from None
    except KeyboardInterrupt:
        raise SearchStoppedError(
            f"interrupted before planner {planner} had proposed a plan; with a later Ctrl-C "
            "there is one, and with --planner sequential or data-parallel at once"
        ) from None
    assert tried.best is not None
    chosen, (_, costs) = tried.best, tried.origin(tried.best)
    best = replace(chosen, options=source.recorded())
    if tried.written is not None and chosen is not tried.written:
        best = replace(best, notes=(*best.notes, solve.gain_note(tried.written, best)))
    if start_plan is not None:
        note_other_model(start_plan, costs.graph)
    if model.file is not None:
        save_plan(best, model.file)
    others: dict[str, Plan | AnabranchError] = {}
    if (
        baselines
        and start_plan is not None
        and start_plan.stage_graph.batch_size == planning.batch_size
    ):
        with suppress(AnabranchError):  # it may not fit as it stands
            others["from"] = solve.foreseen(start_plan, costs, cluster)[0]
    if baselines and planner == "auto":
        if interrupted(best):
            note(
                "interrupted; planning the baselines to compare with: Ctrl-C again leaves them out"
            )
        announce("planning data parallelism and chains to compare with")
        with suppress(KeyboardInterrupt):
            others.update(
                solve.baselines(best, costs, cluster, optimizer=optimizer, **planning.search)
            )
    flushed = ""
    if best.mode == "async" and not in_json():
        sync = replace(best, mode="sync", policy="")
        names = ("data-parallel", "sequential") if others and planner == "auto" else ()
        with suppress(KeyboardInterrupt):
            baselines_of = solve.baselines(sync, costs, cluster, names=names, **planning.search)
            flushed = flush_text(dict(baselines_of))
    planned_s = time.monotonic() - began
    why = None
    if best.mode == "sync":
        with suppress(KeyboardInterrupt):  # the plan is what counts
            why = solve.explain(best, costs, cluster)
    if best.predicted is not None and model.file is not None:
        seconds = {name: other.figures.step_s for name, other in plans_among(others).items()}
        limit = why.limit if why is not None else ""
        save_plan(noting_baselines(best, seconds, limit), model.file)
    document = plan_to_dict(best) | source.facts
    document |= {"rewrites": list(best.rewrites), **tried.document()}
    document["baselines"] = {name: plan_or_error(name, p) for name, p in others.items()}
    document["gain"] = {
        name: ratio(other.figures.step_s, best.figures.step_s)
        for name, other in plans_among(others).items()
    }
    if why is not None:
        document["explanation"] = why.to_dict()
    document["loss_kind"] = costs.graph.loss_kind
    document["normalised"] = list(costs.graph.normalised)
    document["stateful"] = list(costs.graph.stateful)
    if best.mode == "async":
        document["optimizer"] = optimizer.name if optimizer is not None else None
    print_json(document | staleness_document(best, optimizer))
    lines = [*gains(others, best), faster(others, best, planning.max_replicas), flushed]
    say(best.summary([line for line in lines if line]))
    say(glossary(best))
    for sentence in loss_notes(costs.graph.loss_kind, costs.graph.normalised, costs.graph.stateful):
        say(sentence)
    if best.mode == "async":
        print_table(*staleness_table(best.policy, staleness_of(best, optimizer)))
        say(STALENESS_WORDS)
    say(
        f"planned in {planned_s:.1f} s, of which the search that found this plan took "
        f"{best.search_s:.3f} s, its simulation {best.simulate_s:.3f} s and improvement "
        f"{best.improve_s:.3f} s"
    )
    for line in tried.lines():
        say(line)
    if why is not None:
        say(why.summary())
    say_written(model.file)


def gains(others: Mapping[str, Plan | AnabranchError], ours: Plan) -> Iterator[str]:
    """Generate lines that compare a plan with another start, data parallelism and the best chain.

    The chains are the sequential pipeline, with replicas and without, and what the search finds.
    """
    chains = [name for name in others if name not in ("from", "data-parallel")]
    plans = plans_among(others)
    planned = [name for name in chains if name in plans]
    best = min(planned, key=lambda name: plans[name].figures.step_s, default="")
    for name, other in others.items():
        if name in chains and best not in ("", name):
            continue
        if isinstance(other, AnabranchError):
            yield f"{BASELINE_NAMES[name]} has no plan: {other}"
        elif name == best and ours.stage_graph.shape == "chain" and _is_faster(ours, other):
            # Found with more evaluations, or on fewer devices.
            yield f"{BASELINE_NAMES['chain']} is this plan"
        elif name == best and name != "chain":
            yield f"{gain(name, other, ours)}, the best chain of stages"
        else:
            yield gain(name, other, ours)


def gain(name: str, other: Plan, ours: Plan) -> str:
    """One line that compares a plan with a baseline."""
    step_s, graph, own_s = other.figures.step_s, other.stage_graph, ours.figures.step_s
    if (graph, other.schedule) == (ours.stage_graph, ours.schedule):
        return f"{BASELINE_NAMES[name]} is this plan"
    times, taken = gain_text(name, step_s, own_s, ours.mode), time_text(step_s)
    if taken == time_text(own_s) and not times.startswith("as fast as"):
        taken = f"{time_text(step_s, 3)} against {time_text(own_s, 3)}"
    return (
        f"{times} ({taken}, "
        f"depth {graph.depth}, micro-batch {graph.stages[0].microbatch_size}, {other.schedule})"
    )


def flush_text(flushed: Mapping[str, Plan | AnabranchError]) -> str:
    """Name the time of synchronous baselines, and say how to plan with a flush."""
    seconds = {
        BASELINE_NAMES[name]: other.figures.step_s for name, other in plans_among(flushed).items()
    }
    how = "the same command without --mode async plans steps with a flush"
    if not seconds:
        return how
    steps = " and ".join(f"{name} takes {time_text(step_s)}" for name, step_s in seconds.items())
    return f"with a flush, {steps} per batch: {how}"


def _is_faster(plan: Plan, other: Plan) -> bool:
    """Return True if a step is shorter than another plan's, by more than counts as equal."""
    step_s, other_s = plan.figures.step_s, other.figures.step_s
    return step_s < other_s and not is_as_fast(other_s, step_s)


def faster(
    others: Mapping[str, Plan | AnabranchError], ours: Plan, limit: int | None = None
) -> str:
    """Return a line on the best baseline, if that is better than our plan.

    Args:
        limit: most replicas of a stage that our plan may have; baselines have no limit.
    """
    plans = {name: other for name, other in plans_among(others).items() if name != "from"}
    name = min(plans, key=lambda name: plans[name].figures.step_s, default="")
    if not name or not _is_faster(plans[name], ours):
        return ""
    from anabranch.solve import BASELINES

    options = " ".join(
        f"--{key.replace('_', '-')} {value}"
        for key, value in BASELINES[name].items()
        if isinstance(value, str | int)
    )
    if limit is not None and BASELINES[name]["max_replicas"] is None:
        options += " without --max-replicas"
    without = " without a flush" * (ours.mode == "async")
    return f"{BASELINE_NAMES[name]}{without} is faster than this plan: {options} plans it"
