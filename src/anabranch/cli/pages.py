"""Pages of predicted plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli import comparison

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.plans.stages import StageGraph
    from anabranch.profile.profile import Profile
    from anabranch.report.figure import ReportTable
    from anabranch.report.timeline_layout import ShownTimeline
    from anabranch.weights import OptimizerFacts


def write_page(
    file: Path,
    plan: Plan,
    drawn: Sequence[ShownTimeline],
    tables: Sequence[ReportTable],
    notes: Sequence[str] = (),
) -> None:
    """Write the page of a plan, with timelines and the critical paths of steps."""
    from anabranch.files.jsonfile import write_text
    from anabranch.report.html import page
    from anabranch.simulator.critical_path import critical_path

    if plan.mode == "sync":  # without a flush a timeline is no step
        drawn = [one._replace(path=critical_path(one.timeline, one.graph)) for one in drawn]
    write_text(file, page(plan, drawn, tables=tables, notes=notes))


def write_comparison(
    file: Path,
    results: comparison.Results,
    costs: Profile,
    cluster: Cluster,
    optimizer: OptimizerFacts | None,
    best: comparison.BestPlan,
) -> None:
    """Write the page of the best plan, with the others beside it: stages and timelines of three."""
    from anabranch import solve
    from anabranch.report.figure import ReportTable
    from anabranch.report.timeline_layout import ShownTimeline

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
            timeline = solve.foreseen(plan, costs, cluster)[1]
            drawn[graph] = ShownTimeline(title, timeline, graph)
        else:
            simulated = solve.simulate_async(plan, costs, cluster, optimizer=optimizer)
            drawn[graph] = ShownTimeline(title, simulated.timeline, simulated.graph)
    notes = [*best.lines(), *comparison.remarks(results, costs.origin)]
    shown = plans[first]
    if shown.mode == "sync":
        # Beside itself a plan gains nothing.
        step_s = {c.planner: plans[c].figures.step_s for c in others}
        chains = [step_s[name] for name in ("chain", "sequential") if name in step_s]
        chains += [shown.figures.step_s] * (bool(chains) and shown.stage_graph.shape == "chain")
        figures = replace(
            shown.figures,
            data_parallel_s=step_s.get("data-parallel"),
            chain_s=min(chains, default=None) if first.planner != "chain" else None,
        )
        shown = replace(shown, predicted=figures)
    write_page(file, shown, [*drawn.values()], [table], notes)
