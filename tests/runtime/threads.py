"""Workers of all devices of a plan, in threads of this process, under compute options."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from tests.runtime.small import Built
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")


def steps_of(
    model: Built,
    chosen: Plan,
    options: ComputeOptions = PLAIN,
    *,
    seed: int = 0,
    exact: bool = False,
    transport: Callable[[Hub, int], Transport] = LocalTransport,
) -> list[WorkerCache]:
    """Per device, what its rank would have."""
    parts = parts_of(model.captured, chosen, exact=exact)
    hub, result = Hub(timeout=60.0), []
    for rank, device in enumerate(chosen.stage_graph.devices):
        mesh: Any = SimpleNamespace(device=device)
        ours, with_options = transport(hub, rank), {"device": CPU, "seed": seed, "options": options}
        result.append(WorkerCache(model.captured, parts, chosen, mesh, ours, **with_options))
    return result


def workers(model: Built, chosen: Plan, samples: int, *args: Any, **options: Any) -> list[Worker]:
    """One per device; the programs are made before any thread starts."""
    made = [each.worker(samples) for each in steps_of(model, chosen, *args, **options)]
    for worker in made:
        for action in worker.actions:
            worker.layout.program(action.stage, action.microbatch)
    return made


def run(
    model: Built,
    chosen: Plan,
    leaves: dict[str, Tensor],
    *args: Any,
    train: bool = True,
    number: int = 0,
    **options: Any,
) -> list[Outcome]:
    """One step of all devices; gradients are then in the model's parameters."""
    model.module.zero_grad()
    outcomes: dict[int, Outcome] = {}
    errors: list[BaseException] = []
    made = workers(model, chosen, len(next(iter(leaves.values()))), *args, **options)

    def work(rank: int) -> None:
        try:
            outcomes[rank] = made[rank].run(leaves, number, train=train)
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
    return [outcomes[rank] for rank in range(len(made))]


def gradients(model: Built) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}


def step(
    model: Built, chosen: Plan, leaves: dict[str, Tensor], *args: Any, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of all parameters, which the threads share."""
    loss = sum(outcome.loss for outcome in run(model, chosen, leaves, *args, **options))
    return loss, {name: gradient.clone() for name, gradient in gradients(model).items()}
