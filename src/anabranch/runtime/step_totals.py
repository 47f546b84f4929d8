"""Totals of a step, summed over the ranks by one small all-reduce.

Loss, metrics, the gradient norm, whether a number is not finite, whether training is to end
(``interrupt``) and whether a checkpoint is due (``save_clock``) travel together. Whoever reads them
waits for every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from anabranch.errors import NonFiniteError
from anabranch.runtime.collectives import Pending
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.guards.interrupt import INTERRUPT, SAVE_CLOCK
from anabranch.runtime.guards.same_batch import all_alike, require_same_batch, small_digest
from anabranch.runtime.mesh import Mesh


class StepTotals:
    """Sums over the ranks, of one step.

    Attributes:
        loss, metrics: means over the batch, once they have been read.
        number: of the mini-batch, without a flush.
        squares: squared norm of all gradients.
        overflow: whether a gradient of some rank is not finite.

    Args:
        squares: this rank's share of the gradients' squared norm.
        overflow: under a scaled loss, whether a gradient of this rank is not finite.
        digest: of the batch, of ``guards.same_batch``.
        starts: whether the sum begins now; otherwise with ``start``, on all ranks at one place.
        settle: called before ranks ask each other what is wrong, which they do in one order: has to
            finish what this rank does on its own.
    """

    loss: float
    squares: float
    overflow: bool
    metrics: dict[str, float]

    def __init__(
        self,
        mesh: Mesh,
        outcome: Outcome,
        names: Sequence[str],
        why: Callable[[], NonFiniteError],
        *,
        number: int = -1,
        squares: float = 0.0,
        overflow: bool = False,
        digest: bytes = b"",
        starts: bool = True,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._names, self._why, self._mesh, self._digest = names, why, mesh, digest
        self._settle, self._outcome, self._own = settle, outcome, (squares, float(overflow))
        self._pending: Pending | None = None
        self.number = number
        self._is_read = False
        self._error: NonFiniteError | None = None
        self._listeners: list[tuple[Callable[[], None], Callable[[], None]]] = []
        if starts:
            self.start()

    def start(self) -> Pending:
        """Begin the sum, unless it has begun; waits for what the device has to tell."""
        if self._pending is None:
            outcome = self._outcome
            flags = float(INTERRUPT.heard), float(SAVE_CLOCK.wanted)
            short = float(small_digest(self._digest))
            own = [float(outcome.is_bad), *self._own, *flags, short, short**2]
            totals = [torch.tensor(own, dtype=torch.float64), outcome.numbers(self._names)]
            self._pending = self._mesh.start_all_reduce(torch.cat(totals))
        return self._pending

    def read(self) -> None:
        """Wait for the sums.

        Raises:
            NonFiniteError: on every rank, naming stage, micro-batch and step.
            DataError: on every rank, if they have trained on different batches.
        """
        if not self._is_read:
            sums = self.start().wait().tolist()
            bad, self.squares, overflow, heard, wanted, digests, squared, self.loss, *metrics = sums
            self.metrics = dict(zip(self._names, metrics, strict=True))
            self._is_read, self.overflow = True, overflow > 0
            INTERRUPT.agreed |= heard > 0
            SAVE_CLOCK.agree(int(wanted))
            if not all_alike(self._mesh.size, digests, squared):
                self._settle()
                require_same_batch(self._mesh, self._digest)
            if bad or not math.isfinite(self.squares):
                self._settle()
                self._error = self._why()
            self._tell()
        if self._error is not None:
            raise self._error

    def then(self, good: Callable[[], None], bad: Callable[[], None]) -> None:
        """Call one of two when it is known whether the step was a good one."""
        self._listeners.append((good, bad))
        if self._is_read:
            self._tell()

    def _tell(self) -> None:
        for good, bad in self._listeners:
            (good if self._error is None else bad)()
        self._listeners.clear()
