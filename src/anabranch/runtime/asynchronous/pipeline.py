"""The pipeline without a flush: one rank's part of a run, for the user's loop.

::

    steps   put 0 .. put 4   put 5     put 6     ...   drain
            F0 F1 F2 B0 ..   B3* F5    B4* F6          B5* B6*          stream, * an update
            loss of              2         3           4  5  6          totals

Each stage learns from a mini-batch when its gradients have come back. Its loss and metrics are
known on every rank when all stages have learned from it. A rank asks for them when it has put in as
many more mini-batches as the deepest stage holds, so that it does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from anabranch.checkpoint import Checkpoint
from anabranch.errors import DataError, NonFiniteError, warn
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.runtime.asynchronous.requirements import (
    asynchronous_stages,
    budgeted,
    choose,
    clipped_by_stage,
    order_of,
    require_asynchronous,
)
from anabranch.runtime.asynchronous.stream import Stream
from anabranch.runtime.base_pipeline import BasePipeline
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.guards.loop_ends import await_all, begin_unit, end_loop
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.same_batch import BatchCheck
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.measurement.timeline import Recording
from anabranch.runtime.pipeline_options import PipelineOptions
from anabranch.runtime.reference import num_samples
from anabranch.runtime.step_totals import StepTotals
from anabranch.timeline import Timeline
from anabranch.weights import WeightPolicy
from anabranch.workload import Batch, Workload


class Divergence:
    """Watch for a loss that climbs, as stale weights make a learning rate too large sooner."""

    factor, window = 10.0, 8
    """Multiple of the smallest mean so far that is called divergence, and losses of one mean."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=self.window)
        self._least = float("inf")
        self._has_told = False

    def note(self, loss: float) -> str:
        """Take a loss; return a description of divergence once in a run, otherwise empty."""
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        self._least = min(self._least, mean)
        if self._has_told or not 0 < self.factor * self._least < mean:
            return ""
        self._has_told = True
        count = len(self._recent)
        return (
            f"the loss over the last {count} mini-batches is {mean:.4g}, {mean / self._least:.0f} "
            f"times the smallest such mean, {self._least:.4g}"
        )


