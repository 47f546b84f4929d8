"""Loops in forked processes: the same results, whatever becomes of the processes."""

import os
import time
from itertools import count

import pytest

from anabranch.compiled import forked


@pytest.fixture(autouse=True, params=[1, 2, 3, 8])
def cores(request, monkeypatch) -> int:
    """So many, whatever this machine has."""
    monkeypatch.setattr(forked, "cores", lambda: request.param)
    return request.param


@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 13])
def test_the_results_of_a_loop(length):
    """In the order of the items, by different processes."""
    items = [*range(length)]
    assert forked.run_each(lambda item: item**2, items) == [item**2 for item in items]


def test_processes(cores):
    """One for each core, at most one for each item; this one is one of them."""
    found = forked.run_each(lambda _: os.getpid(), [*range(5)])
    assert len(set(found)) == min(cores, 5)
    assert found[0] == os.getpid()


def test_what_a_process_changes_is_its_own(cores):
    """So that what a function remembers does not depend on the number of cores by accident."""
    seen: list[int] = []
    forked.run_each(seen.append, [*range(8)])
    assert seen == [*range(0, 8, cores)]


def test_what_another_process_cannot_do_is_done_here():
    """It may be killed, or what it finds cannot be sent."""
    here = os.getpid()

    def found(item: int) -> int:
        if os.getpid() != here:
            os._exit(1)
        return item

    assert forked.run_each(found, [1, 2, 3]) == [1, 2, 3]
    functions = forked.run_each(lambda item: lambda: item, [1, 2, 3])
    assert [function() for function in functions] == [1, 2, 3]


def test_where_some_processes_cannot_be_had(monkeypatch):
    """As where memory or processes are limited."""
    fork_it, asked = os.fork, count(1)

    def fork() -> int:
        if next(asked) % 2:
            raise BlockingIOError
        return fork_it()

    monkeypatch.setattr(os, "fork", fork)
    assert forked.run_each(str, [*range(9)]) == [*"012345678"]


def test_an_error_reaches_the_caller():
    """It is that of the function, wherever it was raised."""

    def fail(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    with pytest.raises(ValueError, match="two"):
        forked.run_each(fail, [0, 1, 2, 3])


def test_an_interrupt_ends_all():
    """At once, with nothing left behind."""
    here, started = os.getpid(), time.monotonic()

    def wait(item: int) -> int:
        if os.getpid() == here:
            raise KeyboardInterrupt
        time.sleep(60)
        return item

    with pytest.raises(KeyboardInterrupt):
        forked.run_each(wait, [1, 2, 3])
    assert time.monotonic() - started < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
