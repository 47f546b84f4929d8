"""Timeouts of ranks and of the processes that watch them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that processes wait for each other.

    Attributes:
        patience_s: seconds that start-up, the first step, an evaluation, a save and a change of
            plan may always take.
        echo_s: seconds after a first signal in which further ones count as the same: a terminal
            sends Ctrl-C to every process, and then torchrun passes its own on.
        grace_s: seconds that a rank has to report its failure once others have lost it, or to end
            by itself once another rank has reported one.
        loop_end_s: most seconds for which a rank that leaves a loop waits for the others.
        cause_s: seconds for which a failure that is only a consequence waits for its cause.
        abort_s: seconds that communicators of GPUs may take to end after a failure before the user
            is told of it; they go on ending meanwhile.
        regroup_s: seconds that ranks have to leave an interrupted step after another one has died;
            later ranks are ended and replaced as well.
        look_s: seconds between two looks at the ranks, for stalls and different batches.
    """

    patience_s: float = 600.0
    echo_s: float = 3.0
    grace_s: float = 1.0
    loop_end_s: float = 10.0
    cause_s: float = 3.0
    abort_s: float = 2.0
    regroup_s: float = 5.0
    look_s: float = 0.5


TIMEOUTS = Timeouts()
