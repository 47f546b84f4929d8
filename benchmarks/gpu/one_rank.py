"""One rank under each option: losses and weights against the CPU, peak memory against the plan, and
how often the host waits for the GPU in a step.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

import anabranch
from anabranch.cluster import Cluster, Level
from anabranch.graph.capture import Captured
from benchmarks.gpu import subject
from benchmarks.gpu.case import Case, Row
from benchmarks.gpu.operators import sheet_of

OPTIONS = {
    "plain": anabranch.ComputeOptions(),
    "self-check": anabranch.ComputeOptions(),
    "bf16": anabranch.ComputeOptions(precision="bf16"),
    "fp16": anabranch.ComputeOptions(precision="fp16"),
    "offload": anabranch.ComputeOptions(offload=True),
    "dropout-sample": anabranch.ComputeOptions(dropout="sample"),
    "compile": anabranch.ComputeOptions(compile=True),
}
"""Case -> options; ``self-check`` has the pipeline's own comparison with the module as well."""

_OPTIMIZER_FACTOR = 1.0
"""SGD with momentum keeps one number per weight."""


def cases(device: str) -> list[Case]:
    """One per option; ``compile`` is not rehearsed, as it takes a compiler and a minute."""
    bitwise = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    plain = [Case(name) for name in OPTIONS if name != "compile"]
    compiled = [Case("compile", limit_s=120.0)] if device == "cuda" else []
    return [*plain, Case("recompute", environment=bitwise), *compiled]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """A row for some steps here and on the CPU, and one for a step that is weighed and watched."""
    if case == "recompute":
        yield from _recompute(device)
        return
    options = OPTIONS[case]
    dropout = 0.1 if case == "dropout-sample" else 0.0
    pipeline, row = _pipeline(device, device.type, dropout, options, checks=case == "self-check")
    library_bytes = _library_bytes(device)
    data = subject.batches(pipeline.workload)
    losses = [pipeline.step(batch) for batch in data]
    # The CPU computes what there is no other way to know: half precision and numbers of dropout.
    alone = replace(options, compile=False, offload=False)
    expected, _ = _pipeline(torch.device("cpu"), device.type, dropout, alone, checks=False)
    yield subject.agreement(
        losses,
        pipeline.workload.module,
        [expected.step(batch) for batch in data],
        expected.workload.module,
        subject.workload_on(torch.device("cpu"), device.type).module,
        options.precision,
    )
    row["step_s"] = subject.step_seconds(lambda: pipeline.step(data[0]), device)
    row["library_bytes"] = library_bytes
    pipeline.step(data[0], weigh=True)
    if pipeline.peak_bytes is not None:
        row["peak_bytes"] = pipeline.peak_bytes[0]
    if device.type == "cuda":
        row |= _syncs(lambda: pipeline.step(data[0]))
    yield row


def _pipeline(
    device: torch.device,
    size: str,
    dropout: float,
    options: anabranch.ComputeOptions,
    *,
    checks: bool,
    recompute: bool = False,
) -> tuple[anabranch.Pipeline, Row]:
    """A pipeline of one rank, and the peak that its plan predicts."""
    torch.manual_seed(0)
    workload = subject.workload_on(device, size, dropout=dropout)
    captured = anabranch.capture(workload.module, workload.example)
    plan, predicted = _plan(captured, device, recompute)
    pipeline = anabranch.Pipeline(
        workload, plan, captured=captured, compute=options, check_gradients=checks
    )
    return pipeline, {"predicted_bytes": predicted}


def _plan(captured: Captured, device: torch.device, recompute: bool) -> tuple[anabranch.Plan, int]:
    profile = anabranch.estimate(
        captured, sheet_of(device) or "h100", (subject.MICROBATCH, subject.BATCH)
    )
    gpu = Cluster("one GPU", device.type, 1 << 40, (Level("gpu", 1, bandwidth=1e9, latency_s=0.0),))
    plan = anabranch.plan(
        profile,
        gpu,
        subject.BATCH,
        microbatch_size=subject.MICROBATCH,
        optimizer_factor=_OPTIMIZER_FACTOR,
    )
    graph = plan.stage_graph
    stages = tuple(replace(stage, recompute=recompute) for stage in graph.stages)
    plan = replace(plan, stage_graph=replace(graph, stages=stages))
    timeline = anabranch.simulate(plan, profile, gpu, optimizer_factor=_OPTIMIZER_FACTOR)
    return plan, timeline.peak_bytes[0]


def _recompute(device: torch.device) -> Iterator[Row]:
    """With dropout, a forward that is run again has to draw the numbers of the first: three
    trainings, of which the first two show whether the same numbers come out at all.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    found, row = [], Row()
    for recompute in (False, False, True):
        pipeline, row = _pipeline(
            device, device.type, 0.1, OPTIONS["plain"], checks=False, recompute=recompute
        )
        losses = [pipeline.step(batch) for batch in subject.batches(pipeline.workload)]
        weights = [p.detach().to("cpu", copy=True) for p in pipeline.workload.module.parameters()]
        found.append((losses, weights))
    gc.collect()  # of the earlier pipelines nothing may count
    pipeline.step(subject.batches(pipeline.workload, 1)[0], weigh=True)
    assert pipeline.peak_bytes is not None
    first, again, recomputed = found
    yield row | {
        "agrees": _same(again, recomputed),
        "repeatable": _same(first, again),
        "losses": recomputed[0],
        "peak_bytes": pipeline.peak_bytes[0],
    }


Result = tuple[list[float], list[torch.Tensor]]


def _same(one: Result, other: Result) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


def _library_bytes(device: torch.device) -> int:
    """What the matrix library takes for itself from PyTorch's allocator, which counts it in the
    peak and which no plan knows of.
    """
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated(device) - before


def _syncs(step: Callable[[], object]) -> Row:
    """Host waits that PyTorch knows of (not those for events), and the lines that make most."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in told if "called a synchronizing CUDA operation" in str(w.message)]
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    return {"syncs": len(waits), "sync_lines": dict(places.most_common(8))}
