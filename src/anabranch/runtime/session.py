"""One rank's part of a run, which both pipelines hold: other ranks, its stages, batches.

The ranks compare what they were started with, connect, and take one set of weights; from then on
they tell each other of failures. The order of passes and updates is the pipelines' own.
"""

from __future__ import annotations

import multiprocessing
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, get_args

import torch
from torch import Tensor

from anabranch.checkpoint.saved_state import SavedState
from anabranch.errors import TrainingError
from anabranch.graph.loss_kinds import told_stateful
from anabranch.graph.slices import whole_name
from anabranch.plans.plan import Plan
from anabranch.runtime.assignment import assign
from anabranch.runtime.checkpointing import Checkpointing
from anabranch.runtime.data_feed import DataFeed, leaves_of, samples_of
from anabranch.runtime.evaluation import Evaluation
from anabranch.runtime.guards.memory_budget import require_memory
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.same_batch import (
    RECENT_BATCHES,
    BatchCheck,
    batch_digest,
    require_same_batch,
    require_same_copies,
)
from anabranch.runtime.guards.self_check import compare_with_eager
from anabranch.runtime.guards.store_watch import watch_ranks
from anabranch.runtime.initialisation import SEEDS, meta_names
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.messages import channels
from anabranch.runtime.model_state import ModelState
from anabranch.runtime.numerics.nonfinite import Trace
from anabranch.runtime.optimizer_facts import unlike_torchs
from anabranch.runtime.transport import Channel, Transport
from anabranch.runtime.warm_up import warm_up
from anabranch.runtime.worker import Worker
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.workload import Batch, Workload


