"""Draws ``timeline.svg``: one predicted step of the demo's model, as a graph and in a row.

    .venv/bin/python docs/timeline.py

Operators are measured here; each of the four devices has a processor core of its own.
"""

from dataclasses import replace
from pathlib import Path

from anabranch import Cluster, capture, measure, plan, simulate
from anabranch.models import build
from anabranch.report.gantt import timeline_svg

BATCH = 64
FOUR = replace(Cluster.preset("local:4"), cores=0)
PANELS = {"a graph of stages": "auto", "the same model as a sequential pipeline": "sequential"}


def main() -> None:
    """Measure, plan twice, draw."""
    workload = build("glyphs", preset="small")
    profile = measure(capture(workload.module, workload.example), (1, 2, 4, 8, 16, 32, 64))
    plans = [
        plan(profile, FOUR, BATCH, planner=planner, max_replicas=1) for planner in PANELS.values()
    ]
    steps = [simulate(found, profile, FOUR) for found in plans]
    picture = timeline_svg(
        list(zip(PANELS, steps, strict=True)), [found.stage_graph for found in plans]
    )
    Path(__file__).with_name("timeline.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
