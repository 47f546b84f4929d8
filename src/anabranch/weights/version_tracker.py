"""Versions of a stage's weights that are alive, counted alike for the runtime and for prices.

There are two kinds of policy. If a backward reads the weights of its forward, these must be *kept*
until the unit is learned: versions, or predictions. If a backward reads the current weights,
nothing is kept and weights change in place; a prediction then takes the place of the current
weights, which wait in a copy until the pass is over::

    kept (stash, in flight 3)      F3 reads 1 |-------------------> B3
                                   versions alive  1  1 2  1 2 3

    in place (pipeoptim)           F3 reads 1+2 |..|          B3 reads 3
                                                the copy
"""

from __future__ import annotations

from functools import lru_cache

from anabranch.schedule.asynchronous import stage_actions, units_in_flight
from anabranch.schedule.schedule import Kind
from anabranch.weights.base import Reading, Unit, WeightPolicy

_STALE = Unit(number=8, filled=0, in_flight=3, deepest=4)
"""A unit under which policies differ: in the full pipeline, with a version difference of 2."""


def keeps(policy: WeightPolicy, unit: Unit = _STALE) -> bool:
    """Return True if the backward of a unit reads the weights of its forward, not current ones."""
    return policy.forward(unit) == policy.backward(unit)


def predicts(policy: WeightPolicy, unit: Unit = _STALE) -> bool:
    """Return True if any pass of a unit reads a prediction."""
    return bool(policy.forward(unit).ahead or policy.backward(unit).ahead)


class VersionTracker:
    """Versions and predictions of one stage's weights, without the weights; see ``Unit``.

    Attributes:
        version: number of updates so far.
        filled: unit at which the pipeline was last empty.
        begun: one past the last unit with a forward.
        keeps: whether backwards read the weights of their forwards.
        versions: versions that are alive.
        predictions: units whose prediction is kept.
    """

    def __init__(self, policy: WeightPolicy, *, in_flight: int, deepest: int) -> None:
        assert 1 <= in_flight <= deepest, f"{in_flight} in flight, at the deepest source {deepest}"
        self._policy = policy
        self._stage = in_flight, deepest
        self.filled = self.version = self.begun = 0
        self.versions = {0}
        self.predictions: set[int] = set()
        steady = self.unit(in_flight - 1)
        self.keeps, self.predicts = keeps(policy, steady), predicts(policy, steady)

    def unit(self, number: int) -> Unit:
        """Return a unit since the last fill."""
        return Unit(number, self.filled, *self._stage)

    def fill(self, number: int) -> None:
        """Begin to fill the empty pipeline; all versions but the current one are released."""
        assert self.begun == self.version, "a pipeline is filled when it has been drained"
        self.filled = self.version = self.begun = number
        self.versions = {number}

    def forward(self, number: int) -> Reading:
        """Begin a forward, at the place in the order that the policy assumes."""
        unit = self.unit(number)
        reading = self._policy.forward(unit)
        assert self.version <= number <= self.begun, self._place(number)
        # Of several micro-batches only the first sees this version, and no policy asks for it then.
        first = number == self.begun and not self._policy.microbatches
        assert not first or unit.seen == self.version, self._place(number)
        self.begun = max(self.begun, number + 1)
        if self.keeps and reading.ahead:
            self.predictions.add(number)
        return reading

    def backward(self, number: int) -> Reading:
        """Begin a backward of the unit that is learned next."""
        assert number == self.version < self.begun, self._place(number)
        reading = self._policy.backward(self.unit(number))
        assert self.keeps or reading.version == number, f"no version is kept for {reading}"
        return reading

    def finish(self) -> bool:
        """End the oldest unit with an update; return True if the version before it has to stay."""
        old = self.version
        self.predictions.discard(old)
        self.version = old + 1
        self.begun = max(self.begun, self.version)
        self.versions = self._needed() & self.versions | {self.version}
        return old in self.versions

    def _needed(self) -> set[int]:
        if not self.keeps:
            return set()
        units = [self._policy.forward(self.unit(n)) for n in range(self.version, self.begun + 1)]
        needed = {reading.version for reading in units if not reading.ahead}
        if not units[-1].ahead:
            # Later units read the version of the last unit or later versions.
            needed.update(range(units[-1].version, self.version))
        return needed

    def _place(self, number: int) -> str:
        in_flight = self.begun - self.version
        return f"mini-batch {number} at version {self.version}, with {in_flight} in flight"


@lru_cache(maxsize=1 << 12)
def versions_held(
    policy: WeightPolicy,
    *,
    in_flight: int,
    deepest: int,
    microbatches: int = 1,
    last_update: bool = False,
) -> int:
    """Return the most copies of a stage's weights that are alive at once, the current one included.

    They are counted along the stage's ``1f1b`` order until it repeats itself, not by a formula.

    Args:
        in_flight: micro-batches in flight.
        deepest: units in flight at the deepest source, see ``Unit``.
        microbatches: M, micro-batches per mini-batch.
        last_update: whether predictions come from the last update, which then has to be kept; for
            optimizers without a rule of their own.
    """
    units = units_in_flight(in_flight, microbatches)
    tracker = VersionTracker(policy, in_flight=units, deepest=deepest)
    kept_update = int(last_update and tracker.predicts)
    kept_update += sum(policy.corrections.values())
    peak = 1 + kept_update
    # The fill, one round of the steady state for every possible version, and the drain.
    count = microbatches * (units + 2 * deepest + 2)
    for action in stage_actions(0, in_flight, microbatches, count):
        copy = False
        if action.kind is Kind.UPDATE:
            tracker.finish()
        else:
            begin = tracker.forward if action.kind is Kind.FORWARD else tracker.backward
            copy = bool(begin(action.microbatch // microbatches).ahead) and not tracker.keeps
        peak = max(peak, len(tracker.versions) + len(tracker.predictions) + copy + kept_update)
    return peak
