"""Workers of all devices of a plan, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anabranch.plans.plan import Plan
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from tests.runtime.small import Built
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")


def workers(
    model: Built,
    chosen: Plan,
    samples: int,
    *,
    seed: int = 0,
    transport: Callable[[Hub, int], Transport] = LocalTransport,
) -> list[Worker]:
    """One per device; the programs are made before any thread starts."""
    parts = parts_of(model.captured, chosen, exact=False)
    devices = chosen.stage_graph.devices
    hub = Hub(timeout=20.0)
    result = []
    for rank, device in enumerate(devices):
        mesh: Any = SimpleNamespace(device=device)
        steps = WorkerCache(
            model.captured, parts, chosen, mesh, transport(hub, rank), place=CPU, seed=seed
        )
        result.append(steps.worker(samples))
    for worker in result:
        for action in worker.actions:
            worker.layout.program(action.stage, action.microbatch)
    return result


def run(
    model: Built, chosen: Plan, leaves: dict[str, Tensor], *, train: bool = True, **options: Any
) -> list[Outcome]:
    """One step of all devices; gradients are then in the model's parameters."""
    model.module.zero_grad()
    outcomes: dict[int, Outcome] = {}
    errors: list[BaseException] = []

    def work(rank: int, worker: Worker) -> None:
        try:
            outcomes[rank] = worker.run(leaves, 0, train=train)
        except BaseException as error:
            errors.append(error)
            assert worker.transport is not None
            worker.transport.close()

    made = workers(model, chosen, len(leaves["x"]), **options)
    threads = [threading.Thread(target=work, args=each) for each in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return [outcomes[rank] for rank in range(len(made))]


def gradients(model: Built) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
