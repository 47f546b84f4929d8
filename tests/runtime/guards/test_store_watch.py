"""Ranks that watch each other through a store."""

import threading
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from anabranch.runtime.guards.heartbeat import StoreWatch
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.same_batch import DIGESTS, RECENT_BATCHES, RecentBatches
from anabranch.runtime.guards.shared_failure import FAILURE_KEY

STUCK = "3 7 1 3 0 3 0 0 1 0"
"""The third beat: step 7, stage 1, micro-batch 3, forward, in a step, settled."""


@pytest.fixture(autouse=True)
def _in_step() -> Iterator[None]:
    POSITION.settle()
    POSITION.begin(7, Phase.TOTALS)
    with POSITION.waiting():
        yield
    POSITION.__init__()
    RECENT_BATCHES.share(memoryview(bytearray(8 * DIGESTS.recent_ints)).cast("q"))


def ended(store: HashStore, rank: int = 0) -> bool:
    """Whether the watch ends its process within ten seconds."""
    over = threading.Event()
    watch = StoreWatch(store, rank, 2, 0.2, over.set)
    over.wait(10.0)
    watch.close()
    return over.is_set()


def test_a_rank_that_does_not_go_on_ends_the_run(capsys):
    """It is told to all, and to the user."""
    store = HashStore()
    store.set("anabranch/at/1", STUCK)
    assert ended(store)
    told = store.get(FAILURE_KEY).decode()
    assert told.startswith("0: rank 1 has not gone on for")
    assert "in the forward of stage 1, micro-batch 3, step 7; waiting: rank 0" in told
    assert capsys.readouterr().err.startswith("StageFailedError: rank 1 has not gone on")


def test_a_process_that_is_held_up_at_once_is_found(capsys):
    """Between its first page and the next: it might be in start-up for long, but it is silent."""
    store = HashStore()
    store.set("anabranch/at/1", "0 -1 -1 -1 -1 1 0 0 0 5")
    assert ended(store)
    said = "rank 1 has not gone on for"
    assert said in capsys.readouterr().err


def test_a_failure_that_is_told_ends_a_rank_that_cannot(capsys):
    """It may be held up by the rank that failed."""
    store = HashStore()
    store.set(FAILURE_KEY, "1: the reason")
    assert ended(store)
    assert capsys.readouterr().err == "rank 0 stops, because rank 1 failed\n".join(
        ["StageFailedError: ", ""]
    )


def test_ranks_with_different_batches_end_the_run(capsys):
    """Though they go on, as far as they get."""
    RECENT_BATCHES.note(5, 0, b"12345678")
    other = RecentBatches()
    other.note(5, 0, b"x2345678")
    store = HashStore()
    store.set("anabranch/at/1", " ".join([STUCK[:-1] + "0", *map(str, other.numbers)]))
    assert ended(store)
    assert capsys.readouterr().err.startswith("DataError: rank 1 has another batch than the others")


class Cut(HashStore):
    """A store behind a cut link."""

    told = 0

    def set(self, key: str, value: str) -> None:
        self.told += 1
        if self.told > 1:
            raise RuntimeError("connection reset by peer")


def test_a_rank_without_its_store_ends_itself(capsys):
    """Both sides of a cut link give up, also the one that cannot tell."""
    assert ended(Cut(), rank=5)
    assert "rank 5 has not reached the store of the run at" in capsys.readouterr().err


class Silent(HashStore):
    """A store behind a link that was cut: nothing comes back, not even an error."""

    told = 0

    def set(self, key: str, value: str) -> None:
        self.told += 1
        if self.told > 1:
            threading.Event().wait(0.7)


def test_a_rank_whose_store_does_not_answer_ends_itself(capsys):
    """It waited for ever, as the thread that was to end it did."""
    assert ended(Silent(), rank=5)
    assert "rank 5 has not reached the store of the run at" in capsys.readouterr().err


def test_a_rank_that_is_done_holds_nobody_up():
    """Its last page says so."""
    store = HashStore()
    watch = StoreWatch(store, 1, 2, 5.0, lambda: None)
    watch.close()
    assert store.get("anabranch/at/1") == b"0"