class Session:
    """One rank of a run.

    Attributes:
        frozen: parameters that were not trainable when training began.
        gradient_verdict: result of the comparison of gradients with one process.
        graph: stages of the plan.
        batch_digest: of the batch that is under way.
        is_spoilt: some stages have made an update that others have not.

    Args:
        further: channels that are used besides those of the plan's schedule.
        predecessor: a session of this run under another plan, which goes on here and ends there.
        saved: the state of this run that goes on here, from copies in memory.
        options: of ``assign``.

    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        check_gradients: bool,
        check_memory: bool,
        check_batches: BatchCheck = "sampled",
        timeout: float,
        stall_timeout: float | None,
        patience: float | None = None,
        further: Collection[Channel] = (),
        shard_optimizer: bool = False,
        predecessor: Session | None = None,
        saved: SavedState | None = None,
        **options: Any,
    ) -> None:
        if check_batches not in get_args(BatchCheck):
            raise ValueError(f"check_batches is {check_batches!r}; it is 'sampled' or 'full'")
        self._every_value = check_batches == "full"
        POSITION.begin(-1, Phase.START_UP)
        assignment = assign(
            workload,
            plan,
            timeout=timeout,
            shard_optimizer=shard_optimizer,
            goes_on=(goes_on := predecessor is not None or saved is not None),
            **options,
        )
        self.captured, self.parts = assignment.captured, assignment.parts
        self.holders, self.place = assignment.holders, assignment.place
        self._home, compute = assignment.home, assignment.compute
        module = self.captured.module
        self.frozen = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name in self.captured.programs.frozen or not parameter.requires_grad
        }
        # The self-check needs the whole model on one rank.
        self._check_gradients = check_gradients and not meta_names(module)
        self._tells = check_gradients and predecessor is None
        self.gradient_verdict = "not compared: nobody asked for it"
        if predecessor is not None:
            self.gradient_verdict = predecessor.gradient_verdict
        if check_gradients and not self._check_gradients:
            self.gradient_verdict = "not compared: no process has all values of the model"
        self._evaluates = workload.eval_data is not None
        self._examples = [workload.example, *workload.buckets] if workload.buckets else []
        self.graph = graph = plan.stage_graph
        self.mesh = Mesh(graph.devices, self.holders.sets, place=self.place, timeout=timeout)
        self._watch = watch_ranks(
            self.mesh.rank,
            self.mesh.size,
            timeout if stall_timeout is None else stall_timeout,
            patience,
        )
        if self.mesh.rank == 0 and (said := plan.other_model(self.captured.graph)):
            warnings.warn(said, stacklevel=2)
        self.transport: Transport | None = None
        self._is_prepared = self.is_spoilt = False
        self._num_batches, self.batch_digest = 0, bytes(16)
        feed = DataFeed(workload, graph.batch_size)
        self.feed: DataFeed = feed if predecessor is None else predecessor.feed
        with self.mesh.failure.reporting(self._disconnect, graph):
            if check_memory:
                self.require_memory(plan)
            self.transport = self.mesh.transport(self.place, sorted({*channels(graph), *further}))
            drawn = torch.tensor([torch.initial_seed() % SEEDS, secrets.randbits(62)])
            self.mesh.broadcast(drawn, 0)
            self.feed.seed, self._run_id = map(int, drawn)
            if predecessor is not None:
                saved = predecessor.checkpoints.hand_over(self.holders)
                predecessor.close()
            self.state = ModelState(
                assignment,
                self.mesh,
                self.feed.seed,
                goes_on=goes_on,
                needs_all=self._needs_all,
            )
            if compute.sparse_embeddings:
                self.state.require_sparse_updates(self.captured.graph)
            self.workers = WorkerCache(
                self.captured,
                self.parts,
                plan,
                self.mesh,
                self.transport,
                self.place,
                self.feed.seed,
                compute,
            )
            self.checkpoints: Checkpointing = Checkpointing(
                self.state,
                self.workers,
                self.feed,
                self._run_id,
                self.failing,
                timeout,
                workload.save_frozen,
            )
            if saved is not None:
                self.checkpoints.restore(saved)
        self.feed.fail, self.feed.reads = self._fail, self._reads
        # Which bucket a batch is of, its tensors tell together, so none is left out.
        self.feed.types = None if workload.buckets else self.captured.layout.types
        self.trace = Trace(self.captured, graph, self.holders, self.mesh)
        self._evaluation = Evaluation(self.workers, self._begin_batch)
        POSITION.leave()

    def require_memory(self, plan: Plan) -> None:
        """Refuse a plan whose predicted peaks exceed the memory that there is."""
        parameters = self.captured.parameters()
        own, others = self.holders.resident_bytes(parameters, self.mesh.rank, self.place)
        # A forked rank shares the memory of the CPU with its parent, which gives nothing back.
        shares = self.place.type == "cpu" and multiprocessing.parent_process() is not None
        require_memory(plan, self.mesh, own, 0 if shares else others, self.place)

    def leaves(self, batch: Batch, *, is_step: bool = True) -> dict[str, Tensor]:
        """The tensors of a batch by their names.

        Args:
            is_step: for a step of training, rather than a comparison of gradients.

        Raises:
            DataError: if it is not built as the example.
            TrainingError: if a parameter is trained now that was frozen at the start, or an
                attribute that the forward reads has changed.
        """
        if thawed := [name for name, p in self.frozen.items() if p.requires_grad]:
            raise TrainingError(
                f"{', '.join(thawed[:3])} {'were' if len(thawed) > 1 else 'was'} frozen when the "
                "model was captured or the pipeline made, so it has no gradients and no optimizer, "
                "and now requires_grad is True; leave it True from the start, and set it to False "
                "for the steps in which it is to stay as it is"
            )
        for name, part in self.captured.slices.items():
            part.requires_grad_(self.captured.module.get_parameter(whole_name(name)).requires_grad)
        if is_step and (changed := self.captured.programs.exporter.reads.changed()):
            raise TrainingError(
                f"{', '.join(changed[:3])} has changed since the model was captured; the forward "
                "reads it in Python, so the captured model keeps the value that it had: hold it in "
                "a buffer (register_buffer) and change that in place (fill_), or pass it in the "
                "batch, as a tensor with an entry per sample"
            )
        read = self.workers.leaves
        leaves = leaves_of(self.captured, batch, self.place, self.feed.where, read=read)
        self.captured.for_batch(leaves).programs.require_alike(samples_of(leaves))
        self._begin_batch(batch)
        return leaves

    def _begin_batch(self, batch: Batch) -> None:
        """Let others know which batch is the next here."""
        if self.mesh.size > 1:
            leaves = self.captured.layout.flatten(batch)
            self.batch_digest = batch_digest(leaves, every_value=self._every_value)
            RECENT_BATCHES.note(self._run_id, self._num_batches, self.batch_digest)
            self._num_batches += 1

    def prepare(
        self,
        batch: Batch,
        leaves: dict[str, Tensor],
        worker_of: Callable[[WorkerCache, int], Worker] = WorkerCache.worker,
    ) -> None:
        """Once, with the first batch at hand: the check needs the whole model on rank 0.

        Args:
            worker_of: returns the worker for batches of a number of samples.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        require_same_batch(self.mesh, self.batch_digest)
        self.state.require_values()
        if self.mesh.is_on_gpus:
            self._warm_up(leaves, worker_of)
        if self._tells:
            self._tell()
        if self._check_gradients:
            # Of the other buckets the declared examples; what is said is of the batch at hand.
            batches = {self.captured.for_batch(leaves): (batch, leaves)}
            for example in self._examples:
                given = leaves_of(self.captured, example, self.place)
                batches.setdefault(self.captured.for_batch(given), (example, given))
            verdicts = [
                compare_with_eager(
                    self.workers.like(bucket), self.holders, self.mesh, *some, self._home
                )
                for bucket, some in batches.items()
            ]
            self.gradient_verdict = verdicts[0]
            self.captured.programs.exporter.reads.accept()
        self.state.forget_others()

    def _warm_up(
        self, leaves: dict[str, Tensor], worker_of: Callable[[WorkerCache, int], Worker]
    ) -> None:
        """Run every program of this rank's stages once, before any message."""
        planned = self.graph.batch_size
        batches = [leaves]
        for example in self._examples:
            small = leaves_of(self.captured, example, self.place)
            rows = torch.arange(planned, device=self.place) % samples_of(small)
            batches.append({name: leaf[rows] for name, leaf in small.items()})
        done = set()
        for tensors in batches:
            workers, samples = self.workers.for_batch(tensors), samples_of(tensors)
            if (workers.captured, samples) in done:
                continue
            done.add((workers.captured, samples))
            warm_up(worker_of(workers, samples), workers.captured, tensors)
            if self._evaluates:
                held_out = workers.like(workers.captured.evaluation())
                warm_up(held_out.worker(samples), held_out.captured, tensors, train=False)

    def _tell(self) -> None:
        """Say once what is not as in one process."""
        stateful, stages = self.captured.graph.stateful, enumerate(self.graph.stages)
        sliced = any(p.replicas > 1 or self.graph.num_microbatches(s) > 1 for s, p in stages)
        if self.mesh.rank == 0 and stateful and sliced:
            warnings.warn(told_stateful(stateful), stacklevel=6)
        names, optimizer = self.holders.parameters, self.state.optimizer
        if optimizer is None or self.mesh.size == 1 or not (unlike := unlike_torchs(optimizer)):
            return
        updaters = {rank for name in names for rank in self.holders.updaters(name)}
        if self.mesh.rank == min(updaters):
            warnings.warn(unlike, stacklevel=6)

    def _reads(self) -> Collection[str] | None:
        """Tensors of the next batch that are needed here; the check of the first one needs all."""
        is_checked = self._needs_all and not self._is_prepared
        return None if is_checked else self.workers.needed_leaves

    def count(self) -> None:
        """A step has been made with the batch that was fetched last."""
        POSITION.settle()
        self.feed.trained()
        self.checkpoints.check()

    def require_same_copies(self) -> None:
        """Compare the copies of parameters that several ranks hold, all ranks together."""
        held = self.holders.parameters
        copies: dict[tuple[int, ...], list[Tensor]] = {
            ranks: [] for ranks in sorted({*held.values()}) if len(ranks) > 1
        }
        for name, parameter in self.state.parameters.items():
            if held[name] in copies:
                copies[held[name]].append(parameter)
        with self.failing():
            require_same_copies(self.mesh, copies)

    def warn_without_gradient(self) -> None:
        """Name the trainable parameters that no gradient has reached."""
        names = self.state.without_gradient()
        if self.mesh.rank == 0:
            names += self.captured.unused
        if names:
            warnings.warn(
                f"no gradient reaches {', '.join(names)}: the loss does not depend on it, so it "
                "stays as it is; set requires_grad to False if that is meant",
                stacklevel=4,
            )

    def evaluate(self, loader: Iterable[Batch] | None) -> dict[str, float]:
        """Means over held-out batches; nothing may be under way."""
        with POSITION.doing(Phase.EVALUATION):
            with self.failing():
                self.state.require_values()
                self.state.share_buffers()
                reads = self._evaluation.needed_leaves
            chosen = self.feed.held_out(reads) if loader is None else loader
            return self._evaluation.means(
                self.feed.read(chosen), self.feed.step_number, self.failing
            )

    @property
    def _needs_all(self) -> bool:
        """True if this rank needs the whole model until the first step has been compared."""
        return self._check_gradients and self.mesh.rank == 0

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
        """Inside, a failure here reaches the other ranks, and one of theirs is explained."""
        return self.mesh.failure.reporting(self.abort, self.graph)

    def given(self, batches: Iterable[Batch], leave: Callable[[], None]) -> Iterator[Batch]:
        """The same batches; if their source raises on this rank alone, it has to ``leave``."""
        try:
            yield from batches
        except Exception:
            leave()
            raise

    def _fail(self, error: BaseException) -> None:
        self.mesh.failure.publish(error)
        self.abort()

    def abort(self) -> None:
        """Close after a failure, without waiting for anything that is under way."""
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
