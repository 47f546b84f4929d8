"""The first failure of a run, in the store of its ranks: written by the rank that fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import Store

from anabranch.errors import NonFiniteError, StageFailedError
from anabranch.plans.stages import StageGraph
from anabranch.runtime.guards.failure import Failure, PeerLostError, located
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.ranks.process_groups import run_store

FAILURE_KEY = "anabranch/failure"


class SharedFailure:
    """One rank's view of the first failure.

    Attributes:
        is_closed: whether the rank has left the run, and publishes nothing any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self.is_closed = size == 1

    @contextmanager
    def reporting(
        self, close: Callable[[], None], graph: StageGraph | None = None
    ) -> Iterator[None]:
        """Publish a failure inside to the other ranks, and explain one of theirs."""
        try:
            with located(self._rank, graph):
                yield
        except NonFiniteError:
            raise  # on every rank at once; the caller may go on
        except PeerLostError as lost:
            close()
            raise self._explained(lost) from None
        except BaseException as error:
            self.publish(error)
            close()
            raise

    def publish(self, error: BaseException) -> None:
        """Write the reason why this rank ends, unless another rank was the first."""
        if self.is_closed:
            return
        failure = Failure.of(error, self._rank)
        # The store may be gone; the error itself must still reach the user.
        with suppress(RuntimeError, ValueError):
            run_store().compare_set(FAILURE_KEY, "", f"{self._rank}: {failure.message}")

    def _explained(self, lost: PeerLostError) -> BaseException:
        """Return the exception for a rank whose connections broke; another rank has the cause.

        Under torchrun a rank leaves quietly if the cause is published; local ranks report to their
        parent.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return lost
        deadline = time.monotonic() + TIMEOUTS.grace_s
        text = ""
        while not text and time.monotonic() < deadline:
            time.sleep(0.05)
            with suppress(RuntimeError, ValueError):
                text = failure_in(run_store())
        if text and not text.startswith(f"{self._rank}:"):
            return SystemExit(stops_because_of(text, self._rank))
        error = StageFailedError(
            f"rank {self._rank} lost another rank, which was killed or ended outside of the steps: "
            f"{lost}"
        )
        self.publish(error)
        return error


def failure_in(store: Store) -> str:
    """Return the first failure, as ``rank: message``; empty if there is none."""
    return str(store.get(FAILURE_KEY).decode()) if store.check([FAILURE_KEY]) else ""


def stops_because_of(failure: str, rank: int) -> str:
    """Return the text for a rank that ends because another one has failed."""
    return f"rank {rank} stops, because rank {failure.partition(':')[0]} failed"
