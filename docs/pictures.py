"""Draws the pictures of README and docs into ``docs/pictures``.

    .venv/bin/python docs/pictures.py [NAME...]

Without a name all are drawn but ``page``, which needs Chromium. They are the same on every machine:
steps are simulated, operators estimated.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from anabranch import Cluster, capture, estimate, explain, plan, simulate
from anabranch.models import build
from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.gantt import timeline_svg
from anabranch.report.theme import Drawing, rect, text, text_width
from anabranch.report.timeline_layout import ShownTimeline
from anabranch.schedule import rule_named
from anabranch.schedule.asynchronous import repeated, split_batches
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import run
from anabranch.simulator.stream import record
from anabranch.timeline import Timeline

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "planners" / "results.json"
WIDTH, LABELS, BAR = 900.0, 200.0, 20.0
Row = tuple[str, Sequence[tuple[str, float]], str]
"""A label, CSS classes and lengths of the parts of its bar, and a remark."""


def graph_of(predecessors: Mapping[str, str], microbatches: int) -> StageGraph:
    """Stages of one device each: name -> names of those before it, separated by blanks."""
    names = list(predecessors)
    edges = [
        (names.index(p), s) for s, name in enumerate(names) for p in predecessors[name].split()
    ]
    stages = tuple(Stage((name,), (s,), 1) for s, name in enumerate(names))
    return StageGraph(stages, tuple(sorted(edges)), microbatches)


ROW = {"image.0": "", "image.1": "image.0", "text.0": "image.1", "text.1": "text.0"}
TOWERS = {"image.0": "", "image.1": "image.0", "text.0": "", "text.1": "text.0"}


def equal(graph: StageGraph) -> StageTimes:
    """10 ms forward, 20 ms backward on every stage; messages cost nothing."""
    return StageTimes([{1: 0.01}] * len(graph), [{1: 0.02}] * len(graph))


def step_of(graph: StageGraph, schedule: str) -> tuple[StageGraph, Timeline]:
    """One step of equal stages."""
    warm = rule_named(schedule).warm_up(graph)
    return warm, run(warm, rule_named(schedule).order(warm), equal(warm))


def panels(steps: Mapping[str, tuple[StageGraph, Timeline]], *, is_endless: bool = False) -> str:
    """Timelines below each other."""
    shown = [ShownTimeline(title, timeline, graph) for title, (graph, timeline) in steps.items()]
    return timeline_svg(shown, is_endless=is_endless)


def schedules() -> str:
    """One step of four equal stages under three schedules."""
    row = graph_of({"0": "", "1": "0", "2": "1", "3": "2"}, 6)
    return panels({name: step_of(row, name) for name in ("1f1b", "1f1b-split", "zb-h1")})


def concepts() -> str:
    """Two towers and their join on five devices, as a graph and as a chain."""
    graph = graph_of({**TOWERS, "join": "image.1 text.1"}, 4)
    chain = graph_of({**ROW, "join": "text.1"}, 4)
    return panels(
        {"a graph, depth 3": step_of(graph, "1f1b"), "a chain, depth 5": step_of(chain, "1f1b")}
    )


def asynchronous() -> str:
    """The same graph with a flush after four micro-batches, and without one."""
    graph = graph_of({**TOWERS, "join": "image.1 text.1"}, 4)
    stages = tuple(
        replace(s, in_flight=n) for s, n in zip(graph.stages, (3, 2, 3, 2, 1), strict=True)
    )
    single = replace(graph, stages=stages, batch_size=1)
    endless = record(split_batches(single), equal(single), batches=8)
    return panels(
        {
            "synchronous: one batch of 4 micro-batches": step_of(graph, "1f1b"),
            "asynchronous: 8 mini-batches": (repeated(single, 8), endless),
        },
        is_endless=True,
    )


def timeline() -> str:
    """One predicted step of the demo's model on four V100s, as a graph and in a row."""
    four = Cluster.preset("summit:1x4")
    workload = build("glyphs", meta=True)
    captured = capture(workload.module, workload.example)
    profile = estimate(captured, "v100", (1, 2, 4, 8, 16, 32, 64))
    planners = {
        "a graph of stages": "auto",
        "the same model as a sequential pipeline": "sequential",
    }
    plans = {
        title: plan(profile, four, 64, planner=planner, max_replicas=1)
        for title, planner in planners.items()
    }
    return panels({t: (p.stage_graph, simulate(p, profile, four)) for t, p in plans.items()})


def bars(title: str, groups: Mapping[str, Sequence[Row]], legend: Mapping[str, str]) -> str:
    """Horizontal bars, those of a group on one scale."""
    height = 30 * bool(legend) + sum(40 + (BAR + 6) * len(rows) for rows in groups.values()) + 12
    drawing = Drawing(WIDTH, height, title)
    y, x = 8.0, 20.0
    for css, name in legend.items():
        drawing.add(rect(css, x, y + 6, 12, 12, radius=2), text("muted", x + 18, y + 16, 12, name))
        x += 40 + text_width(name, 12)
    y += 30 * bool(legend)
    for heading, rows in groups.items():
        drawing.add(text("bold", 20, y + 22, 13, heading))
        y += 32
        scale = (WIDTH - LABELS - 90) / max(sum(s for _, s in parts) for _, parts, _ in rows)
        for label, parts, remark in rows:
            x = LABELS
            drawing.add(text("muted right", x - 10, y + 15, 12, label))
            for css, length in parts:
                drawing.add(rect(css, x, y, max(length * scale, 1), BAR))
                x += length * scale
            drawing.add(text("", x + 8, y + 15, 12, remark))
            y += BAR + 6
        y += 8
    return drawing.svg()


