"""Drawn schedules: whether what the check lets pass can be executed, and how long it takes."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES, compute_order
from anabranch.schedule.check import check
from anabranch.schedule.lower import lower
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import step_seconds


def drawn_graph(seed: int) -> tuple[StageGraph, str]:
    """A stage graph of up to eight stages with up to four replicas, in micro-batches of several
    sizes, some stages in flight more or less than a rule would have it; and a key of ``SCHEDULES``.
    """
    drawn = random.Random(seed)
    count, batch_size = drawn.randint(1, 8), drawn.choice([8, 12, 16, 30, 32, 64])
    stages, devices = [], 0
    for s in range(count):
        replicas = drawn.choice([1, 1, 2, 3, 4])
        mine = tuple(range(devices, devices + replicas))
        size = drawn.choice([n for n in (1, 2, 3, 4, 8, 16) if n <= batch_size])
        stages.append(Stage((f"op{s}",), mine, size, k=drawn.choice([1, 1, 2])))
        devices += replicas
    edges = {(drawn.randrange(y), y) for y in range(1, count)}
    edges |= {(x, y) for y in range(count) for x in range(y) if drawn.random() < 0.2}
    name = drawn.choice(sorted(SCHEDULES))
    graph = StageGraph(tuple(stages), tuple(sorted(edges)), batch_size)
    warm = SCHEDULES[name]().warm_up(graph)
    if drawn.random() < 0.5:
        return warm, name
    # Counts that nobody has planned: many of them cannot be executed.
    changed = tuple(
        Stage(
            stage.operators,
            stage.devices,
            stage.microbatch_size,
            k=stage.k,
            in_flight=max(1, stage.in_flight + drawn.randint(-2, 2)),
        )
        for stage in warm.stages
    )
    return StageGraph(changed, warm.edges, batch_size), name


def schedules(count: int, first: int = 0) -> dict[str, Any]:
    """Checks of drawn schedules; each that passes is executed by the simulator."""
    taken: list[float] = []
    passed = refused = deadlocks = actions = 0
    for seed in range(first, first + count):
        graph, name = drawn_graph(seed)
        try:
            schedule = lower(compute_order(graph, name), graph)
        except (InvalidScheduleError, DeadlockError):
            refused += 1
            continue
        began = time.perf_counter()
        try:
            check(schedule, graph)
        except (InvalidScheduleError, DeadlockError):
            refused += 1
            continue
        finally:
            taken.append(time.perf_counter() - began)
        passed += 1
        actions = max(actions, sum(map(len, schedule.actions.values())))
        seconds = [{1: 1.0 + s} for s in range(len(graph))]
        try:
            step_seconds(graph, schedule, StageTimes(seconds, seconds))
        except DeadlockError:
            deadlocks += 1
    ordered = sorted(taken)
    return {
        "drawn": count,
        "refused": refused,
        "passed, and executed": passed,
        "deadlocks among them": deadlocks,
        "actions, most": actions,
        "check, median ms": round(statistics.median(ordered) * 1e3, 2),
        "check, p99 ms": round(ordered[int(0.99 * len(ordered))] * 1e3, 2),
        "check, worst ms": round(ordered[-1] * 1e3, 2),
    }
