"""Pipeline: this rank's part of a training run, and what the user's loop holds.

::

    step(batch)   forwards and backwards of all micro-batches      worker
                  gradients summed over whoever holds a parameter  gradients
                  loss, metrics, gradient norm: one small sum      mesh
                  clip, optimizer, scheduler                       this rank's own parameters

Every rank calls the same methods with the same batches; a rank takes the slices that it needs, so
data never travels.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anabranch import checkpoint as disk
from anabranch.errors import DataError, NonFiniteError, TrainingError
from anabranch.graph.capture import Captured
from anabranch.planner.stages import Plan
from anabranch.runtime import steps
from anabranch.runtime.compute import Outcome
from anabranch.runtime.failure import POSITION, PeerLostError, located
from anabranch.runtime.gradients import (
    Holders,
    clip,
    fold_tied,
    reduce_gradients,
    sum_of_squares,
)
from anabranch.runtime.mesh import Mesh, require_whole_replicas
from anabranch.runtime.recording import gather_timeline
from anabranch.runtime.selfcheck import compare_with_eager
from anabranch.runtime.state import State
from anabranch.runtime.steps import Steps
from anabranch.runtime.worker import Worker
from anabranch.timeline import Timeline
from anabranch.workload import Batch, Workload


class Pipeline:
    """Trains a workload by a plan, one rank per device.

    Under ``launch.run`` and under torchrun each rank makes one. A plan for one device needs
    neither.

    The rank keeps the parameters of its own stages. With several ranks, those of other stages are
    replaced by NaN of the same shape, without memory, when training starts: save a checkpoint to
    get at all of them.

    Attributes:
        plan: what is executed.
        optimizer: of this rank's parameters; None where there is nothing to train.
        scheduler: of the learning rate.
        metrics: of the last step, means over the batch, the same on every rank.
        timeline: of the last step that was recorded, the same on every rank.
        step_number: steps done.
        epoch, position: epochs done, and batches of the current one, as ``batches`` counts them.

    Args:
        workload: model, data, optimizer recipe; the same on every rank.
        plan: its operators have to be the model's.
        captured: the captured module, where the caller has it; captured anew otherwise.
        evaluation: what ``captured.evaluation()`` gave, likewise; made when it is first needed.
        exact: gradients bitwise those of one process that accumulates the same micro-batches.
        check_gradients: before the first step, compare loss and gradients of one micro-batch with
            the user's own module in one process.
        timeout: seconds until a silent rank counts as lost; more than the longest step takes.

    Raises:
        InvalidPlanError: if the plan is for another model or another number of ranks, ranks
            disagree, or a stage has tensor parallelism.
        CaptureError: if the module cannot be captured.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        captured: Captured | None = None,
        evaluation: Captured | None = None,
        exact: bool = False,
        check_gradients: bool = True,
        timeout: float = 600.0,
    ) -> None:
        require_whole_replicas(plan.stage_graph)
        self.workload, self.plan = workload, plan
        self._captured = captured or steps.captured_for(workload, plan)
        module = self._captured.module
        place = next((p.device for p in module.parameters()), torch.device("cpu"))
        if place.type == "meta":
            raise TrainingError(
                "the model is on the meta device: it has sizes but no weights; build it on the "
                "CPU to train it"
            )
        parts = steps.parts_of(self._captured, plan, exact=exact)
        devices = plan.stage_graph.devices
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self._holders = Holders.of(parts, plan.stage_graph, rank_of)
        self._mesh = Mesh(devices, self._holders.sets, device_type=place.type, timeout=timeout)
        with self._failing():
            self._mesh.agree("plan and model", steps.digest(self._captured, plan))
            self._transport = self._mesh.transport()
            self._state = State(replace(workload, module=module), self._holders, self._mesh)
            seed = self._common_seed()
        self._train = Steps(
            self._captured, parts, plan, self._mesh, self._transport, place=place, seed=seed
        )
        self._evaluation_captured = evaluation
        self._evaluate: Steps | None = None
        self._exact, self._place = exact, place
        self._fetched: int | None = None
        self._check_gradients, self._is_prepared = check_gradients, False
        self._is_first = True
        self.optimizer, self.scheduler = self._state.optimizer, self._state.scheduler
        self.metrics: dict[str, float] = {}
        self.timeline: Timeline | None = None
        self.step_number = self.epoch = self.position = 0

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self._mesh.rank

    # Training

    def step(self, batch: Batch, *, record: bool = False) -> float:
        """Train on one batch.

        Args:
            batch: all samples, the same on every rank; any number of them.
            record: keep a ``timeline`` of this step.

        Returns:
            The loss, as a mean over the batch, the same on every rank.

        Raises:
            NonFiniteError: on every rank, before the optimizer has changed anything; names stage
                and micro-batch.
            StageFailedError: if something raised on this rank; names stage, micro-batch and step.
            DataError: if the batch is built otherwise than the workload's example.
        """
        leaves = self._leaves(batch)
        with self._failing():
            self._prepare(batch, leaves)
            start = self._now() if record else 0.0
            worker, outcome = self._run(leaves)
            loss = self._update(outcome)
            if record:
                self.timeline = gather_timeline(worker, outcome, self._mesh, start, self._now())
            POSITION.leave()
        self.step_number += 1
        if self._fetched is not None:
            self.position, self._fetched = self._fetched, None
        return loss

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Run one batch without an update.

        Args:
            batch: all samples, the same on every rank.

        Returns:
            The loss, and the gradient of the whole batch for every parameter of this rank that has
            one.
        """
        leaves = self._leaves(batch)
        with self._failing():
            self._prepare(batch, leaves)
            _, outcome = self._run(leaves)
            loss = self._mesh.all_reduce(torch.tensor([outcome.loss], dtype=torch.float64))
            POSITION.leave()
        found = {n: p.grad for n, p in self._state.parameters.items() if p.grad is not None}
        return float(loss[0]), found

    def _prepare(self, batch: Batch, leaves: Mapping[str, Tensor]) -> None:
        """Once, with the first batch at hand: the check needs the whole model on rank 0."""
        if self._is_prepared:
            return
        self._is_prepared = True
        if self._check_gradients:
            compare_with_eager(self._train, self._holders, self._mesh, batch, leaves)
        self._state.forget_others()

    def _now(self) -> float:
        self._mesh.barrier()
        return time.perf_counter()

    def _run(self, leaves: Mapping[str, Tensor]) -> tuple[Worker, Outcome]:
        """Run one batch; ``.grad`` of this rank's parameters is then that of the whole batch."""
        POSITION.begin(self.step_number)
        for parameter in self._state.parameters.values():
            parameter.grad = None
        worker = self._train.worker(_samples(leaves))
        outcome = worker.run(leaves, self.step_number)
        if self._exact:
            self._fold(worker, outcome)
        else:
            reduce_gradients(self._state.parameters, self._holders, self._mesh)
        return worker, outcome

    def _update(self, outcome: Outcome) -> float:
        """Agree on loss, metrics and gradient norm, then let the optimizer have the gradients."""
        names = self._captured.metrics
        largest = self.workload.clip_norm
        squares = 0.0
        if largest is not None:
            squares = sum_of_squares(self._state.parameters, self._holders, self._mesh.rank)
        bad = float(outcome.bad is not None)
        mine = [outcome.loss, squares, bad, *(outcome.metrics.get(name, 0.0) for name in names)]
        sums = self._mesh.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        if sums[2]:
            self._raise_non_finite(outcome)
        self.metrics = dict(zip(names, sums[3:], strict=True))
        if self._is_first:
            self._is_first = False
            self._warn_without_gradient()
        if largest is not None:
            clip(self._state.parameters, sums[1], largest)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(sums[0])

    def _fold(self, worker: Worker, outcome: Outcome) -> None:
        graph = self.plan.stage_graph
        expected: dict[str, list[tuple[int, int]]] = {}
        for s, stage in enumerate(graph.stages):
            rank = self._mesh.rank_of[stage.devices[0]]
            for use in self._train.parts.program(s, stage.microbatch_size).tied:
                expected.setdefault(use.name, []).append((use.order, rank))
        fold_tied(
            outcome.tied,
            self._state.parameters,
            expected,
            worker.graph.num_microbatches(0),
            self._holders,
            self._mesh,
        )
        # A stage may hold a parameter without using it in a way that has a gradient; its copy must
        # be updated all the same. One holder has the whole gradient, so the sum changes no bit.
        others = {n: p for n, p in self._state.parameters.items() if n not in expected}
        reduce_gradients(others, self._holders, self._mesh)

    def _raise_non_finite(self, outcome: Outcome) -> None:
        stage, microbatch = outcome.bad or (-1, -1)
        found = self._mesh.all_gather(torch.tensor([stage, microbatch]))
        stage, microbatch = min(tuple(each.tolist()) for each in found if each[0] >= 0)
        raise NonFiniteError(
            f"the loss of step {self.step_number} is not finite: stage {stage}, micro-batch "
            f"{microbatch} is the first; no parameter was changed in this step; look at the "
            "batch, lower the learning rate, or set clip_norm"
        )

    def _warn_without_gradient(self) -> None:
        names = self._state.without_gradient()
        if self._mesh.rank == 0:
            names += self._captured.unused
        if names:
            warnings.warn(
                f"no gradient reaches {', '.join(names)}: the loss does not depend on it, so it "
                "stays as it is; set requires_grad to False if that is meant",
                stacklevel=4,
            )

    # Data

    def batches(self, *, epochs: int | None = None) -> Iterator[Batch]:
        """The workload's batches from where training is, epoch after epoch; those trained on count.

        Args:
            epochs: how many epochs there are in all; by default there is no end.

        Raises:
            DataError: if the workload has no data, or reading it raised.
        """
        if self.workload.data is None:
            raise DataError("the workload has no data; pass batches to step yourself")
        while epochs is None or self.epoch < epochs:
            skip, count = self.position, 0
            for batch in self._read(
                self.workload.data(self.plan.stage_graph.batch_size, self.epoch),
                f"data of epoch {self.epoch}",
            ):
                count += 1
                if count > skip:
                    self._fetched = count
                    yield batch
            if count == 0:
                raise DataError(f"epoch {self.epoch} of the data has no batches")
            self.epoch, self.position, self._fetched = self.epoch + 1, 0, None

    def _read(self, loader: Iterable[Batch], what: str = "held-out data") -> Iterator[Batch]:
        iterator = iter(loader)
        count = 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                wrapped = DataError(
                    f"the {what} raised at batch {count}: {type(error).__name__}: {error}"
                )
                self._fail(wrapped)
                raise wrapped from error
            count += 1
            yield batch

    def _leaves(self, batch: Batch) -> dict[str, Tensor]:
        try:
            leaves = self._captured.flatten_batch(batch)
        except ValueError as error:
            raise DataError(str(error)) from error
        sizes = {name: leaf.shape[0] if leaf.dim() else 0 for name, leaf in leaves.items()}
        if len(set(sizes.values())) > 1 or 0 in sizes.values():
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise DataError(
                f"the tensors of a batch need one number of samples, at least 1: {listed}"
            )
        return {name: leaf.to(self._place) for name, leaf in leaves.items()}

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
        if loader is None:
            if self.workload.eval_data is None:
                raise DataError(
                    "the workload has no held-out data; give Workload an eval_data, or pass "
                    "batches to evaluate"
                )
            loader = self.workload.eval_data(self.plan.stage_graph.batch_size)
        evaluation = self._evaluation()
        names = evaluation.captured.metrics
        sums = torch.zeros(1 + len(names), dtype=torch.float64)
        samples = 0
        with self._failing():
            self._state.share_buffers()
        for batch in self._read(loader):
            leaves = self._leaves(batch)
            size = _samples(leaves)
            with self._failing():
                outcome = evaluation.worker(size).run(leaves, self.step_number, train=False)
            shares = [outcome.loss, *(outcome.metrics.get(name, 0.0) for name in names)]
            sums += torch.tensor(shares, dtype=torch.float64) * size
            samples += size
        if samples == 0:
            raise DataError("the held-out data has no batches")
        with self._failing():
            totals = (self._mesh.all_reduce(sums) / samples).tolist()
            POSITION.leave()
        return dict(zip(("loss", *names), totals, strict=True))

    def _evaluation(self) -> Steps:
        if self._evaluate is None:
            captured = self._evaluation_captured or self._captured.evaluation()
            parts = steps.evaluation_parts(captured, self.plan)
            self._evaluate = Steps(
                captured,
                parts,
                self.plan,
                self._mesh,
                self._transport,
                place=self._place,
                seed=self._train.seed,
            )
        return self._evaluate

    # State on disk

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: parameters, buffers, optimizer, scheduler, position in the data.

        Args:
            folder: a new folder, on a file system that all ranks see; it appears when it is
                complete.

        Raises:
            TrainingError: if the folder exists, or cannot be written.
        """
        progress = disk.Progress(self.step_number, self.epoch, self.position, self._train.seed)
        with self._failing():
            self._state.save(Path(folder).absolute(), progress)

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        workload: Workload,
        plan: Plan,
        *,
        captured: Captured | None = None,
        evaluation: Captured | None = None,
        exact: bool = False,
        check_gradients: bool = True,
        timeout: float = 600.0,
    ) -> Pipeline:
        """Continue from a checkpoint, under any plan for the same model.

        Args:
            folder: what ``save`` wrote.
            workload: as it was; the optimizer recipe has to be of the same kind.
            plan: may have other stages, devices and replicas.
            captured: see ``Pipeline``; likewise the other options.
            evaluation: see ``Pipeline``.
            exact: see ``Pipeline``.
            check_gradients: see ``Pipeline``.
            timeout: see ``Pipeline``.

        Raises:
            FileFormatError: naming file and key, if the checkpoint is damaged or of another model.
        """
        pipeline = cls(
            workload,
            plan,
            captured=captured,
            evaluation=evaluation,
            exact=exact,
            check_gradients=check_gradients,
            timeout=timeout,
        )
        with pipeline._failing():
            saved = disk.Checkpoint(folder)
            pipeline._state.load(saved, everything=check_gradients and pipeline._mesh.rank == 0)
        progress = saved.progress
        pipeline.step_number = progress.step
        pipeline.epoch, pipeline.position = progress.epoch, progress.position
        pipeline._train.seed = progress.seed
        return pipeline

    # Failures

    def _common_seed(self) -> int:
        """Rank 0's seed of random numbers, for all."""
        seed = torch.tensor([torch.initial_seed() % 2**62])
        self._mesh.broadcast(seed, 0)
        return int(seed)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell the other ranks of a failure here; make sense of a broken connection to them."""
        try:
            with located(self._mesh.rank):
                yield
        except NonFiniteError:
            raise  # on every rank at once; the caller may go on
        except PeerLostError as lost:
            self.close()
            raise self._mesh.explain(lost) from None
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._mesh.publish(error)
        self.close()

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        transport = getattr(self, "_transport", None)
        if transport is not None:
            transport.close()
        self._mesh.close()


def _samples(leaves: Mapping[str, Tensor]) -> int:
    return int(next(iter(leaves.values())).shape[0])
