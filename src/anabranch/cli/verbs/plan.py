"""The verb ``plan``: stages, devices, micro-batches and a schedule for a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import settings
from anabranch.cli.clusters import cluster_to_plan_for, note_other_model
from anabranch.cli.comparison import noting_baselines
from anabranch.cli.compiling import begin_compiling
from anabranch.cli.output import in_json, note, print_json, say_written
from anabranch.cli.parsing import named_values, usage
from anabranch.cli.planned_model import PlannedModel, flush_text
from anabranch.cli.progress import announce
from anabranch.cli.rewriting import named_rewrites
from anabranch.cli.source import ModelSource
from anabranch.cli.spread import spread
from anabranch.errors import AnabranchError, InvalidPlanError, SearchStoppedError
from anabranch.plans.plan import Plan

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
    from anabranch.files import load_plan, save_plan
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
    with _searching(planner, start):
        tried = solve.plan_with_rewrites(
            costs,
            lambda names: costs_of(replace(source, rewrites=names, batch_size=None))[0],
            searched,
            tries=fixed is None,
            announce=announce,
        )
    assert tried.best is not None
    costs = tried.origin(tried.best)[1]
    best = replace(tried.chosen(), options=source.recorded())
    if start_plan is not None:
        note_other_model(start_plan, costs.graph)
    if model.file is not None:
        save_plan(best, model.file)
    search = partial(solve.baselines, profile=costs, cluster=cluster, **planning.search)
    others = dict[str, Plan | AnabranchError]()
    if baselines:
        names = None if planner == "auto" else ["from"]
        if names is None and best.interrupted:
            note(
                "interrupted; planning the baselines to compare with: Ctrl-C again leaves them out"
            )
        if names is None:
            announce("planning data parallelism and chains to compare with")
        with suppress(KeyboardInterrupt):
            others |= search(best=best, names=names, optimizer=optimizer, start=start_plan)
    flushed = ""
    if best.mode == "async" and not in_json():
        sync = replace(best, mode="sync", policy="")
        names = ["data-parallel", "sequential"] if others and planner == "auto" else []
        with suppress(KeyboardInterrupt):
            flushed = flush_text(dict(search(best=sync, names=names)))
    planned_s = time.monotonic() - began
    why = None
    if best.mode == "sync":
        with suppress(KeyboardInterrupt):  # the plan is what counts
            why = solve.explain(best, costs, cluster)
    if best.predicted is not None and model.file is not None:
        limit = why.limit if why is not None else ""
        save_plan(noting_baselines(best, others, limit), model.file)
    result = PlannedModel(
        best, costs, tried, others, why, optimizer, planned_s, flushed, planning.max_replicas
    )
    print_json(result.document() | source.facts)
    result.say()
    say_written(model.file)


@contextmanager
def _searching(planner: str, start: Path | None) -> Iterator[None]:
    """Name the file of --from in its errors, and the search that Ctrl-C ended without a plan."""
    try:
        yield
    except InvalidPlanError as error:
        if start is None:
            raise
        raise InvalidPlanError(f"--from {start}: {error}") from None
    except KeyboardInterrupt:
        raise SearchStoppedError(
            f"interrupted before planner {planner} had proposed a plan; with a later Ctrl-C "
            "there is one, and with --planner sequential or data-parallel at once"
        ) from None
