"""Check of two micro-batches against the user's own module, before the first step.

Tracing can lose work that Python does outside of it, and the loss of two halves may differ from
that of a whole; a wrong gradient trains silently. So rank 0 runs the user's module on the samples
of both micro-batches at once, and two numbers per parameter are compared: the norm of the gradient,
and its product with a fixed series of signs. Then it calls the module again, to see if the loss is
the same. Both sides compute without compute options and without dropout. Replicas stay idle. With
batch normalisation, whose statistics are those of a micro-batch, there is one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import TrainingError, warn
from anabranch.graph.capture import Captured
from anabranch.graph.flat_program import gradient_types
from anabranch.graph.module_state import on_one_device
from anabranch.graph.reverted import unchanged_state, without_gradients
from anabranch.graph.slices import in_slices, view_named, whole_name
from anabranch.runtime.data_parallel.buckets import dense, entries
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.numerics.dropout import NoDropout
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.placement import roomy_home
from anabranch.runtime.reference import (
    draws_random,
    largest_distance,
    num_samples,
    reference,
    require_repeatable,
    same_numbers,
    take,
)
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.schedule.schedule import Kind
from anabranch.workload import Batch

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Shares by which gradients may differ.

    Attributes:
        coarse: largest difference relative to a gradient's norm, for half precision, and for
            float32 on a GPU, whose products may be rounded to TF32.
        noise: differences below this share of the norm of all gradients are always rounding.
    """

    coarse: float = 1e-2
    noise: float = 1e-5


_TOLERANCES = Tolerances()
_SIGNS = torch.randn(1009, generator=torch.Generator().manual_seed(0)).sign().double()
"""Signs, repeated along a gradient; their number is prime, so that no dimension has this period."""

_ALL_THE_SAME = "--no-check-gradients (check_gradients=False) trains all the same"


def compare_with_eager(
    steps: WorkerCache,
    holders: Holders,
    mesh: Mesh,
    batch: Batch,
    leaves: Mapping[str, Tensor],
    home: torch.device,
) -> str:
    """Compare loss and gradients of the first samples of a batch, unless the model draws random
    numbers besides dropout; the whole model was on ``home``, and runs there.

    Returns:
        The result, in a line.

    Raises:
        TrainingError: on every rank, naming the parameter that differs most; or if the second call
            of the module has another loss.
    """
    captured = steps.captured
    home = roomy_home(captured.module, home)
    cuts = _cuts(steps, leaves)
    size = cuts[-1][1]
    worker = steps.alone(max(stop - start for start, stop in cuts), size)
    names = sorted(
        n for n, p in captured.parameters().items() if p.requires_grad and n in holders.parameters
    )
    eager = _EagerModule(captured, home, batch, size, names, mesh)
    if _any_random(worker, mesh):
        eager.digests([(0, size)], checks_repeat=True)
        drawn = "the model draws random numbers besides dropout"
        return f"not compared: {drawn}; anabranch verify compares with the same ones"
    first = {name: leaf[:size] for name, leaf in leaves.items()}
    own = _pipeline_digests(worker, captured, first, names, holders, mesh)
    whole = eager.digests([(0, size)], checks_repeat=True)
    if not torch.isfinite(whole).all():
        # The model's own trouble, which the step will name.
        return "not compared: the loss or a gradient is not finite"
    types = {n: p.dtype for n, p in captured.parameters().items()}
    tolerances = eager.tolerances()
    worst = _difference(names, types, own, whole, tolerances)
    if not worst:
        return (
            f"right: loss and {len(set(map(whole_name, names)))} gradients of {size} samples are "
            "those of the module in one process, up to rounding"
        )
    if len(cuts) > 1 and not _difference(names, types, own, eager.digests(cuts), tolerances):
        raise _sliced(captured, float(own[-1, 0]), float(whole[-1, 0]), cuts)
    raise _other(worst, names, own, whole, size)


@dataclass(frozen=True, slots=True)
class _EagerModule:
    """The user's own module on rank 0.

    Attributes:
        home: device on which it runs.
        size: first samples of the batch that it is run on.
        names: parameters whose gradients are compared.
    """

    captured: Captured
    home: torch.device
    batch: Batch
    size: int
    names: list[str]
    mesh: Mesh

    def digests(self, slices: list[tuple[int, int]], *, checks_repeat: bool = False) -> Tensor:
        """Return on every rank the digest of each gradient, and the loss, if these slices of the
        samples are micro-batches.

        Args:
            checks_repeat: whether to call the module again, to see if the loss is the same.
        """
        digests = _empty_digests(self.names)
        if self.mesh.rank == 0:
            module, some = self.captured.module, take(self.batch, 0, self.size)
            with on_one_device(module, self.home), NoDropout():
                with unchanged_state(self.captured), same_numbers(module):
                    result = reference(module, some, slices, self.captured.weights)
                if checks_repeat:
                    for note in require_repeatable(self.captured, some, result.loss):
                        warn(note)
            gradients = in_slices(result.gradients, self.names, view_named)
            for i, name in enumerate(self.names):
                digests[i] = _digest(gradients.get(name))
            digests[-1, 0] = result.loss
        self.mesh.broadcast(digests, 0)
        return digests

    def tolerances(self) -> Mapping[torch.dtype, float]:
        """Return the tolerances of types that are not rounded more coarsely here."""
        devices = {self.home, *(p.device for p in self.captured.module.parameters())}
        on_gpu = any(map(accelerator.is_on_accelerator, devices))
        in_half = not gradient_types(self.captured.programs.example) <= _TOLERANCE.keys()
        return {} if on_gpu or in_half else _TOLERANCE


