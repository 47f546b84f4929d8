"""The endless 1F1B of one rank.

A synchronous pipeline is emptied after every batch. This one is kept full: a mini-batch is put in,
and whatever its stage can do then is done, under the weights that the policy wants::

    put     0    1    2    3       4       5       drain              in flight
    stage 0 F0   F1   F2   B0* F3  B1* F4  B2* F5  B3* B4* B5*        3
    stage 1 F0   F1   B0*  F2  B1* F3  B2* F4 ...                     2       * an update
    stage 2 F0   B0*  F1   B1* F2  B2* F3 ...                         1

Every stage follows the synchronous order ``alternate`` over a batch without end. The receive of new
activations is posted before the backward that makes room begins.

The order does not depend on when messages arrive, so every rank knows what all others do: when
mini-batch m has been put in, a stage that holds k has learned from all up to ``m - k``.

With M micro-batches per mini-batch the update follows the backward of the last of them. A shorter
mini-batch (the last of an epoch) would leave a policy that counts on M without the version that it
reads, so the stream is drained behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.compute.stage_compute import Outcome
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.worker import Flight, Worker


class Stream:
    """Mini-batches of one rank between forward and backward.

    Attributes:
        most_behind: updates between the forward and the backward of a mini-batch at most so far,
            the version difference of this rank's stage.

    Args:
        update: called when a mini-batch's gradients, summed over the replicas, are there.
        tell: called when a forward has sent what it made.
    """

    def __init__(
        self,
        worker: Callable[[Mapping[str, Tensor]], Worker],
        stage: int,
        weights: VersionedWeights,
        reducer: Reducer,
        *,
        in_flight: int,
        microbatches: int,
        update: Callable[[Flight], None],
        tell: Callable[[], None],
    ) -> None:
        self._worker, self._stage, self._weights, self._tell = worker, stage, weights, tell
        self._in_flight, self._microbatches, self._update = in_flight, microbatches, update
        self._reducer, self._sums = reducer, _Sums(reducer)
        self._flights: deque[_Passing] = deque()
        self.most_behind = 0

    @property
    def is_empty(self) -> bool:
        """Whether no mini-batch is between forward and update; the same on all ranks."""
        return not self._flights

    def put(self, leaves: Mapping[str, Tensor], number: int, unit: int | None = None) -> bool:
        """Forward a mini-batch, and learn from earlier ones what has to be learned before.

        The weights may count it as another ``unit``. Returns that this rank has a part in it.
        """
        unit = number if unit is None else unit
        if self.is_empty:
            self._weights.fill(unit)
        worker = self._worker(leaves)
        flight = Flight(worker, leaves, number, self._sums)
        count = worker.graph.num_microbatches(self._stage)
        passing = _Passing(flight, unit, count, self._weights.version)
        flight.expect(back=False)
        self._flights.append(passing)
        if len(self._flights) == 1:
            flight.expect(back=True)
        for microbatch in range(count):
            if sum(passing.held for passing in self._flights) == self._in_flight:
                self._backward()
            if microbatch == 0:
                passing.version = self._weights.version
            with self._weights.forward(unit):
                flight.forward(microbatch)
            passing.forwards += 1
            self._tell()
        if count < self._microbatches:
            self.drain()
        return True

    def drain(self) -> None:
        """Learn from everything that is in flight."""
        while self._flights:
            self._backward()

    def _backward(self) -> None:
        """The next backward, and the update if it completes a mini-batch."""
        passing = self._flights[0]
        flight = passing.flight
        if passing.backwards == 0:
            self._sums.begins(flight.last_backwards, flight.outcome)
        with self._weights.backward(passing.unit):
            flight.backward(passing.backwards)
        passing.backwards += 1
        if passing.backwards < passing.count:
            return
        self._flights.popleft()
        if self._flights:
            self._flights[0].flight.expect(back=True)
        self.most_behind = max(self.most_behind, self._weights.version - passing.version)
        POSITION.begin(flight.number, is_minibatch=True)
        self._reducer.take_all()
        self._update(flight)


class _Passing:
    """A mini-batch on its way: how many of its micro-batches have been forwarded, and learned."""

    def __init__(self, flight: Flight, unit: int, count: int, version: int) -> None:
        self.flight, self.unit, self.count, self.version = flight, unit, count, version
        self.forwards = self.backwards = 0

    @property
    def held(self) -> int:
        """Micro-batches between forward and backward."""
        return self.forwards - self.backwards


class _Sums:
    """Sums over replicas, begun during the last backward of a mini-batch; a ``Watcher``."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def begins(self, stages: Sequence[int], outcome: Outcome) -> None:
        self._reducer.begin(stages)

    def before_forward(self, stage: int) -> None:
        """Nothing: every replica updates all of its parameters."""

    def before_last(self, stage: int) -> None:
        self._reducer.arm(stage)

    def after_last(self, stage: int) -> None:
        self._reducer.complete(stage)

    def waits(self) -> None:
        """Nothing: an update is made where its mini-batch ends, never earlier."""
