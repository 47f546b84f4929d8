"""Measured steps with real compute: graph, chain, data parallelism, and one process.

    python -m benchmarks.measured [--ranks 2] [--cases mmt:8 ...] [--rounds 5] [--json]

Each model is captured, measured and planned here: by ``auto`` for graphs, by ``chain`` for rows of
stages (the same search), and data parallelism. Contenders with the same plan are run once. One
process is PyTorch alone, with one thread and with as many as there are ranks. In every round each
contender trains for some steps in new processes, one after the other, so that a machine whose speed
drifts meets all alike; a row has the medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from anabranch import launch
from anabranch.calibration.machine import OtherLoad
from anabranch.calibration.measure import calibrate
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.models import build
from anabranch.plans.plan import Plan
from anabranch.runtime.measurement.workload import measure_workload
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.solve import plan
from anabranch.workload import Workload
from benchmarks.planners.common import Row, machine, table
from benchmarks.prediction.__main__ import calmest, local

MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "mmt": ("mmt", {"branches": "2", "layers": "2", "hidden": "256", "feedforward": "1024"}),
    "candle-uno": ("candle-uno", {"branches": "4", "features": "512", "width": "1024"}),
    "dlrm": ("dlrm", {"features": "256", "width": "1024", "rows": "20000", "embedding": "16"}),
    "transformer": ("transformer", {}),
}
"""Name -> built-in model and the options that differ from its small preset: branches with heavy
parameters, and a model without branches.
"""

CASES = (
    *("mmt:8", "mmt:64", "candle-uno:8", "candle-uno:64", "candle-uno:512"),
    *("dlrm:16", "dlrm:128", "transformer:32"),
)
SETTLING, STEPS = 4, 8
"""Steps of a round: those before any counts, and those that do."""

PLANNED = {"graph": "auto", "chain": "chain", "data parallelism": "data-parallel"}
"""Contender -> its planner."""


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        run: trains for a round; returns the seconds of the steps.
        predicted_s: seconds of a step as they were predicted; 0 for one process.
        shape: number of stages and of replicas in words.
    """

    run: Callable[[], list[float]]
    predicted_s: float = 0.0
    shape: str = ""


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES, help="MODEL:SAMPLES")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    load = OtherLoad()
    cluster = local(calmest(calibrate)[0], arguments.ranks)
    rows = [measured(case, cluster, arguments.rounds) for case in arguments.cases]
    if arguments.json:
        document = {**machine(), "others_cores": load.cores(), "rows": rows}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    names = [*rows[0]["steps"]]
    columns = ["model", "samples", *(f"{name}, ms" for name in names), "graph is"]
    lines = [
        [
            row["model"],
            str(row["samples"]),
            *(_cell(row, name) for name in names),
            row["shape"]["graph"],
        ]
        for row in rows
    ]
    sys.stdout.write(table(columns, lines) + "\n")
    sys.stdout.write(f"others took {load.cores():.2f} cores meanwhile\n")


def measured(case: str, cluster: Cluster, rounds: int) -> Row:
    """Measure the contenders of a case in turns; one row."""
    name, _, samples = case.partition(":")
    contenders = contenders_of(name, int(samples), cluster)
    steps: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, how in contenders.items():
            steps[contender] += how.run()
    return {
        "model": name,
        "samples": int(samples),
        "ranks": cluster.num_devices,
        "steps": {
            contender: statistics.median(seconds) if seconds else None
            for contender, seconds in steps.items()
        },
        "predicted": {contender: how.predicted_s for contender, how in contenders.items()},
        "shape": {contender: how.shape for contender, how in contenders.items()},
    }


def contenders_of(name: str, samples: int, cluster: Cluster) -> dict[str, Contender]:
    """Plan a model in every way; a plan that another contender has, too, is run once."""
    model, options = MODELS[name]
    make = partial(build, model, preset="small", options=options)
    workload = make()
    captured = capture(workload.module, workload.example)
    counts = [1 << i for i in range(samples.bit_length())]
    profile = measure_workload(workload, counts, captured=captured)
    contenders: dict[str, Contender] = {}
    known: dict[object, str] = {}
    for contender, planner in PLANNED.items():
        found = plan(profile, cluster, samples, planner=planner, model=name)
        graph = found.stage_graph
        shape = f"{len(graph)} stages, depth {graph.depth}, {found.schedule}"
        same = known.setdefault((graph, found.schedule, found.shard_optimizer), contender)
        run = partial(pipelined, workload, captured, found) if same == contender else list
        contenders[contender] = Contender(
            run, found.figures.step_s, shape if same == contender else f"as {same}"
        )
    for threads in (1, cluster.num_devices):
        run = partial(launch.run, alone, 1, make, samples, threads)
        name = f"one process, {threads} thread{'s' * (threads > 1)}"
        contenders[name] = Contender(lambda run=run: run()[0])
    return contenders


def pipelined(workload: Workload, captured: Captured, chosen: Plan) -> list[float]:
    """Train for a round by a plan; seconds of the steps on the first rank."""
    prepare(captured, chosen.stage_graph)

    def rank() -> list[float]:
        pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
        batches = [*islice(pipe.batches(), SETTLING + STEPS)]
        return timed(pipe.step, batches)

    return launch.run(rank, len(chosen.stage_graph.devices))[0]


def alone(make: Callable[[], Workload], samples: int, threads: int) -> list[float]:
    """Train for a round in one process without anabranch."""
    torch.set_num_threads(threads)
    workload = make()
    optimizer = workload.make_optimizer([*workload.module.named_parameters()])

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        result = workload.module(**batch)
        (result["loss"] if isinstance(result, dict) else result).backward()
        optimizer.step()

    assert workload.data is not None
    return timed(step, [*islice(workload.data(samples, 0), SETTLING + STEPS)])


def timed(step: Callable[..., object], batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Seconds of the steps that count."""
    seconds = []
    for batch in batches:
        begun = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begun)
    return seconds[SETTLING:]


def _cell(row: Row, name: str) -> str:
    step_s, predicted_s = row["steps"][name], row["predicted"][name]
    if step_s is None:
        return row["shape"][name]
    return f"{step_s * 1e3:.1f}" + (f" ({predicted_s * 1e3:.1f})" if predicted_s else "")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
