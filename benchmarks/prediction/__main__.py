"""The simulator's step beside the measured one: built-in models, real compute, local ranks.

    python -m benchmarks.prediction [--models mmt] [--ranks 2 4] [--turns 3] [--actions] [--json]

The machine is calibrated first. Then plans take turns. A turn has rounds: while all ranks wait, one
of them times operators and update of the model; the plan is trained for some steps; the model is
timed again. A round's prediction is the mean of those by its two profiles. So a machine whose speed
drifts, as that of shared ones does from second to second, is predicted at the speed that it has. A
turn beside which others computed is made again, a few times at most. A row is the round with the
median error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.calibration.machine import OtherLoad
from anabranch.calibration.measure import Calibrated, calibrate
from anabranch.cli.source import measured
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.models import MODELS, build
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.solve import plan, simulate
from anabranch.timeline import Timeline
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table

T = TypeVar("T")

BATCH = 32
ROUNDS, STEPS, SETTLING = 5, 8, 4
"""Rounds of a turn, steps of a round, and how many more before them."""

QUIET, TRIES = 0.06, 4
"""Processor cores that others may take of a turn, and how often it is made at most."""

KINDS: dict[str, dict[str, Any]] = {
    "1f1b": {"planner": "graphpipe", "schedule": "1f1b", "max_replicas": 1},
    "data-parallel": {"planner": "data-parallel"},
}


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--actions", action="store_true", help="also where the time goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    machine, _ = calmest(calibrate)
    rows: list[Row] = []
    for model in arguments.models:
        rows += measure(model, arguments.ranks, arguments.turns, machine)
        if not arguments.json:
            show(rows[-len(arguments.ranks) * len(KINDS) :], actions=arguments.actions)
    off = [abs(row["predicted_s"] / row["step_s"] - 1) for row in rows]
    summary = {"median": statistics.median(off), "worst": max(off), "steps": len(off)}
    if arguments.json:
        calibration = machine.cluster.calibration
        found = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "calibration": None if calibration is None else asdict(calibration),
            "rows": rows,
            "error": summary,
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    remark = machine.cluster.calibration.remark if machine.cluster.calibration else ""
    sys.stdout.write(
        f"\n{remark}\nerror of the prediction: median {summary['median']:.1%}, worst "
        f"{summary['worst']:.1%}, of {len(off)} steps\n"
    )


def measure(model: str, ranks: list[int], turns: int, machine: Calibrated) -> list[Row]:
    """A row for every number of ranks and kind of plan."""
    workload = build(model, preset="small")
    captured = capture(workload.module, workload.example)
    counts = tuple(1 << i for i in range(BATCH.bit_length()))
    profile = measured(captured, workload, counts, "cpu")
    plans = {
        (count, kind): plan(profile, local(machine, count), BATCH, model=model, **options)
        for count in ranks
        for kind, options in KINDS.items()
    }
    # Ranks forget the parameters of other stages; to be timed, the model has to be whole.
    spare = build(model, preset="small")
    whole = capture(spare.module, spare.example)
    seen: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for _ in range(turns):
        for (count, kind), chosen in plans.items():
            cluster, sizes = local(machine, count), sizes_of(chosen)

            def timed(sizes: tuple[int, ...] = sizes) -> Profile:
                return measured(whole, spare, sizes, "cpu")

            turn = partial(launch.run, trained, count, workload, chosen, captured, timed)
            ranks_rounds, others = calmest(turn)
            for round_ in ranks_rounds[0]:
                found = [simulate(chosen, profile, cluster) for profile in round_.profiles]
                plain = [uncalibrated(chosen, profile, count) for profile in round_.profiles]
                seen[count, kind].append(
                    {
                        "step_s": statistics.median(round_.steps),
                        "predicted_s": statistics.fmean(timeline.step_s for timeline in found),
                        "uncalibrated_s": statistics.fmean(plain),
                        "others": others,
                        "actions": beside(found[0], round_.timeline),
                    }
                )
    return [
        {"model": model, "ranks": count, "kind": kind, **middle(found)}
        for (count, kind), found in seen.items()
    ]


def calmest(make: Callable[[], T]) -> tuple[T, float]:
    """What was made while others computed least, and on how many cores they did."""
    found: list[tuple[float, T]] = []
    for _ in range(TRIES):
        load = OtherLoad()
        made = make()
        found.append((load.cores(), made))
        if found[-1][0] <= QUIET:
            break
    cores, made = min(found, key=lambda one: one[0])
    return made, cores


def sizes_of(chosen: Plan) -> tuple[int, ...]:
    """The sample counts that a plan needs; two at least."""
    graph = chosen.stage_graph
    sizes = {size for s in range(len(graph)) for size in graph.slice_sizes(s)} - {0}
    return tuple(sorted(sizes | {2 * max(sizes)}))


def middle(found: list[Row]) -> Row:
    """The round with the median error."""
    ordered = sorted(found, key=lambda row: row["predicted_s"] / row["step_s"])
    return ordered[len(ordered) // 2]


def local(machine: Calibrated, count: int) -> Cluster:
    """So many local ranks with the calibration."""
    preset = Cluster.preset(f"local:{count}")
    levels = (replace(machine.cluster.levels[0], size=count),)
    return replace(preset, levels=levels, calibration=machine.cluster.calibration)


def uncalibrated(chosen: Plan, profile: Profile, count: int) -> float:
    """The step as it is predicted without calibration and update."""
    return simulate(chosen, replace(profile, update=None), Cluster.preset(f"local:{count}")).step_s


@dataclass(frozen=True)
class Round:
    """Seconds of some steps, one of them recorded, and the profiles before and after them."""

    profiles: tuple[Profile, Profile]
    steps: list[float]
    timeline: Timeline | None


def trained(
    workload: Workload, chosen: Plan, captured: Captured, timed: Callable[[], Profile]
) -> list[Round]:
    """The rounds of a turn, of one rank; the first one has the profiles."""
    prepare(captured, chosen.stage_graph)
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    batches = pipe.batches()
    for _ in range(SETTLING):
        pipe.step(next(batches))

    def profile() -> Profile | None:
        found = timed() if pipe.rank == 0 else None
        dist.barrier()
        return found

    rounds: list[Round] = []
    before = profile()
    for _ in range(ROUNDS):
        steps: list[float] = []
        for step in range(-SETTLING, STEPS):
            batch = next(batches)
            begun = time.perf_counter()
            pipe.step(batch)
            if step >= 0:
                steps.append(time.perf_counter() - begun)
        pipe.step(next(batches), record=True)
        after = profile()
        if before is not None and after is not None:
            rounds.append(Round((before, after), steps, pipe.timeline))
        before = after
    return rounds


def beside(predicted: Timeline, recorded: Timeline | None) -> Row:
    """Per device and kind of action: seconds predicted and measured; what is left at the end."""
    found: Row = defaultdict(lambda: [0.0, 0.0])
    for column, timeline in enumerate((predicted, recorded)):
        if timeline is None:
            continue
        last: dict[int, float] = defaultdict(float)
        for span in timeline.spans:
            last[span.device] = max(last[span.device], span.end)
            if span.action.kind.is_compute:
                name = f"{span.device} {span.action.kind.name.lower()}"
                found[name][column] += span.end - span.start
        for device, end in last.items():
            found[f"{device} after the last action"][column] += timeline.step_s - end
    return dict(sorted(found.items()))


def show(rows: list[Row], *, actions: bool) -> None:
    """Print some rows."""
    columns = ["model", "ranks", "plan", "step ms", "predicted", "off", "uncalibrated", "others"]
    lines = [
        [
            row["model"],
            str(row["ranks"]),
            row["kind"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['predicted_s'] / row['step_s'] - 1:+.1%}",
            f"{row['uncalibrated_s'] / row['step_s'] - 1:+.1%}",
            f"{row['others']:.2f}",
        ]
        for row in rows
    ]
    sys.stdout.write(table(columns, lines) + "\n")
    for row in rows if actions else ():
        sys.stdout.write(f"{row['model']}, {row['ranks']} ranks, {row['kind']}\n")
        for name, (said, seen) in row["actions"].items():
            sys.stdout.write(f"    {name:28s} {said * 1e3:8.2f} {seen * 1e3:8.2f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
