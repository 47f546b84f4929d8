"""Execution of the asynchronous schedule on one rank.

The schedule (``AsynchronousOrder``) has no end. When a mini-batch is put in, the stage executes it
up to the last forward of that mini-batch; a drain does the passes that are left::

    put     0    1    2    3       4       5       drain              in flight
    stage 0 F0   F1   F2   B0* F3  B1* F4  B2* F5  B3* B4* B5*        3
    stage 1 F0   F1   B0*  F2  B1* F3  B2* F4 ...                     2       * an update
    stage 2 F0   B0*  F1   B1* F2  B2* F3 ...                         1

The order does not depend on when messages arrive, so every rank knows the progress of all others:
when mini-batch m has been put in, a stage with k in flight has learned from all up to ``m - k``.

After a mini-batch with fewer micro-batches than the others (the last of an epoch) the version that
a policy for micro-batches reads would be missing, so the pipeline is drained behind it. With round
robin the last round before a drain may lack mini-batches; a replica without one adds nothing to the
sum and makes the same update::

    mini-batches 0 .. 4     replica 0   F0    F2    B0* F4    B2*    B4*     5 = 2 rounds and a half
    of 2 replicas           replica 1      F1    F3     B1*   B3*     -*
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import NonFiniteError
from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.compute.outcome import GradientNorms, Outcome
from anabranch.runtime.data_parallel.buckets import entries
from anabranch.runtime.data_parallel.gradients import divide, gradients_of
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.data_parallel.updates import make_rows, row_tables
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.numerics.nonfinite import Trace
from anabranch.runtime.reference import num_samples
from anabranch.runtime.session import Session
from anabranch.runtime.step_totals import LateTotals
from anabranch.runtime.worker import BatchRun, Worker
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.schedule.asynchronous import AsynchronousOrder
from anabranch.schedule.schedule import Action, Kind
from anabranch.weights import WeightPolicy

_CONSEQUENCE = (
    "mini-batches follow each other without waiting, so other stages may have been updated by "
    "then: resume from a checkpoint"
)


@dataclass(frozen=True, slots=True)
class _Learned:
    """An update whose numbers have not been checked yet for infinities and NaNs.

    Attributes:
        run: this rank's mini-batch; None if it had none in a round.
        outcome: outcome of the mini-batch; brings the norms of gradients and this rank's terms.
        is_last_turn: whether the mini-batch is the last one of its round.
    """

    run: BatchRun | None
    outcome: Outcome
    is_last_turn: bool


class Stream:
    """Mini-batches of one rank between forward and update.

    Attributes:
        most_behind: most updates so far between the forward and the backward of a mini-batch, the
            version difference of this rank's stage.
        weights: versions of the stage's weights.
        totals: losses and metrics of mini-batches over all ranks.
        listener: called with every mini-batch that this rank has learned from.
        delay: most mini-batches by which the check of an update comes later than the update.

    Args:
        clip: largest norm of the stage's gradients; None for any.
    """

    def __init__(
        self,
        session: Session,
        order: AsynchronousOrder,
        stage: int,
        policy: WeightPolicy,
        *,
        clip: float | None,
    ) -> None:
        self._session, self._order, self._stage = session, order, stage
        self._policy, self._clip, state = policy, clip, session.state
        self.totals = LateTotals(session, self._error, self._spoil)
        self.listener: Callable[[BatchRun], None] | None = None
        self.weights = VersionedWeights(
            state.parameters,
            state.optimizer,
            policy,
            in_flight=order.in_flight[stage],
            deepest=order.deepest(stage),
            scheduler=state.scheduler,
        )
        self.delay = int(accelerator.has_streams(session.device))
        self._unjudged: deque[_Learned] = deque()
        self._has_stopped = self._has_warned = False
        self._reducer = Reducer(
            state.parameters, session.holders, session.mesh, notes=order.round_robin
        )
        self._row_tables = row_tables(session)
        self._turns, self._per_update = order.turns[stage], order.per_update
        self._turn = order.graph.stages[stage].devices.index(session.mesh.device) % self._turns
        self._runs: dict[int, BatchRun] = {}
        self._count = self.most_behind = 0

    def put(self, leaves: Mapping[str, Tensor], number: int) -> None:
        """Forward a mini-batch, after the passes that the schedule has before it."""
        before = len(self._unjudged)
        self.totals.give_out(number, leaves)
        takes_part = self._forward(leaves, number)
        # The device has work to do meanwhile.
        self._judge(min(before, len(self._unjudged)))
        if not takes_part:
            self.totals.note(number, Outcome())
        self.totals.begin()

    def _forward(self, leaves: Mapping[str, Tensor], number: int) -> bool:
        """Forward a mini-batch; return True if this rank takes part in it."""
        if not self._count:  # nothing is between forward and update, on all ranks at once
            self._first = self.weights.version
            self.weights.fill(self._first)
            self._actions = self._order.actions(self._stage)
            self._forwards = 0
        unit, turn = divmod(self._count, self._turns)
        self._count += 1
        if turn != self._turn:
            return False
        workers, samples = self._session.workers.for_batch(leaves), num_samples(leaves)
        worker = self.worker_of(workers, samples, self._count - 1)
        run = self._runs[unit] = worker.begin(leaves, number, self._reducer)
        run.expect(Kind.RECEIVE_FORWARD)
        if len(self._runs) == 1:
            run.expect(Kind.RECEIVE_BACKWARD)
        while self._forwards < (unit + 1) * self._per_update:
            self._do(next(self._actions))
        if worker.graph.num_microbatches(self._stage) < self._per_update:
            self.drain()
        return True

    def drain(self) -> None:
        """Learn from all mini-batches in flight; all replicas are at one version afterwards."""
        updates = -(-self._count // self._turns)
        while self._count and self.weights.version < self._first + updates:
            self._do(next(self._actions))
        self._count = 0
        if self._session.transport is not None:
            self._session.transport.settle()
        self._judge(len(self._unjudged))
        self.totals.begin()

    def worker_of(self, workers: WorkerCache, samples: int, turn: int | None = None) -> Worker:
        """Return the worker for a mini-batch of ``samples``, by default in this rank's turn."""
        if not self._order.round_robin:
            return workers.worker(samples)
        turn = self._turn if turn is None else turn
        return workers.worker_of(self._order.for_turn(turn, samples))

    def _do(self, action: Action) -> None:
        if action.kind is Kind.UPDATE:
            self._update(action.microbatch)
            return
        is_forward = action.kind is Kind.FORWARD
        self._forwards += is_forward
        unit, microbatch = divmod(action.microbatch, self._per_update)
        run = self._runs.get(unit)
        if run is None:
            return  # the drain came before this mini-batch
        if is_forward:
            self.most_behind = max(self.most_behind, self._first + unit - self.weights.version)
            with self.weights.forward(self._first + unit):
                run.do(Kind.FORWARD, microbatch)
            self.totals.begin()
            return
        if microbatch == 0:
            self._reducer.begin(run.tasks.last_backwards)
        with self.weights.backward(self._first + unit):
            run.do(Kind.BACKWARD, microbatch)

    def _update(self, unit: int) -> None:
        run = self._runs.pop(unit, None)
        if (following := self._runs.get(unit + 1)) is not None:
            following.expect(Kind.RECEIVE_BACKWARD)
        if run is None:
            self._reducer.sum_now()
        else:
            POSITION.begin(run.number, Phase.UPDATE, is_minibatch=True)
            self._reducer.take_all()
        minibatches = min(self._turns, self._count - unit * self._turns)
        self._learn(run, minibatches)
        if run is not None:
            POSITION.begin(run.number, is_minibatch=True)

    def _learn(self, run: BatchRun | None, minibatches: int) -> None:
        """Make an update from the sum of gradients of some mini-batches, unless numbers are known
        to be not finite; a GPU is asked when the next mini-batch is under way. An update by bad
        numbers does no harm, as the run then ends on all ranks.

        Args:
            run: this rank's mini-batch; None if it has none in a round.
        """
        parameters = self._session.state.parameters
        divide(parameters, minibatches)
        make_rows(parameters, self._row_tables)
        gradients = gradients_of(parameters)
        outcome = run.outcome if run is not None else Outcome()
        outcome.bring(GradientNorms(gradients), further=self._reducer.terms)
        if not self._has_warned:
            self._has_warned = True
            self._session.state.warn_without_gradient()
        self._unjudged.append(_Learned(run, outcome, self._turn == minibatches - 1))
        if not self.delay:
            self._find_bad(self._unjudged[-1])
        if self._clip is not None:
            with_gradient = [p for p in parameters.values() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([entries(g) for g in gradients.values()])
            torch.nn.utils.clip_grads_with_norm_(with_gradient, self._clip, norm)
        self.weights.update(skip=self._has_stopped, minibatches=minibatches)
        if not self.delay:
            self._judge(1)

    def _judge(self, count: int) -> None:
        """Check the first ``count`` unchecked updates, and note their mini-batches as learned."""
        for _ in range(count):
            learned = self._unjudged.popleft()
            if self.delay:
                self._find_bad(learned)
            if (run := learned.run) is not None:
                self.totals.note(run.number, run.outcome)
                if self.listener is not None:
                    self.listener(run)

    def _find_bad(self, learned: _Learned) -> None:
        """Note if the numbers of an update were not finite."""
        outcome = learned.outcome
        self._has_stopped |= outcome.is_bad
        # Each replica knows whether its own term was bad. If no term was, but their sum
        # overflowed, the last replica reports it.
        if not learned.is_last_turn and all(map(math.isfinite, outcome.further)):
            outcome.bad_parameters.clear()

    def _spoil(self) -> None:
        """End the run after a bad mini-batch. All ranks learn of it at the same mini-batch, but at
        different places in their order. Collectives have to begin in the same order on all ranks,
        so each first finishes its own passes.
        """
        self._session.is_spoilt = True
        self.drain()

    def _error(self, number: int, leaves: Mapping[str, Tensor], outcome: Outcome) -> NonFiniteError:
        """Return the error of a bad mini-batch, the same on every rank."""
        trace, when = Trace(self._session), f"mini-batch {number}"
        return trace.error(outcome, leaves, when, _CONSEQUENCE, self.advice())

    def advice(self) -> str:
        """Describe the settings of a run that diverges, with what to change."""
        optimizer = self._session.state.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        rates = dict.fromkeys(float(group["lr"]) for group in groups)
        lr = ", ".join(f"{rate:.3g}" for rate in rates) or "nothing to learn with"
        stale = ", ".join(f"stage {s}: {k - 1}" for s, k in enumerate(self._order.in_flight))
        return (
            f"under policy {self._policy.name} the version difference in updates is {stale}; the "
            f"learning rate is {lr}: lower it, or let it rise slowly at the start, clip gradients "
            "(clip_stage_norm, in a run file clip-stage-norm), choose fewer stages or a policy "
            "that predicts, or train with --mode sync"
        )
