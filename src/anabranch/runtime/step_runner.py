"""Steps of one rank under one plan.

::

    forwards and backwards of all micro-batches      worker
    gradients summed over whoever holds a parameter  reducer, while backwards go on
    loss, metrics, gradient norm: one small sum      step_totals
    clip, optimizer, scheduler                       updates, of this rank alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import NonFiniteError, TrainingError
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.data_parallel.gradients import gradients_of
from anabranch.runtime.data_parallel.updates import Updates
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.numerics.nonfinite import Trace
from anabranch.runtime.reference import num_samples
from anabranch.runtime.session import Session
from anabranch.runtime.step_totals import LateTotals, StepTotals
from anabranch.runtime.worker import Worker

_ADVICE = "lower the learning rate, or set clip_norm"
_BEFORE = "no parameter was changed in this step"
_AFTER = (
    "other stages may have been updated by then, since steps follow each other without waiting: "
    "resume from a checkpoint"
)


class StepRunner:
    """Runs steps, in which all ranks wait for the totals or read them one step later.

    Nobody waits for a GPU that makes its update only if all numbers are finite: its result is asked
    for when it has the passes of the next step, and the totals begin then::

        host   passes 1  update 1  passes 2  ask 1, totals 1  update 2  passes 3  ask 2 ...
        GPU         passes 1 | update 1 | passes 2        | update 2 ...

    Attributes:
        metrics: metrics of the step whose loss was returned last.
        late: totals of steps that nobody waited for.
        is_first: whether no update was made yet.
        ran: worker, batch tensors and outcome of the last batch.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._mesh, self._state = session, session.mesh, session.state
        self._workers, self._clip_norm = session.workers, session.assignment.workload.clip_norm
        self.updates = Updates(session)
        self.metrics: dict[str, float] = {}
        self.late = LateTotals(session, partial(self._error, _AFTER))
        self.is_first = True
        self._is_late = accelerator.has_streams(session.device)
        self._unresolved: tuple[Outcome, bool] | None = None  # and whether an update was made
        self._is_bad = False  # this rank has met a loss that is not finite, and updates no more
        self.ran: tuple[Worker, dict[str, Tensor], Outcome]

    @property
    def decides_together(self) -> bool:
        """True if the next update depends on something that only all ranks together know."""
        return self.is_first or self._clip_norm is not None or self._workers.loss_scale is not None

    def step(self, leaves: dict[str, Tensor]) -> float:
        """Run one batch, wait for the totals of all ranks, then update; return the loss."""
        return self._agree(self._run(leaves))

    def step_alone(self, leaves: dict[str, Tensor]) -> None:
        """Run one batch without waiting for ranks that hold other parameters."""
        self._session.refuse_spoilt()
        outcome = self._run(leaves)
        POSITION.begin(self._number, Phase.UPDATE)
        self.resolve()
        self._update_alone(outcome)
        self.updates.all_gather()
        self.late.give_out(self._number, leaves)
        self.late.note(self._number, outcome)
        if not self._is_late:
            self.late.begin()
        POSITION.leave()

    def resolve(self) -> None:
        """Ask for the result of the last update, if it is not known, and begin the totals of its
        step: on all ranks at the same point, whatever each knows by then.
        """
        if self._unresolved is not None:
            (outcome, is_update), self._unresolved = self._unresolved, None
            self._is_bad |= outcome.is_bad
            if self._is_bad:
                self.updates.drop()
            elif is_update:
                self.updates.advance()
        self.late.begin()

    def update_early(self) -> None:
        """Make an update of the batches since the last one, if there are any."""
        if self.updates.accumulated:
            self.updates.finish_early()
            self._agree(self.ran[2])

    def gradients(self, leaves: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Run one batch without an update; return the loss and this rank's gradients."""
        scale = self._workers.loss_scale
        while True:
            outcome = self._run(leaves, alone=True)
            if scale is not None:
                outcome.bring(further=scale.unscale(self._state.gradients()))
            overflow = not all(outcome.further)
            sums = torch.tensor([outcome.loss, float(overflow)], dtype=torch.float64)
            loss, overflows = self._mesh.all_reduce(sums).tolist()
            if scale is None or not overflows:
                break
            scale.update(overflow=True)
        POSITION.leave()
        return loss, gradients_of(self._state.parameters)

    @property
    def _number(self) -> int:
        return self._session.feed.step_number

    def _run(self, leaves: dict[str, Tensor], *, alone: bool = False) -> Outcome:
        """Run one batch, and wait for its gradients if it is the last one of an update."""
        POSITION.begin(self._number)
        samples = num_samples(leaves)
        worker = self._workers.for_batch(leaves).worker(samples)
        self.updates.prepare(worker, samples, alone=alone)
        outcome = worker.run(leaves, self._number, watcher=self.updates.reducer)
        self.ran = worker, leaves, outcome
        POSITION.begin(self._number, Phase.TOTALS)
        self.updates.finish(worker, outcome)
        return outcome

    def _agree(self, outcome: Outcome) -> float:
        """Wait for all ranks, then let the optimizer have the gradients; return the loss."""
        POSITION.begin(self._number, Phase.TOTALS)
        scaled = self._workers.loss_scale is not None  # an overflow is no error then
        if not scaled and (self._clip_norm is None or not self.updates.is_last):
            self.updates.check(outcome)  # otherwise their norm tells
        try:
            return self._apply(outcome)
        except NonFiniteError:
            self.updates.drop()
            raise

    def _apply(self, outcome: Outcome) -> float:
        is_last = self.updates.is_last
        clips, scale = self._clip_norm is not None, self._workers.loss_scale if is_last else None
        finite = [] if scale is None else scale.unscale(self._state.gradients())
        squared = self.updates.squares() if clips and is_last else []
        outcome.bring(further=[*finite, *squared])
        numbers = outcome.further
        overflow = not all(numbers[: len(finite)])
        squares = 0.0 if overflow else sum(numbers[len(finite) :])
        if not math.isfinite(squares):
            self.updates.check(outcome)
        totals = StepTotals(
            self._session,
            outcome,
            partial(self._error, _BEFORE, self._number, self.ran[1], outcome),
            number=self._number,
            digest=self._session.batch_digest,
            squares=squares,
            overflow=overflow,
        )
        totals.read()
        POSITION.begin(self._number, Phase.UPDATE)
        self.metrics, self.late.newest = totals.metrics, totals
        if self.is_first and is_last:
            self.is_first = False
            self._state.warn_without_gradient()
        if scale is not None:
            scale.update(totals.overflow)
        if totals.overflow:
            self.updates.drop()
        else:
            self.updates.apply(totals.squares, self._clip_norm)
            self.updates.all_gather()
        return totals.loss

    def _update_alone(self, outcome: Outcome) -> None:
        """Let the optimizer have the gradients, if what this rank knows is finite."""
        is_update, is_late = self.updates.is_last, self._is_late and not self._is_bad
        guards = is_late and self.updates.may_guard
        if guards:
            self.updates.apply_guarded(outcome)
        else:
            self.updates.check(outcome)
        if is_late and (guards or not is_update):
            self._unresolved = outcome, is_update
            return
        self._is_bad |= outcome.is_bad
        if self._is_bad:
            self.updates.drop()
        else:
            self.updates.apply()

    def _error(
        self, consequence: str, number: int, leaves: Mapping[str, Tensor], outcome: Outcome
    ) -> NonFiniteError:
        """Return the error of a bad step, the same on every rank."""
        trace, when = Trace(self._session), f"step {number}"
        return trace.error(outcome, leaves, when, consequence, _ADVICE)

    # Totals that are read a step later

    def losses(self, first: int, before: int | None = None) -> Iterator[float]:
        """Generate the losses of steps made alone, from ``first`` to ``before``, by default of all
        that are left; see ``LateTotals``.
        """
        if before is None:
            self._wait(self.resolve)
        yield from self.late.losses(first, math.inf if before is None else before, self._read)

    def _read(self, totals: StepTotals) -> float:
        self._wait(totals.read)
        self.metrics = totals.metrics
        return totals.loss

    def _wait(self, read: Callable[[], None]) -> None:
        """Wait for steps made alone, or their totals; after a bad one forget all later ones."""
        with self._session.failing():
            try:
                with POSITION.doing(Phase.TOTALS):
                    read()
            except NonFiniteError:
                self.late.clear()
                self._unresolved, self._is_bad = None, False
                self._session.is_spoilt = self._mesh.size > 1
                self.updates.drop()
                raise

    def settle(self, *, reads: bool = True) -> None:
        """Complete the last step, and find out whether it was a good one.

        Args:
            reads: whether to read the totals; otherwise they are left to be read later.
        """
        with self._session.failing():
            self._session.refuse_spoilt()
            self.resolve()  # the scheduler may be behind
        if reads:
            self._wait(self.late.settle)

    def then(self, good: Callable[[float | None], None], bad: Callable[[], None]) -> None:
        """Call one of two when it is known whether the last step was a good one; the first with its
        loss, None if there was no step.
        """
        if (newest := self.late.newest) is None:
            good(None)
        else:
            newest.then(lambda: good(newest.loss), bad)

    def leave(self) -> None:
        """End a loop; the others need this rank's messages and its share of the last totals."""
        if self._session.transport is not None:
            self._session.transport.flush()
        with suppress(TrainingError):  # raised again where training goes on
            self.resolve()
            self.late.settle()

    def refuse_between(self, action: str) -> None:
        """Raise a TrainingError where batches wait for their update."""
        done, wanted = self.updates.accumulated, self.updates.accumulate
        if done:
            raise TrainingError(
                f"{done} of {wanted} batches of an update are done, so there can be no {action} "
                f"now; wait for step {self._number + wanted - done}, or call update() first"
            )
