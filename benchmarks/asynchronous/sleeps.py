"""Four stages that sleep 5 ms forward and 10 ms backward: throughput without a flush, and with one.

Each micro-batch is one sample that takes those times at every stage. GPipe with 4 micro-batches
takes 4 + 3 of them for a step, 105 ms; without a flush a stage needs 15 ms per sample, so that the
ideal is 7/4 = 1.75 times GPipe's throughput. The messages are real. So is the processor time
between the sleeps, which four ranks on few cores make each other wait for; stages that take four
times as long show what is left where it counts for less.

A mini-batch that has come back is replaced at once, so with as few in flight as 1F1B has, whatever
a hop takes beyond the sleeps holds up the next mini-batch. ``stash, deep`` has the in-flight counts
of ``1f1b-deep``, which hide that, and weights that are twice as stale.

``bare`` is a rank that sleeps the same times without any message: no way to train can be faster on
the machine at the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan, Prediction
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import asynchronous_stages
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.schedule.asynchronous import split_batches, warm_up
from anabranch.simulator import stream
from anabranch.simulator.costs import StageTimes
from anabranch.weights import POLICIES, policy_named
from anabranch.workload import Batch, Workload
from benchmarks.asynchronous.flow import Side, Train, seconds_per_batch
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours
from benchmarks.runtime.ops import Wait
from benchmarks.runtime.sleeps import WIDTH, Line, Linked, numbered, predicted_s

STAGES, MICROBATCHES = 4, 4
FORWARD_S, BACKWARD_S = 5e-3, 10e-3
LONGER = 4
"""Times as long, of the second table."""

SAMPLES = 48
"""Samples that are timed in one turn, of the first table; of the second, half as many."""

DEEP = ", deep"
"""Behind the name of a policy: with the in-flight counts of ``1f1b-deep``."""

SYNC = ("gpipe", "1f1b")
REFERENCE = "gpipe"

momentum = partial(torch.optim.SGD, lr=1e-6, momentum=0.9)
"""An optimizer that every policy knows, and that costs next to nothing."""


def rows(*, samples: int = SAMPLES, turns: int = 3) -> list[Row]:
    """One row per synchronous schedule and per policy; fewer for longer stages."""
    return [
        *_rows((*POLICIES, f"stash{DEEP}"), 1, samples, turns),
        *_rows(("stash", "2bw", "pipeoptim", f"stash{DEEP}"), LONGER, samples // 2, turns),
    ]


def _rows(policies: tuple[str, ...], times: int, samples: int, turns: int) -> list[Row]:
    """One row per side, with ``bare`` first, for stages that take so many times as long."""
    seconds_of = times * FORWARD_S, times * BACKWARD_S
    module, example = Line(Wait(*seconds_of) for _ in range(STAGES)), torch.zeros(2, WIDTH)
    captured = ours.captured_model(module, example)
    plans = {name: _plan(captured, MICROBATCHES) for name in SYNC}
    plans = {name: ours.under(plan, name) for name, plan in plans.items()}
    for name in policies:
        plans[name] = without_flush(captured, name)
    sides: dict[str, tuple[Side, int]] = {"bare": (partial(_bare, *seconds_of), samples)}
    for name, plan in plans.items():
        batches = samples // plan.stage_graph.batch_size
        make = _synchronous if name in SYNC else _asynchronous
        sides[name] = partial(make, captured, example, plan), batches
    seconds = seconds_per_batch(sides, STAGES, turns=turns)
    found = [_row("bare", seconds["bare"], 1, 1 / sum(seconds_of), None)]
    for name, plan in plans.items():
        predicted, ideal = _simulated(plan, *seconds_of)
        batch = plan.stage_graph.batch_size
        found.append(_row(name, seconds[name], batch, batch / ideal, batch / predicted))
    reference = next(row["samples_per_s"] for row in found if row["side"] == REFERENCE)
    expected = next(row["predicted_per_s"] for row in found if row["side"] == REFERENCE)
    for row in found:
        row["ms"] = f"{seconds_of[0] * 1e3:g}/{seconds_of[1] * 1e3:g}"
        row["over_gpipe"] = row["samples_per_s"] / reference
        if row["predicted_per_s"] is not None:
            row["predicted_over_gpipe"] = row["predicted_per_s"] / expected
    return found


def _row(side: str, seconds: float, batch: int, ideal: float, predicted: float | None) -> Row:
    per_s = batch / seconds
    return {
        "side": side,
        "batch_s": seconds,
        "samples_per_s": per_s,
        "ideal_per_s": ideal,
        "predicted_per_s": predicted,
        "over_ideal": per_s / ideal,
    }


def _plan(captured: Captured, microbatches: int) -> Plan:
    devices = [[d] for d in range(STAGES)]
    return ours.plan_of(captured, numbered(STAGES), devices, microbatches=microbatches)


def without_flush(captured: Captured, policy: str) -> Plan:
    """The asynchronous plan: one micro-batch per mini-batch, or ``MICROBATCHES`` where the policy
    updates after several.
    """
    policy, is_deep = policy.removesuffix(DEEP), policy.endswith(DEEP)
    plan = _plan(captured, MICROBATCHES if policy_named(policy).microbatches else 1)
    graph = (
        asynchronous_stages(ours.under(plan, "1f1b-deep")) if is_deep else warm_up(plan.stage_graph)
    )
    nothing = Prediction(0.0, 0.0, 0.0, (0,) * len(graph.devices))
    return replace(plan, stage_graph=graph, predicted=nothing, mode="async", policy=policy)


def _simulated(plan: Plan, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Seconds per mini-batch with the links of local ranks, and with links that cost nothing."""
    every = [forward_s] * STAGES, [backward_s] * STAGES
    if plan.mode == "sync":
        return predicted_s(plan, *every, nbytes=4 * WIDTH), ours.ideal_s(plan, *every)
    times = [{1: forward_s}] * STAGES, [{1: backward_s}] * STAGES
    links = Linked(*times, cluster=Cluster.preset(f"local:{STAGES}"), nbytes=4 * WIDTH)
    graph = plan.stage_graph
    order = split_batches(graph)
    return stream.steady(order, links).period_s, stream.steady(order, StageTimes(*times)).period_s


