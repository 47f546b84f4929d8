"""What a weight prediction costs, as a share of the work of a mini-batch.

The transformer of ``benchmarks.runtime.transformer`` (7 million parameters), one process and one
thread, in the order of a stage with one update between forward and backward. Prediction and putting
back are timed where they happen, by the processor time of this process, so that a busy machine does
not count. A stage holds a part of the model and predicts that part, so the share is the same for
it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn

from anabranch.models import build
from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.weights import policy_named
from benchmarks.planners.common import Row, table
from benchmarks.runtime.transformer import BATCH, SIZES, LossOnly

IN_FLIGHT = 2

RECIPES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
}
CASES = (
    ("SGD, momentum", "spectrain"),
    ("SGD, momentum", "pipeoptim"),
    ("SGD, momentum", "predict-stash"),
    ("AdamW", "pipeoptim"),
    ("AdamW", "predict-stash"),
)


def rows(*, batch: int = BATCH, steps: int = 8) -> list[Row]:
    """One row per optimizer and policy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_row(recipe, policy, batch, steps) for recipe, policy in CASES]
    finally:
        torch.set_num_threads(threads)


def _row(recipe: str, policy: str, batch: int, steps: int) -> Row:
    workload = build("transformer", preset="small", options=SIZES)
    assert workload.data is not None
    inputs = next(iter(workload.data(batch, 0)))
    model = LossOnly(workload.module)
    parameters = dict(model.named_parameters())
    weights = VersionedWeights(
        parameters,
        RECIPES[recipe]([*parameters.values()]),
        policy_named(policy),
        in_flight=IN_FLIGHT,
        deepest=IN_FLIGHT,
    )
    weights.fill(0)
    losses: deque[torch.Tensor] = deque()
    whole, predicting = [], []
    for n in range(steps + IN_FLIGHT):
        clock = _Clock()
        started = time.process_time()
        with clock.around(partial(weights.forward, n)):
            losses.append(model(**inputs))
        if len(losses) == IN_FLIGHT:
            with clock.around(partial(weights.backward, n + 1 - IN_FLIGHT)):
                losses.popleft().backward()
            weights.update()
        if n >= IN_FLIGHT:  # the first ones have no state to predict from
            whole.append(time.process_time() - started)
            predicting.append(clock.seconds)
    step_s, prediction_s = statistics.median(whole), statistics.median(predicting)
    return {
        "optimizer": recipe,
        "policy": policy,
        "parameters": sum(p.numel() for p in parameters.values()),
        "batch": batch,
        "step_s": step_s,
        "prediction_s": prediction_s,
        "share": prediction_s / step_s,
    }


class _Clock:
    """Processor seconds of entering and leaving contexts, without what happens inside."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def around(self, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        started = time.process_time()
        context = make()
        context.__enter__()
        self.seconds += time.process_time() - started
        yield
        started = time.process_time()
        context.__exit__(None, None, None)
        self.seconds += time.process_time() - started


def show(found: list[Row]) -> str:
    """Share of a step."""
    lines = [
        [
            row["optimizer"],
            row["policy"],
            f"{row['batch']}",
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['prediction_s'] * 1e3:.2f}",
            f"{row['share']:.2%}",
        ]
        for row in found
    ]
    heads = ["optimizer", "policy", "samples", "step ms", "prediction ms", "share"]
    return table(heads, lines)
