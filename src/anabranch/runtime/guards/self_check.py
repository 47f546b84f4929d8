"""One micro-batch through the pipeline and through the user's own module, before the first step.

Tracing can lose what Python does behind its back, and a wrong gradient trains silently. So rank 0
runs the user's module, and two numbers per parameter are compared: the norm of the gradient, and
its product with a fixed pattern of signs. Both sides compute without compute options. Replicas stay
idle: with one slice per micro-batch, batch normalisation compares as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.errors import TrainingError
from anabranch.graph.capture import on_one_device
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.compute.stage_compute import unchanged_buffers
from anabranch.runtime.data_parallel.gradients import Holders, reduce_gradients
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.reference import reference, take
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.schedule.schedule import Kind
from anabranch.workload import Batch

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 1e-2
"""Largest difference relative to a gradient's norm. The coarse one is for half precision, and for
float32 on a GPU, whose products may be rounded to TF32.
"""

_NOISE = 1e-5
"""Differences below this share of the norm of all gradients are rounding, whatever they are
relative to.
"""


def compare_with_eager(
    steps: WorkerCache,
    holders: Holders,
    mesh: Mesh,
    batch: Batch,
    leaves: Mapping[str, Tensor],
    home: torch.device,
) -> None:
    """Compare loss and gradients of the first samples of a batch, unless the model draws random
    numbers; the whole model was at ``home``, and runs there.

    Raises:
        TrainingError: on every rank, naming the parameter that differs most.
    """
    size = _size(steps, leaves)
    worker = _worker(steps, size)
    if _any_random(worker, mesh):
        return
    module = steps.captured.module
    parameters = {
        n: p for n, p in module.named_parameters() if mesh.rank in holders.parameters.get(n, ())
    }
    for parameter in parameters.values():
        parameter.grad = None
    with unchanged_buffers(module):
        outcome = worker.run({name: leaf[:size] for name, leaf in leaves.items()}, 0)
    # There is one micro-batch; in exact mode uses of tied parameters come back one by one.
    for (name, _, _), gradient in sorted(outcome.tied.items(), key=lambda use: use[0]):
        parameter = parameters[name]
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    reduce_gradients(parameters, holders, mesh)
    names = sorted(
        n for n, p in module.named_parameters() if p.requires_grad and n in holders.parameters
    )
    mine = torch.zeros((len(names) + 1, 2), dtype=torch.float64)
    for i, name in enumerate(names):
        if name in parameters and holders.owner(name) == mesh.rank:
            mine[i] = _digest(parameters[name].grad)
    mine[-1, 0] = outcome.loss
    for parameter in parameters.values():
        parameter.grad = None
    mesh.all_reduce(mine)
    eager = torch.zeros_like(mine)
    if mesh.rank == 0:
        with on_one_device(module, home):
            result = reference(module, take(batch, 0, size), [(0, size)])
        for i, name in enumerate(names):
            eager[i] = _digest(result.gradients.get(name))
        eager[-1, 0] = result.loss
    mesh.broadcast(eager, 0)
    if not torch.isfinite(eager).all():
        return  # the model's own trouble, which the step will name
    types = {n: p.dtype for n, p in module.named_parameters()}
    on_gpu = any(p.is_cuda for p in module.parameters()) or home.type == "cuda"
    _compare(names, types, mine, eager, size, {} if on_gpu else _TOLERANCE)


def _size(steps: WorkerCache, leaves: Mapping[str, Tensor]) -> int:
    """Samples of the smallest micro-batch; two at least, which batch normalisation needs."""
    available = int(next(iter(leaves.values())).shape[0])
    smallest = min(s.microbatch_size // s.replicas for s in steps.stage_graph.stages)
    return min(available, max(smallest, 2))


def _worker(steps: WorkerCache, size: int) -> Worker:
    graph = steps.stage_graph
    stages = tuple(
        replace(stage, devices=stage.devices[:1], microbatch_size=size, k=1, in_flight=1)
        for stage in graph.stages
    )
    return steps.build(replace(graph, stages=stages, batch_size=size))


def _any_random(worker: Worker, mesh: Mesh) -> bool:
    mine = any(
        is_random(worker.layout.program(action.stage, action.microbatch).module)
        for action in worker.actions
        if action.kind is Kind.FORWARD
    )
    return bool(mesh.all_reduce(torch.tensor([float(mine)]))[0])


def _digest(gradient: Tensor | None) -> Tensor:
    """Norm, and product with alternating signs."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    flat = dense.detach().reshape(-1).double().cpu()
    signed = flat[::2].sum() - flat[1::2].sum()
    return torch.stack([torch.linalg.vector_norm(flat), signed])


def _compare(
    names: list[str],
    types: Mapping[str, torch.dtype],
    mine: Tensor,
    eager: Tensor,
    size: int,
    tolerances: Mapping[torch.dtype, float],
) -> None:
    floor = _NOISE * float(torch.linalg.vector_norm(eager[:-1, 0]))
    worst, worst_excess = "", 1.0
    for i, name in enumerate(names):
        tolerance = tolerances.get(types[name], _COARSE)
        count = max(float(eager[i, 0]), float(mine[i, 0]))
        excess = float((mine[i] - eager[i]).abs().max()) / (tolerance * count + floor + 1e-30)
        if not excess <= worst_excess:
            worst, worst_excess = name, excess
    ours, theirs = float(mine[-1, 0]), float(eager[-1, 0])
    allowed = max(tolerances.values(), default=_COARSE) * max(abs(theirs), 1e-3)
    if not worst and not abs(ours - theirs) <= allowed:
        raise TrainingError(
            f"the pipeline's loss is not the model's: {ours:.6g}, in one process {theirs:.6g} "
            f"(first {size} samples); the model does something in Python that tracing loses; "
            "anabranch verify has more, check_gradients=False trains all the same"
        )
    if not worst:
        return
    i = names.index(worst)
    raise TrainingError(
        f"the pipeline's gradient of {worst} is not the model's: its norm is "
        f"{float(mine[i, 0]):.6g}, in one process {float(eager[i, 0]):.6g} (first {size} samples; "
        f"loss {float(mine[-1, 0]):.6g} and {float(eager[-1, 0]):.6g}); the model does something "
        "in Python that tracing loses, such as a custom autograd.Function, a hook, or state that "
        "changes from call to call; anabranch verify has more, check_gradients=False trains all "
        "the same"
    )
