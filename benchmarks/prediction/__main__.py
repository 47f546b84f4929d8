"""The simulator's step beside the measured one: built-in models, real compute, local ranks.

    python -m benchmarks.prediction [--models mmt] [--ranks 2 4] [--turns 3] [--actions] [--json]

The machine is calibrated, and plans are made. Then models take turns, one after the other, and all
of them again: the machine is calibrated anew, and the plans of a model are trained. For each plan
there are rounds: one rank times operators and update of the model some times, another one in every
round, while the others wait; then the plan is trained for some steps. A turn's prediction is by its
calibration and by the medians of all times, as a mean of the ranks. So a machine whose speed
drifts, as that of shared ones does from second to second and from core to core, is predicted at the
speed that it has.

What a user sees is another figure: the step that was predicted when the plan was made, by a profile
of the whole model alone and by the calibration, minutes before.

A turn beside which others computed is made again, a few times at most. The row is the mean of the
turns' median steps beside the mean of their predictions, and how far turns are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import torch.distributed as dist

from anabranch import launch
from anabranch.calibration.machine import OtherLoad
from anabranch.calibration.measure import calibrate
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured, capture
from anabranch.models import MODELS, build
from anabranch.plans.plan import Plan
from anabranch.profile.measure import Measurement
from anabranch.profile.profile import Profile, UpdateCost
from anabranch.runtime.measurement.workload import measure_update, measure_workload
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.solve import plan, simulate
from anabranch.timeline import Timeline
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table
from benchmarks.planners.common import machine as facts_of_machine

T = TypeVar("T")

BATCH = 32
ROUNDS, SETTLING, STEPS, RECORDED = 6, 4, 6, 2
"""Rounds of a turn, and steps of a round: those before any counts, those that do, and recorded
ones. Behind the profile's turn caches are cold for some steps.
"""

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
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--actions", action="store_true", help="also where the time goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    machine, _ = calmest(calibrate)
    cases = [
        case for model in arguments.models for case in cases_of(model, arguments.ranks, machine)
    ]
    found = [turn for _ in range(arguments.turns) for turn in turns(cases)]
    rows = [row_of(case, predicted_turns(case, found)) for case in cases]
    cores = os.cpu_count() or 1
    summary = {
        what: errors(
            [row for row in rows if (row["ranks"] <= cores) == (what == "with a core per rank")]
        )
        for what in ("with a core per rank", "with more ranks than cores")
    }
    if arguments.json:
        calibration = machine.calibration
        document = {
            **facts_of_machine(),
            "calibration": None if calibration is None else asdict(calibration),
            "rows": rows,
            "error": summary,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    show(rows, actions=arguments.actions)
    sys.stdout.write(f"\n{machine.calibration.remark if machine.calibration else ''}\n")
    for what, error in summary.items():
        sys.stdout.write(f"{what}, error in the median and at most: {error}\n")


def errors(rows: Sequence[Row]) -> dict[str, str]:
    """Median and largest error of predictions, and of those that plans were made with; how far the
    same steps were apart when they were measured again.
    """
    if not rows:
        return {}
    off = {
        name: [abs(row[key] / row["step_s"] - 1) for row in rows]
        for name, key in (("prediction", "predicted_s"), ("as planned", "planned_s"))
    }
    off["apart"] = [row["apart"] for row in rows]
    return {name: f"{statistics.median(e):.1%}, {max(e):.1%}" for name, e in off.items()}


@dataclass(frozen=True)
class Case:
    """A plan of a model, and the model twice: ranks forget the parameters of other stages; to be
    timed, it has to be whole.
    """

    model: str
    ranks: int
    kind: str
    chosen: Plan
    workload: Workload
    captured: Captured
    spare: Workload
    whole: Captured


def cases_of(model: str, ranks: list[int], machine: Cluster) -> list[Case]:
    """One for every number of ranks and kind of plan."""
    workload, spare = (build(model, preset="small") for _ in range(2))
    captured, whole = (capture(one.module, one.example) for one in (workload, spare))
    counts = [1 << i for i in range(BATCH.bit_length())]
    profile = measure_workload(workload, counts, captured=captured)
    return [
        Case(
            model,
            count,
            kind,
            plan(profile, local(machine, count), BATCH, model=model, **options),
            workload,
            captured,
            spare,
            whole,
        )
        for count in ranks
        for kind, options in KINDS.items()
    ]


@dataclass(frozen=True)
class Turn:
    """A calibration, and behind it, by case of a model, what ranks have seen and on how many cores
    others computed.
    """

    machine: Cluster
    seen: Mapping[int, tuple[list[Trained], float]]


def turns(cases: Sequence[Case]) -> Iterator[Turn]:
    """A turn of each model."""
    for _, alike in groupby(cases, key=attrgetter("model")):
        machine, _ = calmest(calibrate)
        yield Turn(
            machine,
            {id(case): calmest(partial(launch.run, trained, case.ranks, case)) for case in alike},
        )


def predicted_turns(case: Case, found: Sequence[Turn]) -> list[Row]:
    """The turns of a case beside its predictions."""
    rows = []
    for turn in found:
        if id(case) not in turn.seen:
            continue
        by_rank, others = turn.seen[id(case)]
        seen_by_all = mean_profile([rank.profile for rank in by_rank])
        timeline = simulate(case.chosen, seen_by_all, local(turn.machine, case.ranks))
        assert case.chosen.predicted is not None
        rows.append(
            {
                "step_s": statistics.median(by_rank[0].steps),
                "predicted_s": timeline.step_s,
                "planned_s": case.chosen.predicted.step_s,
                "uncalibrated_s": uncalibrated(case.chosen, seen_by_all, case.ranks),
                "others": others,
                "actions": beside(timeline, by_rank[0].timelines),
            }
        )
    return rows


def row_of(case: Case, turns: Sequence[Row]) -> Row:
    """The mean of the turns, and how far the longest step is from the shortest."""
    steps = [turn["step_s"] for turn in turns]
    means = {
        name: statistics.fmean(turn[name] for turn in turns)
        for name in ("step_s", "predicted_s", "planned_s", "uncalibrated_s", "others")
    }
    actions = {
        name: _means([turn["actions"][name] for turn in turns]) for name in turns[0]["actions"]
    }
    return {
        "model": case.model,
        "ranks": case.ranks,
        "kind": case.kind,
        **means,
        "apart": max(steps) / min(steps) - 1,
        "actions": actions,
    }


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


def local(machine: Cluster, count: int) -> Cluster:
    """So many local ranks with the calibration."""
    preset = Cluster.preset(f"local:{count}")
    levels = (replace(machine.levels[0], size=count),)
    return replace(preset, levels=levels, calibration=machine.calibration)


def uncalibrated(chosen: Plan, profile: Profile, count: int) -> float:
    """The step as it is predicted without calibration and update."""
    return simulate(chosen, replace(profile, update=None), Cluster.preset(f"local:{count}")).step_s


@dataclass(frozen=True)
class Trained:
    """Seconds of steps on one rank, some more of them recorded, and its profile between them."""

    steps: list[float]
    timelines: list[Timeline]
    profile: Profile


def trained(case: Case) -> Trained:
    """A turn, on one rank."""
    prepare(case.captured, case.chosen.stage_graph)
    pipe = Pipeline(case.workload, case.chosen, captured=case.captured, check_gradients=False)
    measurement = Measurement(case.whole, sizes_of(case.chosen))
    ranks = dist.get_world_size()
    updates: list[UpdateCost] = []
    steps: list[float] = []
    timelines: list[Timeline] = []
    batches = pipe.batches()
    for turn in range(max(ROUNDS, ranks)):
        if turn % ranks == pipe.rank:
            measurement.turn()
            updates.append(measure_update(case.spare))
        # A step is given its batch: reading them is no part of it, nor of the ranks beside it.
        given = [next(batches) for _ in range(SETTLING + STEPS + RECORDED)]
        dist.barrier()
        for step, batch in enumerate(given[:-RECORDED], -SETTLING):
            begun = time.perf_counter()
            pipe.step(batch)
            if step >= 0:
                steps.append(time.perf_counter() - begun)
        for batch in given[-RECORDED:]:
            pipe.step(batch, record=True)
            assert pipe.timeline is not None
            timelines.append(pipe.timeline)
    update = UpdateCost(*_means([astuple(update) for update in updates]))
    profile = replace(measurement.profile(), update=update)
    return Trained(steps, timelines, profile)


def mean_profile(profiles: list[Profile]) -> Profile:
    """The mean of what several ranks have measured: their processors differ."""
    updates = [astuple(profile.update) for profile in profiles if profile.update is not None]
    costs = tuple(
        replace(
            alike[0],
            forward_s=_means([cost.forward_s for cost in alike]),
            backward_s=_means([cost.backward_s for cost in alike]),
            weight_s=_means([cost.weight_s for cost in alike]),
        )
        for alike in zip(*(profile.costs for profile in profiles), strict=True)
    )
    return replace(profiles[0], costs=costs, update=UpdateCost(*_means(updates)))


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


def beside(predicted: Timeline, recorded: Sequence[Timeline]) -> Row:
    """Per device and kind of action: seconds predicted and measured, the median of some steps; what
    is left at the end.
    """
    said, seen = _by_kind(predicted), [_by_kind(timeline) for timeline in recorded]
    return {
        name: (seconds, statistics.median(one[name] for one in seen))
        for name, seconds in sorted(said.items())
    }


def _by_kind(timeline: Timeline) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    last: dict[int, float] = defaultdict(float)
    for span in timeline.spans:
        last[span.device] = max(last[span.device], span.end)
        if span.action.kind.is_compute:
            found[f"{span.device} {span.action.kind.name.lower()}"] += span.end - span.start
    for device, end in last.items():
        found[f"{device} after the last action"] = timeline.step_s - end
    return found


def show(rows: list[Row], *, actions: bool) -> None:
    """Print some rows."""
    columns = ["model", "ranks", "plan", "step ms", "predicted", "off", "apart"]
    columns += ["as planned", "uncalibrated", "others"]
    lines = [
        [
            row["model"],
            str(row["ranks"]),
            row["kind"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['predicted_s'] / row['step_s'] - 1:+.1%}",
            f"{row['apart']:.1%}",
            f"{row['planned_s'] / row['step_s'] - 1:+.1%}",
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
