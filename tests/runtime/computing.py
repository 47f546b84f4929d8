"""One step of all devices of a plan in threads of this process, under compute options."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.worker_cache import WorkerCache
from tests.runtime.small import Built
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")


def steps_of(
    model: Built, chosen: Plan, options: ComputeOptions, *, seed: int = 0, exact: bool = False
) -> list[WorkerCache]:
    """Per device, what its rank would have."""
    parts = parts_of(model.captured, chosen, exact=exact)
    devices = chosen.stage_graph.devices
    hub = Hub(timeout=60.0)
    result = []
    for rank, device in enumerate(devices):
        mesh: Any = SimpleNamespace(device=device)
        transport = LocalTransport(hub, rank)
        result.append(
            WorkerCache(
                model.captured,
                parts,
                chosen,
                mesh,
                transport,
                place=CPU,
                seed=seed,
                options=options,
            )
        )
    return result


def step(
    model: Built,
    chosen: Plan,
    leaves: dict[str, Tensor],
    options: ComputeOptions = PLAIN,
    *,
    seed: int = 0,
    number: int = 0,
    exact: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of all parameters, which the threads share."""
    model.module.zero_grad()
    losses: dict[int, float] = {}
    errors: list[BaseException] = []
    made = [
        each.worker(len(next(iter(leaves.values()))))
        for each in steps_of(model, chosen, options, seed=seed, exact=exact)
    ]
    for worker in made:
        for action in worker.actions:
            worker.layout.program(action.stage, action.microbatch)

    def work(rank: int) -> None:
        try:
            losses[rank] = made[rank].run(leaves, number).loss
        except BaseException as error:
            errors.append(error)
            assert made[rank].transport is not None
            made[rank].transport.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, len(made))]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    named = model.module.named_parameters()
    return sum(losses.values()), {n: p.grad.clone() for n, p in named if p.grad is not None}
