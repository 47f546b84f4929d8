"""What the host does per micro-batch of a middle stage, where the device has nothing to do.

A transformer so narrow that operators take no time but for being called, in three stages of a row
of 1F1B; messages of the middle one are there at once and go nowhere. Beside it a plain loop calls
the same programs: a forward and a backward of autograd per micro-batch, as a pipeline of one's own
would have it. A GPU that is faster than this waits for its host. Seconds are processor time, which
others on the machine do not lengthen much.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anabranch.graph.capture import capture
from anabranch.models import build
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.transport.base import Spec
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.schedule import SCHEDULES
from anabranch.schedule.schedule import Kind
from benchmarks.planners.common import Row, table

MICROBATCHES, TURNS = 16, 15
SIZES = {
    "layers": "6",
    "sequence": "4",
    "hidden": "8",
    "heads": "2",
    "feedforward": "16",
    "vocabulary": "16",
}


class NullTransport:
    """Messages that are there at once, and go nowhere."""

    def __init__(self) -> None:
        self._tensors: dict[Spec, Tensor] = {}

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """Drop a message."""

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Any:
        """Have the same tensors for each message of a form."""
        tensors = []
        for shape, dtype in specs:
            if (shape, dtype) not in self._tensors:
                self._tensors[shape, dtype] = torch.ones(shape, dtype=dtype) / 8
            tensors.append(self._tensors[shape, dtype])
        return SimpleNamespace(wait=lambda: tensors)

    def settle(self) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """Nor here."""

    def close(self) -> None:
        """Nothing is open."""


def worker(options: ComputeOptions = PLAIN) -> tuple[Worker, dict[str, Tensor]]:
    """The middle one of three, and a batch."""
    torch.manual_seed(0)
    workload = build("transformer", preset="small", options=SIZES)
    captured = capture(workload.module, workload.example)
    assert workload.data is not None
    leaves = dict(next(iter(workload.data(MICROBATCHES, 0))))
    ops, count = captured.graph.ops, len(captured.graph.ops)
    cuts = [count * i // 3 for i in range(4)]
    stages = tuple(
        Stage(tuple(op.name for op in ops[cuts[s] : cuts[s + 1]]), (s,), 1) for s in range(3)
    )
    of = {name: s for s, stage in enumerate(stages) for name in stage.operators}
    pairs = {(of[ops[a].name], of[ops[b].name]) for a, b in captured.graph.edges}
    edges = tuple(sorted((x, y) for x, y in pairs if x != y))
    graph = SCHEDULES["1f1b"]().warm_up(StageGraph(stages, edges, MICROBATCHES))
    nothing = Prediction(1.0, 1.0, 0.0, (0,) * 3)
    plan = Plan(graph, "1f1b", "by hand", "", "", "", 0.0, 0.0, nothing)
    mesh: Any = SimpleNamespace(device=1)
    parts = parts_of(captured, plan, exact=False)
    cache = WorkerCache(
        captured,
        parts,
        plan,
        mesh,
        NullTransport(),
        device=torch.device("cpu"),
        seed=0,
        options=options,
    )
    return cache.worker(MICROBATCHES), leaves


def plain(worker: Worker, leaves: dict[str, Tensor]) -> Callable[[], None]:
    """A loop that calls the programs of a worker's stage."""
    stage, program = 1, worker.layout.program(1, 0)
    runnable = worker.compute._prepared.runnable(stage, 1)  # type: ignore[attr-defined]
    shapes = [program.shapes[port.value] for port in program.inputs]
    arriving = [torch.ones(shape, dtype=dtype) / 8 for shape, dtype in shapes]
    grads = [torch.ones(*program.shapes[port.value][:1]) / 8 for port in program.outputs]
    batch = [leaves[name] for name in runnable.program.batch]

    def loop() -> None:
        for microbatch in range(MICROBATCHES):
            pairs = zip(program.inputs, arriving, strict=True)
            inputs = [tensor.detach().requires_grad_(port.grad) for port, tensor in pairs]
            samples = [leaf.narrow(0, microbatch, 1) for leaf in batch]
            outputs = runnable.call(*inputs, *samples)
            torch.autograd.backward(outputs[: len(grads)], grads)

    return loop


def seconds(call: Callable[[], object], turns: int = TURNS) -> float:
    """The median of calls, each per micro-batch."""
    taken = []
    for _ in range(turns):
        begun = time.thread_time()
        call()
        taken.append(time.thread_time() - begun)
    return statistics.median(taken) / MICROBATCHES


def rows() -> list[Row]:
    """Seconds per micro-batch of both, in turns, and ours by kind of action."""
    ours, leaves = worker()
    ours.clock = SimpleNamespace(mark=time.thread_time)  # type: ignore[assignment]
    loop = plain(ours, leaves)
    ours.run(leaves, 0), loop()
    both: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[Kind, list[float]] = defaultdict(list)
    gc.collect()
    for turn in range(TURNS):
        both["loop"].append(seconds(loop, 1))
        begun = time.thread_time()
        outcome = ours.run(leaves, turn)
        both["ours"].append((time.thread_time() - begun) / MICROBATCHES)
        spent: dict[Kind, float] = defaultdict(float)
        for action, (start, end) in outcome.times:
            spent[action.kind] += end - start
        for kind, total in spent.items():
            by_kind[kind].append(total / MICROBATCHES)
    medians = {name: statistics.median(taken) for name, taken in both.items()}
    kinds = {str(kind): statistics.median(taken) for kind, taken in by_kind.items()}
    ratio = medians["ours"] / medians["loop"]
    beside_s = medians["ours"] - medians["loop"]
    nodes = ours.layout.program(1, 0).module.graph.nodes
    calls = sum(node.op.startswith("call") for node in nodes)
    return [
        {
            "operators": calls,
            "loop_s": medians["loop"],
            "ours_s": medians["ours"],
            "ratio": ratio,
            "beside_s": beside_s,
            **{f"{kind}_s": value for kind, value in kinds.items()},
        }
    ]


def show(found: list[Row]) -> str:
    """Microseconds per micro-batch."""
    columns = list(found[0])
    lines = [
        [f"{row[c] * 1e6:.0f}" if c.endswith("_s") else f"{row[c]:.3g}" for c in columns]
        for row in found
    ]
    return table([c.replace("_s", " us") for c in columns], lines)
