"""Real trainings as pipelines, beside one process and beside what is to be beaten.

python -m benchmarks.trainings [glyphs retrieval flights drugs] [--curves PAGE] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planners.common import machine
from benchmarks.trainings import curves
from benchmarks.trainings.loops import Curve, alone, pipelined
from benchmarks.trainings.tasks import TASKS, Task

_ALIKE = 50
"""Steps in which rounding, which every step adds to, has not grown yet."""


def trained(task: Task) -> dict[str, Any]:
    """All loops of a training, and what is to be beaten."""
    workload = task.make()
    score = task.score(workload)
    plan, first = pipelined(task, workload, score)
    whole = task.batch_size
    loops: dict[str, Curve] = {
        "pipeline": first,
        "one process": alone(task, workload, score, coupled_samples=whole),
    }
    if task.couples:
        size = task.microbatch_size
        loops["loss of micro-batches"] = alone(task, workload, score, coupled_samples=size)
    graph = plan.stage_graph
    return {
        "metric": task.metric,
        "ranks": len(graph.devices),
        "edges": [list(edge) for edge in graph.edges],
        "batch_size": whole,
        "microbatch_sizes": [stage.microbatch_size for stage in graph.stages],
        "baselines": dict(task.baselines()),
        "curves": {name: asdict(curve) for name, curve in loops.items()},
    }


def show(name: str, row: dict[str, Any]) -> str:
    """A training as lines of text."""
    loops = row["curves"]
    losses = zip(loops["pipeline"]["losses"], loops["one process"]["losses"], strict=True)
    apart = [abs(a - b) / abs(b) for a, b in losses]
    lines = [f"{name}: held-out {row['metric']}"]
    lines += [f"  {what:24} {value:.4f}" for what, value in row["baselines"].items()]
    lines += [
        f"  {loop:24} {curve['scores'][-1]:.4f}  after {curve['steps'][-1]} steps, "
        f"{curve['seconds']:.0f} s"
        for loop, curve in loops.items()
    ]
    lines += [
        f"  losses of pipeline and one process differ by {apart[0]:.1e} in the first step, "
        f"{max(apart[:_ALIKE]):.1e} in {_ALIKE}, {max(apart):.1e} in all"
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, then print figures or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--curves", type=Path, help="write the page of curves, .png or .svg")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - TASKS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(TASKS)}")
    found = {}
    for name in arguments.names or TASKS:
        found[name] = trained(TASKS[name])
        if not arguments.json:
            sys.stdout.write(show(name, found[name]))
            sys.stdout.flush()
    if arguments.curves:
        curves.draw(found, arguments.curves)
    if arguments.json:
        sys.stdout.write(json.dumps(machine() | {"trainings": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
