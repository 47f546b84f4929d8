"""Attempts of a run in one store: torchrun starts ranks again, and the store keeps what earlier
attempts wrote, such as addresses of processes that are gone.

No variable tells which attempt it is: agents of torchrun count failures of their own, and count
nothing when a host comes or goes. So the first rank numbers the attempts in the store, and answers
the question of each other rank, which has a random name and is never mistaken for an older one::

    rank 1   asks/1 = 5f3a 0                      reads answer/5f3a, sets 2/ready/1, waits for 2/go
    rank 0   attempts + 1 = 2   reads asks/1, sets answer/5f3a = 2      all ready: sets 2/go
"""

from __future__ import annotations

import os
import secrets
import time

from torch._C._distributed_c10d import PrefixStore, Store

from anabranch.errors import StageFailedError

_ROOT = "anabranch/attempts"
_POLL_S = 0.02


def own_restarts() -> int:
    """Return how often torchrun's agent on this host has started its ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def begin_attempt(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Store, int]:
    """Return a part of the store in which no earlier attempt has written, the same on all ranks,
    and the number of restarts before this attempt; all ranks call it.

    Raises:
        StageFailedError: if not all ranks have come in time.
    """
    deadline = time.monotonic() + timeout_s
    lead = _lead if rank == 0 else _follow
    number, restarts = lead(store, rank, size, deadline)
    return PrefixStore(f"{_ROOT}/{number}", store), max(restarts, number)


def _lead(store: Store, rank: int, size: int, deadline: float) -> tuple[int, int]:
    number = store.add(_ROOT, 1) - 1
    counts, answered = {rank: own_restarts()}, set[str]()
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if (asked := _read(store, f"{_ROOT}/asks/{other}")) and asked not in answered:
                answered.add(asked)
                name, count = asked.split()
                counts[other] = int(count)
                store.set(f"{_ROOT}/answer/{name}", str(number))
        missing -= {r for r in missing if store.check([f"{_ROOT}/{number}/ready/{r}"])}
        if missing:
            _pause(deadline, f"ranks {', '.join(map(str, sorted(missing)))} have")
    restarts = max(counts.values())
    store.set(f"{_ROOT}/{number}/go", str(restarts))
    return number, restarts


def _follow(store: Store, rank: int, size: int, deadline: float) -> tuple[int, int]:
    while True:
        name = secrets.token_hex(8)
        store.set(f"{_ROOT}/asks/{rank}", f"{name} {own_restarts()}")
        while not (answer := _read(store, f"{_ROOT}/answer/{name}")):
            _pause(deadline, "rank 0 has")
        store.set(f"{_ROOT}/{answer}/ready/{rank}", "1")
        # A first rank that is about to be ended may have answered: the next one counts on.
        while int(_read(store, _ROOT) or 0) == int(answer) + 1:
            if restarts := _read(store, f"{_ROOT}/{answer}/go"):
                return int(answer), int(restarts)
            _pause(deadline, "not all ranks have")


def _read(store: Store, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _pause(deadline: float, who: str) -> None:
    if time.monotonic() > deadline:
        raise StageFailedError(
            f"{who} not come to the start of the run in time; look for what ended them, or for a "
            "host that cannot reach the first one"
        )
    time.sleep(_POLL_S)
