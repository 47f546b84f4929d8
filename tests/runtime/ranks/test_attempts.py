"""Attempts of a run that torchrun starts again, in one store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from anabranch.errors import StageFailedError
from anabranch.runtime.ranks.attempts import begin_attempt


def attempt(store: HashStore, size: int) -> list[tuple[Store, int]]:
    """What all ranks get."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: begin_attempt(store, rank, size, 20.0), range(size)))


def test_an_attempt_reads_nothing_of_those_before() -> None:
    """Also where there are fewer ranks than before, which have other numbers."""
    store = HashStore()
    for number, size in enumerate((3, 2, 3, 1)):
        begun = attempt(store, size)
        assert [restarts for _, restarts in begun] == [number] * size
        assert not any(part.check(["address"]) for part, _ in begun)
        begun[0][0].set("address", str(number))
        assert [part.get("address") for part, _ in begun] == [str(number).encode()] * size


def test_all_ranks_know_of_the_most_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that torchrun makes anew for each of them has seen none."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert [restarts for _, restarts in attempt(HashStore(), 2)] == [2, 2]


def test_the_answer_of_a_first_rank_that_has_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered, and never said that all are there; the next first rank does."""
    store = HashStore()
    with pytest.raises(StageFailedError, match="ranks 1, 2 have not come to the start"):
        begin_attempt(store, 0, 3, 0.0)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(begin_attempt, store, 1, 2, 20.0)
        while not store.check(["anabranch/attempts/asks/1"]):
            pass
        name = store.get("anabranch/attempts/asks/1").decode().split()[0]
        store.set(f"anabranch/attempts/answer/{name}", "0")
        first, restarts = begin_attempt(store, 0, 2, 20.0)
        first.set("address", "here")
        assert follower.result()[0].get("address") == b"here"
        assert follower.result()[1] == restarts == 1


def test_a_rank_alone_gives_up() -> None:
    with pytest.raises(StageFailedError, match="rank 0 has not come to the start of the run"):
        begin_attempt(HashStore(), 1, 2, 0.0)
