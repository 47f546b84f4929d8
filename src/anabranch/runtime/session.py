"""What a rank has whatever way it trains: the other ranks, its part of the model, the data.

A pipeline of either mode begins with the same meeting: the ranks compare what they were started
with, connect, give each other one set of weights, and from then on tell each other of failures. Its
evaluation, its checkpoints and its place in the data are the same things, too. What differs, the
order of forwards, backwards and updates, is left to whoever builds on this.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anabranch import checkpoint as disk
from anabranch.errors import NonFiniteError, TrainingError
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import PLAIN, ComputeOptions, require_exact
from anabranch.runtime.data_feed import DataFeed
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.evaluation import Evaluation
from anabranch.runtime.guards.agreement import facts_of, require_agreement
from anabranch.runtime.guards.failure import PeerLostError, located
from anabranch.runtime.guards.memory_budget import require_memory
from anabranch.runtime.guards.self_check import compare_with_eager
from anabranch.runtime.mesh import Mesh, join, require_whole_replicas
from anabranch.runtime.messages import channels
from anabranch.runtime.model_state import ModelState
from anabranch.runtime.plan_parts import captured_for, parts_of
from anabranch.runtime.transport import Channel
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.workload import Batch, Workload


class Joined:
    """One rank of a run.

    Attributes:
        workload: model, data, recipes.
        plan: what is executed.
        optimizer: of this rank's parameters; None where there is nothing to train.
        scheduler: of the learning rate.
        metrics: of the step whose loss was returned last, means over the batch, the same on every
            rank.
        step_number: steps done.

    Args:
        workload: the same on every rank.
        plan: one rank per device.
        captured: the captured module, where the caller has it.
        evaluation: the same in evaluation mode, likewise.
        facts: options of the run that all ranks must have alike, besides ``compute``.
        compute: how stages are computed.
        exact: gradients bitwise those of one process.
        check_gradients: compare one micro-batch with the user's own module first.
        check_memory: compare predicted peaks with the memory that there is.
        timeout: seconds until a silent rank counts as lost.
        further: channels that are used besides those of the plan's schedule.

    Raises:
        InvalidPlanError: if the plan is for another model or another number of ranks, ranks
            disagree, or a stage has tensor parallelism.
        InfeasiblePlanError: if a rank would take more memory than there is.
        CaptureError: if the module cannot be captured.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        captured: Captured | None,
        evaluation: Captured | None,
        facts: Mapping[str, object],
        compute: ComputeOptions = PLAIN,
        exact: bool = False,
        check_gradients: bool = True,
        check_memory: bool = True,
        timeout: float = 600.0,
        further: Collection[Channel] = (),
    ) -> None:
        require_whole_replicas(plan.stage_graph)
        self.workload, self.plan = workload, plan
        self._captured = captured or captured_for(workload, plan)
        module = self._captured.module
        self._place = place = _place_of(self._captured)
        join(place.type, timeout)
        require_agreement(facts_of(self._captured, plan, facts))
        self._parts = parts_of(self._captured, plan, exact=exact)
        if exact:
            require_exact(compute, self._parts)
        graph = plan.stage_graph
        self._holders = Holders.of(self._parts, graph)
        self._mesh = Mesh(
            graph.devices, self._holders.sets, device_type=place.type, timeout=timeout
        )
        with self._failing():
            if check_memory:
                held = self._holders.bytes_of(module, self._mesh.rank)
                require_memory(plan, self._mesh, held, place)
            wanted = sorted({*channels(graph), *further})
            self._transport = self._mesh.transport(place, wanted)
            self._state = ModelState(replace(workload, module=module), self._holders, self._mesh)
            seed = self._common_seed()
        self._train = WorkerCache(
            self._captured,
            self._parts,
            plan,
            self._mesh,
            self._transport,
            place=place,
            seed=seed,
            options=compute,
        )
        self._feed = DataFeed(workload, plan.stage_graph.batch_size, self._fail)
        self._evaluation = Evaluation(
            self._captured, evaluation, plan, self._mesh, self._transport, compute
        )
        self._check_gradients, self._is_prepared = check_gradients, False
        self.optimizer, self.scheduler = self._state.optimizer, self._state.scheduler
        self.metrics: dict[str, float] = {}
        self.step_number = 0

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self._mesh.rank

    @property
    def epoch(self) -> int:
        """Epochs done, as ``batches`` counts them."""
        return self._feed.epoch

    @property
    def position(self) -> int:
        """Batches of the current epoch that were trained on."""
        return self._feed.position

    def batches(self, *, epochs: int | None = None) -> Iterator[Batch]:
        """The workload's batches from where training is, epoch after epoch; those trained on count.

        Args:
            epochs: how many epochs there are in all; by default there is no end.

        Raises:
            DataError: if the workload has no data, or reading it raised.
        """
        return self._feed.batches(epochs)

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        transport = getattr(self, "_transport", None)
        if transport is not None:
            transport.close()
        self._mesh.close()

    # For whoever builds on this

    def _prepare(self, batch: Batch, leaves: dict[str, Tensor]) -> None:
        """Once, with the first batch at hand: the check needs the whole model on rank 0."""
        if self._is_prepared:
            return
        self._is_prepared = True
        if self._check_gradients:
            compare_with_eager(self._train, self._holders, self._mesh, batch, leaves)
        self._state.forget_others()

    def _given(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, whose source may raise on this rank alone."""
        try:
            yield from batches
        except Exception:
            self._part()
            raise

    def _part(self) -> None:
        """Leave a loop so that the others, who may still need this rank, can end it as well."""
        raise NotImplementedError

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

    def _means(self, loader: Iterable[Batch] | None) -> dict[str, float]:
        """Of held-out batches; nothing may be under way."""
        chosen = self._feed.held_out() if loader is None else loader
        with self._failing():
            self._state.share_buffers()
        return self._evaluation.means(
            self._feed.read(chosen), self._place, self._failing, self.step_number, self._train.seed
        )

    def _write(self, folder: str | Path, further: Mapping[str, Tensor] | None = None) -> None:
        """A checkpoint; nothing may be under way."""
        scale = self._train.loss_scale
        progress = disk.Progress(
            self.step_number,
            self.epoch,
            self.position,
            self._train.seed,
            None if scale is None else scale.scale,
            0 if scale is None else scale.streak,
        )
        with self._failing():
            self._state.save(Path(folder).absolute(), progress, further)

    def _read_from(self, folder: str | Path) -> disk.Checkpoint:
        """Take a checkpoint over, before the first step."""
        with self._failing():
            saved = disk.Checkpoint(folder)
            everything = self._check_gradients and self._mesh.rank == 0
            self._state.load(saved, everything=everything)
        progress = saved.progress
        self.step_number = progress.step
        self._feed.epoch, self._feed.position = progress.epoch, progress.position
        self._train.seed = progress.seed
        scale = self._train.loss_scale
        if scale is not None and progress.loss_scale is not None:
            scale.scale, scale.streak = progress.loss_scale, progress.loss_streak
        return saved

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
            with located(self._mesh.rank, self.plan.stage_graph):
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


def _place_of(captured: Captured) -> torch.device:
    """Where the model is.

    Raises:
        TrainingError: if it has no weights.
    """
    place = next((p.device for p in captured.module.parameters()), torch.device("cpu"))
    if place.type == "meta":
        raise TrainingError(
            "the model is on the meta device: it has sizes but no weights; build it on the CPU to "
            "train it"
        )
    return place
