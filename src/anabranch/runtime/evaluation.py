"""Means over held-out batches: the same stages in evaluation mode, forwards only."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anabranch.errors import DataError
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.data_feed import leaves_of, samples_of
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.session import Session
from anabranch.workload import Batch


def evaluate(session: Session, loader: Iterable[Batch] | None) -> dict[str, float]:
    """Return loss and metrics as means over the samples of batches, the same on every rank; nothing
    may be under way.

    Args:
        loader: by default the workload's held-out data.

    Raises:
        DataError: if there are no batches.
    """
    training, feed = session.workers, session.feed
    before: tuple[Outcome, int] | None = None
    samples = 0
    with POSITION.doing(Phase.EVALUATION):
        with session.failing():
            session.state.require_values()
            session.state.share_buffers()
            workers = training.in_evaluation
            names, needed = workers.captured.metrics, workers.needed_leaves
            sums = torch.zeros(1 + len(names), dtype=torch.float64)
        # Whoever lacks held-out data may go on.
        chosen = feed.held_out(needed) if loader is None else loader

        def add(outcome: Outcome, size: int) -> None:
            shares = [outcome.loss, *(outcome.metrics.get(name, 0.0) for name in names)]
            sums.add_(torch.tensor(shares, dtype=torch.float64) * size)

        for number, batch in enumerate(feed.read(chosen)):
            what = f"held-out batch {number}"
            leaves = leaves_of(session.captured, batch, session.place, what, read=workers.leaves)
            session.begin_batch(batch)
            size = samples_of(leaves)
            with session.failing():
                worker = training.for_batch(leaves).in_evaluation.worker(size)
                outcome = worker.run(leaves, feed.step_number, train=False)
                outcome.bring()
                # A look at a device waits for it, so the next batch is under way by then.
                if before is not None:
                    add(*before)
            before, samples = (outcome, size), samples + size
        if before is None:
            raise DataError("the held-out data has no batches")
        with session.failing(), POSITION.doing(Phase.TOTALS):
            add(*before)
            totals = (session.mesh.all_reduce(sums) / samples).tolist()
    return dict(zip(("loss", *names), totals, strict=True))
