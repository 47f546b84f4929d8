"""Means over held-out batches: the same stages in evaluation mode, forwards only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from anabranch.errors import DataError
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.data_feed import leaves_of, samples_of
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.workload import Batch


class Evaluation:
    """Means over held-out batches.

    Args:
        begins: called with each batch.
    """

    def __init__(self, training: WorkerCache, begins: Callable[[Batch], None]) -> None:
        self._training, self._begins = training, begins

    def _made(self, training: WorkerCache) -> WorkerCache:
        return training.like(training.captured.evaluation())

    @property
    def needed_leaves(self) -> frozenset[str]:
        """Names of the tensors of a batch that this rank needs for it."""
        return self._made(self._training).needed_leaves

    def means(
        self,
        batches: Iterable[Batch],
        step: int,
        failing: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, float]:
        """Loss and metrics as means over samples, the same on every rank.

        Raises:
            DataError: if there are no batches.
        """
        training, workers = self._training, self._made(self._training)
        names = workers.captured.metrics
        sums = torch.zeros(1 + len(names), dtype=torch.float64)
        samples = 0
        before: tuple[Outcome, int] | None = None

        def add(outcome: Outcome, size: int) -> None:
            shares = [outcome.loss, *(outcome.metrics.get(name, 0.0) for name in names)]
            sums.add_(torch.tensor(shares, dtype=torch.float64) * size)

        for number, batch in enumerate(batches):
            what = f"held-out batch {number}"
            leaves = leaves_of(training.captured, batch, training.place, what, read=workers.leaves)
            self._begins(batch)
            size = samples_of(leaves)
            with failing():
                worker = self._made(training.for_batch(leaves)).worker(size)
                outcome = worker.run(leaves, step, train=False)
                outcome.bring()
                # A look at a device waits for it, so the next batch is under way by then.
                if before is not None:
                    add(*before)
            before, samples = (outcome, size), samples + size
        if before is None:
            raise DataError("the held-out data has no batches")
        with failing(), POSITION.doing(Phase.TOTALS):
            add(*before)
            totals = (training.mesh.all_reduce(sums) / samples).tolist()
        return dict(zip(("loss", *names), totals, strict=True))
