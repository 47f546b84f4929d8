"""Totals of mini-batches over all ranks, begun in one order and read when that costs no waiting.

A rank may learn from mini-batches in another order than others, or not at all. What was learned too
early is kept until its turn::

    given out   5  6  7  8          6 and 8 are learned or none of this rank's
    tell        -  .  -  .          5 holds them up; with it, 5 and 6 are told
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from anabranch.errors import NonFiniteError
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.step_totals import StepTotals
from anabranch.runtime.worker import BatchRun


class Divergence:
    """Watch for a loss that climbs, as stale weights make a learning rate too large sooner."""

    factor, window = 10.0, 8
    """Times the smallest mean so far that is called divergence, and losses of one mean."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=self.window)
        self._least = float("inf")
        self._has_told = False

    def note(self, loss: float) -> str:
        """Take a loss; once in a run, what is wrong as text, otherwise nothing."""
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


class MinibatchTotals:
    """Sums of loss and metrics over all ranks, of mini-batches whose loss has not been read.

    Attributes:
        listener: called with every mini-batch that this rank has learned from.
    """

    def __init__(
        self,
        mesh: Mesh,
        metrics: Sequence[str],
        why: Callable[[int, Mapping[str, Tensor]], NonFiniteError],
        settle: Callable[[], None],
    ) -> None:
        self._mesh, self._metrics, self._why, self._settle = mesh, metrics, why, settle
        self._given_out: deque[tuple[int, Mapping[str, Tensor], bytes]] = deque()
        self._learned: dict[int, Outcome] = {}
        self._begun: deque[StepTotals] = deque()
        self._divergence = Divergence()
        self.listener: Callable[[BatchRun], None] | None = None

    def give_out(self, number: int, leaves: Mapping[str, Tensor], digest: bytes) -> None:
        """Add the next mini-batch."""
        self._given_out.append((number, leaves, digest))

    def note(self, run: BatchRun) -> None:
        """Note that this rank has learned from its part of a mini-batch."""
        self._learned[run.number] = run.outcome
        if self.listener is not None:
            self.listener(run)

    def skip(self, number: int) -> None:
        """Note that this rank has no part in a mini-batch."""
        self._learned[number] = Outcome()

    def tell(self) -> None:
        """Begin all sums before which no other is missing."""
        while self._given_out and self._given_out[0][0] in self._learned:
            number, leaves, digest = self._given_out.popleft()
            totals = StepTotals(
                self._mesh,
                self._learned.pop(number),
                self._metrics,
                partial(self._why, number, leaves),
                number=number,
                digest=digest,
                settle=self._settle,
            )
            self._begun.append(totals)

    def settle(self) -> None:
        """Wait for all sums that have begun; they are still to be taken."""
        for totals in self._begun:
            totals.read()

    def take(self, before: int) -> Iterator[StepTotals]:
        """Generate the sums of mini-batches before a number, each once."""
        while self._begun and self._begun[0].number < before:
            yield self._begun.popleft()

    def last(self) -> StepTotals:
        """Remove and return the sums that were begun last."""
        return self._begun.pop()

    def read(self, totals: StepTotals) -> str:
        """Wait for the sums of a mini-batch; once in a run, return what says that losses climb."""
        totals.read()
        return self._divergence.note(totals.loss)