def _pipeline_digests(
    worker: Worker,
    captured: Captured,
    leaves: dict[str, Tensor],
    names: list[str],
    holders: Holders,
    mesh: Mesh,
) -> Tensor:
    """Return the digests of the pipeline's gradients and its loss, on every rank."""
    digests = _empty_digests(names)
    parameters = {
        n: p for n, p in captured.parameters().items() if mesh.rank in holders.parameters.get(n, ())
    }
    with without_gradients(parameters.values()):
        with unchanged_state(captured):
            outcome = worker.run(leaves, 0)
        # In exact mode uses of tied parameters come back one by one.
        for (name, _, _), gradient in sorted(outcome.tied.items(), key=lambda use: use[0]):
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        Reducer(parameters, holders, mesh).sum_now(everywhere=True)
        for i, name in enumerate(names):
            if name in parameters and holders.owner(name) == mesh.rank:
                digests[i] = _digest(parameters[name].grad)
    digests[-1, 0] = outcome.loss
    mesh.all_reduce(digests)
    return digests


def _empty_digests(names: list[str]) -> Tensor:
    """Return zeros for the digest of each gradient and, in a last row, for the loss."""
    return torch.zeros((len(names) + 1, 2), dtype=torch.float64)


def _cuts(steps: WorkerCache, leaves: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Return the samples of two micro-batches, as small as the smallest slice of the plan; of one
    with at least two samples, with batch normalisation or too few samples.
    """
    available = num_samples(leaves)
    size = max(1, min(s.microbatch_size // s.replicas for s in steps.stage_graph.stages))
    graph = steps.captured.graph
    if graph.normalised or graph.stateful or available < 2 * size:
        return [(0, min(available, max(size, 2)))]
    return [(0, size), (size, 2 * size)]


def _any_random(worker: Worker, mesh: Mesh) -> bool:
    forwards = (a for a in worker.actions if a.kind is Kind.FORWARD)
    programs = (worker.layout.program(a.stage, a.microbatch).module for a in forwards)
    return any(mesh.gather(any(map(draws_random, programs))))


def _digest(gradient: Tensor | None) -> Tensor:
    """Return norm, and product with random signs, as the plain sum is zero behind a softmax."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    flat = entries(dense(gradient).detach()).reshape(-1).double().cpu()
    rest = flat[len(flat) - len(flat) % len(_SIGNS) :]
    rows = flat[: len(flat) - len(rest)].view(-1, len(_SIGNS))
    signed = (rows @ _SIGNS).sum() + rest @ _SIGNS[: len(rest)]
    return torch.stack([torch.linalg.vector_norm(flat), signed])


def _difference(
    names: list[str],
    types: Mapping[str, torch.dtype],
    own: Tensor,
    eager: Tensor,
    tolerances: Mapping[torch.dtype, float],
) -> str:
    """Return the parameter whose gradient differs most, by more than rounding; ``loss`` if only the
    loss does; empty if nothing does.
    """
    floor = _TOLERANCES.noise * float(torch.linalg.vector_norm(eager[:-1, 0])) + 1e-30
    norms = dict(zip(names, torch.maximum(eager[:, 0], own[:, 0]).tolist(), strict=False))
    distance, worst = largest_distance(
        dict(zip(names, own, strict=False)),
        dict(zip(names, eager, strict=False)),
        lambda name: tolerances.get(types[name], _TOLERANCES.coarse) * norms[name] + floor,
    )
    if distance > 1.0 or math.isnan(distance):
        return worst
    ours, theirs = float(own[-1, 0]), float(eager[-1, 0])
    allowed = max(tolerances.values(), default=_TOLERANCES.coarse) * max(abs(theirs), 1e-3)
    return "" if abs(ours - theirs) <= allowed else "loss"


def _sliced(
    captured: Captured, ours: float, theirs: float, cuts: list[tuple[int, int]]
) -> TrainingError:
    """Return the error for micro-batches with another loss, though the graph shows no reason."""
    size = cuts[-1][1]
    suspects = " or ".join(captured.foreign) or "an index along them or a hook on a parameter"
    return TrainingError(
        f"micro-batches change what {type(captured.module).__name__} is trained on: for {size} "
        f"samples at once its loss is {theirs:.6g}, for {len(cuts)} micro-batches "
        f"{ours:.6g}, although the graph says that the loss is a {captured.graph.loss_kind} over "
        f"the samples; something computes across samples, such as {suspects}: train "
        "with one micro-batch of the whole batch and no replicas (--microbatch-size, "
        f"--max-replicas 1), or compute it per sample; {_ALL_THE_SAME}"
    )


def _other(worst: str, names: list[str], own: Tensor, eager: Tensor, size: int) -> TrainingError:
    """Return the error for a pipeline that computes something else than the module."""
    losses = f"{float(own[-1, 0]):.6g}, in one process {float(eager[-1, 0]):.6g}"
    if worst == "loss":
        what, numbers = "loss", f"{losses} (first {size} samples)"
    else:
        what, i = f"gradient of {worst}", names.index(worst)
        numbers = (
            f"its norm is {float(own[i, 0]):.6g}, in one process {float(eager[i, 0]):.6g} (first "
            f"{size} samples; loss {losses})"
        )
    return TrainingError(
        f"the pipeline's {what} is not the model's: {numbers}; the model does something in Python "
        "that tracing loses, such as a custom autograd.Function, a hook, or state that changes "
        f"from call to call; anabranch verify has more, {_ALL_THE_SAME}"
    )
