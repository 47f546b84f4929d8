"""Two ranks on one GPU, over Gloo and through the host: plans of several kinds against one process
on the CPU, and what a rank says when the other one is gone.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator

import torch

import anabranch
from anabranch.graph.capture import Captured
from anabranch.verification import even_plan
from anabranch.weights import POLICIES
from anabranch.workload import Workload
from benchmarks.gpu import subject
from benchmarks.gpu.case import Case, Row, first_gpu
from benchmarks.replay import Replay
from benchmarks.runtime import ours

LOST = {"peer-killed": signal.SIGKILL, "peer-stopped": signal.SIGSTOP}
"""Case -> what the last rank does to itself."""

TIMEOUT_S = 15.0
"""Until a silent rank counts as lost."""

PLANS = ("stages", "steps", "self-check", "tied", "replicas", "evaluation", "asynchronous")


def cases(device: str) -> list[Case]:
    """All on the first GPU."""
    return two_ranks(first_gpu())


def two_ranks(environment: dict[str, str]) -> list[Case]:
    """The cases of two ranks, wherever they are."""
    options = {"ranks": 2, "environment": environment}
    plans = [Case(name, **options) for name in PLANS]
    return plans + [Case(name, **options, loses_a_rank=True) for name in LOST]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """Train for some steps on both ranks; each of them compares what it has."""
    workload = subject.workload_on(device, device.type, tied=case == "tied")
    captured = anabranch.capture(workload.module, workload.example)
    if case in LOST:
        yield from _lose(case, workload, captured)
        return
    if case == "asynchronous":
        yield _asynchronous(workload, captured, device.type)
        return
    pipeline = anabranch.Pipeline(
        workload, _plan(case, captured), captured=captured, check_gradients=case == "self-check"
    )
    transport = type(pipeline._session.transport).__name__
    data = subject.batches(workload)
    start, expected = (
        subject.workload_on(torch.device("cpu"), device.type, tied=case == "tied") for _ in range(2)
    )
    if case == "steps":
        losses = list(pipeline.steps(data))
    else:
        losses = [pipeline.step(batch) for batch in data]
    their_losses = subject.trained_alone(expected, data)
    row = subject.agreement(losses, workload.module, their_losses, expected.module, start.module)
    if case == "evaluation":
        row |= _evaluation(pipeline, expected)
    step_s = subject.step_seconds(lambda: pipeline.step(data[0]), device)
    yield row | {"step_s": step_s, "transport": transport}
    pipeline.close()


def _plan(case: str, captured: Captured) -> anabranch.Plan:
    if case != "replicas":
        return even_plan(captured.graph, 2, subject.BATCH)
    count = subject.BATCH // subject.MICROBATCH
    return ours.plan_of(
        captured, lambda _: 0, [[0, 1]], microbatches=count, microbatch_size=subject.MICROBATCH
    )


def _evaluation(pipeline: anabranch.Pipeline, expected: Workload) -> Row:
    """The held-out loss of both."""
    held_out = subject.batches(expected, 2)
    loss = pipeline.evaluate(held_out)["loss"]
    expected.module.eval()
    with torch.no_grad():
        theirs = [float(expected.module(**batch)["loss"]) for batch in held_out]
    expected.module.train()
    return {"evaluation_error": abs(loss / statistics.mean(theirs) - 1)}


def _asynchronous(workload: Workload, captured: Captured, size: str) -> Row:
    """Without a flush; one process replays it, version for version."""
    plan = even_plan(captured.graph, 2, subject.BATCH)
    stages = [stage.operators for stage in plan.stage_graph.stages]
    plan = ours.plan_of(
        captured,
        lambda name: int(name in stages[1]),
        [[0], [1]],
        microbatches=1,
        microbatch_size=subject.BATCH,
    )
    pipeline = anabranch.AsyncPipeline(
        workload, plan, policy="stash", captured=captured, check_gradients=False
    )
    data = subject.batches(workload, 2 * subject.STEPS)
    losses = list(pipeline.steps(data))
    start, expected = (subject.workload_on(torch.device("cpu"), size) for _ in range(2))
    replay = Replay(expected, stages, POLICIES["stash"](), batch_size=subject.BATCH)
    theirs = list(replay.train(data))
    row = subject.agreement(losses, workload.module, theirs, expected.module, start.module)
    pipeline.close()
    return row


def _lose(case: str, workload: Workload, captured: Captured) -> Iterator[Row]:
    """The last rank ends or stops before its third step."""
    pipeline = anabranch.Pipeline(
        workload,
        even_plan(captured.graph, 2, subject.BATCH),
        captured=captured,
        check_gradients=False,
        timeout=TIMEOUT_S,
    )
    for number, batch in enumerate(subject.batches(workload, 50)):
        if number == 2 and pipeline.rank == 1:
            yield {"lost_at": time.time()}
            os.kill(os.getpid(), LOST[case])
        pipeline.step(batch)
