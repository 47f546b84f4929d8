"""One rank's part of a run, which both pipelines hold: other ranks, its stages, batches.

The ranks compare what they were started with, connect, and take one set of weights; from then on
they tell each other of failures. The order of passes and updates is the pipelines' own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import AnabranchError, DataError, TrainingError, warn
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.runtime.assignment import assign
from anabranch.runtime.data_feed import DataFeed, leaves_of
from anabranch.runtime.first_batch import FirstBatch
from anabranch.runtime.guards.heartbeat import watch_ranks
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.same_batch import RECENT_BATCHES, batch_digest
from anabranch.runtime.messages import channels
from anabranch.runtime.pipeline_options import PipelineOptions
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.reference import num_samples
from anabranch.runtime.state.checkpointing import Checkpointing
from anabranch.runtime.state.initialisation import SEEDS, meta_names
from anabranch.runtime.state.model_state import ModelState
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker_cache import WorkerCache, WorkerOf
from anabranch.workload import Batch, Workload


class Session:
    """One rank of a run.

    Attributes:
        options: options of the run, with the plan's for what was left out; a run that goes on
            compares no gradients and no memory again.
        frozen: parameters that were not trainable when training began.
        graph: stages of the plan.
        copied: ``further`` of the copy in memory that this session continues, if it does.
        first: checks and preparations with the first batch.
        batch_digest: digest of the current batch.
        is_spoilt: whether some stages have made an update that others have not.

    Args:
        facts: what else all ranks must have alike, by name.
        further: stages whose channels are used besides those of the plan's schedule.
        predecessor: session of this run under another plan; this one continues and closes it.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        options: PipelineOptions,
        *,
        facts: Mapping[str, object] | None = None,
        further: StageGraph | None = None,
        predecessor: Session | None = None,
    ) -> None:
        POSITION.begin(-1, Phase.START_UP)
        self.copied: Mapping[str, Any] | None = None
        saved = None
        if predecessor is None and options.copies is not None:
            saved, self.copied = options.copies.read()
        goes_on = predecessor is not None or saved is not None
        if goes_on:
            options = replace(options, check_gradients=False, check_memory=False)
        self.assignment = assignment = assign(
            workload, plan, options, facts=facts or {}, goes_on=goes_on
        )
        self.options = options = assignment.options
        self.captured, self.parts = captured, parts = assignment.captured, assignment.parts
        self.holders, self.device = holders, device = assignment.holders, assignment.device
        self.frozen = {
            name: parameter
            for name, parameter in captured.module.named_parameters()
            if name in captured.programs.exporter.frozen or not parameter.requires_grad
        }
        self.graph = graph = plan.stage_graph
        timeout, stall_s = options.timeout, options.stall_timeout
        self.mesh = mesh = Mesh(graph.devices, holders.sets, torch_device=device, timeout=timeout)
        stall_s = timeout if stall_s is None else stall_s
        self._watch = watch_ranks(mesh.rank, mesh.size, stall_s, options.patience)
        if mesh.rank == 0 and (text := plan.other_model(captured.graph)):
            warn(text)
        self.transport: Transport | None = None
        self.is_spoilt = False
        self._num_batches, self.batch_digest = 0, bytes(16)
        compares = options.check_gradients and not meta_names(captured.module)
        self._needs_all = needs_all = compares and mesh.rank == 0
        feed = DataFeed(workload, graph.batch_size)
        self.feed: DataFeed = feed if predecessor is None else predecessor.feed
        feed = self.feed
        with mesh.failure.reporting(self._disconnect, graph):
            if options.check_memory:
                assignment.require_memory(plan, mesh)
            used = {*channels(graph), *channels(further or graph)}
            self.transport = transport = mesh.transport(device, sorted(used))
            drawn = mesh.gather([torch.initial_seed() % SEEDS, secrets.randbits(62)])
            feed.seed, self._run_id = seed, run_id = drawn[0]
            if predecessor is not None:
                saved = predecessor.checkpoints.hand_over(holders)
                predecessor.close()
            state = ModelState(assignment, mesh, seed, goes_on=goes_on, needs_all=needs_all)
            workers = WorkerCache(
                captured, parts, plan, mesh, transport, device, seed, options.compute
            )
            self.first: FirstBatch = FirstBatch(
                assignment,
                state,
                workers,
                compares=compares,
                before=None if predecessor is None else predecessor.first,
            )
            if self.copied is not None:
                self.first.verdict = self.copied["gradients"]
            self.state, self.workers = state, workers
            self.checkpoints: Checkpointing = Checkpointing(
                assignment, state, workers, feed, run_id, self.failing
            )
            if saved is not None:
                self.checkpoints.restore(saved)
        feed.fail, feed.reads = self._fail, self._reads
        # The bucket of a batch follows from all of its tensors, so none is left out.
        feed.types = None if workload.buckets else captured.layout.types
        POSITION.leave()

    def leaves(self, batch: Batch, *, is_step: bool = True) -> dict[str, Tensor]:
        """Return the tensors of a batch by their names.

        Args:
            is_step: whether the batch is for a step of training, not a comparison of gradients.

        Raises:
            DataError: if it is not built as the example.
            TrainingError: if a parameter is trained now that was frozen at the start, or an
                attribute that the forward reads, or a part of the module, has changed, or torch has
                no gradients or casts by itself.
        """
        if thawed := [name for name, p in self.frozen.items() if p.requires_grad]:
            raise TrainingError(
                f"{', '.join(thawed[:3])} {'were' if len(thawed) > 1 else 'was'} frozen when the "
                "model was captured or the pipeline made, so it has no gradients and no optimizer, "
                "and now requires_grad is True; leave it True from the start, and set it to False "
                "for the steps in which it is to stay as it is"
            )
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            raise TrainingError(
                "a step would learn nothing in torch.no_grad or torch.inference_mode: leave it out"
            )
        self._refuse_autocast()
        self.captured.freeze_slices()
        self._require_unchanged(self.workers, values=is_step)
        read, batch = self.workers.leaves, self.captured.layout.packed(batch)
        try:
            leaves = leaves_of(self.captured, batch, self.device, self.feed.where, read=read)
        except DataError:
            self._finish_saving()
            raise
        self.captured.for_batch(leaves).programs.require_alike(num_samples(leaves))
        self.begin_batch(batch)
        return leaves

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise TrainingError(
                "torch.autocast is on around the pipeline, and stages would send each other other "
                "types than their programs have; leave it out, and train with precision bf16 or "
                'fp16 (ComputeOptions(precision="bf16"), --precision bf16)'
            )

    def _require_unchanged(self, workers: WorkerCache, *, values: bool = True) -> None:
        reads = workers.captured.programs.exporter.reads
        if values and (changed := reads.changed()):
            raise TrainingError(
                f"{', '.join(changed[:3])} has changed since the model was captured, which keeps "
                "what the forward reads in Python: hold it in a buffer (register_buffer), change "
                "tensors in place (fill_), or pass it in the batch, as a tensor with an entry per "
                "sample; for other layers or modes, save a checkpoint and resume from it"
            )
        if changed := reads.changed_buffers():
            raise TrainingError(
                f"{', '.join(changed[:3])} has changed since the model was captured, and by its "
                "value the forward goes one way or another; if weights that are loaded bring the "
                "value, load them, or set it, in the function that makes the module"
            )

    def begin_batch(self, batch: Batch) -> None:
        """Note the digest of the next batch here, which other ranks compare with theirs."""
        if self.mesh.size > 1:
            leaves = self.captured.layout.flatten(batch)
            every_value = self.options.check_batches == "full"
            self.batch_digest = batch_digest(leaves, every_value=every_value)
            RECENT_BATCHES.note(self._run_id, self._num_batches, self.batch_digest)
            self._num_batches += 1

    def prepare(
        self, batch: Batch, leaves: dict[str, Tensor], worker_of: WorkerOf = WorkerCache.worker
    ) -> None:
        """Make the checks and preparations that need a batch, once; see ``FirstBatch``."""
        self.first.prepare(batch, leaves, self.batch_digest, worker_of)

    def _reads(self) -> Collection[str] | None:
        """Tensors of the next batch that are needed here; the check of the first one needs all."""
        is_checked = self._needs_all and not self.first.is_over
        return None if is_checked else self.workers.needed_leaves

    def evaluate(self, loader: Iterable[Batch] | None) -> dict[str, float]:
        """Return loss and metrics as means over the samples of held-out batches, by default those
        of the workload: the same stages in evaluation mode, forwards only. No batch may be in
        flight. All ranks return the same numbers.

        Raises:
            DataError: if there are no batches.
        """
        self._refuse_autocast()
        before, samples = None, 0
        with POSITION.doing(Phase.EVALUATION):
            with self.failing():
                self.state.require_values()
                self.state.share_buffers()
                workers = self.workers.in_evaluation
                self._require_unchanged(workers)
                names = workers.captured.metrics
                sums = torch.zeros(1 + len(names), dtype=torch.float64)
            # A caller without held-out data may go on after this error.
            chosen = self.feed.held_out(workers.needed_leaves) if loader is None else loader

            for number, batch in enumerate(self.feed.read(chosen)):
                what = f"held-out batch {number}"
                leaves = leaves_of(self.captured, batch, self.device, what, read=workers.leaves)
                self.begin_batch(batch)
                size = num_samples(leaves)
                with self.failing():
                    worker = self.workers.for_batch(leaves).in_evaluation.worker(size)
                    outcome = worker.run(leaves, self.feed.step_number, train=False)
                    outcome.bring()
                    # Reading numbers waits for the device, so the next batch is started before.
                    if before is not None:
                        sums += before[0].numbers(names) * before[1]
                before = outcome, size
                samples += size
            if before is None:
                raise DataError("the held-out data has no batches")
            with self.failing(), POSITION.doing(Phase.TOTALS):
                sums += before[0].numbers(names) * before[1]
                totals = (self.mesh.all_reduce(sums) / samples).tolist()
        return dict(zip(("loss", *names), totals, strict=True))

    def count(self) -> None:
        """Note that a step has been made with the batch that was fetched last."""
        POSITION.settle()
        self.feed.trained()
        self.checkpoints.check()

    def refuse_spoilt(self) -> None:
        """Raise a TrainingError where some stages have made an update that others have not."""
        if self.is_spoilt:
            raise TrainingError(
                "a loss or a gradient was not finite, and when that was known some stages had been "
                "updated and others not, so these weights belong to no step; resume from a "
                "checkpoint"
            )

    # Failures

    def failing(self) -> AbstractContextManager[None]:
        """Context in which a failure here reaches the other ranks, and theirs are explained."""
        return self.mesh.failure.reporting(self.abort, self.graph)

    def given(self, batches: Iterable[Batch], leave: Callable[[], None]) -> Iterator[Batch]:
        """Generate the same batches; if their source raises, this rank has to ``leave``."""
        try:
            yield from batches
        except Exception:
            leave()
            raise

    def _fail(self, error: BaseException) -> None:
        self._finish_saving()
        self.mesh.failure.publish(error)
        self.abort()

    def _finish_saving(self) -> None:
        """Complete the checkpoint of a good step, from which training goes on after bad data."""
        with suppress(AnabranchError):
            self.checkpoints.finish()

    def abort(self) -> None:
        """Close after a failure, without waiting for any operation in progress."""
        self.checkpoints.give_up()
        self._disconnect()

    def _disconnect(self) -> None:
        self.mesh.abort()
        self.close()

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        if self._watch is not None:
            self._watch.close()
        if self.transport is not None:
            self.transport.close()
        self.mesh.close()
