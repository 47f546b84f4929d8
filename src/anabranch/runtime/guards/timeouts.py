"""Timeouts of ranks and of those who watch them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that processes wait for each other.

    Attributes:
        patience_s: seconds that start-up, the first step, an evaluation, a save and a
            change to another plan may take at least.
        echo_s: signals within so many seconds of the first are the same one: a terminal
            sends Ctrl-C to every process, and then torchrun passes its own on.
        grace_s: seconds that a rank has to say why it failed once others have lost it, or
            to end by itself once another has said so.
        loop_end_s: seconds that a rank that leaves a loop waits for the others at most.
        cause_s: how long a failure that is only a consequence waits for its cause to arrive.
        abort_s: seconds that communicators of GPUs may take to end after a failure before
            the user is told of it; they go on ending meanwhile.
        regroup_s: seconds that ranks have to leave an interrupted step after another one has died;
            who is later is ended and replaced as well.
        look_s: seconds between two looks at the ranks: whether they go on, and with the
            same batches.
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