def measured() -> dict[str, dict[str, float]]:
    """Case -> planner -> seconds of its step, of the benchmark of planners.

    A case may be of several groups, and a row has the one for which it was measured last.
    """
    steps: dict[str, dict[str, float]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        if row.get("step_s"):
            steps.setdefault(row["case"], {})[row["planner"]] = row["step_s"]
    return steps


def planners() -> str:
    """Steps of every planner's plan for two models."""
    names = {"data-parallel", "even", "pipedream", "dapple", "sequential", "chain", "graphpipe"}
    groups = {}
    for case in ("dlrm on summit:4x4, batch 1024", "candle-uno on summit:4x4, batch 16384"):
        steps = {p: s for p, s in measured()[case].items() if p in names | {"auto"}}
        groups[case] = [
            (planner, [("f" if planner == "auto" else "hf", seconds)], f"{seconds * 1e3:.0f} ms")
            for planner, seconds in sorted(steps.items(), key=lambda item: item[1])
        ]
    return bars("Predicted step of the plan of each planner", groups, {})


def winners() -> str:
    """Who wins where: batch and devices against the kind of the best plan."""
    steps = measured()
    devices = (4, 8, 16, 32, 64, 128, 256)
    models = {"mmt": (64, 512), "dlrm": (256, 2048), "candle-uno": (4096, 32768)}
    left, top, cell, tall = 190.0, 62.0, 112.0, 40.0
    drawing = Drawing(left + cell * len(devices) + 20, top + tall * 6 + 22, "Best plan by case")
    legend = {"f": "a graph of stages", "w": "a chain", "tail": "data parallelism"}
    x = 20.0
    for css, name in legend.items():
        drawing.add(rect(css, x, 12, 12, 12, radius=2), text("muted", x + 18, 22, 12, name))
        x += 40 + text_width(name, 12)
    for i, count in enumerate(devices):
        place = left + cell * (i + 0.5)
        drawing.add(text("muted num", place, top - 10, 12, f"{count} devices"))
    y = top
    for model, batches in models.items():
        for batch in batches:
            drawing.add(text("right", left - 12, y + 25, 12, f"{model}, {batch:,} samples"))
            for i, count in enumerate(devices):
                found = steps[f"{model} on summit:{count // 4}x4, batch {batch}"]
                drawing.add(*winner(found, left + cell * i, y, cell, tall))
            y += tall
    return drawing.svg()


def winner(
    steps: Mapping[str, float], x: float, y: float, width: float, height: float
) -> list[str]:
    """A cell: the kind of the best plan, and its gain over the best of the other kinds."""
    data = steps.get("data-parallel", float("inf"))
    chain = min(steps.get(name, float("inf")) for name in ("chain", "sequential", "data-parallel"))
    best = min(steps.values())
    if best < 0.998 * chain:
        css, ink, gain = "f", "tf num", f"{chain / best:.2f}x"
    elif chain < 0.998 * data:
        css, ink, gain = "w", "tw num", "" if data == float("inf") else f"{data / chain:.2f}x"
    else:
        css, ink, gain = "tail", "num", ""
    box = rect(css, x + 2, y + 2, width - 4, height - 4, radius=4)
    return [box, text(ink, x + width / 2, y + height / 2 + 5, 13, gain)]


def why() -> str:
    """Parts of the critical paths of three steps."""
    colours = {
        "stage": "f",
        "edge": "b",
        "all-reduce": "sum",
        "update": "update",
        "all-gather": "w",
    }
    cases = {"mmt": 64, "dlrm": 2048, "candle-uno": 4096}
    cluster = Cluster.preset("summit:8x4")
    rows: list[Row] = []
    for model, batch in cases.items():
        workload = build(model)
        captured = capture(workload.module, workload.example)
        profile = estimate(captured, "v100", [1 << k for k in range(batch.bit_length())])
        reasons = explain(plan(profile, cluster, batch), profile, cluster)
        lengths: dict[str, float] = {}
        for name, seconds, _ in reasons.parts():
            css = next((css for word, css in colours.items() if word in name), "tail")
            lengths[css] = lengths.get(css, 0.0) + seconds / reasons.step_s
        order = [css for css in (*colours.values(), "tail") if css in lengths]
        remark = f"{reasons.step_s * 1e3:.0f} ms"
        rows.append((f"{model}, {batch:,} samples", [(css, lengths[css]) for css in order], remark))
    names = ("stages that compute", "messages", "all-reduce", "update", "all-gather", "the rest")
    legend = dict(zip((*colours.values(), "tail"), names, strict=True))
    return bars("Critical paths of three steps", {"32 V100 in nodes of 4": rows}, legend)


def page() -> bytes:
    """The top of the page of a plan, in Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))))
    command = [sys.executable, "-m", "anabranch"]
    with tempfile.TemporaryDirectory() as folder:
        made, shot = Path(folder) / "plan.json", Path(folder) / "page.png"
        words = "plan mmt --cluster summit:8x4 --batch-size 64 --device v100 -o"
        subprocess.run([*command, *words.split(), made], check=True)
        html = made.with_suffix(".html")
        subprocess.run([*command, "simulate", made, "--report", html], check=True)
        size = ("--window-size=1280,900", f"--screenshot={shot}", html.as_uri())
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", *size], check=True)
        return shot.read_bytes()


PICTURES: Mapping[str, Callable[[], str]] = {
    draw.__name__: draw
    for draw in (timeline, concepts, schedules, asynchronous, planners, winners, why)
}


def main() -> None:
    """Draw what is asked for."""
    for name in sys.argv[1:] or PICTURES:
        if name == "page":
            (HERE / "pictures" / "page.png").write_bytes(page())
        else:
            (HERE / "pictures" / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
