"""Ends of loops without a barrier, which ranks tell each other through the store of the run."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from anabranch.errors import DataError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.process_groups import run_store


def begin_unit(mesh: Mesh, loop: str, number: int) -> None:
    """Note that this rank begins unit ``number`` of a loop without a barrier between units.

    Costs two requests to the store, some 50 us.

    Raises:
        DataError: if another rank's loop has ended before it.
    """
    if mesh.size > 1:
        store = run_store()
        # Written before reading, as in ``end_loop``, so at least one of two ranks sees the other.
        store.set(f"{loop}/begun/{mesh.rank}", str(number + 1))
        if store.check([f"{loop}/ended"]):
            rank, count = map(int, store.get(f"{loop}/ended").split())
            if number >= count:
                raise _unequal(rank, count, {mesh.rank: number + 1})


def end_loop(mesh: Mesh, loop: str, count: int) -> None:
    """Note that this rank's loop ends after ``count`` units; DataError if others have more."""
    if mesh.size > 1:
        store = run_store()
        store.set(f"{loop}/ended", f"{mesh.rank} {count}")
        keys = {r: f"{loop}/begun/{r}" for r in range(mesh.size) if r != mesh.rank}
        begun = {r: int(store.get(key)) for r, key in keys.items() if store.check([key])}
        if more := {rank: number for rank, number in begun.items() if number > count}:
            raise _unequal(mesh.rank, count, more)


def _unequal(rank: int, count: int, more: dict[int, int]) -> DataError:
    most = ", ".join(f"rank {other} is at number {number}" for other, number in more.items())
    return DataError(
        f"the ranks have unequal numbers of batches: rank {rank} has {count}, and {most}; all "
        "ranks take the same batches, each of them its slice: give every rank the whole data, not "
        "a part of it, and let it end at the same place"
    )


def await_all(mesh: Mesh, key: str, patience_s: float) -> None:
    """Wait up to ``patience_s`` until all ranks have come to ``key``, which is used once.

    A rank that ended while others still send to it would look to them like a failure. A barrier
    would need a place among the other collectives.
    """
    if mesh.failure.is_closed:
        return
    name = f"anabranch/part/{key}"
    # A rank that does not come has failed, which is reported in another way.
    with suppress(RuntimeError, ValueError), POSITION.waiting():
        store = run_store()
        if store.add(name, 1) == mesh.size:
            store.set(f"{name}/all", "")
        store.wait([f"{name}/all"], timedelta(seconds=patience_s))
