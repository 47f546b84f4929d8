"""Heartbeat of a rank: its position and its last batches, in integers that another process reads.

The parent of local ranks reads them from shared memory, ranks of torchrun from the store of the run
(``store_watch``). Both give them to a ``Watch``, which tells why a run cannot go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from anabranch.errors import AnabranchError, DataError, StageFailedError
from anabranch.runtime.guards.position import POSITION, POSITION_INTS, describe_position
from anabranch.runtime.guards.same_batch import RECENT_BATCHES, RECENT_INTS, BatchWatch
from anabranch.runtime.guards.stall import Stall

HEARTBEAT_INTS = POSITION_INTS + RECENT_INTS


def share(ints: memoryview) -> None:
    """Keep the heartbeat of this process in memory that another process reads."""
    POSITION.share(ints[:POSITION_INTS])
    RECENT_BATCHES.share(ints[POSITION_INTS:])


def heartbeat() -> list[int]:
    """Return the integers of this process as they are now."""
    return [*POSITION.numbers, *RECENT_BATCHES.numbers]


def place_text(ints: Sequence[int]) -> str:
    """Describe the position of a heartbeat."""
    return describe_position(ints[:POSITION_INTS])


class Watch:
    """Heartbeats of all ranks as they were last read.

    Args:
        stall_timeout: seconds without progress that end a run; None for no limit.
    """

    def __init__(self, num_ranks: int, stall_timeout: float | None) -> None:
        self._stall = Stall(stall_timeout) if stall_timeout else None
        self._batches = BatchWatch(num_ranks)

    def note(self, rank: int, ints: Sequence[int], now: float, *, is_done: bool = False) -> None:
        """Take the heartbeat of a rank, its last one if it is done."""
        self._batches.note(rank, ints[POSITION_INTS:])
        if self._stall is not None and not is_done:
            self._stall.note(rank, ints[:POSITION_INTS], now)
        elif self._stall is not None:
            self._stall.forget(rank, now)

    def problem(
        self, now: float, silent: Collection[int] = (), *, has_failed: bool = False
    ) -> AnabranchError | None:
        """Return why the run cannot go on, if something is wrong.

        Args:
            silent: ranks whose processes are stopped, or do not answer.
            has_failed: whether a rank has failed; different batches may be the cause.
        """
        if unequal := self._batches.found(now, is_over=has_failed):
            return DataError(unequal)
        if self._stall is None or has_failed or not (stalled := self._stall.found(now, silent)):
            return None
        return StageFailedError(stalled)
