"""The pipeline: one rank's part of a training run, as the user's loop holds it.

::

    step(batch)   forwards and backwards of all micro-batches      worker
                  gradients summed over whoever holds a parameter  reducer, while backwards go on
                  loss, metrics, gradient norm: one small sum      step_totals
                  clip, optimizer, scheduler                       updates, of this rank alone

``step`` waits for the totals before anything is changed, so all ranks wait for each other once per
step. ``steps`` reads them one step later, so nobody waits, and the pipeline stays full::

    step     rank 0   F0 F1 .. B0 F2 .. B3 | F0 F1 ..            steps    F0 F1 .. B3 F0 F1 ..
             rank 1      F0 .. B0 F1 .. .. |    F0 ..                        F0 .. .. F0 ..

Every rank calls the same methods with the same batches and takes the slices that it needs, so data
never travels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import (
    DataError,
    InfeasiblePlanError,
    InvalidPlanError,
    NonFiniteError,
    TrainingError,
)
from anabranch.graph.capture import Captured
from anabranch.graph.module_state import only_frozen
from anabranch.plans.plan import Plan
from anabranch.runtime.base_pipeline import BasePipeline
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.compute.stage_compute import Outcome
from anabranch.runtime.data_feed import samples_of
from anabranch.runtime.data_parallel.updates import Updates
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.measurement.peak_memory import PeakMemory
from anabranch.runtime.measurement.timeline import gather_timeline
from anabranch.runtime.measurement.yardstick import yardstick_s
from anabranch.runtime.numerics.nonfinite import Ran
from anabranch.runtime.placement import fetched
from anabranch.runtime.session import Session
from anabranch.runtime.step_totals import StepTotals
from anabranch.runtime.worker import Worker
from anabranch.timeline import Timeline
from anabranch.workload import Batch, Workload


class Pipeline(BasePipeline):
    """Trains a workload by a plan, one rank per device.

    Under ``launch.run`` and under torchrun each rank makes one. A plan for one device needs
    neither.

    The rank keeps the parameters of its own stages. With several ranks, those of other stages are
    replaced by NaN of the same shape, without memory, when training starts: save a checkpoint to
    get at all of them.

    Attributes:
        optimizer: of this rank's parameters; None where there is nothing to train.
        scheduler: of the learning rate.
        metrics: of the step whose loss was returned last, means over the batch, the same on every
            rank.
        timeline: of the last step that was recorded, the same on every rank.
        peak_bytes: most bytes of tensors in the last step that was weighed, by rank; the prediction
            is ``plan.predicted.device_peak_bytes``. None before.

    Args:
        workload: model, data, optimizer recipe; the same on every rank.
        plan: its operators have to be the model's.
        captured: the captured module, where the caller has it; captured anew otherwise.
        accumulate: batches that make one update, with the mean of their gradients; clipping and
            the scheduler count updates. What the last batches leave over, ``update`` uses.
        compute: precision, compilation, offloading, random numbers; the same on every rank.
        exact: gradients bitwise those of one process that accumulates the same micro-batches.
        shard_optimizer: replicas of a stage share its optimizer state: each parameter, or rows of a
            large one, is updated by one of them, which alone has its state and gets its summed
            gradient, and sends it to the others (ZeRO stage 1). Parameters are those of a run
            without, bit for bit where sums have one order. Not with ``exact``. By default as the
            plan says.
        check_gradients: before the first step, compare loss and gradients of one micro-batch with
            the user's own module in one process.
        check_memory: before anything is allocated, compare the predicted peaks of all ranks with
            the memory of the plan's cluster and with what is free here.
        check_copies: after every so many steps, compare the copies of parameters that several ranks
            hold, bit for bit; 0 for never. Reads each parameter once.
        timeout: seconds until a silent rank counts as lost; more than the longest step takes.
        stall_timeout: under torchrun, seconds without progress after which the ranks end the run
            and name the one that holds it up; ``timeout`` by default. ``launch.run`` has an
            argument of that name for local ranks.
        device: where this rank's stages are computed, by default where the model is. They are moved
            there, the rest of the model stays. ``cuda`` is the GPU of the number ``LOCAL_RANK``, in
            turn where ranks outnumber GPUs.

    Raises:
        InvalidPlanError: if the plan is for another model or another number of ranks, ranks
            disagree.
        InfeasiblePlanError: if a rank would take more memory than there is.
        CaptureError: if the module cannot be captured.
        ValueError: if ``accumulate`` is less than 1, or ``shard_optimizer`` meets ``exact``.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        captured: Captured | None = None,
        accumulate: int = 1,
        compute: ComputeOptions = PLAIN,
        exact: bool = False,
        shard_optimizer: bool | None = None,
        check_gradients: bool = True,
        check_memory: bool = True,
        check_copies: int = 100,
        timeout: float = 600.0,
        stall_timeout: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}; an update takes at least one batch")
        if exact and shard_optimizer:
            raise ValueError(
                "exact mode adds gradients of tied parameters on all their holders, which "
                "shard_optimizer gives to one of them; take one of the two"
            )
        self.workload = workload
        self._accumulate, self._exact, self._shards = accumulate, exact, shard_optimizer
        self._checks_memory = check_memory
        # What another plan changes nothing about.
        self._make_session = partial(
            Session,
            workload,
            compute=compute,
            exact=exact,
            check_memory=check_memory,
            timeout=timeout,
            stall_timeout=stall_timeout,
            device=device,
        )
        self._facts = {
            "accumulate": accumulate,
            "exact": exact,
            "check_memory": check_memory,
            "check_copies": check_copies,
            "clip_norm": workload.clip_norm,
        }
        self._check_copies = check_copies
        self._begin(plan, captured=captured, check_gradients=check_gradients)
        self.metrics: dict[str, float] = {}
        self.timeline: Timeline | None = None
        self.peak_bytes: tuple[int, ...] | None = None

    def _begin(self, plan: Plan, *, check_gradients: bool, **options: Any) -> None:
        """Hold this rank's part of a plan."""
        shards = plan.shard_optimizer and not self._exact if self._shards is None else self._shards
        facts = {"shard_optimizer": shards, "check_gradients": check_gradients}
        self.plan = plan
        self._session = session = self._make_session(
            plan=plan,
            facts={**self._facts, **facts},
            shard_optimizer=shards,
            check_gradients=check_gradients,
            **options,
        )
        self._mesh, self._state, self._workers = session.mesh, session.state, session.workers
        self.optimizer, self.scheduler = session.state.optimizer, session.state.scheduler
        self._updates = Updates(
            session.state,
            session.parts,
            plan.stage_graph,
            session.holders,
            session.mesh,
            accumulate=self._accumulate,
            exact=self._exact,
            tables=session.shared_tables(self._accumulate),
        )
        self._is_first = True
        self._unread: StepTotals | None = None
        self._is_bad = False  # this rank has met a loss that is not finite, and updates no more
        self._is_spoilt = False  # some stages have made an update that others have not

    def yardstick_s(self) -> tuple[float, ...]:
        """Per rank, seconds of a fixed piece of work that all do at the same time; all ranks call
        it together.
        """
        with self._session.failing():
            self._settle()
            self._mesh.barrier()
            mine = torch.tensor([yardstick_s(self._session.place)], dtype=torch.float64)
            return tuple(float(seconds) for seconds in self._mesh.all_gather(mine))

    def change_plan(self, plan: Plan) -> None:
        """Go on under another plan for the same ranks; all ranks call it between the same steps.

        Parameters, buffers and the optimizer's state go from rank to rank in memory. What follows
        is what would follow from ``save`` and ``resume``, bit for bit, without a file and without
        another start. ``optimizer`` and ``scheduler`` are other objects afterwards.

        Raises:
            InvalidPlanError: if the plan is for another model, batch size or number of ranks.
            InfeasiblePlanError: if a rank would take more memory than there is.
            TrainingError: if an update is still to come for the last batches (``accumulate``).
        """
        before = self.plan.stage_graph
        if plan.stage_graph.batch_size != before.batch_size:
            raise InvalidPlanError(
                f"the plan to change to is for batches of {plan.stage_graph.batch_size} samples, "
                f"but training has batches of {before.batch_size}; plan for these"
            )
        with self._session.failing():
            self._settle()
        self._refuse_between("change of the plan")
        session = self._session
        with session.failing():
            missing = session.lack_for_change(plan) if self._checks_memory else ""
        if missing:
            raise InfeasiblePlanError(missing)
        # What is frozen for a while goes on with its optimizer's state.
        with only_frozen(session.captured.module, session.frozen):
            self._begin(
                plan,
                captured=session.captured,
                check_gradients=False,
                check_memory=False,
                predecessor=session,
            )

    # Training

    def step(self, batch: Batch, *, record: bool = False, weigh: bool = False) -> float:
        """Train on one batch.

        Args:
            batch: all samples, the same on every rank; any number of them.
            record: keep a ``timeline`` of this step.
            weigh: measure ``peak_bytes`` in this step, which on a CPU makes it several times as
                long; compiled stages on a CPU cannot be measured.

        Returns:
            The loss, as a mean over the batch, the same on every rank.

        Raises:
            NonFiniteError: on every rank, before the optimizer has changed anything; names stage
                and micro-batch.
            StageFailedError: if something raised on this rank; names stage, micro-batch and step.
            DataError: if the batch is built otherwise than the workload's example.
        """
        begun = time.perf_counter()
        leaves = self._session.leaves(batch)
        with self._session.failing():
            self._settle()
            self._session.prepare(batch, leaves)
            start = lead = 0.0
            if record:
                self._workers.clock.begin()
                lead = time.perf_counter() - begun
                self._mesh.barrier()
                start = time.perf_counter()
            with self._weighed(leaves) if weigh else nullcontext():
                worker, outcome = self._run(leaves)
                loss = self._agree(outcome)
            if record:
                self._workers.clock.end()
                end = time.perf_counter()
                self.timeline = gather_timeline(worker, outcome, self._mesh, start, end, lead)
            POSITION.leave()
        self._count()
        return loss

    @contextmanager
    def _weighed(self, leaves: dict[str, Tensor]) -> Iterator[None]:
        if self._session.place.type != "cuda" and self._workers.options.backend is not None:
            yield  # compiled code shows nobody what it makes
            return
        gauge = PeakMemory(self._session.place, self._updates.tensors, leaves.values())
        with gauge.measuring():
            yield
        peaks = self._mesh.all_gather(torch.tensor([gauge.peak_bytes]))
        self.peak_bytes = tuple(int(peak) for peak in peaks)

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on batches without a barrier between them, as long as there are any.

        A rank updates each stage as soon as its own gradients are there and goes on to the next
        batch; what all ranks have to tell each other is read one step later, and parameters that
        another rank updates (``shard_optimizer``) are there by the next forward of their stage, or
        when the loop is left. Where something global
        decides about the update (``clip_norm``), and in the first step, ranks agree as in ``step``.

        Args:
            batches: see ``step``; a batch must not be changed once it has been given.

        Yields:
            The loss of each step, when the next step has been made (the last one at the end), with
            ``metrics`` to it. ``step_number``, ``save`` and ``evaluate`` are those of the step that
            was made last.

        Raises:
            NonFiniteError: on every rank, one step late: a rank with a loss that is not finite does
                not update its own parameters from then on, but other stages may have been updated
                by gradients that are not finite; names stage, micro-batch and step.
            StageFailedError, DataError: see ``step``.
        """
        before: StepTotals | None = None
        try:
            for batch in self._session.given(batches, self._leave):
                if self._is_first or self._decides_together:
                    if before is not None:  # the plan has changed meanwhile
                        yield self._read(before)
                        before = None
                    yield self.step(batch)
                    continue
                tally = self._go(batch)
                if before is not None:
                    yield self._read(before)
                before = tally
            self._finish_share()
            if before is not None:
                yield self._read(before)
        except (GeneratorExit, DataError):
            self._leave()
            raise

    def _finish_share(self) -> None:
        """Wait for the parameters that other ranks have updated."""
        with self._session.failing():
            self._updates.finish_share()

    def _leave(self) -> None:
        """End a loop; the others need this rank's messages and its share of the last totals."""
        if self._session.transport is not None:
            self._session.transport.flush()
        with suppress(TrainingError):  # whoever goes on hears of it
            self._finish_share()
            if self._unread is not None:
                self._unread.read()

    def update(self) -> None:
        """Make an update of the batches since the last one, if there are any."""
        with self._session.failing():
            self._settle()
            if self._updates.accumulated:
                self._updates.finish_early()
                self._agree(self._ran[2])

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Run one batch without an update.

        Args:
            batch: all samples, the same on every rank.

        Returns:
            The loss, and the gradient of the whole batch for every parameter of this rank that has
            one; they hold until the next step.

        Raises:
            TrainingError: if an update is still to come for earlier batches (``accumulate``).
        """
        leaves = self._session.leaves(batch)
        scale = self._workers.loss_scale
        with self._session.failing():
            self._settle()
            self._refuse_between("gradients of one batch")
            self._session.prepare(batch, leaves)
            while True:
                worker, outcome = self._run(leaves, alone=True)
                self._updates.finish(worker, outcome)
                finite = [] if scale is None else scale.unscale(self._state.gradients())
                overflow = not all(fetched(finite))
                sums = torch.tensor([outcome.loss, float(overflow)], dtype=torch.float64)
                loss, overflows = self._mesh.all_reduce(sums).tolist()
                if scale is None or not overflows:
                    break
                scale.update(overflow=True)
            POSITION.leave()
        found = {n: p.grad for n, p in self._state.parameters.items() if p.grad is not None}
        return loss, found

    def _run(self, leaves: dict[str, Tensor], *, alone: bool = False) -> tuple[Worker, Outcome]:
        """Run one batch; sums of gradients may still be on their way."""
        POSITION.begin(self.step_number)
        samples = samples_of(leaves)
        worker = self._workers.for_batch(leaves).worker(samples)
        self._updates.prepare(worker, samples, alone=alone)
        outcome = worker.run(leaves, self.step_number, watcher=self._updates.reducer)
        self._ran = worker, leaves, outcome
        return worker, outcome

    @property
    def _decides_together(self) -> bool:
        """Whether an update depends on something that only all ranks together know."""
        return self.workload.clip_norm is not None or self._workers.loss_scale is not None

    def _agree(self, outcome: Outcome) -> float:
        """Wait for all ranks, then let the optimizer have the gradients."""
        POSITION.begin(self.step_number, Phase.SUMS)
        self._updates.finish(self._ran[0], outcome)
        scaled = self._workers.loss_scale is not None  # an overflow is no error then
        if not scaled and (self.workload.clip_norm is None or not self._updates.is_last):
            self._updates.check(outcome)  # otherwise their norm tells
        try:
            return self._apply(outcome)
        except NonFiniteError:
            self._updates.drop()
            raise

    def _apply(self, outcome: Outcome) -> float:
        largest = self.workload.clip_norm
        clips = largest is not None and self._updates.is_last
        scale = self._workers.loss_scale if self._updates.is_last else None
        finite = [] if scale is None else scale.unscale(self._state.gradients())
        numbers = fetched([*finite, *(self._updates.squares() if clips else ())])
        overflow = not all(numbers[: len(finite)])
        squares = 0.0 if overflow else sum(numbers[len(finite) :])
        if not math.isfinite(squares):
            self._updates.check(outcome)
        tally = self._tally(outcome, squares=squares, overflow=overflow)
        tally.read()
        POSITION.begin(self.step_number, Phase.UPDATE)
        self.metrics = tally.metrics
        if self._is_first and self._updates.is_last:
            self._is_first = False
            self._session.warn_without_gradient()
        if scale is not None:
            scale.update(tally.overflow)
        if tally.overflow:
            self._updates.drop()
        else:
            self._updates.apply(tally.squares, largest)
            self._updates.start_share()
            self._updates.finish_share()
        return tally.loss

    def _tally(
        self,
        outcome: Outcome,
        *,
        squares: float = 0.0,
        overflow: bool = False,
        is_first: bool = True,
    ) -> StepTotals:
        def why() -> NonFiniteError:
            return self._session.trace.why(ran, is_first=is_first)

        ran = Ran(self._ran[0], self._ran[1], self.step_number, outcome)
        names = self._session.captured.metrics
        return StepTotals(
            self._mesh,
            outcome,
            names,
            why,
            squares=squares,
            overflow=overflow,
            digest=self._session.batch_digest,
        )

    def _go(self, batch: Batch) -> StepTotals:
        """One step without waiting for ranks that hold other parameters."""
        leaves = self._session.leaves(batch)
        with self._session.failing():
            self._refuse_spoilt()
            worker, outcome = self._run(leaves)
            POSITION.begin(self.step_number, Phase.SUMS)
            self._updates.finish(worker, outcome)
            POSITION.begin(self.step_number, Phase.UPDATE)
            self._update_alone(outcome)
            self._updates.start_share()
            tally = self._tally(outcome, is_first=False)
            POSITION.leave()
        self._unread = tally
        self._count()
        return tally

    def _count(self) -> None:
        self._session.count()
        every = self._check_copies
        if every and self.step_number % every == 0 and self.is_between_updates:
            self._finish_share()
            self._session.require_same_copies()

    def _update_alone(self, outcome: Outcome) -> None:
        """Let the optimizer have the gradients, if what this rank knows is finite."""
        if self._updates.may_guard and not self._is_bad:
            guard = self._updates.apply_guarded(outcome.unread_losses)
            # The device is at the update, or further, while the host looks.
            if not any(fetched([guard])):
                self._updates.end_guarded()
                return
        self._updates.check(outcome)
        self._is_bad |= outcome.is_bad
        if self._is_bad:
            self._updates.drop()
        else:
            self._updates.apply()

    def _read(self, tally: StepTotals) -> float:
        with self._session.failing():
            try:
                with POSITION.doing(Phase.SUMS):
                    tally.read()
            except NonFiniteError:
                self._unread, self._is_bad = None, False
                self._is_spoilt = self._mesh.size > 1
                self._updates.drop()
                raise
        self.metrics = tally.metrics
        return tally.loss

    def _settle(self) -> None:
        """Find out whether the step that was made last was a good one, and have its parameters."""
        self._refuse_spoilt()
        self._finish_share()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read(unread)

    def _refuse_spoilt(self) -> None:
        """Raises TrainingError where stages have parted ways."""
        if self._is_spoilt:
            raise TrainingError(
                "a loss was not finite, and when that was known some stages had been updated and "
                "others not, so these weights belong to no step; resume from a checkpoint"
            )

    def _refuse_between(self, what: str) -> None:
        """Raises TrainingError where batches wait for their update."""
        done, wanted = self._updates.accumulated, self._updates.accumulate
        if done:
            raise TrainingError(
                f"{done} of {wanted} batches of an update are done, so there can be no {what} now; "
                f"wait for step {self.step_number + wanted - done}, or call update() first"
            )

    # Evaluation

    def evaluate(self, loader: Iterable[Batch] | None = None) -> dict[str, float]:
        """Mean loss and metrics over held-out batches, in evaluation mode.

        Args:
            loader: batches, the same on every rank; by default the workload's ``eval_data``.

        Returns:
            ``loss`` and the metrics, means over samples, the same on every rank.

        Raises:
            DataError: if there is no held-out data, or reading it raised.
        """
        with self._session.failing():
            self._settle()
        return self._session.evaluate(loader)

    # State on disk

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = None) -> None:
        """Write a checkpoint: parameters, buffers, optimizer, scheduler, position in the data.

        Args:
            folder: a new folder, on a file system that all ranks see; it appears when it is
                complete.
            wait: until it is on the disk. Otherwise this rank's part is copied and written by a
                thread while training goes on; ``finish_saving``, or the next ``save``, waits for
                it. What goes wrong is then raised by a later step.
            keep: how many checkpoints named ``step-N`` may be beside it afterwards, with itself;
                older ones are removed. By default all.

        Raises:
            TrainingError: if the folder exists, or cannot be written, or an update is still to come
                for the last batches (``accumulate``).
        """
        with self._session.failing():
            if wait:
                self._settle()
            else:
                self._refuse_spoilt()
                self._finish_share()
        self._refuse_between("checkpoint")
        saving = self._session.checkpoints.save(folder, wait=wait, keep=keep)
        if self._unread is None:
            saving.confirm()
        else:
            self._unread.then(saving.confirm, saving.give_up)

    @property
    def is_between_updates(self) -> bool:
        """Whether a checkpoint can be written now."""
        return not self._updates.accumulated

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        workload: Workload,
        plan: Plan,
        *,
        check_gradients: bool = True,
        **options: Any,
    ) -> Pipeline:
        """Continue from a checkpoint, under any plan for the same model.

        Args:
            folder: what ``save`` wrote.
            workload: as it was; the optimizer recipe has to be of the same kind.
            plan: may have other stages, devices and replicas.
            check_gradients: see ``Pipeline``.
            options: others of ``Pipeline``.

        Raises:
            FileFormatError: naming file and key, if the checkpoint is damaged or of another model.
        """
        pipeline = cls(workload, plan, check_gradients=check_gradients, **options)
        pipeline._session.load(folder)
        return pipeline

    @classmethod
    def from_weights(
        cls, path: str | Path, workload: Workload, plan: Plan, **options: Any
    ) -> Pipeline:
        """Begin with weights that something else saved, such as a model of Hugging Face.

        Args:
            path: a safetensors file of the whole model by the names of its ``state_dict``, or a
                folder with ``model.safetensors`` or ``model.safetensors.index.json``. Each rank
                reads its own part. Numbers of a narrower type are taken as they are.
            options: of ``Pipeline``.

        Raises:
            FileFormatError: naming file and tensor, if it is damaged or of another model.
        """
        pipeline = cls(workload, plan, **options)
        pipeline._session.load_weights(path)
        return pipeline
