"""The simulator's step beside the measured one: built-in models, real compute, local ranks.

    python -m benchmarks.prediction [--models mmt] [--ranks 2 4] [--turns 3] [--actions] [--json]

The machine is calibrated first. Then plans take turns. A turn has rounds: one rank times operators
and update of the model some times, another one in every round, while the others wait; then the plan
is trained for some steps. The row is the median of the steps of all rounds beside the prediction by
the medians of all times, as a mean of the ranks. So a machine whose speed drifts, as that of shared
ones does from second to second and from core to core, is predicted at the speed that it has.

A turn beside which others computed is made again, a few times at most. Of several turns the
one with the median error counts.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
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
from anabranch.profile.measure import Measurement
from anabranch.profile.profile import Profile, UpdateCost
from anabranch.runtime.measurement.update import measure_update
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.solve import plan, simulate
from anabranch.timeline import Timeline
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table

T = TypeVar("T")

BATCH = 32
ROUNDS, STEPS, SETTLING = 12, 4, 2
"""Rounds of a turn (of more ranks, as many), steps of a round, and how many more before them."""

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
            cluster = local(machine, count)
            turn = partial(launch.run, trained, count, workload, chosen, captured, spare, whole)
            by_rank, others = calmest(turn)
            one, seen_by_all = by_rank[0], mean_profile([rank.profile for rank in by_rank])
            found = simulate(chosen, seen_by_all, cluster)
            seen[count, kind].append(
                {
                    "step_s": statistics.median(one.steps),
                    "predicted_s": found.step_s,
                    "uncalibrated_s": uncalibrated(chosen, seen_by_all, count),
                    "others": others,
                    "actions": beside(found, one.timeline),
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
    """The turn with the median error."""
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
class Trained:
    """Seconds of steps on one rank, one of them recorded, and its profile between them."""

    steps: list[float]
    timeline: Timeline | None
    profile: Profile


def trained(
    workload: Workload, chosen: Plan, captured: Captured, spare: Workload, whole: Captured
) -> Trained:
    """A turn, on one rank."""
    prepare(captured, chosen.stage_graph)
    pipe = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    measurement = Measurement(whole, sizes_of(chosen))
    updates: list[UpdateCost] = []
    batches, steps = pipe.batches(), list[float]()
    for turn in range(max(ROUNDS, dist.get_world_size())):
        if turn % dist.get_world_size() == pipe.rank:
            measurement.turn()
            updates.append(measure_update(spare))
        dist.barrier()
        for step in range(-SETTLING, STEPS):
            batch = next(batches)
            begun = time.perf_counter()
            pipe.step(batch)
            if step >= 0:
                steps.append(time.perf_counter() - begun)
    pipe.step(next(batches), record=True)
    update = UpdateCost(*_means([astuple(update) for update in updates]))
    profile = replace(measurement.profile(), update=update)
    return Trained(steps, pipe.timeline, profile)


def mean_profile(profiles: list[Profile]) -> Profile:
    """The mean of what several ranks have measured: their processors differ."""
    updates = [astuple(profile.update) for profile in profiles if profile.update is not None]
    costs = tuple(
        replace(
            alike[0],
            forward_s=_means([cost.forward_s for cost in alike]),
            backward_s=_means([cost.backward_s for cost in alike]),
        )
        for alike in zip(*(profile.costs for profile in profiles), strict=True)
    )
    return replace(profiles[0], costs=costs, update=UpdateCost(*_means(updates)))


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


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
