"""Members that ``Pipeline`` and ``AsyncPipeline`` have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from anabranch.checkpoint import Checkpoint
from anabranch.plans.plan import Plan
from anabranch.runtime.measurement.clocks import yardstick_s
from anabranch.runtime.pipeline_options import PipelineOptions
from anabranch.runtime.session import Session
from anabranch.workload import Batch, Workload


class BasePipeline:
    """A pipeline around one rank's ``Session``.

    Attributes:
        options: options as they were given.
    """

    workload: Workload
    options: PipelineOptions

    def __init__(self, workload: Workload, plan: Plan, **options: Any) -> None:
        raise NotImplementedError

    def _hold(self, plan: Plan, options: PipelineOptions, **further: Any) -> Session:
        """Hold this rank's part of a plan, with further arguments of ``Session``."""
        session = Session(self.workload, plan, options, **further)
        self.plan, self._session = plan, session
        self._mesh, self._state = session.mesh, session.state
        self.optimizer, self.scheduler = session.state.optimizer, session.state.scheduler
        session.checkpoints.settle = self._settle
        return session

    @classmethod
    def resume(cls, folder: str | Path, workload: Workload, plan: Plan, **options: Any) -> Self:
        """Continue from a checkpoint of either kind of pipeline, under any plan for the same model.

        After one without a flush under the same plan, training without a flush goes on as if there
        had been a ``drain``.

        Args:
            folder: what ``save`` wrote.
            workload: as it was; the optimizer recipe has to be of the same kind.
            plan: may have other stages, devices and replicas.
            options: of the pipeline.

        Raises:
            FileFormatError: naming file and key, if the checkpoint is damaged or of another model.
        """
        pipeline = cls(workload, plan, **options)
        session = pipeline._session
        saved = session.checkpoints.load(folder)
        with session.failing():
            pipeline._take_over(saved)
        return pipeline

    def _take_over(self, saved: Checkpoint) -> None:
        """Load the entries of a checkpoint that only a pipeline of this kind writes."""

    @classmethod
    def from_weights(cls, path: str | Path, workload: Workload, plan: Plan, **options: Any) -> Self:
        """Begin with weights that something else saved, such as a model of Hugging Face.

        Args:
            path: a safetensors file of the whole model by the names of its ``state_dict``, or a
                folder with ``model.safetensors`` or ``model.safetensors.index.json``. Each rank
                reads its own part. Numbers of a narrower type are taken as they are.
            options: of the pipeline.

        Raises:
            FileFormatError: naming file and tensor, if it is damaged or of another model.
        """
        pipeline = cls(workload, plan, **options)
        pipeline._session.checkpoints.load_weights(path)
        return pipeline

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._session.mesh.rank

    @property
    def step_number(self) -> int:
        """Batches trained on; without a flush batches put in, all learned from after ``drain``."""
        return self._session.feed.step_number

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

    @property
    def gradient_verdict(self) -> str:
        """Result of the comparison of gradients with one process, once there was a step."""
        return self._session.first.verdict

    def from_first(self, document: Any) -> Any:
        """Return what the first rank has, as JSON; all ranks call it together."""
        with self.failing():
            return self._mesh.gather(document)[0]

    def yardstick_s(self) -> tuple[float, ...]:
        """Return each rank's seconds of a fixed piece of work; all ranks call it together."""
        self._settle()
        with self.failing():
            self._mesh.barrier()
            return tuple(self._mesh.gather(yardstick_s(self._session.device)))

    def failing(self) -> AbstractContextManager[None]:
        """Context in which a failure here reaches the other ranks, and theirs are explained."""
        return self._session.failing()

    def batches(self, *, epochs: int | None = None) -> Iterator[Batch]:
        """Generate batches from the current position on, epoch after epoch; training advances it.

        Args:
            epochs: total number of epochs, including those that are done: a loop over epochs asks
                for one more each time. By default there is no end.

        Raises:
            DataError: if the workload has no data, or reading it raised.
        """
        return self._session.feed.batches(epochs)

    def batches_left(self, epochs: int) -> int | None:
        """Count the batches until so many epochs in all are done; None if the data does not say."""
        return self._session.feed.batches_left(epochs)

    def evaluate(self, loader: Iterable[Batch] | None = None) -> dict[str, float]:
        """Mean loss and metrics over held-out batches, in evaluation mode.

        Without a flush the mini-batches in flight are learned from first.

        Args:
            loader: batches, the same on every rank; by default the workload's ``eval_data``.

        Returns:
            ``loss`` and the metrics, means over samples, the same on every rank.

        Raises:
            DataError: if there is no held-out data, or reading it raised.
        """
        self._settle()
        return self._session.evaluate(loader)

    def _settle(self) -> None:
        """Wait until this rank has no batch in flight."""
        raise NotImplementedError

    def finish_saving(self) -> None:
        """Wait until a checkpoint of ``save(wait=False)`` is on the disk.

        Raises:
            TrainingError: if it could not be written.
        """
        self._session.checkpoints.finish()

    def close(self) -> None:
        """Break this rank's connections; the others find out when they next wait for it."""
        self._session.close()
