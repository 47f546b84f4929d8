"""Updates of one stage's weights from summed gradients, until a number is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.errors import NonFiniteError
from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.data_parallel.buckets import entries
from anabranch.runtime.data_parallel.gradients import divide, gradients_of
from anabranch.runtime.numerics.nonfinite import Finding, bad_names
from anabranch.runtime.session import Session
from anabranch.runtime.worker import Run
from anabranch.schedule.asynchronous import AsynchronousOrder
from anabranch.weights import WeightPolicy

_CONSEQUENCE = (
    "mini-batches follow each other without waiting, so other stages may have been updated by "
    "then: resume from a checkpoint"
)


class StageUpdates:
    """Updates of one stage on one rank.

    Attributes:
        weights: versions of the stage's weights.

    Args:
        clip: largest norm of the stage's gradients; None for any.
    """

    def __init__(
        self,
        session: Session,
        policy: WeightPolicy,
        order: AsynchronousOrder,
        stage: int,
        clip: float | None,
    ) -> None:
        self._session, self._clip = session, clip
        state = session.state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 has told of the optimizer for all (choose)
            self.weights = VersionedWeights(
                state.parameters,
                state.optimizer,
                policy,
                in_flight=order.in_flight[stage],
                deepest=order.deepest(stage),
                scheduler=state.scheduler,
            )
        self._first_bad: tuple[int, list[Finding]] | None = None
        self._has_stopped = self._has_warned = False

    def make(self, run: Run | None, blame: bool, minibatches: int) -> None:
        """Make an update from the sum of gradients of some mini-batches.

        Args:
            run: this rank's mini-batch; None if it has none in a round.
            blame: numbers that are not finite count as this mini-batch's.
        """
        parameters = self._session.state.parameters
        divide(parameters, minibatches)
        gradients = gradients_of(parameters)
        bad = bad_names(gradients)
        if not self._has_warned:
            self._has_warned = True
            self._session.warn_without_gradient()
        self._has_stopped |= bool(bad)
        if run is not None:
            run.outcome.bad_parameters.extend(bad if blame else [])
            if run.outcome.is_bad and self._first_bad is None:
                self._has_stopped = True
                self._first_bad = run.number, self._session.trace.findings(run.outcome)
        if self._clip is not None:
            with_gradient = [p for p in parameters.values() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([entries(g) for g in gradients.values()])
            torch.nn.utils.clip_grads_with_norm_(with_gradient, self._clip, norm)
        self.weights.update(skip=self._has_stopped, minibatches=minibatches)

    def error(self, number: int, leaves: Mapping[str, Tensor], advice: str) -> NonFiniteError:
        """Return the error of a bad mini-batch, the same on every rank.

        Args:
            advice: what helps where nothing in the batch is to blame.
        """
        bad = self._first_bad
        findings = bad[1] if bad is not None and bad[0] == number else []
        return self._session.trace.error(
            findings, leaves, f"mini-batch {number}", _CONSEQUENCE, advice
        )
