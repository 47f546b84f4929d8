"""The pipeline: one rank's part of a training run, as the user's loop holds it.

``step`` waits for the totals before anything is changed, so all ranks wait for each other once per
step. ``steps`` reads them one step later, so nobody waits, and the pipeline stays full::

    step     rank 0   F0 F1 .. B0 F2 .. B3 | F0 F1 ..            steps    F0 F1 .. B3 F0 F1 ..
             rank 1      F0 .. B0 F1 .. .. |    F0 ..                        F0 .. .. F0 ..

Every rank calls the same methods with the same batches and takes the slices that it needs, so data
never travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import DataError, InfeasiblePlanError, InvalidPlanError
from anabranch.graph.capture import Captured
from anabranch.graph.module_state import only_frozen
from anabranch.plans.plan import Plan
from anabranch.runtime.base_pipeline import BasePipeline
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.guards.memory_budget import lack
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.guards.same_batch import BatchCheck, require_same_copies
from anabranch.runtime.measurement.peak_memory import PeakMemory
from anabranch.runtime.measurement.timeline import StepRecording
from anabranch.runtime.pipeline_options import PipelineOptions
from anabranch.runtime.state.spare_copies import SpareCopies
from anabranch.runtime.step_runner import StepRunner
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
        timeline: timeline of the last step that was recorded, the same on every rank.
        peak_bytes: most bytes of tensors in the last step that was weighed, by rank; the prediction
            is ``plan.predicted.device_peak_bytes``. None before.
        copied: ``further`` of the copy that training goes on from, as ``copy_state`` got it; None
            for a pipeline that begins otherwise.

    Args:
        workload: model, data, optimizer recipe; the same on every rank.
        plan: plan whose operators are the model's.
        captured: the captured module, where the caller has it; captured anew otherwise.
        accumulate: batches that make one update, with the mean of their gradients; clipping and
            the scheduler count updates. ``update`` uses batches that are left over at the end.
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
            what is free here.
        check_batches: what ranks compare of every batch: names, types, sizes and, ``sampled``, 32
            values of each tensor on the CPU, or, ``full``, all values, which takes a pass through
            the batch (and a copy from the GPU of what is there).
        check_copies: after every so many steps, compare the copies of parameters that several ranks
            hold, bit for bit; 0 for never. Reads each parameter once.
        timeout: seconds until a silent rank counts as lost; more than the longest step takes.
        stall_timeout: under torchrun, seconds without progress after which the ranks end the run
            and name the one that holds it up; ``timeout`` by default. ``launch.run`` has an
            argument of that name for local ranks.
        patience: the same limit for start-up, the first step, an evaluation or a save; by default
            600, or ``stall_timeout`` if that is more.
        device: where this rank's stages are computed, by default where the model is. They are moved
            there, the rest of the model stays. A name without an index is the GPU of the number
            ``LOCAL_RANK``, in turn where ranks outnumber GPUs.
        copies: memory for ``copy_state``; training goes on from the copy that it has, if any, and
            then nothing is compared with one process.

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
        check_batches: BatchCheck = "sampled",
        check_copies: int = 100,
        timeout: float = 600.0,
        stall_timeout: float | None = None,
        patience: float | None = None,
        device: torch.device | str | None = None,
        copies: SpareCopies | None = None,
    ) -> None:
        self.workload = workload
        self.options = PipelineOptions(
            captured=captured,
            accumulate=accumulate,
            compute=compute,
            exact=exact,
            check_memory=check_memory,
            check_copies=check_copies,
            check_batches=check_batches,
            shard_optimizer=shard_optimizer,
            check_gradients=check_gradients,
            timeout=timeout,
            stall_timeout=stall_timeout,
            patience=patience,
            device=device,
            copies=copies,
        )
        self._begin(plan, self.options)
        self.copied = self._session.copied
        self.timeline: Timeline | None = None
        self.peak_bytes: tuple[int, ...] | None = None

    def _begin(self, plan: Plan, options: PipelineOptions, **further: Any) -> None:
        self._steps = StepRunner(self._hold(plan, options, **further))
        self._updates = self._steps.updates

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
        self._settle()
        self._steps.refuse_between("change of the plan")
        session, steps = self._session, self._steps
        with session.failing():
            own = self._state.bytes_on(session.device)  # which will be free again
            missing = (
                lack(plan, self._mesh, own, 0, session.device) if self.options.check_memory else ""
            )
        if missing:
            raise InfeasiblePlanError(missing)
        # What is frozen for a while goes on with its optimizer's state.
        with only_frozen(session.captured.module, session.frozen):
            options = replace(self.options, captured=session.captured)
            self._begin(plan, options, predecessor=session)
        self._steps.metrics, self._steps.late.begun = steps.metrics, steps.late.begun

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the batch whose loss was returned last, the same on every rank."""
        return self._steps.metrics

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
            POSITION.begin(self.step_number)
            self._steps.settle()
            self._session.prepare(batch, leaves)
            device, workers = self._session.device, self._session.workers
            recording = StepRecording(self._mesh, workers.clock, begun) if record else None
            # Compiled code on a CPU shows nobody what it makes.
            if weigh and (accelerator.has_own_memory(device) or workers.options.backend is None):
                gauge = PeakMemory(device, self._updates.tensors, leaves.values())
                with gauge.measuring():
                    loss = self._steps.step(leaves)
                self.peak_bytes = tuple(self._mesh.gather(gauge.peak_bytes))
            else:
                loss = self._steps.step(leaves)
            if recording is not None:
                self.timeline = recording.timeline(self._steps.ran[2])
            POSITION.leave()
        self._count()
        return loss

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on batches without a barrier between them, as long as there are any.

        A rank updates its stages as soon as their gradients are there and goes on to the next
        batch; what all ranks have to tell each other is read one step later. Where something global
        decides about the update (``clip_norm``), and in the first step, ranks agree as in ``step``.

        Args:
            batches: see ``step``; a batch must not be changed once it has been given.

        Yields:
            The loss of each step, when the next step has been made (the last one at the end), with
            ``metrics`` to it. On a GPU the learning rate of a scheduler follows then as well.
            ``step_number``, ``save`` and ``evaluate`` are those of the step that was made last.

        Raises:
            NonFiniteError: on every rank, one step late: a rank with a loss that is not finite does
                not update its own parameters from then on, but other stages may have been updated
                by gradients that are not finite; names stage, micro-batch and step.
            StageFailedError, DataError: see ``step``.
        """
        first = self.step_number
        try:
            for batch in self._session.given(batches, self._steps.leave):
                if self._steps.decides_together:
                    yield from self._steps.losses(first)  # if the plan has changed meanwhile
                    yield self.step(batch)
                    continue
                leaves = self._session.leaves(batch)
                with self._session.failing():
                    self._steps.step_alone(leaves)
                self._count()
                yield from self._steps.losses(first, self.step_number - 1)
            yield from self._steps.losses(first)
        except (GeneratorExit, DataError):
            self._steps.leave()
            raise

    def _count(self) -> None:
        self._session.count()
        every = self.options.check_copies
        if every and self.step_number % every == 0 and self.is_between_updates:
            with self._session.failing():
                held = self._session.holders.parameters
                require_same_copies(self._mesh, held, self._state.parameters)

    def update(self) -> None:
        """Make an update of the batches since the last one, if there are any."""
        with self._session.failing():
            self._steps.settle()
            self._steps.update_early()

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
        leaves = self._session.leaves(batch, is_step=False)
        with self._session.failing():
            self._steps.settle()
            self._steps.refuse_between("gradients of one batch")
            self._session.prepare(batch, leaves)
            return self._steps.gradients(leaves)

    def _settle(self) -> None:
        self._steps.settle()

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
        self._steps.settle(reads=wait or self._session.checkpoints.is_open)
        self._steps.refuse_between("checkpoint")
        saving = self._session.checkpoints.save(folder, wait=wait, keep=keep)
        self._steps.then(lambda _: saving.confirm(), saving.give_up)

    def copy_state(self, further: Mapping[str, Any], note: Callable[[float], None]) -> None:
        """Copy what ``save`` would write into ``copies``; all ranks call it between the same steps.

        Args:
            further: for ``copied``, as JSON.
            note: called with the loss of the last step before the copy counts.
        """
        copies = self.options.copies
        assert copies is not None
        self._steps.settle(reads=copies.is_dense)
        kept = {**further, "gradients": self.gradient_verdict}
        confirm = self._session.checkpoints.copy_to(copies, kept)

        def count(loss: float | None) -> None:
            if loss is not None:
                note(loss)
            confirm()

        self._steps.then(count, lambda: None)

    @property
    def is_between_updates(self) -> bool:
        """Return True if a checkpoint can be written now."""
        return not self._updates.accumulated
