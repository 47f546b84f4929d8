"""Detection of a run that does not go on, and of the rank that holds it up.

Whoever watches reads the positions of all ranks again and again. One rank that does not go on soon
holds up all others, which wait for it; that is a stall when nobody has gone on for long::

    rank 0   waiting for gradients ...         12 s     a victim
    rank 1   in the forward of stage 1 ...     13 s     named first
    rank 2   waiting for activations ...       13 s     a victim

Ranks may take long without being held up: they compile in the first step, evaluate with other code,
write large files. There the limit is ``PATIENCE_S`` at least.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from anabranch.runtime.guards.position import (
    Phase,
    describe_position,
    is_settled,
    phase_of,
    waits,
)

FLOOR_S, FACTOR = 60.0, 100.0
"""By default a rank may take so long: this many seconds, or this many times the predicted step if
that is more. Less would find hangs sooner and take slow data, or a busy machine, for one.
"""

PATIENCE_S = 600.0
"""Seconds that start-up, the first step, an evaluation, a save and a change to another plan may
take at least.
"""

_UNHURRIED = (Phase.START_UP, Phase.EVALUATION, Phase.SAVE, Phase.MOVE)


def default_timeout_s(step_s: float) -> float:
    """Seconds without progress that are a stall, for a predicted step."""
    return max(FLOOR_S, FACTOR * step_s)


class Stall:
    """Positions of ranks as they were last seen, and since when.

    Args:
        timeout_s: seconds without progress.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._seen: dict[int, tuple[list[int], float]] = {}

    def note(self, rank: int, position: Sequence[int], now: float) -> None:
        """A rank is there at a time, in seconds of any clock."""
        before = self._seen.get(rank)
        if before is None or before[0] != list(position):
            self._seen[rank] = list(position), now

    def forget(self, rank: int, now: float) -> None:
        """A rank has ended; who waited for it may not have noticed yet, so that the time of the
        others begins anew.
        """
        if self._seen.pop(rank, None) is not None:
            self._seen = {other: (position, now) for other, (position, _) in self._seen.items()}

    def found(self, now: float, silent: Collection[int] = ()) -> str:
        """Describe the stall of a run; empty if there is none.

        Args:
            silent: ranks whose processes are stopped, or do not answer.
        """
        quiet = {rank: now - since for rank, (_, since) in self._seen.items()}
        stopped = sorted(rank for rank in silent if quiet.get(rank, 0.0) > self.timeout_s)
        if not stopped:
            if not quiet or any(q <= self._limit(rank) for rank, q in quiet.items()):
                return ""
            if all(phase_of(seen) is Phase.OUTSIDE for seen, _ in self._seen.values()):
                return ""  # what the user does between steps is nobody's business
        first = stopped[0] if stopped else min(quiet, key=self._blame)
        others = sorted(set(quiet) - {first})
        why = "its process is stopped or does not answer, " if first in stopped else ""
        message = (
            f"rank {first} has not gone on for {quiet[first]:.1f} s: {why}{self._where(first)}"
        )
        if others:
            message += f"; {self._folded(others)}"
        return (
            f"{message}. A rank may be silent for {self.timeout_s:g} s (--timeout), in start-up, "
            f"evaluation and while it saves for {max(self.timeout_s, PATIENCE_S):g} s"
        )

    def _limit(self, rank: int) -> float:
        seen = self._seen[rank][0]
        hurries = waits(seen) or (is_settled(seen) and phase_of(seen) not in _UNHURRIED)
        return self.timeout_s if hurries else max(self.timeout_s, PATIENCE_S)

    def _blame(self, rank: int) -> tuple[bool, float]:
        """Sort key: ranks that do not wait come first, then those that stopped first."""
        seen, since = self._seen[rank]
        return waits(seen), since

    def _where(self, rank: int) -> str:
        return describe_position(self._seen[rank][0]) or "outside of the steps"

    def _folded(self, ranks: Sequence[int]) -> str:
        waiting = [rank for rank in ranks if waits(self._seen[rank][0])]
        told = [f"rank {rank} is {self._where(rank)}" for rank in ranks if rank not in waiting]
        if waiting:
            named = ", ".join(map(str, waiting))
            told.append(f"waiting: rank{'s' if len(waiting) > 1 else ''} {named}")
        return "; ".join(told)
