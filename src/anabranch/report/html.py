"""Page of a plan and its timelines: one HTML file that loads nothing else.

The script draws timelines and memory on canvases, with zoom, lanes that open to replicas and links
between stage graph, lanes and table. ``gantt`` draws timelines in files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from anabranch.plans.plan import NOT_PREDICTED, Plan, memory_text, time_text
from anabranch.plans.stages import StageGraph
from anabranch.report import charts, gantt, names, page_data, stagegraph, timeline_layout
from anabranch.report.stage_table import busy_shares, stage_table
from anabranch.report.theme import DARK, FONT, LIGHT, PIXELS, Drawing, escape, num, style
from anabranch.timeline import Timeline

BUTTONS = (
    ("back", "\u2190", "earlier"),
    ("on", "\u2192", "later"),
    ("out", "\u2212", "zoom out"),
    ("in", "+", "zoom in"),
    ("all", "all of it", "show all of it"),
)
"""(action of the script, text, description for screen readers)."""

SWITCHES = (
    ("replicas", "all replicas", "a row for every device of every stage"),
    ("path", "critical path", "what the end of the step waited for, second by second"),
)
"""(switch of the script, text, description), hidden where a page has nothing of it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A named value as text.

    Attributes:
        more: further text in small print; may be empty.
    """

    name: str
    value: str
    more: str = ""

    @property
    def line(self) -> str:
        """Value and further text in one line."""
        return f"{self.value}{', ' if self.more else ''}{self.more}"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table with a heading.

    Attributes:
        columns: column headings; the first column and those with words are aligned left.
        rows: at least one row of cells.
        remark: a sentence below the table.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remark: str = ""


def spent(parts: Sequence[tuple[str, float, str]], step_s: float) -> ReportTable:
    """Return a table of the parts of a predicted step: name, seconds, share and remark."""
    rows = [
        (name, ms(seconds), f"{seconds / step_s if step_s else 0.0:.1%}", remark)
        for name, seconds, remark in parts
    ]
    return ReportTable(
        "Where the predicted step goes",
        ("part", "ms", "of the step", ""),
        [*rows, ("together", ms(step_s), "100.0%", "")],
        "The parts are those of the critical path: what the end of the step waited for.",
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def page(
    plan: Plan,
    shown: Sequence[timeline_layout.ShownTimeline],
    *,
    figures: Sequence[Figure] = (),
    tables: Sequence[ReportTable] = (),
    losses: Sequence[float] = (),
    other_losses: Sequence[float] = (),
    held_out: Mapping[int, float] | None = None,
    about: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    version_difference: Sequence[int] = (),
    peak_versions: Sequence[int] = (),
    steps_before: int = 0,
    headline: str = "",
) -> str:
    """Write the page.

    Args:
        plan: the plan to show.
        shown: timelines from top to bottom.
        figures: figures at the top; by default those predicted by the plan.
        tables: tables below the figures.
        losses: loss of each step.
        other_losses: losses of another run, drawn over them in the second colour.
        held_out: step -> loss of held-out data behind it.
        steps_before: steps of earlier runs, after which the losses begin.
        about: origin of the page, such as command and date.
        notes: remarks, one sentence each; notes of the plan come first.
        version_difference: most updates between forward and backward of a mini-batch, per stage, as
            measured; empty with a flush.
        peak_versions: most copies of its weights, per device, ascending; empty with a flush.
        headline: the first sentence; by default that of the plan's prediction.
    """
    title = f"{plan.model or 'model'} on {plan.cluster or 'devices'}"
    parts = [
        _header(plan, title, headline),
        _figures([*(figures or _predicted(plan)), _shape(plan)]),
    ]
    graphs = *(one.graph for one in shown), plan.stage_graph
    kinds = [names.same_stages(graph) for graph in graphs]
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    own = numbers[kinds[-1]]
    if len(set(kinds[:-1])) > 1:
        for one, kind in zip(shown, kinds, strict=False):
            stages = _stages(one.graph, one.timeline, numbers[kind])
            parts.append(_section(f"Stages: {one.title}", stages, is_foldable=True))
    else:
        same = [one.timeline for one, kind in zip(shown, kinds, strict=False) if kind == kinds[-1]]
        stages = _stages(plan.stage_graph, same[-1] if same else None, own)
        parts.append(_section("Stages", stages, is_foldable=True))
    script = ""
    if shown:
        is_endless = plan.mode == "async"
        layout = timeline_layout.arrange(shown, is_endless=is_endless)
        what = "Some mini-batches" if is_endless else "One training step"
        parts.append(_timeline_section(what, gantt.title(layout)))
        script = _script(layout)
        if any(any(one.timeline.memory.values()) for one in shown):
            memory = _canvas("memory", "Memory of every device over the step")
            parts.append(_section("Memory of every device", memory))
    parts += [_text_table(table) for table in tables]
    if losses:
        unit = "step" if plan.mode == "sync" else "mini-batch"
        chart = charts.loss_chart(
            losses, unit=unit, before=steps_before, other=other_losses, held_out=held_out
        )
        note = '<p class="hint">Green: the loss of held-out data.</p>' if held_out else ""
        parts.append(_section("Loss", _picture(chart) + note))
    table = _scrolling(
        stage_table(plan, shown, version_difference, peak_versions, own), "Stages in detail"
    )
    parts.append(_section("Stages in detail", f"{_SEARCH if shown else ''}{table}"))
    bounds = plan.predicted.bounds(plan.stage_graph) if plan.predicted is not None else ()
    parts += [_notes([*bounds, *plan.notes, *notes]), _about(about or {}), _footer(plan)]
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


_SEARCH = (
    '<p class="search" hidden><input type="search" id="search" placeholder="search operators" '
    'aria-label="search operators"> <span id="matches" role="status"></span></p>'
)


def _script(layout: timeline_layout.TimelineLayout) -> str:
    data = page_data.as_json(page_data.data(layout))
    return (
        f'<script type="application/json" id="timeline-data">{data}</script>\n'
        f"<script>(() => {{\n{_resource('page.js')}{_resource('page_links.js')}}})();</script>"
    )


def _header(plan: Plan, title: str, first: str) -> str:
    graph = plan.stage_graph
    how = f"{plan.schedule} schedule"
    if plan.mode == "async":
        how = f"asynchronous {plan.schedule} without a flush, policy {plan.policy}"
        if plan.round_robin:
            how += ", replicas taking mini-batches in turn (round-robin)"
    origin = (
        f"{f'{plan.planner} planner' if plan.planner else 'made by hand'}, {how}, "
        f"batch of {graph.batch_size:,} samples; {plan.costs}"
    )
    if not first and plan.predicted is not None:
        first = plan.predicted.headline(graph, plan.mode)
    headline = f'<p class="headline">{escape(first)}</p>' if first else ""
    return f"<header><h1>{escape(title)}</h1>{headline}<p>{escape(origin)}</p></header>"


def _predicted(plan: Plan) -> list[Figure]:
    graph, predicted = plan.stage_graph, plan.predicted
    what = "step" if plan.mode == "sync" else "time per mini-batch"
    if predicted is None:
        return [Figure(f"predicted {what}", NOT_PREDICTED, "the plan has no figure of it")]
    per_s = graph.batch_size / predicted.step_s if predicted.step_s else 0.0
    peaks = predicted.device_peak_bytes
    peak = memory_text(max(peaks, default=0))
    more = f"fullest device; emptiest {memory_text(min(peaks, default=0))}"
    figures = [
        Figure(f"predicted {what}", time_text(predicted.step_s), f"{per_s:,.0f} samples/s"),
        Figure("bubble", f"{predicted.bubble:.1%}", "share of time without compute"),
        Figure("peak memory", peak, more),
    ]
    if plan.mode == "async":
        figures.append(Figure("weight policy", plan.policy, "no flush between mini-batches"))
    return figures


def _shape(plan: Plan) -> Figure:
    graph = plan.stage_graph
    counts = {"stage": len(graph), "device": len(graph.devices)}
    parts = (f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    return Figure("depth", str(graph.depth), " on ".join(parts))


def _figures(figures: Sequence[Figure]) -> str:
    cells = "".join(
        f'<div class="figure"><dt>{escape(figure.name)}</dt><dd><div class="value">'
        f'{escape(figure.value)}</div><div class="more">{escape(figure.more)}</div></dd></div>'
        for figure in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def _stages(graph: StageGraph, timeline: Timeline | None, number: int) -> str:
    """Return the whole stage graph: with names where the page is wide enough, else with numbers."""
    busy = busy_shares(graph, timeline) if timeline is not None else ()
    full, wide = stagegraph.width_of(graph), PIXELS.width - 4
    drawings = [("small", stagegraph.draw_small(graph, 424, busy))]
    if full <= wide:
        drawings.append(("named", stagegraph.draw(graph, busy)))
    else:
        drawings.append(("wide", stagegraph.draw_small(graph, wide, busy)))
    pictures = "".join(
        f'<div class="{name}">{drawing.svg(standalone=False)}</div>' for name, drawing in drawings
    )
    other, largest = drawings[-1]
    fits = f"@container stages (min-width:{num(largest.width)}px)"
    what = "The stronger the colour of a stage, the larger the share of the time that it computes."
    hint = f'<p class="hint">{what}</p>' if busy else ""
    return (
        f'<div class="panel-box stages" data-graph="{number}">'
        f"<style>.stages .{other}{{display:none}}"
        f"{fits}{{.stages .{other}{{display:block}}.stages .small{{display:none}}}}</style>"
        f"{pictures}</div>{hint}"
    )


def _text_table(table: ReportTable) -> str:
    """Return a table with text aligned left and numbers right."""
    columns = zip(*table.rows, strict=True)
    words = [any(any(map(str.isalpha, cell)) for cell in column) for column in columns]
    sides = ["left" if i == 0 or has_words else "" for i, has_words in enumerate(words)]

    def row(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(sides, cells, strict=True)
        filled = (f'<{tag} class="{side}">{escape(cell)}</{tag}>' for side, cell in pairs)
        return f"<tr>{''.join(filled)}</tr>"

    body = "".join(row("td", cells) for cells in table.rows)
    content = f"<table><thead>{row('th', table.columns)}</thead><tbody>{body}</tbody></table>"
    remark = f'<p class="hint">{escape(table.remark)}</p>' if table.remark else ""
    heading = table.heading[:1].upper() + table.heading[1:]
    return _section(heading, f"{_scrolling(content, table.heading)}{remark}")


def _section(heading: str, content: str, *, is_foldable: bool = False) -> str:
    title = f"<h2>{escape(heading)}</h2>"
    if is_foldable:
        return f"<section><details open><summary>{title}</summary>{content}</details></section>"
    return f"<section>{title}{content}</section>"


def _picture(drawing: Drawing) -> str:
    """Fit a picture to the page; on narrow pages it scrolls instead of becoming unreadable."""
    width = f"width:{num(drawing.width)}px;max-width:100%;min-width:{num(PIXELS.narrowest)}px"
    drawing.attributes += f' style="{width}"'
    return _scrolling(drawing.svg(standalone=False))


def _scrolling(content: str, label: str = "") -> str:
    """Return content that scrolls sideways; with a label it can be reached and scrolled by keys."""
    region = f' tabindex="0" role="region" aria-label="{escape(label)}"' if label else ""
    return f'<div class="panel-box"><div class="scroll"{region}>{content}</div></div>'


def _canvas(name: str, title: str) -> str:
    keys = ' tabindex="0" role="application" aria-label="timeline, moved by keys"'
    extra = keys if name == "timeline" else ""
    missing = "<noscript>drawn by a script</noscript>"
    return f'<div id="{name}" class="canvas"{extra} data-title="{escape(title)}">{missing}</div>'


def _timeline_section(what: str, title: str) -> str:
    buttons = [
        f'<button type="button" data-switch="{name}" aria-pressed="false" title="{label}" hidden>'
        f"{face}</button>"
        for name, face, label in SWITCHES
    ]
    buttons += [
        f'<button type="button" data-zoom="{name}" title="{label}" aria-label="{label}">'
        f"{face}</button>"
        for name, face, label in BUTTONS
    ]
    hint = (
        "Point at a box for its action, click a name to see its devices. Zoom with the buttons, a "
        "double click or Ctrl and the wheel; drag to move. By keys: + and \u2212 zoom, left and "
        "right move, up and down choose a stage, Enter opens it."
    )
    return (
        f'<section><h2>{what} <span id="zoom" hidden>{"".join(buttons)}</span></h2>'
        f'{_canvas("timeline", title)}<p class="hint" id="said" role="status"></p>'
        f'<p class="hint">{hint}</p></section>'
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Notes", f'<ul class="notes">{items}</ul>')


def _about(about: Mapping[str, str]) -> str:
    if not about:
        return ""
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in about.items())
    return _section("Where this comes from", f'<dl class="about">{items}</dl>')


def _footer(plan: Plan) -> str:
    seconds = {
        "search": plan.search_s,
        "simulation": plan.simulate_s,
        "improvement": plan.improve_s,
    }
    took = ", ".join(f"{what} {took_s:.3f} s" for what, took_s in seconds.items())
    text = f"anabranch \u00b7 {took} \u00b7 costs: {plan.profile}"
    return f"<footer>{escape(text)}</footer>"
