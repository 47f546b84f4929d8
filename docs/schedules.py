"""Draws ``schedules.svg``: one step of four equal stages under three schedules.

    .venv/bin/python docs/schedules.py

A forward takes 10 ms, and each half of a backward as long; messages cost nothing.
"""

from pathlib import Path

from anabranch.plans.stages import Stage, StageGraph
from anabranch.report.gantt import timeline_svg
from anabranch.schedule import rule_named
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import run

STAGES, MICROBATCHES = 4, 6
PANELS = ("1f1b", "1f1b-split", "zb-h1")


def main() -> None:
    """Simulate each schedule, draw."""
    row = StageGraph(
        tuple(Stage((f"part {s}",), (s,), 1) for s in range(STAGES)),
        tuple((s, s + 1) for s in range(STAGES - 1)),
        MICROBATCHES,
    )
    times = StageTimes([{1: 0.01}] * STAGES, [{1: 0.02}] * STAGES)
    graphs = [rule_named(name).warm_up(row) for name in PANELS]
    steps = [
        run(graph, rule_named(name).order(graph), times)
        for name, graph in zip(PANELS, graphs, strict=True)
    ]
    picture = timeline_svg(list(zip(PANELS, steps, strict=True)), graphs)
    Path(__file__).with_name("schedules.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
