"""Settings of the simulator: how often it repeats what a long run repeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Tuned numbers of long runs whose seconds are told from shorter ones.

    Attributes:
        steps_in_a_row: steps that are simulated to see how long one takes behind others.
        most_in_a_row: actions of them at most; more take too long to be worth it.
        tolerance: how much increases may differ between devices, as a share of the longer
            run: rounding.
        units: repetitions that a run has more than the one before: messages that take
            turns on a port are where they were after 1, 2, 3 or 4 of them as a rule.
        most_times: times that short steps are simulated, each twice as long as the one
            before.
        batches: mini-batches that one of three streams has more than the one before.
        most_streams: times that streams are simulated, each twice as long as the one
            before.
        shown: mini-batches that a timeline shows beyond those that fill the pipeline.
    """

    steps_in_a_row: int = 3
    most_in_a_row: int = 400_000
    tolerance: float = 1e-11
    units: int = 12
    most_times: int = 4
    batches: int = 6
    most_streams: int = 5
    shown: int = 4


REPETITIONS = Repetitions()