class AsyncPipeline(BasePipeline):
    """Trains a workload by a plan without a flush, one rank per device.

    Under ``launch.run`` and under torchrun each rank makes one, as with ``Pipeline``. A mini-batch
    is the unit of learning; gradients are not accumulated over several of them (``accumulate``), as
    a larger mini-batch does the same.

    Attributes:
        policy: the weight policy: which weights passes read.
        reason: reason for this policy, if it was chosen for the user.
        is_round_robin: a stage has replicas that take mini-batches in turn.
        version_difference: per stage, most updates between the forward and the backward of a
            mini-batch, up to the last drain; with ``round_robin`` updates of rounds.
        peak_versions: per rank, most copies of its stage's weights alive at once, up to the last
            drain; ``weight_bytes`` are their bytes.
        timeline: timeline of the last recorded mini-batches, the same on every rank.

    Args:
        workload: model, data, optimizer recipe; the same on every rank.
        plan: a plan of mode ``async``, or any 1F1B plan with one stage per device whose micro-batch
            is the mini-batch; with several micro-batches per mini-batch, all of one size, for
            ``2bw`` and ``2bw-ef``.
        policy: a weight policy or its name; ``auto`` asks ``weights.recommend``. By default the
            plan's, or ``auto``.
        captured: see ``Pipeline``; so are ``check_gradients``, ``check_batches``, ``timeout`` and
            ``stall_timeout``.
        round_robin: the replicas of a stage take mini-batches in turn, each of them whole, instead
            of splitting every one (PipeDream's 1F1B-RR). A stage with R replicas makes one update
            for R mini-batches, with the mean of their gradients. Not with ``vertical-sync`` and
            ``2bw``. A drain ends a round early, and running means (BatchNorm) are of the first
            replica's mini-batches. By default as the plan says.
        compute: see ``ComputeOptions``; not ``fp16``. Under ``bf16`` products in a backward read
            the half-precision copies that their forward made, under any policy. A stage with
            recomputation runs its forward again on the weights of the backward, which differ from
            those of the forward under ``naive``, ``pipeoptim`` and ``spectrain``.
        clip_stage_norm: largest norm of a stage's own gradients, in place of ``clip_norm`` of the
            workload, which is over all stages.
        check_memory: see ``Pipeline``; only for plans of mode ``async``, whose prediction includes
            versions, and with ``round_robin``, for which the need is computed.

    Raises:
        InvalidPlanError: see ``Pipeline``; also if the plan cannot run without a flush, a device
            has several stages, or stages share a trainable parameter.
        InvalidScheduleError: if the plan's in-flight counts rise along a stage edge.
        PolicyError: if the policy does not fit the plan or the optimizer, or the workload clips the
            norm over all stages.
        InfeasiblePlanError, CaptureError: see ``Pipeline``.
    """

    is_between_updates = True
    """A checkpoint can always be written."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        policy: WeightPolicy | str | None = None,
        round_robin: bool | None = None,
        captured: Captured | None = None,
        compute: ComputeOptions = PLAIN,
        clip_stage_norm: float | None = None,
        check_gradients: bool = True,
        check_memory: bool = True,
        check_batches: BatchCheck = "sampled",
        timeout: float = 600.0,
        stall_timeout: float | None = None,
        patience: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if clip_stage_norm is not None and not clip_stage_norm > 0:
            raise ValueError(f"clip_stage_norm is a norm, more than 0; not {clip_stage_norm}")
        self.options = options = PipelineOptions(
            captured=captured,
            compute=compute,
            check_memory=check_memory,
            check_batches=check_batches,
            shard_optimizer=False,
            check_gradients=check_gradients,
            timeout=timeout,
            stall_timeout=stall_timeout,
            patience=patience,
            device=device,
        )
        workload = clipped_by_stage(workload, clip_stage_norm)
        graph = asynchronous_stages(plan)
        self._order = order = order_of(plan, graph, in_turns=round_robin)
        self.is_round_robin = order.round_robin
        is_predicted = plan.mode == "async" and order.round_robin == plan.round_robin
        self.policy, self.reason = choose(policy, plan, order.per_update, workload)
        self.workload = workload
        session = self._hold(
            plan,
            replace(options, check_memory=check_memory and is_predicted),
            facts={
                "policy": repr(self.policy),
                "round_robin": order.round_robin,
                "check_memory": check_memory,
                "clip_stage_norm": clip_stage_norm,
            },
            further=order.graph,
        )
        compute = session.options.compute
        require_asynchronous(graph, order, session.parts, self.policy, workload, compute)
        if order.round_robin and check_memory and not is_predicted:
            kind = session.assignment.device.type
            captured = session.captured.under_autocast(compute.precision, kind)
            with session.failing():
                session.assignment.require_memory(
                    budgeted(plan, order, captured, self.policy, self.optimizer), self._mesh
                )
        (self._stage,) = graph.stages_of[self._mesh.device]
        with session.failing(), POSITION.doing(Phase.START_UP):
            self._stream = Stream(session, order, self._stage, self.policy, clip=clip_stage_norm)
        self._totals = self._stream.totals
        self._measured_at = -1
        self._number, self._parted, self._loops = next(_NUMBERS), count(), count()
        self._recent_s: deque[float] = deque(maxlen=8)
        self._divergence = Divergence()
        self.metrics: dict[str, float] = {}
        self.version_difference: tuple[int, ...] = ()
        self.peak_versions: tuple[int, ...] = ()
        self.weight_bytes: tuple[int, ...] = ()
        self.timeline: Timeline | None = None
        self._recording: Recording | None = None

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on mini-batches that follow each other without a flush.

        Args:
            batches: the same on every rank, none larger than the plan's; a batch must not be
                changed once it has been given.

        Yields:
            The loss of every mini-batch, in order, when all stages have learned from it: as many
            mini-batches late as the deepest stage holds, on a GPU one more. When the iterable ends,
            the pipeline is drained, and the other losses follow. ``metrics`` belong to the loss;
            ``step_number``, ``evaluate`` and ``save`` count all mini-batches that were put in. A
            loop that is left early leaves mini-batches in flight: the next call goes on with them,
            but their losses are not yielded any more.

        Raises:
            NonFiniteError: on every rank, late like the loss; names stage and mini-batch. Stages
                have made different updates by then: training can only go on from a checkpoint.
            StageFailedError: if an exception was raised on this rank; names stage and mini-batch.
            DataError: if a batch is built otherwise than the workload's example, or too large; or
                if the ranks have unequal numbers of batches.
        """
        first, loop = self.step_number, f"{self._number}/{next(self._loops)}"
        try:
            for batch in self._session.given(batches, self._leave):
                with self._session.failing():
                    begin_unit(self._mesh, loop, self.step_number - first)
                self._put(batch)
                late = self._order.late + self._stream.delay
                yield from self._totals.losses(first, self.step_number - late, self._read)
            with self._session.failing():
                end_loop(self._mesh, loop, self.step_number - first)
            with suppress(NonFiniteError):  # its turn comes after the losses before it
                self.drain()
            yield from self._totals.losses(first, self.step_number, self._read)
        except GeneratorExit:
            self._leave()
            raise

    def _leave(self) -> None:
        """End a loop; other ranks need this rank's messages until they leave it, too."""
        if self._session.transport is not None:
            self._session.transport.flush()
            # An error in the user's loop on one rank also ends here, and must not wait for long.
            patience_s = min(1.0 + 4 * max(self._recent_s, default=0.0), TIMEOUTS.loop_end_s)
            key = f"{self._number}/{self.step_number}/{next(self._parted)}"
            await_all(self._mesh, key, patience_s)

    def step(self, batch: Batch) -> float:
        """Train on one mini-batch and drain; see ``steps``, which keeps the pipeline full.

        Returns:
            The loss, as a mean over the mini-batch, the same on every rank.
        """
        self._put(batch)
        self.drain()
        return self._read(self._totals.begun.pop())

    def drain(self) -> None:
        """Learn from all mini-batches in flight; all stages are at one version afterwards."""
        self._session.refuse_spoilt()
        with self._session.failing():
            self._stream.drain()
            with POSITION.doing(Phase.TOTALS):
                self._totals.settle()
                self._measure()
            POSITION.leave()

    def _leaves(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of a mini-batch; a ``DataError`` is raised on every rank."""
        try:
            which = self._session.feed.where
            leaves = self._session.leaves(batch)
            samples, most = num_samples(leaves), self.plan.stage_graph.batch_size
            if samples > most:
                raise DataError(
                    f"{which or 'a mini-batch'} has {samples} samples and the plan is for {most}: "
                    "how much a stage holds without a flush is planned; plan for larger "
                    "mini-batches"
                )
        except DataError:
            self._leave()
            raise
        return leaves

    def _put(self, batch: Batch) -> None:
        self._session.refuse_spoilt()
        leaves = self._leaves(batch)
        started = time.perf_counter()
        with self._session.failing():
            POSITION.begin(self.step_number, is_minibatch=True)
            self._session.prepare(batch, leaves, self._stream.worker_of)
            self._stream.put(leaves, self.step_number)
            POSITION.leave()
        self._recent_s.append(time.perf_counter() - started)
        self._session.count()

    def _read(self, totals: StepTotals) -> float:
        with self._session.failing(), POSITION.doing(Phase.TOTALS):
            totals.read()
        self.metrics = totals.metrics
        if (climbs := self._divergence.note(totals.loss)) and self.rank == 0:
            text = f"{climbs}, at mini-batch {totals.number}: {self._stream.advice()}"
            warn(text)
        return totals.loss

    def record(self, minibatches: int) -> None:
        """Record a ``timeline`` of the next mini-batches, which exists after the next ``drain``.

        Args:
            minibatches: mini-batches with work for every device, besides those of the fill.
        """
        first, size = self.step_number, self.plan.stage_graph.batch_size
        last = first + minibatches + 2 * self._order.late
        clock = self._session.workers.clock
        clock.begin()
        self._recording = Recording(first, last, size, self._order.per_update, clock)
        self._stream.listener = self._recording.note

    def _measure(self) -> None:
        """Exchange the numbers of versions and the recording with all ranks."""
        if self._measured_at == self.step_number:
            return
        self._measured_at = self.step_number
        weights = self._stream.weights
        figures = [weights.peak_versions, weights.peak_bytes, self._stream.most_behind, self._stage]
        versions, nbytes, behind, stages = zip(*self._mesh.gather(figures), strict=True)
        self.peak_versions, self.weight_bytes = versions, nbytes
        self.version_difference = tuple(
            max(b for b, stage in zip(behind, stages, strict=True) if stage == s)
            for s in range(len(self._order.graph))
        )
        if self._recording is not None and self._recording.last < self.step_number:
            self._session.workers.clock.end()
            self.timeline, self._recording = self._recording.timeline(self._mesh), None
            self._stream.listener = None

    def _settle(self) -> None:
        self.drain()

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = None) -> None:
        """Drain, then save as ``Pipeline.save``; ``Pipeline.resume`` takes the checkpoint, too."""
        self.drain()
        entries = self._stream.weights.entries()
        self._session.checkpoints.save(folder, entries, wait=wait, keep=keep).confirm()

    def _take_over(self, saved: Checkpoint) -> None:
        self._stream.weights.load(saved)


_NUMBERS = count()
"""Numbers of the pipelines of this process; all ranks make them in the same order."""
