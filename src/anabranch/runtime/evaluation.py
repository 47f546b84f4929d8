"""Evaluation: the same stages in evaluation mode, forwards only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from anabranch.errors import DataError
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.data_feed import leaves_of, samples_of
from anabranch.runtime.guards.failure import POSITION
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.plan_parts import evaluation_parts
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.workload import Batch


class Evaluation:
    """Means over held-out batches.

    Args:
        training: the model as it is trained.
        captured: the same in evaluation mode; made when it is first needed if it is not given.
        plan: whose stages.
        mesh: the ranks.
        transport: between them.
        options: how stages are computed.
    """

    def __init__(
        self,
        training: Captured,
        captured: Captured | None,
        plan: Plan,
        mesh: Mesh,
        transport: Transport | None,
        options: ComputeOptions = PLAIN,
    ) -> None:
        self._training, self._captured, self._plan = training, captured, plan
        self._mesh, self._transport, self._options = mesh, transport, options
        self._steps: WorkerCache | None = None

    def means(
        self,
        batches: Iterable[Batch],
        place: torch.device,
        failing: Callable[[], AbstractContextManager[None]],
        step: int,
        seed: int,
    ) -> dict[str, float]:
        """Loss and metrics as means over samples, the same on every rank.

        Args:
            batches: the same on every rank.
            place: where the tensors live.
            failing: what to run in, so that other ranks hear of failures.
            step: steps done.
            seed: of random numbers.

        Raises:
            DataError: if there are no batches.
        """
        steps = self._steps or self._make(place, seed)
        names = steps.captured.metrics
        sums = torch.zeros(1 + len(names), dtype=torch.float64)
        samples = 0
        for number, batch in enumerate(batches):
            leaves = leaves_of(self._training, batch, place, f"held-out batch {number}")
            size = samples_of(leaves)
            with failing():
                outcome = steps.worker(size).run(leaves, step, train=False)
            shares = [outcome.loss, *(outcome.metrics.get(name, 0.0) for name in names)]
            sums += torch.tensor(shares, dtype=torch.float64) * size
            samples += size
        if samples == 0:
            raise DataError("the held-out data has no batches")
        with failing():
            totals = (self._mesh.all_reduce(sums) / samples).tolist()
            POSITION.leave()
        return dict(zip(("loss", *names), totals, strict=True))

    def _make(self, place: torch.device, seed: int) -> WorkerCache:
        captured = self._captured or self._training.evaluation()
        self._steps = WorkerCache(
            captured,
            evaluation_parts(captured, self._plan),
            self._plan,
            self._mesh,
            self._transport,
            place=place,
            seed=seed,
            options=self._options,
        )
        return self._steps
