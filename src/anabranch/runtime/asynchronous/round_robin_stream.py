"""The endless 1F1B of one replica that takes every R-th mini-batch of its stage, whole.

``round_robin`` has the rules. All replicas begin the sum of a round during their backward of it,
and have made the update when the next pass wants its weights.

When the pipeline is drained the last round may lack mini-batches::

    mini-batches 0 .. 4     replica 0   F0    F2    B0 F4    B2    B4     5 = 2 rounds and a half
    of 2 replicas           replica 1      F1    F3    B1    B3    --     joins in with nothing

A replica without one adds nothing to the sum and makes the same update. The next mini-batch begins
a round, at the first replica.

The learning rate's schedule makes a step for every mini-batch of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from anabranch.runtime.asynchronous.round_robin import RoundRobin
from anabranch.runtime.asynchronous.stream import Stream
from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.data_feed import samples_of
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.worker import Flight, Worker
from anabranch.runtime.worker_cache import WorkerCache


class RoundRobinStream:
    """Mini-batches of one replica between forward and backward; see ``Stream``.

    Args:
        update: called with this rank's mini-batch (None if it has none), whether numbers that are
            not finite count as that mini-batch's, and the number of mini-batches of the round.
    """

    def __init__(
        self,
        steps: WorkerCache,
        rounds: RoundRobin,
        stage: int,
        device: int,
        weights: VersionedWeights,
        reducer: Reducer,
        *,
        parameters: Mapping[str, nn.Parameter],
        update: Callable[[Flight | None, bool, int], None],
        tell: Callable[[], None],
    ) -> None:
        self._steps, self._rounds, self._weights, self._reducer = steps, rounds, weights, reducer
        self._parameters, self._update = parameters, update
        graph = rounds.graph
        self._replicas = graph.stages[stage].replicas
        self._replica = graph.stages[stage].devices.index(device)
        self._near = [stage, *graph.predecessors[stage], *graph.successors[stage]]
        self._workers: dict[tuple[Any, ...], Worker] = {}
        self._stream = Stream(
            self._worker,
            stage,
            weights,
            reducer,
            in_flight=rounds.in_flight[stage],
            microbatches=1,
            update=self._learn,
            tell=tell,
        )
        self._given = self._turn = self._first = 0

    @property
    def most_behind(self) -> int:
        """Rounds that were learned between the forward and the backward of one at most so far."""
        return self._stream.most_behind

    @property
    def is_empty(self) -> bool:
        """Whether no mini-batch is between forward and update; the same on all ranks."""
        return not self._given

    def put(self, leaves: Mapping[str, Tensor], number: int) -> bool:
        """Let a mini-batch have its turn; see ``Stream.put``."""
        if self.is_empty:
            self._first = self._weights.version
            self._weights.fill(self._first)
        turn = self._given
        self._given += 1
        round_, replica = divmod(turn, self._replicas)
        if replica != self._replica:
            return False
        self._turn = turn
        return self._stream.put(leaves, number, self._first + round_)

    def drain(self) -> None:
        """Learn from everything that is in flight; all replicas are at one version afterwards."""
        self._stream.drain()
        rounds = -(-self._given // self._replicas)
        if self._given and self._weights.version < self._first + rounds:
            self._reducer.sum_now()
            self._learn(None)
        self._given = 0

    def _worker(self, leaves: Mapping[str, Tensor]) -> Worker:
        """For the mini-batch whose turn it is: who sends to this rank, and to whom it sends."""
        stages, turn = self._rounds.graph.stages, self._turn
        peers = (stages[s].devices[turn % stages[s].replicas] for s in self._near)
        steps, samples = self._steps.for_batch(leaves), samples_of(leaves)
        key = (steps, samples, *peers)
        if key not in self._workers:
            self._workers[key] = steps.build(self._rounds.one(turn, samples), steps.options)
        return self._workers[key]

    def _learn(self, flight: Flight | None) -> None:
        """The sum over a round is there; it is full unless the pipeline is being drained."""
        before = (self._weights.version - self._first) * self._replicas
        count = min(self._replicas, self._given - before)
        if count > 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        # Each replica knows whether its own term was to blame. If no term was, but the sum of them
        # overflowed, the last one answers for it.
        blame = self._replica == count - 1 or not self._reducer.has_finite_terms
        self._update(flight, blame, count)
