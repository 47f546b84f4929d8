"""One rank's share of a run, which both pipelines hold: the other ranks, its stages, the data.

The ranks compare what they were started with, connect, and take one set of weights; from then on
they tell each other of failures. The order of passes and updates is the pipelines' own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import Checkpoint, Progress, RankPart
from anabranch.checkpoint.plain import PlainWeights
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.series import keep_newest
from anabranch.checkpoint.writing import Target, abandon, begin, finish, write_part
from anabranch.errors import TrainingError
from anabranch.graph.capture import Captured
from anabranch.plans.plan import TAKE_ROWS, Plan
from anabranch.runtime.compute.options import ComputeOptions, require_exact
from anabranch.runtime.data_feed import DataFeed, leaves_of
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.rows import SharedTable, shared_tables, takes_rows
from anabranch.runtime.evaluation import Evaluation
from anabranch.runtime.guards.agreement import facts_of, require_agreement
from anabranch.runtime.guards.memory_budget import lack, require_memory
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.same_batch import (
    RECENT_BATCHES,
    batch_digest,
    require_same_batch,
    require_same_copies,
)
from anabranch.runtime.guards.self_check import compare_with_eager
from anabranch.runtime.guards.store_watch import watch_ranks
from anabranch.runtime.initialisation import SEEDS, meta_names, require_constants
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.messages import channels
from anabranch.runtime.model_state import ModelState
from anabranch.runtime.moved_state import MovedState, move
from anabranch.runtime.numerics.nonfinite import Trace
from anabranch.runtime.optimizer_facts import updates_by_element
from anabranch.runtime.placement import claim, own_device, roomy_home, start_of
from anabranch.runtime.plan_parts import buckets_of, captured_for, parts_of
from anabranch.runtime.process_groups import join
from anabranch.runtime.transport import Channel, Transport
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.workload import Batch, Workload


class Session:
    """One rank of a run.

    Args:
        facts: options of the run that all ranks must have alike, besides ``compute``.
        further: channels that are used besides those of the plan's schedule.
        predecessor: a session of this run under another plan, which goes on here and ends there.

    Raises:
        InvalidPlanError: if the plan is for another model or another number of ranks, ranks
            disagree.
        InfeasiblePlanError: if a rank would take more memory than there is.
        CaptureError: if the module cannot be captured.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        captured: Captured | None,
        facts: Mapping[str, object],
        compute: ComputeOptions,
        exact: bool,
        check_gradients: bool,
        check_memory: bool,
        timeout: float,
        stall_timeout: float | None,
        device: torch.device | str | None,
        further: Collection[Channel] = (),
        shard_optimizer: bool = False,
        predecessor: Session | None = None,
    ) -> None:
        graph = plan.stage_graph
        POSITION.begin(-1, Phase.START_UP)
        self._plan, self._timeout = plan, timeout
        if compute.sparse_embeddings is None:
            compute = replace(compute, sparse_embeddings=plan.sparse_embeddings)
        self.captured = captured or captured_for(workload, plan)
        buckets_of(self.captured, workload)
        self._examples = [workload.example, *workload.buckets] if workload.buckets else []
        module = self.captured.module
        self._frozen = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name in self.captured.frozen or not parameter.requires_grad
        }
        # The self-check needs the whole model on one rank.
        self.gradient_verdict = "not compared: nobody asked for it"
        if predecessor is not None:
            self.gradient_verdict = predecessor.gradient_verdict
        if check_gradients and meta_names(module):
            check_gradients = False
            self.gradient_verdict = "not compared: no process has all values of the model"
        self._home = start_of(module)
        self.place = place = self._home if device is None else own_device(device)
        claim(place)
        join(timeout)
        require_agreement(
            facts_of(self.captured, plan, {**facts, **asdict(compute), "device": place.type})
        )
        if meta_names(module):
            require_constants(self.captured, place)
        self.parts = parts_of(self.captured, plan, exact=exact)
        if exact:
            require_exact(compute, self.parts)
        self.holders = Holders.of(self.parts, graph)
        if predecessor is not None:  # what other ranks have forgotten they get back row by row
            for parameter in module.parameters():
                if any(parameter.stride()):
                    parameter.data = parameter.data.contiguous()
        if shard_optimizer:
            trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
            held = map(self.holders.held_by, range(len(graph.devices)))
            given = {frozenset(names & trainable.keys()) for names in held}
            job = replace(workload, module=module)
            cut = all(updates_by_element(job, names) for names in given if names)
            self.holders = self.holders.sharded(trainable, cut=cut)
        self.mesh = Mesh(graph.devices, self.holders.sets, place=place, timeout=timeout)
        self._watch = watch_ranks(
            self.mesh.rank, self.mesh.size, timeout if stall_timeout is None else stall_timeout
        )
        if self.mesh.rank == 0 and (said := plan.other_model(self.captured.graph)):
            warnings.warn(said, stacklevel=2)
        self.transport: Transport | None = None
        self._saving: Saving | None = None
        self._copies: dict[str, Tensor] = {}
        self._num_saved = 0
        with self.failing():
            if check_memory:
                self.require_memory(plan)
            wanted = sorted({*channels(graph), *further})
            self.transport = self.mesh.transport(place, wanted)
            drawn = torch.tensor([torch.initial_seed() % SEEDS, secrets.randbits(62)])
            self.mesh.broadcast(drawn, 0)
            seed, self._run_id = map(int, drawn)
            self.state = ModelState(
                replace(workload, module=module),
                self.holders,
                self.mesh,
                place,
                seed,
                goes_on=None if predecessor is None else predecessor._hand_over(self.holders),
            )
            if compute.sparse_embeddings:
                self._require_sparse_updates()
        self.workers = WorkerCache(
            self.captured,
            self.parts,
            plan,
            self.mesh,
            self.transport,
            place=place,
            seed=seed,
            options=compute,
        )
        self.feed: DataFeed = (
            DataFeed(workload, graph.batch_size, self._fail)
            if predecessor is None
            else predecessor.feed
        )
        self.feed.report_to(self._fail)
        self.feed.seed, self.feed.reads = seed, self._reads
        # Which bucket a batch is of, its tensors tell together, so none is left out.
        self.feed.types = None if workload.buckets else self.captured.leaf_types
        self.trace = Trace(self.captured, self.state.parameters, self.mesh)
        self._evaluation = Evaluation(self.workers, self._begin_batch)
        self._check_gradients, self._is_prepared = check_gradients, False
        self.step_number = self._num_batches = 0
        self.batch_digest = bytes(16)
        if predecessor is not None:
            self._go_on_from(predecessor._progress())
        POSITION.leave()

    def _hand_over(self, holders: Holders) -> MovedState:
        """End here, and give other holders what they need; all ranks together."""
        self.finish_saving()
        with self.failing(), POSITION.doing(Phase.MOVE):
            part = self.state.part({}, copies=None)
            moved = move(part, lambda key: holders.readers(key, self.mesh.size), self.mesh)
        self.state.forget_training()
        self.close()
        return moved

    def _require_sparse_updates(self) -> None:
        mine = self.state.parameters
        tables = [p.name for p in self.captured.graph.parameters if p.table and p.name in mine]
        if tables and not takes_rows(self.state.optimizer):
            raise TrainingError(
                f"{type(self.state.optimizer).__name__}, as it is set, takes no sparse gradients, "
                f"which sparse_embeddings gives {', '.join(tables)}; have the Workload's optimizer "
                f"be {TAKE_ROWS}, or train with --no-sparse-embeddings "
                "(sparse_embeddings=False), also by this plan"
            )

    def shared_tables(self, accumulate: int) -> dict[str, SharedTable]:
        """Tables whose holders exchange rows of gradients; all ranks ask together.

        Args:
            accumulate: batches of an update.
        """
        if self.workers.options.backend is not None:
            return {}  # compiled backwards give whole gradients
        return shared_tables(
            self.captured.graph,
            self._plan.stage_graph,
            self.holders,
            self.mesh,
            self.state.optimizer,
            sparse_embeddings=bool(self.workers.options.sparse_embeddings),
            accumulate=accumulate,
        )

    def require_memory(self, plan: Plan) -> None:
        """Refuse a plan whose predicted peaks exceed the memory that there is."""
        own, others = self.holders.resident_bytes(self.captured.module, self.mesh.rank, self.place)
        # A forked rank shares the memory of the CPU with its parent, which gives nothing back.
        shares = self.place.type == "cpu" and multiprocessing.parent_process() is not None
        require_memory(plan, self.mesh, own, 0 if shares else others, self.place)

    def lack_for_change(self, plan: Plan) -> str:
        """What ``require_memory`` would say of a plan to change to, by which what is here goes."""
        return lack(plan, self.mesh, self.state.bytes_on(self.place), 0, self.place)

    @property
    def frozen(self) -> Collection[str]:
        """Parameters that were not trainable when training began."""
        return self._frozen.keys()

    def leaves(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of a batch by their names.

        Raises:
            DataError: if it is not built as the example.
            TrainingError: if a parameter is trained now that was frozen at the start.
        """
        if thawed := [name for name, p in self._frozen.items() if p.requires_grad]:
            raise TrainingError(
                f"{', '.join(thawed[:3])} {'were' if len(thawed) > 1 else 'was'} frozen when the "
                "model was captured or the pipeline made, so it has no gradients and no optimizer, "
                "and now requires_grad is True; leave it True from the start, and set it to False "
                "for the steps in which it is to stay as it is"
            )
        read = self.workers.leaves
        leaves = leaves_of(self.captured, batch, self.place, self.feed.where, read=read)
        self._begin_batch(batch)
        return leaves

    def _begin_batch(self, batch: Batch) -> None:
        """Let others know which batch is the next here."""
        if self.mesh.size > 1:
            self.batch_digest = batch_digest(self.captured.flatten_batch(batch))
            RECENT_BATCHES.note(self._run_id, self._num_batches, self.batch_digest)
            self._num_batches += 1

    def prepare(self, batch: Batch, leaves: dict[str, Tensor]) -> None:
        """Once, with the first batch at hand: the check needs the whole model on rank 0."""
        if self._is_prepared:
            return
        self._is_prepared = True
        require_same_batch(self.mesh, self.batch_digest)
        self.state.require_values()
        if self._check_gradients:
            home = roomy_home(self.captured.module, self._home)
            # Of the other buckets the declared examples; what is said is of the batch at hand.
            batches = {self.captured.for_batch(leaves): (batch, leaves)}
            for example in self._examples:
                given = leaves_of(self.captured, example, self.place)
                batches.setdefault(self.captured.for_batch(given), (example, given))
            verdicts = [
                compare_with_eager(self.workers.like(bucket), self.holders, self.mesh, *some, home)
                for bucket, some in batches.items()
            ]
            self.gradient_verdict = verdicts[0]
        self.state.forget_others()

    def _reads(self) -> Collection[str] | None:
        """Tensors of the next batch that are needed here; the check of the first one needs all."""
        is_checked = self._needs_all and not self._is_prepared
        return None if is_checked else self.workers.needed_leaves

    def count(self) -> None:
        """A step has been made with the batch that was fetched last."""
        POSITION.settle()
        self.step_number += 1
        self.feed.trained()
        if self._saving is not None:
            with self.failing():
                self._saving.check()

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
        with self.failing():
            self.state.require_values()
            self.state.share_buffers()
            reads = self._evaluation.needed_leaves
        with POSITION.doing(Phase.EVALUATION):
            chosen = self.feed.held_out(reads) if loader is None else loader
            return self._evaluation.means(self.feed.read(chosen), self.step_number, self.failing)

    def save(
        self,
        folder: str | Path,
        further: Mapping[str, Tensor] | None = None,
        *,
        wait: bool = True,
        keep: int | None = None,
    ) -> Saving | None:
        """Write a checkpoint; nothing may be under way.

        Args:
            wait: until it is on the disk. Otherwise it is written by a thread, and gets its name
                once it is confirmed.
            keep: how many checkpoints there may be in its parent folder.

        Returns:
            What is to be confirmed, unless it was waited for.
        """
        with POSITION.doing(Phase.SAVE):
            return self._save(folder, further, wait=wait, keep=keep)

    def _save(
        self,
        folder: str | Path,
        further: Mapping[str, Tensor] | None,
        *,
        wait: bool,
        keep: int | None,
    ) -> Saving | None:
        self.finish_saving()
        with self.failing():
            self.state.require_values()
            target = Target(
                Path(folder).absolute(), self._checkpoint_id(), self.mesh.size, self._progress()
            )
            part = self.state.part(further or {}, copies=None if wait else self._copies)
            described = part.described()
            if wait:
                self._write(target, part, described)
                if keep is not None and self.mesh.rank == 0:
                    keep_newest(target.folder.parent, keep)
                return None
            self._saving = Saving(
                target, self.mesh.rank, part, described, keep=keep, timeout=self._timeout
            )
        return self._saving

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self.failing(), POSITION.doing(Phase.SAVE):
                saving.wait()

    def _write(self, target: Target, part: RankPart, described: Mapping[str, object]) -> None:
        mesh = self.mesh
        lock: int | None = None
        try:
            if mesh.rank == 0:
                lock = begin(target)
            mesh.barrier()
            write_part(target, mesh.rank, part, described)
            mesh.barrier()
            if lock is not None:
                finish(target, lock)
                lock = None
            mesh.barrier()
        except BaseException:
            if lock is not None:
                abandon(target, lock)
            raise

    def _checkpoint_id(self) -> str:
        """Of the next checkpoint, which no other has, the same on every rank."""
        self._num_saved += 1
        return hashlib.sha256(f"{self._run_id} {self._num_saved}".encode()).hexdigest()[:16]

    def _progress(self) -> Progress:
        scale = self.workers.loss_scale
        return Progress(
            self.step_number,
            self.feed.epoch,
            self.feed.position,
            self.workers.seed,
            None if scale is None else scale.scale,
            0 if scale is None else scale.streak,
            self._loader_state(),
            self._plan.stage_graph.batch_size,
        )

    def _loader_state(self) -> dict[str, Any] | None:
        """What a loader tells of its position; None where it has nothing that JSON can hold."""
        if self.mesh.rank != 0 or (state := self.feed.loader_state()) is None:
            return None
        try:
            kept = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            kept = None
        if kept != state:
            warnings.warn(
                "the state_dict of the loader holds more than JSON can (numbers, texts, lists, and "
                "mappings by texts), so the checkpoint has the number of batches alone: training "
                "that resumes reads up to it",
                stacklevel=6,
            )
            return None
        return state

    def load(self, folder: str | Path) -> Checkpoint:
        """Take a checkpoint over, before the first step."""
        with self.failing(), POSITION.doing(Phase.START_UP):
            saved = Checkpoint(folder)
            saved.verify(self.mesh.rank, self.mesh.size)
            self.mesh.barrier()  # nothing is taken over before all files are known to be whole
            self.state.load(saved, everything=self._needs_all)
        self._go_on_from(saved.progress)
        self.feed.state = saved.progress.data
        if self.mesh.rank == 0:
            self._warn_of_other_batches(saved.progress)
        return saved

    def _warn_of_other_batches(self, progress: Progress) -> None:
        """Say that batches are not as large as those before the checkpoint."""
        before, now = progress.batch_size, self._plan.stage_graph.batch_size
        if before in (0, now):
            return
        within = (
            f"; {progress.position} batches of epoch {progress.epoch} are done, behind which as "
            "many of the new size are left out, so some samples come twice or not at all"
        )
        warnings.warn(
            f"the checkpoint was trained with batches of {before} samples, this run has {now}"
            f"{within if progress.position else ''}; --batch-size {before}, or a plan for it, goes "
            "on as before",
            stacklevel=5,
        )

    def _go_on_from(self, progress: Progress) -> None:
        scale = self.workers.loss_scale
        self.step_number, self.workers.seed = progress.step, progress.seed
        self.feed.epoch, self.feed.position = progress.epoch, progress.position
        self.feed.seed = progress.seed
        if scale is not None and progress.loss_scale is not None:
            scale.scale, scale.streak = progress.loss_scale, progress.loss_streak

    def load_weights(self, path: str | Path) -> None:
        """Begin with weights that something else saved."""
        with self.failing(), POSITION.doing(Phase.START_UP):
            self.state.load_weights(PlainWeights(path), everything=self._needs_all)

    @property
    def _needs_all(self) -> bool:
        """Whether this rank needs the whole model until the first step has been compared."""
        return self._check_gradients and self.mesh.rank == 0

    # Failures

    def failing(self) -> AbstractContextManager[None]:
        """Inside, a failure here reaches the other ranks, and one of theirs is explained."""
        return self.mesh.failure.reporting(self.abort, self._plan.stage_graph)

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
        """As ``close``, after a failure: nothing that is under way is waited for."""
        if self._saving is not None:
            self._saving.give_up()
        self.mesh.abort()
        self.close()

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        if self._watch is not None:
            self._watch.close()
        if self.transport is not None:
            self.transport.close()
        self.mesh.close()


class BasePipeline:
    """What both pipelines show of their session."""

    _session: Session

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self._session.mesh.rank

    @property
    def step_number(self) -> int:
        """Batches trained on; without a flush those put in, all of them learned after ``drain``."""
        return self._session.step_number

    @property
    def epoch(self) -> int:
        """Epochs done, as ``batches`` counts them."""
        return self._session.feed.epoch

    @property
    def position(self) -> int:
        """Batches of the current epoch that were trained on."""
        return self._session.feed.position

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the model's metrics, besides its loss."""
        return tuple(self._session.captured.metrics)

    def from_first(self, value: float) -> float:
        """The number that the first rank has; all ranks ask together."""
        told = torch.tensor([value], dtype=torch.float64)
        with self.failing():
            self._session.mesh.broadcast(told, 0)
        return float(told)

    def failing(self) -> AbstractContextManager[None]:
        """Inside, a failure here reaches the other ranks, and one of theirs is explained."""
        return self._session.failing()

    def batches(self, *, epochs: int | None = None) -> Iterator[Batch]:
        """The workload's batches from where training is, epoch after epoch; those trained on count.

        Args:
            epochs: how many epochs there are in all; by default there is no end.

        Raises:
            DataError: if the workload has no data, or reading it raised.
        """
        return self._session.feed.batches(epochs)

    def batches_left(self, epochs: int) -> int | None:
        """How many batches so many epochs in all have from where training is; None where the data
        does not say.
        """
        return self._session.feed.batches_left(epochs)

    def finish_saving(self) -> None:
        """Wait until a checkpoint of ``save(wait=False)`` is on the disk.

        Raises:
            TrainingError: if it could not be written.
        """
        self._session.finish_saving()

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        self._session.close()
