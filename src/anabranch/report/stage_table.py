"""Table of the stages of a plan: devices, micro-batches, and times of the timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.plans.plan import Plan, ranges
from anabranch.plans.stages import StageGraph
from anabranch.report import lanes, names
from anabranch.report.theme import escape, significant
from anabranch.report.timeline_layout import ShownTimeline
from anabranch.schedule.schedule import Kind
from anabranch.timeline import Timeline


def busy_shares(graph: StageGraph, timeline: Timeline) -> list[float]:
    """Return the share of time in which each stage computes on its devices."""
    seconds = [0.0] * len(graph)
    for span in timeline.spans:
        if span.action.kind.is_compute and span.action.stage < len(graph):
            seconds[span.action.stage] += span.end - span.start
    whole = [stage.replicas * timeline.step_s for stage in graph.stages]
    return [s / w if w else 0.0 for s, w in zip(seconds, whole, strict=True)]


def stage_table(
    plan: Plan,
    shown: Sequence[ShownTimeline],
    version_difference: Sequence[int],
    peak_versions: Sequence[int],
    number: int,
) -> str:
    """Return a table of the stages, with times of the timelines that executed this plan.

    Args:
        version_difference: see ``page``, as for ``peak_versions``.
        number: number of this stage graph among those of the page, for its script.
    """
    graph = plan.stage_graph
    own = [one for one in shown if names.same_stages(one.graph) == names.same_stages(graph)]
    times = [lanes.medians(one.timeline) for one in own]
    busy = [busy_shares(graph, one.timeline) for one in own]
    which = " / ".join(one.title for one in own)
    heads = [("stage", ""), ("after", ""), ("devices", ""), ("micro-batch", ""), ("in flight", "")]
    if version_difference:
        heads += [
            ("versions behind", "updates between forward and backward at most"),
            ("weight versions", "copies of the weights on each of its devices"),
        ]
    if times:
        median = f"median per micro-batch: {which}"
        heads += [
            ("forward, ms", median),
            ("backward, ms", median),
            ("busy", f"share of the {'step' if plan.mode == 'sync' else 'time shown'}: {which}"),
        ]
    head = "".join(f'<th title="{escape(more)}">{escape(name)}</th>' for name, more in heads)
    head += '<th class="left">operators</th>'
    prefix = names.graph_prefix(graph)
    rows = []
    for s, stage in enumerate(graph.stages):
        after = ranges(graph.predecessors[s]) or "\u2013"
        size_text = f"{stage.microbatch_size}" + (
            f", k {k}" if (k := graph.group_size(s)) > 1 else ""
        )
        flight = f"{stage.in_flight}" + (", recompute" if stage.recompute else "")
        cells = [str(s), after, ranges(stage.devices), size_text, flight]
        if version_difference:
            peaks = [peak_versions[graph.devices.index(d)] for d in stage.devices]
            versions = ", ".join(map(str, peaks))
            cells += [str(version_difference[s]), versions]
        if times:
            cells += _stage_times(s, busy, times)
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(
            f"<tr>{row}{_operators_cell(stage.operators, names.operators(stage, prefix))}</tr>"
        )
    body = "".join(rows)
    thead = f"<thead><tr>{head}</tr></thead>"
    return f'<table data-graph="{number}">{thead}<tbody>{body}</tbody></table>'


def _stage_times(
    s: int, busy: Sequence[Sequence[float]], times: Sequence[Mapping[tuple[int, Kind], float]]
) -> list[str]:
    """Format forward and backward times of a micro-batch and the busy share, by timeline."""

    def seconds(*kinds: Kind) -> str:
        sums = [sum(t.get((s, kind), 0.0) for kind in kinds) for t in times]
        return " / ".join(significant(total * 1e3) for total in sums)

    return [
        seconds(Kind.FORWARD),
        seconds(Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
        " / ".join(f"{shares[s]:.0%}" for shares in busy),
    ]


def _operators_cell(operators: Sequence[str], short: str) -> str:
    if len(operators) == 1:
        return f'<td class="left ops">{escape(short)}</td>'
    items = "".join(f"<li>{escape(name)}</li>" for name in operators)
    return (
        f'<td class="left ops"><details><summary>{len(operators)}: {escape(short)}</summary>'
        f"<ol>{items}</ol></details></td>"
    )
