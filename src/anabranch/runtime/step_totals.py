"""Totals of a step, summed over the ranks by one small all-reduce.

Loss, metrics, the gradient norm, whether a number is not finite, whether training is to end
(``INTERRUPT``) and whether a checkpoint is due (``SAVE_CLOCK``) travel together. Reading them waits
for every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from anabranch.errors import NonFiniteError
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.guards.interrupt import INTERRUPT, SAVE_CLOCK
from anabranch.runtime.guards.same_batch import all_alike, require_same_batch, small_digest
from anabranch.runtime.session import Session


class StepTotals:
    """Sums over the ranks, of one step.

    Attributes:
        loss, metrics: means over the batch, once they have been read.
        number: number of the step, or of the mini-batch without a flush.
        squares: squared norm of all gradients.
        overflow: whether a gradient of some rank is not finite.

    Args:
        squares: this rank's share of the gradients' squared norm.
        overflow: under a scaled loss, whether a gradient of this rank is not finite.
        digest: digest of the batch, see ``guards.same_batch``.
        settle: called before ranks tell each other what is wrong, which needs one order of
            collectives on all of them: has to finish this rank's own work.
    """

    loss: float
    squares: float
    overflow: bool
    metrics: dict[str, float]

    def __init__(
        self,
        session: Session,
        outcome: Outcome,
        why: Callable[[], NonFiniteError],
        *,
        number: int,
        digest: bytes,
        squares: float = 0.0,
        overflow: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._names, self._mesh = session.captured.metrics, session.mesh
        self._why, self._digest, self._settle, self.number = why, digest, settle, number
        self._is_read = False
        self._error: NonFiniteError | None = None
        self._listeners: list[tuple[Callable[[], None], Callable[[], None]]] = []
        flags = float(INTERRUPT.heard), float(SAVE_CLOCK.wanted)
        short = float(small_digest(digest))
        own = [float(outcome.is_bad), squares, float(overflow), *flags, short, short**2]
        totals = [torch.tensor(own, dtype=torch.float64), outcome.numbers(self._names)]
        self._pending = self._mesh.start_all_reduce(torch.cat(totals))

    def read(self) -> None:
        """Wait for the sums.

        Raises:
            NonFiniteError: on every rank, naming stage, micro-batch and step.
            DataError: on every rank, if they have trained on different batches.
        """
        if not self._is_read:
            sums = self._pending.wait().tolist()
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
            del self._why  # it holds the batch
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


class LateTotals:
    """Totals of steps that are read while later steps are made, begun in one order on all ranks.

    Without a flush a rank may learn from mini-batches in another order than other ranks, or not at
    all. An outcome that comes too early is kept until its turn::

        given out   5  6  7  8          6 and 8 are learned, or not of this rank
        begin       -  .  -  .          5 holds them up; with it, the sums of 5 and 6 begin

    Attributes:
        begun: totals whose losses nobody has taken.
        newest: totals of the last step, if they have begun; None before the first.

    Args:
        why: returns the error of a bad step, given its number, its batch and this rank's outcome.
        settle: see ``StepTotals``.
    """

    def __init__(
        self,
        session: Session,
        why: Callable[[int, Mapping[str, Tensor], Outcome], NonFiniteError],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._session, self._why, self._settle = session, why, settle
        self._given_out: deque[tuple[int, Mapping[str, Tensor], bytes]] = deque()
        self._learned: dict[int, Outcome] = {}
        self.begun: deque[StepTotals] = deque()
        self.newest: StepTotals | None = None

    def give_out(self, number: int, leaves: Mapping[str, Tensor]) -> None:
        """Add the next step, with the current batch."""
        self._given_out.append((number, leaves, self._session.batch_digest))

    def note(self, number: int, outcome: Outcome) -> None:
        """Note the outcome of this rank's part of a step."""
        self._learned[number] = outcome

    def begin(self) -> None:
        """Begin all sums that no earlier one holds up."""
        while self._given_out and self._given_out[0][0] in self._learned:
            number, leaves, digest = self._given_out.popleft()
            outcome = self._learned.pop(number)
            self.newest = StepTotals(
                self._session,
                outcome,
                partial(self._why, number, leaves, outcome),
                number=number,
                digest=digest,
                settle=self._settle,
            )
            self.begun.append(self.newest)

    def settle(self) -> None:
        """Wait for all sums that have begun; their losses can still be taken."""
        for totals in self.begun:
            totals.read()

    def losses(
        self, first: int, before: float, read: Callable[[StepTotals], float]
    ) -> Iterator[float]:
        """Generate the losses of steps before a number, each once; those before ``first``, of
        another loop, are only read.
        """
        while self.begun and self.begun[0].number < before:
            totals = self.begun.popleft()
            loss = read(totals)
            if totals.number >= first:
                yield loss

    def clear(self) -> None:
        for steps in (self._given_out, self._learned, self.begun):
            steps.clear()
        self.newest = None
