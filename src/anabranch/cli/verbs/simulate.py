"""The verb ``simulate``: the predicted timeline of a plan file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import output
from anabranch.cli.clusters import note_other_model
from anabranch.cli.comparison import STALENESS_WORDS, staleness_table
from anabranch.cli.parsing import usage
from anabranch.cli.settings import PlanFile, PlannedModelSettings, PolicyName, ScheduleName
from anabranch.cli.source import model_of_plan
from anabranch.cli.spread import spread
from anabranch.plans.plan import Mode, Plan, time_text

if TYPE_CHECKING:
    from anabranch.solve import Explanation, Simulated
    from anabranch.timeline import Timeline


@spread
def simulate(
    plan_file: PlanFile,
    other: PlannedModelSettings,
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
    schedule: ScheduleName | None = None,
    mode: Mode | None = None,
    policy: PolicyName | None = None,
    why: Annotated[bool, typer.Option("--why")] = False,
    trace: Annotated[Path | None, typer.Option(callback=output.file_to_write)] = None,
    report: Annotated[Path | None, typer.Option(callback=output.file_to_write)] = None,
    actions: Annotated[bool, typer.Option("--actions")] = False,
) -> None:
    """Predict the timeline of one step of PLAN.

    Without a flush, with --mode async or for an asynchronous plan: the time per mini-batch of the
    full pipeline, and the timeline of some mini-batches from an empty pipeline to an empty one.

    Args:
        model: The model or profile that it is for [default: the plan's, if it is a built-in name or
            a profile].
        schedule: Another schedule than the plan's.
        mode: Another mode than the plan's.
        why: Also say what the step is spent on, and what would help.
        trace: Write a trace for Perfetto or chrome://tracing.
        report: Write a self-contained HTML page.
        actions: With --json: list the actions, device by device, with start and end.
    """
    from anabranch import solve
    from anabranch.files import load_plan
    from anabranch.files.jsonfile import write_text

    if actions and not output.in_json():
        raise typer.BadParameter("--actions is for --json; --report draws them, --trace lists them")
    plan = load_plan(plan_file)
    batch_size = plan.stage_graph.batch_size
    cluster = other.cluster_of(plan, plan_file)
    chosen = mode or plan.mode
    usage(solve.check_mode, chosen, policy or "", schedule or "auto")
    model = model or model_of_plan(plan.model, plan_file)
    source, device = other.source(model, plan), other.device_of(plan, cluster)
    costs, optimizer = source.profile_and_optimizer(
        device, batch_size, chosen, other.optimizer, policy=policy or plan.policy
    )
    explanation = None
    if chosen == "async":
        if why:
            raise typer.BadParameter("--why explains a step; without a flush there is none")
        simulated = solve.simulate_async(
            plan, costs, cluster, policy=policy or "", optimizer=optimizer
        )
        shown, timeline, graph = simulated.plan, simulated.timeline, simulated.graph
        is_known = (chosen, shown.policy, other.cluster) == (plan.mode, plan.policy, None)
        shown = _compared(shown, plan if is_known else None, _slowest(simulated))
        title = f"predicted, {graph.batch_size // batch_size} mini-batches"
    else:
        shown = replace(solve.synchronous(plan), profile=costs.origin)
        shown, timeline = solve.foreseen(shown, costs, cluster, schedule=schedule)
        simulated, graph, title = None, shown.stage_graph, "predicted"
        if why or report is not None:
            explained = solve.explain(shown, costs, cluster)
            explanation = explained if why else None
            is_known = (schedule, other.cluster) == (None, None)
            shown = _compared(shown, plan if is_known else None, explained.limit)
    if trace is not None:
        from anabranch.report.chrome import trace as to_trace

        write_text(trace, json.dumps(to_trace(timeline, graph)))
    if report is not None:
        from anabranch.record import shown_timeline
        from anabranch.report.html import ReportTable, page, spent

        tables = [spent(explanation.parts(), explanation.step_s)] if explanation is not None else []
        if simulated is not None:
            table = staleness_table(shown.policy, simulated.staleness)
            tables = [ReportTable(*table, STALENESS_WORDS)]
        drawn = shown_timeline(title, timeline, graph, shown.mode)
        write_text(report, page(shown, [drawn], tables=tables))
    files = {"trace": trace, "report": report}
    note_other_model(plan, costs.graph)
    as_planned = (plan.mode, None, None, None, plan.precision)
    if (chosen, schedule, policy, other.cluster, costs.graph.precision) == as_planned:
        _say_if_changed(plan, plan_file, shown, is_timed=source.is_timed(device))
    facts: dict[str, Any] = dict(source.facts)
    if actions:
        facts["actions"] = [
            {
                "device": span.device,
                "start_s": span.start,
                "end_s": span.end,
                "kind": span.action.kind.name.lower(),
                "stage": span.action.stage,
                "microbatch": span.action.microbatch,
                "action": str(span.action),
            }
            for span in timeline.spans
        ]
    _say(shown, timeline, simulated, explanation, facts, files)


def _compared(shown: Plan, file: Plan | None, limit: str) -> Plan:
    """Return a simulated plan with the baselines of its file, if these are comparable: the plan
    itself still takes the time that the file has.
    """
    known = file.predicted if file is not None else None
    if known is not None and not math.isclose(known.step_s, shown.figures.step_s, rel_tol=1e-3):
        known = None
    others = (known.data_parallel_s, known.chain_s) if known is not None else (None, None)
    figures = replace(shown.figures, limit=limit, data_parallel_s=others[0], chain_s=others[1])
    return replace(shown, predicted=figures)


def _slowest(simulated: Simulated) -> str:
    """Describe the stage that computes most, which sets the pace of a pipeline without a flush."""
    stages, timeline = simulated.graph.stages, simulated.timeline
    count = simulated.graph.batch_size // simulated.plan.stage_graph.batch_size
    whole_s = simulated.steady.period_s * count
    busy = [max(timeline.busy_s[device] for device in stage.devices) for stage in stages]
    slowest = busy.index(max(busy))
    return f"stage {slowest} computes, {busy[slowest] / whole_s:.0%}" if whole_s else ""


def _say_if_changed(plan: Plan, file: Path, simulated: Plan, *, is_timed: bool) -> None:
    """Remark that the figures in a plan file are not those of the plan in it; ``is_timed``: its
    operators have just been timed anew, so that they differ by some per cent all the same.
    """
    noted, step_s = plan.predicted, simulated.figures.step_s
    if noted is not None and abs(noted.step_s - step_s) > 0.05 * noted.step_s:
        why = "it was changed since it was planned, or its costs were others"
        if is_timed:
            why = "operators were timed anew just now, or it was changed since it was planned"
        output.note(f"{file} itself says {time_text(noted.step_s)}: {why}")


def _say(
    plan: Plan,
    timeline: Timeline,
    simulated: Simulated | None,
    why: Explanation | None,
    facts: Mapping[str, Any],
    files: Mapping[str, Path | None],
) -> None:
    """Print the figures of a step or, where there is no flush, of the full pipeline.

    Args:
        facts: facts about the source, for a JSON document.
        files: files that were written, by their kind.
    """
    batch_size, figures = plan.stage_graph.batch_size, plan.figures
    step_s, bubble = figures.step_s, figures.bubble
    more: dict[str, Any] = {"period_s": timeline.period_s, "exposed_sums": timeline.exposed_sums}
    if simulated is not None:
        more = {
            "mode": plan.mode,
            "policy": plan.policy,
            "periodic": simulated.steady.periodic,
            "staleness": [asdict(stage) for stage in simulated.staleness],
            "timeline_batches": simulated.graph.batch_size // batch_size,
            "timeline_s": timeline.step_s,
        }
    if why is not None:
        more["explanation"] = why.to_dict()
    output.print_json(
        {
            "step_s": step_s,
            "bubble": bubble,
            "device_peak_bytes": figures.device_peak_bytes,
            "samples_per_s": batch_size / step_s if step_s else 0.0,
            "profile": plan.profile,
            "parts": {f"{what}_s": seconds for what, seconds in timeline.parts.items()},
            **more,
            **facts,
            **files,
        }
    )
    output.say(figures.text(batch_size, plan.mode))
    parts, whole_s = timeline.parts, timeline.step_s
    if simulated is not None:  # of a mini-batch of the full pipeline, as the line above
        count, whole_s = simulated.graph.batch_size // batch_size, step_s
        parts = {what: seconds / count for what, seconds in parts.items()}
        parts["compute"] = (1 - bubble) * step_s  # fill and drain have other shares of the cores
        parts["wait"] = max(0.0, step_s - (sum(parts.values()) - parts["wait"]))
    shares = (f"{what} {seconds * 1e3:.2f} ms" for what, seconds in parts.items())
    output.say(f"of {whole_s * 1e3:.2f} ms a device has on average: {', '.join(shares)}")
    output.say(f"costs: {plan.profile}")
    if simulated is not None:
        output.print_table(*staleness_table(plan.policy, simulated.staleness))
        output.say(STALENESS_WORDS)
    if why is not None:
        output.say(why.summary())
    for file in files.values():
        output.say_written(file)
