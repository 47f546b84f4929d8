"""Checks and preparations of a rank that need a batch, made once, before the first step.

::

    all ranks     the same batch, and values for all tensors
    GPUs          every program once, before any message            (warm_up)
    all ranks     loss and gradients against the user's own module  (guards.self_check)
    afterwards    each rank has its own stages alone
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.errors import warn
from anabranch.graph.capture import Captured
from anabranch.graph.loss_kinds import loss_notes
from anabranch.graph.reverted import unchanged_state, without_gradients
from anabranch.runtime.assignment import Assignment
from anabranch.runtime.compute.outcome import Key
from anabranch.runtime.data_feed import leaves_of
from anabranch.runtime.guards.same_batch import require_same_batch
from anabranch.runtime.guards.self_check import compare_with_eager
from anabranch.runtime.messages import gradient_ports
from anabranch.runtime.reference import num_samples
from anabranch.runtime.state.model_state import ModelState
from anabranch.runtime.state.optimizer_facts import unlike_torchs
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache, WorkerOf
from anabranch.schedule.schedule import Kind
from anabranch.workload import Batch

Leaves = dict[str, Tensor]


class FirstBatch:
    """Checks and preparations of one rank with the first batch.

    Attributes:
        verdict: result of the comparison of gradients with one process.
        is_over: whether checks and preparations have been made.

    Args:
        compares: whether the comparison is made: the user asks, and a process has all values.
        before: first batch of this run under another plan, whose warnings are not repeated.
    """

    def __init__(
        self,
        assignment: Assignment,
        state: ModelState,
        workers: WorkerCache,
        *,
        compares: bool,
        before: FirstBatch | None,
    ) -> None:
        self._assignment, self._state, self._workers = assignment, state, workers
        self._captured, self._mesh, self._device = workers.captured, workers.mesh, workers.device
        self._graph, workload = workers.stage_graph, assignment.workload
        asked = assignment.options.check_gradients
        self._compares, self._tells = compares, asked and before is None
        self._examples = [workload.example, *workload.buckets] if workload.buckets else []
        self._evaluates = workload.eval_data is not None
        self.is_over = False
        self.verdict: str = (
            "not compared: nobody asked for it" if before is None else before.verdict
        )
        if asked and not compares:
            self.verdict = "not compared: no process has all values of the model"

    def prepare(self, batch: Batch, leaves: Leaves, digest: bytes, worker_of: WorkerOf) -> None:
        """Make the checks and preparations; all ranks call it together.

        Args:
            digest: digest of the batch.
            worker_of: returns the worker for batches of a number of samples.
        """
        if self.is_over:
            return
        self.is_over = True
        require_same_batch(self._mesh, digest)
        self._state.require_values()
        if self._mesh.is_on_gpus:
            self._warm_up(leaves, worker_of)
        if self._tells:
            self._tell()
        if self._compares:
            self._compare(self._captured.layout.packed(batch), leaves)
        self._state.forget_others()

    def _compare(self, batch: Batch, leaves: Leaves) -> None:
        """Compare gradients with one process, also of the other buckets, by their declared
        examples; the verdict is that of the batch at hand.
        """
        batches: dict[Captured, tuple[Batch, Leaves]] = {
            self._captured.for_batch(leaves): (batch, leaves)
        }
        for example in self._examples:
            tensors = leaves_of(self._captured, example, self._device)
            batches.setdefault(self._captured.for_batch(tensors), (example, tensors))
        verdicts = [
            compare_with_eager(
                self._workers.like(bucket),
                self._assignment.holders,
                self._mesh,
                *some,
                self._assignment.home,
            )
            for bucket, some in batches.items()
        ]
        self.verdict = verdicts[0]
        self._captured.programs.exporter.reads.accept()

    def _warm_up(self, leaves: Leaves, worker_of: WorkerOf) -> None:
        """Run every program of this rank's stages once, before any message."""
        batches = [leaves]
        for example in self._examples:
            small = leaves_of(self._captured, example, self._device)
            rows = torch.arange(self._graph.batch_size, device=self._device) % num_samples(small)
            batches.append({name: leaf[rows] for name, leaf in small.items()})
        done = set()
        for tensors in batches:
            alike, samples = self._workers.for_batch(tensors), num_samples(tensors)
            if (alike.captured, samples) in done:
                continue
            done.add((alike.captured, samples))
            warm_up(worker_of(alike, samples), alike.captured, tensors)
            if self._evaluates:
                held_out = alike.in_evaluation
                warm_up(held_out.worker(samples), held_out.captured, tensors, train=False)

    def _tell(self) -> None:
        """Warn once of differences from training in one process."""
        stateful, stages = self._captured.graph.stateful, enumerate(self._graph.stages)
        sliced = any(p.replicas > 1 or self._graph.num_microbatches(s) > 1 for s, p in stages)
        for sentence in loss_notes(None, (), stateful) if self._mesh.rank == 0 and sliced else ():
            warn(sentence)
        optimizer, holders = self._state.optimizer, self._assignment.holders
        if optimizer is None or self._mesh.size == 1 or not (unlike := unlike_torchs(optimizer)):
            return
        if self._mesh.rank == min(r for name in holders.parameters for r in holders.updaters(name)):
            warn(unlike)


def warm_up(
    worker: Worker, captured: Captured, leaves: Mapping[str, Tensor], *, train: bool = True
) -> int:
    """Compute one micro-batch of each stage and size of a worker, forward and backward, before
    anything travels.

    What a GPU does when it first meets a program takes seconds and waits for the whole device:
    kernels are loaded, compiled, chosen by trial, and memory is allocated. Ranks that do so one
    after the other, each when its first micro-batch arrives, wait for each other; here all do it at
    once. Inputs are zeros of the right shapes, and nothing is kept: not gradients, not buffers that
    change, not random numbers. The first update needs no such step: it comes when all ranks have
    told each other their totals, so nothing is under way then.

    Args:
        captured: what the worker computes.
        leaves: the tensors of a batch of the worker's size.
        train: with backwards.

    Returns:
        The number of programs.
    """
    keys: dict[tuple[int, int], Key] = {}
    for action in worker.actions:
        if action.kind is Kind.FORWARD:
            key = action.stage, action.microbatch
            start, stop = worker.layout.slice(*key)
            keys.setdefault((action.stage, stop - start), key)
    parameters = captured.parameters().values()
    with without_gradients(parameters), unchanged_state(captured):
        worker.compute.begin(leaves, 0, train=train)
        for key in keys.values():
            _compute(worker, key, train=train)
        worker.compute.begin({}, 0, train=train)  # frees the leaves
    return len(keys)


def _compute(worker: Worker, key: Key, *, train: bool) -> None:
    program, device = worker.layout.program(*key), worker.torch_device

    def zeros(value: int) -> Tensor:
        shape, dtype = program.shapes[value]
        return torch.zeros(shape, dtype=dtype, device=device)

    worker.compute.forward(key, {port.value: zeros(port.value) for port in program.inputs})
    if train:
        outputs = gradient_ports(program.outputs)
        worker.compute.backward(key, {port: zeros(port.value) for port in outputs})
        worker.compute.weight_gradients(key)
