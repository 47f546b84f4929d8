"""One page that shows a plan and its timelines, in one file that may load no other.

Its pictures are complete without the script, which adds zoom and tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from anabranch.plans.plan import NOT_PREDICTED, Plan, ranges
from anabranch.plans.stages import StageGraph
from anabranch.report import charts, gantt, lanes, names, page_data, stagegraph, timeline_layout
from anabranch.report.theme import (
    DARK,
    FONT,
    LIGHT,
    Drawing,
    escape,
    milliseconds,
    num,
    significant,
    size,
    style,
)
from anabranch.schedule.schedule import Kind
from anabranch.timeline import Timeline


@dataclass(frozen=True, slots=True)
class WeightVersions:
    """Versions of weights that a run without a flush has measured.

    Attributes:
        version_difference: per stage, updates between forward and backward at most.
        peak_versions, weight_bytes: per device, ascending, copies of its weights and their bytes.
    """

    version_difference: Sequence[int] = ()
    peak_versions: Sequence[int] = ()
    weight_bytes: Sequence[int] = ()
    round_robin: bool = False


NOT_MEASURED = WeightVersions()
"""Of a run with a flush, or of a plan alone."""


Metric = float | str | Sequence[float]

WIDTH = 1236.0
"""Of the pictures: what is left of the page at 1280 pixels."""

NARROWEST = 760
"""On a phone pictures scroll rather than shrink below this."""

BUTTONS = (
    ("back", "\u2190", "earlier"),
    ("on", "\u2192", "later"),
    ("out", "\u2212", "zoom out"),
    ("in", "+", "zoom in"),
    ("all", "all of it", "show all of it"),
)
"""What the script does, face, and what a screen reader says."""


def page(
    plan: Plan,
    timelines: Sequence[tuple[str, Timeline]],
    *,
    losses: Sequence[float] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    notes: Sequence[str] = (),
    graphs: Sequence[StageGraph] | None = None,
    measured_s: float | None = None,
    weights: WeightVersions = NOT_MEASURED,
) -> str:
    """Write the page.

    Args:
        plan: what is shown; its predicted figures come first.
        timelines: headings and timelines, from top to bottom.
        losses: of the training steps, in order.
        metrics: numbers and lines of text are figures, sequences curves over the steps.
        notes: remarks, one sentence each; those of the plan come first.
        graphs: the stage graph of each timeline where they are not all the plan's.
        measured_s: seconds that are set against the prediction; by default those of the first
            timeline whose source is ``measured``. Without a flush, per mini-batch.
        weights: of a run without a flush.

    Raises:
        ValueError: if graphs and timelines differ in number.
    """
    measured = next((t for _, t in timelines if t.source == "measured"), None)
    if measured_s is None:
        measured_s = measured.step_s if measured is not None else 0.0
    title = f"{plan.model or 'model'} on {plan.cluster or 'devices'}"
    curves: dict[str, Sequence[float]] = {"loss": losses} if losses else {}
    facts: dict[str, float | str] = {}
    for name, value in (metrics or {}).items():
        if isinstance(value, str | int | float):
            facts[name] = value
        else:
            curves[name] = value
    figures = _headline(plan, measured, measured_s) + _of_weights(plan, weights)
    parts = [
        _header(plan, title, weights),
        _figures(figures + _of_training(losses, facts, _unit(plan))),
        _section("Stages", _picture(stagegraph.draw(plan.stage_graph), shrink=0.6)),
    ]
    script = ""
    if timelines:
        is_endless = plan.mode == "async"
        layout = timeline_layout.arrange(
            timelines, graphs or plan.stage_graph, width=WIDTH, is_endless=is_endless
        )
        what = "Some mini-batches" if is_endless else "One training step"
        parts.append(_timeline_section(what, layout))
        script = _script(layout)
    if memory := charts.memory_chart(timelines, width=WIDTH):
        parts.append(_section("Memory of every device", _picture(memory)))
    for name, values in curves.items():
        chart = charts.curve_chart(name, list(values), width=WIDTH, unit=_unit(plan))
        parts.append(_section(name.capitalize() if name == "loss" else name, _picture(chart)))
    parts.append(_section("Stages in detail", _table(plan, timelines, graphs, weights)))
    parts += [_notes([*plan.notes, *notes]), _footer(plan)]
    return _document(title, parts, script)


def _document(title: str, parts: Iterable[str], script: str) -> str:
    def variables(palette: Mapping[str, str], ground: str) -> str:
        colours = {**palette, "ground": ground}
        return ";".join(f"--{name}:{colour}" for name, colour in colours.items())

    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} \u00b7 anabranch</title>",
            f"<style>:root{{{variables(LIGHT, '#f4f6f9')};--font:{FONT}}}",
            f"@media (prefers-color-scheme:dark){{:root{{{variables(DARK, '#0b0f14')}}}}}",
            f"{_resource('page.css')}{style()}</style></head>",
            "<body><main>",
            *parts,
            f'</main><div id="tip" role="status" hidden></div>{script}</body></html>\n',
        ]
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script(layout: timeline_layout.TimelineLayout) -> str:
    data = page_data.as_json(page_data.data(layout))
    return (
        f'<script type="application/json" id="timeline-data">{data}</script>\n'
        f"<script>{_resource('page.js')}</script>"
    )


def _unit(plan: Plan) -> str:
    return "step" if plan.mode == "sync" else "mini-batch"


def _header(plan: Plan, title: str, weights: WeightVersions) -> str:
    graph = plan.stage_graph
    how = f"{plan.schedule} schedule"
    if plan.mode == "async":
        how = f"asynchronous {plan.schedule} without a flush, policy {plan.policy}"
        if weights.round_robin:
            how += ", replicas taking mini-batches in turn (round-robin)"
    said = (
        f"{f'{plan.planner} planner' if plan.planner else 'made by hand'}, {how}, "
        f"batch of {graph.batch_size:,} samples; {plan.costs}"
    )
    return f"<header><h1>{escape(title)}</h1><p>{escape(said)}</p></header>"


Figure = tuple[str, str, str]
"""Name, value, and what else there is to say."""


def _headline(plan: Plan, measured: Timeline | None, measured_s: float) -> list[Figure]:
    graph, predicted = plan.stage_graph, plan.predicted
    what = "step" if plan.mode == "sync" else "time per mini-batch"
    figures: list[Figure] = [(f"predicted {what}", NOT_PREDICTED, "the plan has no figure of it")]
    if predicted is not None:
        per_s = graph.batch_size / predicted.step_s if predicted.step_s else 0.0
        said = f"{significant(per_s)} samples/s"
        figures = [(f"predicted {what}", milliseconds(predicted.step_s), said)]
    if measured_s:
        said = f"{significant(graph.batch_size / measured_s)} samples/s"
        figures.append((f"measured {what}", milliseconds(measured_s), said))
        if predicted is not None:
            ratio = measured_s / predicted.step_s if predicted.step_s else math.inf
            # A percentage says something of what is near.
            said = f"{ratio - 1:+.1%} of the {what}" if ratio < 2 else f"the predicted {what}"
            shown = f"{ratio:.2f}\u00d7" if ratio < 10 else f"{ratio:.1f}\u00d7"
            figures.append(("measured / predicted", shown, said))
    stages = f"{len(graph)} stage{'s' if len(graph) > 1 else ''} on {len(graph.devices)} devices"
    depth = ("depth", str(graph.depth), stages)
    if predicted is None:
        return [*figures, depth]
    also = f"measured {measured.bubble:.1%}" if measured else "share of time without compute"
    peak = max(predicted.device_peak_bytes, default=0)
    least = min(predicted.device_peak_bytes, default=0)
    return [
        *figures,
        ("bubble", f"{predicted.bubble:.1%}", also),
        depth,
        ("peak memory", size(peak), f"fullest device; emptiest {size(least)}"),
    ]


def _of_weights(plan: Plan, weights: WeightVersions) -> list[Figure]:
    if plan.mode != "async":
        return []
    in_turn = "replicas take mini-batches in turn"
    how = in_turn if weights.round_robin else "no flush between mini-batches"
    figures: list[Figure] = [("weight policy", plan.policy, how)]
    if weights.version_difference:
        behind = ", ".join(map(str, weights.version_difference))
        figures.append(("version difference", behind, "updates from forward to backward, by stage"))
    if weights.peak_versions:
        most = size(max(weights.weight_bytes))
        versions = ", ".join(map(str, weights.peak_versions))
        figures.append(("weight versions", versions, f"copies, by device; {most} at most"))
    return figures


def _of_training(
    losses: Sequence[float] | None, facts: Mapping[str, float | str], unit: str
) -> list[Figure]:
    figures: list[Figure] = []
    if losses:
        units = "steps" if unit == "step" else f"{unit}es"
        last, first = significant(losses[-1]), significant(losses[0])
        figures.append(("loss", last, f"from {first}, {len(losses):,} {units}"))
    for name, value in facts.items():
        shown = value if isinstance(value, str) else significant(value)
        head, _, more = shown.partition(" (")
        figures.append((name, head, more.removesuffix(")")))
    return figures


def _figures(figures: Sequence[Figure]) -> str:
    cells = "".join(
        f'<div class="figure"><dt>{escape(name)}</dt><dd><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></dd></div>'
        for name, value, more in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def _picture(drawing: Drawing, *, shrink: float | None = None) -> str:
    """A picture as wide as the page allows; it scrolls rather than become unreadable."""
    least = NARROWEST if shrink is None else drawing.width * shrink
    drawing.attributes += (
        f' style="width:{num(drawing.width)}px;max-width:100%;min-width:{num(least)}px"'
    )
    return _scrolling(drawing.svg(standalone=False))


def _scrolling(content: str) -> str:
    return f'<div class="panel-box"><div class="scroll">{content}</div></div>'


def _timeline_section(what: str, layout: timeline_layout.TimelineLayout) -> str:
    buttons = "".join(
        f'<button type="button" data-zoom="{name}" title="{said}" aria-label="{said}">'
        f"{face}</button>"
        for name, face, said in BUTTONS
    )
    picture = _picture(gantt.paint(layout))
    hint = (
        "Point at a box for its action. Zoom with the buttons, a double click or Ctrl and the "
        "wheel; drag to move. Devices of one branch stand together; branches run side by side."
    )
    return (
        f'<section><h2>{what} <span id="zoom" hidden>{buttons}</span></h2>'
        f'<div id="timeline" tabindex="0">{picture}</div><p class="hint">{hint}</p></section>'
    )


def _table(
    plan: Plan,
    timelines: Sequence[tuple[str, Timeline]],
    graphs: Sequence[StageGraph] | None,
    weights: WeightVersions,
) -> str:
    """Every stage of the plan, with the times of those timelines that executed this very plan."""
    graph = plan.stage_graph
    own = [
        (title, t)
        for (title, t), g in zip(timelines, graphs or [graph] * len(timelines), strict=True)
        if g == graph
    ]
    times = [lanes.medians(t) for _, t in own]
    which = " / ".join(title for title, _ in own)
    heads = [("stage", ""), ("after", ""), ("devices", ""), ("micro-batch", ""), ("in flight", "")]
    if weights.version_difference:
        heads += [
            ("versions behind", "updates between forward and backward at most"),
            ("weight versions", "copies of the weights on each of its devices"),
        ]
    if times:
        said = f"median per micro-batch: {which}"
        heads += [
            ("forward, ms", said),
            ("backward, ms", said),
            ("busy", f"share of the {'step' if plan.mode == 'sync' else 'time shown'}: {which}"),
        ]
    head = "".join(f'<th title="{escape(more)}">{escape(name)}</th>' for name, more in heads)
    head += '<th class="left">operators</th>'
    prefix = names.graph_prefix(graph)
    rows = []
    for s, stage in enumerate(graph.stages):
        after = ranges(graph.predecessors[s]) or "\u2013"
        size_text = f"{stage.microbatch_size}" + (f", k {stage.k}" if stage.k > 1 else "")
        flight = f"{stage.in_flight}" + (", recompute" if stage.recompute else "")
        cells = [str(s), after, ranges(stage.devices), size_text, flight]
        if weights.version_difference:
            of_devices = [weights.peak_versions[graph.devices.index(d)] for d in stage.devices]
            versions = ", ".join(map(str, of_devices))
            cells += [str(weights.version_difference[s]), versions]
        if times:
            cells += _stage_times(s, stage.devices, [t for _, t in own], times)
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(
            f"<tr>{row}{_operators_cell(stage.operators, names.operators(stage, prefix))}</tr>"
        )
    body = "".join(rows)
    return _scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _stage_times(
    s: int,
    devices: Sequence[int],
    timelines: Sequence[Timeline],
    times: Sequence[Mapping[tuple[int, Kind], float]],
) -> list[str]:
    """Forward and backward milliseconds of a micro-batch and the busy share, by timeline."""

    def seconds(*kinds: Kind) -> str:
        sums = [sum(t.get((s, kind), 0.0) for kind in kinds) for t in times]
        return " / ".join(significant(total * 1e3) for total in sums)

    busy = []
    for timeline in timelines:
        total = sum(timeline.busy_s.get(d, 0.0) for d in devices)
        busy.append(total / (len(devices) * timeline.step_s) if timeline.step_s else 0.0)
    return [
        seconds(Kind.FORWARD),
        seconds(Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
        " / ".join(f"{share:.0%}" for share in busy),
    ]


def _operators_cell(operators: Sequence[str], short: str) -> str:
    if len(operators) == 1:
        return f'<td class="left ops">{escape(short)}</td>'
    items = "".join(f"<li>{escape(name)}</li>" for name in operators)
    return (
        f'<td class="left ops"><details><summary>{len(operators)}: {escape(short)}</summary>'
        f"<ol>{items}</ol></details></td>"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Notes", f'<ul class="notes">{items}</ul>')


def _footer(plan: Plan) -> str:
    search = milliseconds(plan.search_s)
    simulate = milliseconds(plan.simulate_s + plan.improve_s)
    said = f"anabranch \u00b7 search {search}, simulation {simulate} \u00b7 costs: {plan.profile}"
    return f"<footer>{escape(said)}</footer>"