def _synchronous(captured: Captured, example: Batch, plan: Plan) -> Train:
    batch = torch.zeros(plan.stage_graph.batch_size, WIDTH)
    workload = Workload(captured.module, example, optimizer=momentum)
    prepare(captured, plan.stage_graph)
    pipeline = Pipeline(workload, plan, captured=captured, check_gradients=False)
    return lambda count: (pipeline.step(batch) for _ in range(count))


def _asynchronous(captured: Captured, example: Batch, plan: Plan) -> Train:
    batch = torch.zeros(plan.stage_graph.batch_size, WIDTH)
    workload = Workload(captured.module, example, optimizer=momentum)
    prepare(captured, plan.stage_graph)
    pipeline = AsyncPipeline(workload, plan, captured=captured, check_gradients=False)
    return lambda count: pipeline.steps(batch for _ in range(count))


def _bare(forward_s: float, backward_s: float) -> Train:
    stage, x = Wait(forward_s, backward_s), torch.zeros(1, WIDTH)

    def train(count: int) -> Iterator[object]:
        for _ in range(count):
            y = stage(x)
            y.backward(torch.ones_like(y))
            yield None

    return train


def show(found: list[Row]) -> str:
    """Throughput of every side, over GPipe's and over its own ideal."""
    lines = [
        [
            row["ms"],
            row["side"],
            f"{row['samples_per_s']:.1f}",
            f"{row['over_gpipe']:.2f}",
            f"{row['predicted_over_gpipe']:.2f}" if "predicted_over_gpipe" in row else "-",
            f"{row['over_ideal']:.3f}",
        ]
        for row in found
    ]
    heads = ["ms", "side", "samples/s", f"over {REFERENCE}", "predicted", "over its ideal"]
    return table(heads, lines)
