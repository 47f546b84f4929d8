"""The page."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.html import Figure, ReportTable, page
from anabranch.report.page_data import as_json
from anabranch.report.timeline_layout import ShownTimeline
from anabranch.timeline import OverheadSpan, SumSpan
from tests.report.examples import STEP, TWO_TOWERS, chain, plan, timeline
from tests.strategies import plans, timelines

PREDICTED = timeline(STEP)
SHOWN = [ShownTimeline("predicted", PREDICTED, TWO_TOWERS)]
MEASURED = replace(timeline(STEP, source="measured"), step_s=10e-3)

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Text by tag, and whether every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def figures(html: str) -> dict[str, tuple[str, str]]:
    """Headline figure -> value and what stands below it."""
    pattern = r'<dt>(.*?)</dt><dd><div class="value">(.*?)</div><div class="more">(.*?)</div>'
    return {name: (value, more) for name, value, more in re.findall(pattern, html)}


def data_of(html: str):
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', html)
    return json.loads(found[1])


def test_the_script_knows_the_all_reduces():
    """Start and end in microseconds, bytes and stages, by row."""
    step = replace(PREDICTED, sums=(SumSpan(1, 7.5e-3, 8.5e-3, (0, 1, 2), 3 * 2**20),))
    (panel,) = data_of(page(plan(), [ShownTimeline("predicted", step, TWO_TOWERS)]))["panels"]
    assert panel["sums"] == [[], [[7500, 8500, "3.0 MiB", "0-2"]], []]
    assert panel["sumHeight"] > 0


def test_the_script_knows_the_updates():
    """Start and end in microseconds, and what it is, by row."""
    step = replace(PREDICTED, overheads=(OverheadSpan(1, 8e-3, 8.5e-3, "gather"),))
    (panel,) = data_of(page(plan(), [ShownTimeline("predicted", step, TWO_TOWERS)]))["panels"]
    assert panel["updates"] == [[], [[8000, 8500, "sending what was updated"]], []]


def test_the_headline_figures_are_the_plans():
    """8 ms for 4 samples, a quarter of it bubble, 3 MiB on the fullest device."""
    found = figures(page(plan(), SHOWN))
    assert found == {
        "predicted step": ("8.00 ms", "500 samples/s"),
        "bubble": ("25.0%", "share of time without compute"),
        "depth": ("2", "3 stages on 3 devices"),
        "peak memory": ("3.0 MiB", "fullest device; emptiest 1.0 MiB"),
    }


def test_given_figures_stand_in_place_of_the_plans():
    """Name, value and the rest as they are; the shape of the plan follows."""
    said = [Figure("step", "10.00 ms", "predicted 8.00 ms"), Figure("error", "0")]
    found = figures(page(plan(), SHOWN, figures=said))
    assert found["step"] == ("10.00 ms", "predicted 8.00 ms")
    assert found["error"] == ("0", "")
    assert list(found) == ["step", "error", "depth"]


def test_tables_curves_and_where_it_comes_from():
    """In this order; text to the left, numbers to the right."""
    html = page(
        plan(),
        [],
        tables=[
            ReportTable("Where it goes", ("part", "ms", ""), [("work", "7.5", "of all")], "In all.")
        ],
        losses=[2.0, 1.5, 0.5],
        about={"command": "anabranch train mmt", "host": "a<b"},
    )
    reader = read(html)
    assert reader.texts["h2"] == [
        *("Stages", "Where it goes", "Loss", "Stages in detail"),
        "Where this comes from",
    ]
    row = '<tr><td class="left">work</td><td class="">7.5</td><td class="left">of all</td></tr>'
    assert row in html
    assert reader.texts["dd"][-2:] == ["anabranch train mmt", "a<b"]
    assert "search 0.010 s, simulation 0.020 s, improvement 0.000 s" in html, "as plan prints them"


def test_a_page_without_timelines_has_no_script():
    """A plan alone."""
    html = page(plan(), [])
    assert "<script" not in html
    assert read(html).texts["h1"] == ["two-branch on local:3"]


def test_the_page_needs_nothing_else():
    """No address but the names of XML, and a policy against loading any."""
    html = page(plan(), SHOWN, losses=[1.0])
    reader = read(html)
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in reader.tags}
    assert not [attrs for _, attrs in reader.tags if {"src", "href", "srcset"} & attrs.keys()]
    policy = next(a for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy["content"]
    assert "url(" not in html
    assert "@import" not in html


def test_the_table_lists_every_stage():
    """With the median times of the timeline: 1 ms forward and backward on the towers."""
    html = page(plan(), SHOWN)
    rows = re.findall(r"<tr>(.*?)</tr>", html)[1:]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert cells[0] == ["0", "\u2013", "0", "2", "2", "1", "1", "47%"]
    assert cells[2][:5] == ["2", "0-1", "2", "2", "1"]
    assert "<li>text.1</li>" in rows[0]


def test_stages_of_one_device_have_shares_of_their_own():
    """Device 0 computes all 8 ms, 2 of them for stage 0 and 6 for stage 2."""
    stages = tuple(Stage((f"op{s}",), (s % 2,), 1, in_flight=1) for s in range(3))
    graph = StageGraph(stages, ((0, 1), (1, 2)), batch_size=1)
    step = "0: 0F0 0-2 | 2F0 2-4 | 2B0 4-8\n1: 1F0 0-4"
    html = page(plan(graph), [ShownTimeline("predicted", timeline(step, step_ms=8.0), graph)])
    assert "busy 100%" not in html
    for s, share in enumerate(("25%", "50%", "75%")):
        assert f"stage {s} on device {s % 2}, busy {share}" in html
        assert f"<td>{share}</td>" in html


def test_the_table_sets_measured_times_against_predicted_ones():
    """Only of timelines that executed this plan."""
    html = page(
        plan(),
        [
            *SHOWN,
            ShownTimeline("measured", MEASURED, TWO_TOWERS),
            ShownTimeline("other", timeline("0: 0F0 0-9"), chain(1)),
        ],
    )
    assert "<td>1 / 1</td>" in html
    assert "<td>47% / 40%</td>" in html


NASTY = "</script><script>alert(1)</script>&\"'<!--"


def test_nothing_that_a_user_wrote_becomes_markup():
    """Model, operators, headings, metrics and notes."""
    graph = StageGraph((Stage((NASTY, "x" + NASTY), (0,), 1),), (), 1)
    html = page(
        replace(plan(graph, model=NASTY), cluster=NASTY, profile=NASTY, notes=(NASTY,)),
        [ShownTimeline(NASTY, timeline("0: 0F0 0-1"), graph)],
        figures=[Figure(NASTY, NASTY, NASTY)],
        tables=[ReportTable(NASTY, (NASTY, NASTY), [(NASTY, NASTY)], NASTY)],
        losses=[1.0],
        about={NASTY: NASTY},
        notes=[NASTY],
    )
    reader = read(html)
    assert [tag for tag, _ in reader.tags].count("script") == 2  # data and program
    assert "<script>alert" not in html
    assert "<!--" not in html
    assert reader.texts["h1"] == [f"{NASTY} on {NASTY}"]
    assert "".join(reader.texts["li"]).endswith(2 * NASTY)  # the notes, after the operators
    assert data_of(html)["panels"][0]["title"] == NASTY


@given(st.lists(st.text() | st.integers()))
def test_embedded_json_cannot_end_its_script(value):
    """And is still the same JSON."""
    text = as_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_numbers_that_are_no_json_are_refused():
    """NaN would break the script in the browser instead."""
    with pytest.raises(ValueError, match="JSON"):
        as_json(math.nan)


def test_the_script_gets_every_action_and_message():
    """Microseconds; per row start, end, kind, stage, micro-batch."""
    (panel,) = data_of(page(plan(), SHOWN))["panels"]
    assert panel["devices"] == [0, 1, 2]
    assert panel["rows"][0] == [
        [0, 1000, 0, 0, 0],
        [1000, 2000, 0, 0, 1],
        [4000, 5000, 1, 0, 0],
        [7000, 8000, 1, 0, 1],
    ]
    assert panel["messages"] == [[0, 2, 1000, 1100, 1], [2, 0, 3900, 4000, 0]]
    assert panel["operators"] == ["text.0, text.1", "image.0", "head, loss"]


def test_every_picture_has_a_title():
    """For screen readers."""
    html = page(plan(), SHOWN, losses=[2.0, 1.0])
    titles = re.findall(r"<svg.*?>\n<title>(.*?)</title>", html)
    assert [title.split(":")[0] for title in titles] == [
        "Stage graph",  # in numbers, for narrow pages
        "Stage graph",
        "loss over the training steps",
    ]
    assert 'data-title="Timeline of one training step: ' in html
    assert 'data-title="Memory of every device over the step"' in html


@given(st.data(), plans())
def test_any_plan_gives_a_page(data, any_plan):
    """Well-formed, and the same each time."""
    graph = any_plan.stage_graph
    steps = [ShownTimeline("step", data.draw(timelines(graph)), graph)]
    losses = data.draw(st.lists(st.floats(0, 9), max_size=3))
    html = page(any_plan, steps, losses=losses)
    read(html)
    assert html == page(any_plan, steps, losses=losses)


def test_a_run_without_a_flush_says_so_everywhere():
    """Policy, versions of every stage, and no word of steps."""
    endless = replace(plan(), mode="async", policy="stash")
    whole = tuple(replace(s, microbatch_size=4) for s in endless.stage_graph.stages)
    endless = replace(endless, stage_graph=replace(endless.stage_graph, stages=whole))
    devices = len(endless.stage_graph.devices)
    versions = {"version_difference": (2, 1, 0), "peak_versions": (3, 2, 1)[:devices]}
    shown = [ShownTimeline("measured", MEASURED, endless.stage_graph)]
    html = page(endless, shown, losses=[1.0, 0.5], **versions)
    found = figures(html)
    assert "asynchronous 1f1b without a flush, policy stash" in html
    assert found["weight policy"] == ("stash", "no flush between mini-batches")
    assert "numbers: mini-batches" in html
    assert "10.00 ms shown" in html
    assert "all of it" in html
    assert data_of(html)["counted"] == "mini-batch"
    assert "whole step" not in html
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    assert re.findall(r"<td>(.*?)</td>", rows[1])[5:7] == ["2", "3"]


def test_replicas_in_turn_are_told_of():
    """In the line below the title."""
    endless = replace(plan(), mode="async", policy="stash", round_robin=True)
    html = page(endless, [])
    assert "replicas taking mini-batches in turn (round-robin)" in html


def test_the_bound_and_fewer_devices_are_told():
    """Both sentences of the summary."""
    shown = plan(chain(2))
    figures = replace(
        shown.predicted, step_s=2.0, bound_s=1.0, enough_devices=1, enough_step_s=2.04
    )
    items = "".join(read(page(replace(shown, predicted=figures), [])).texts["li"])
    assert "within 2.00x of the best possible on these devices" in items
    assert "1 device is enough for 98% of this speed" in items
