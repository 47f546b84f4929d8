"""Clock, queue and shared cores."""

import pytest

from anabranch.cost.overheads import slowdown_of
from anabranch.simulator.engine import Engine, SharedCores


def test_events_happen_in_the_order_of_time():
    """Also those that an event puts in while the clock runs."""
    engine, seen = Engine(), []

    def note(what):
        seen.append((engine.now, what))
        if what == "a":
            engine.after(1.5, note, "from a")

    engine.at(3.0, note, "c")
    engine.at(1.0, note, "a")
    engine.run()
    assert seen == [(1.0, "a"), (2.5, "from a"), (3.0, "c")]


def test_events_at_one_time_keep_their_order():
    """Otherwise two runs of one schedule could differ."""
    engine, seen = Engine(), []
    for name in "zyx":
        engine.at(1.0, seen.append, name)
    engine.run()
    assert seen == ["z", "y", "x"]


def test_a_place_is_kept_for_an_event_that_is_put_in_later():
    """y took its place before z came; x happens first and knows that y is still to come."""
    engine, seen = Engine(), []

    def note(what):
        seen.append(what)
        if what == "x":
            assert engine.place < place
            engine.at_place(1.0, place, note, "y")

    engine.at(1.0, note, "x")
    engine.last_place += 1
    place = engine.last_place
    engine.at(1.0, note, "z")
    engine.run()
    assert seen == ["x", "y", "z"]


def ends(cores: int, jobs: list[tuple[float, float]]) -> list[float]:
    """When each (start, seconds of work) ends."""
    engine = Engine()
    shared = SharedCores(engine, (1.0,) * cores)
    result = [0.0] * len(jobs)

    def finish(i):
        result[i] = engine.now

    for i, (start, work) in enumerate(jobs):
        engine.at(start, lambda job: shared.after(job[1], finish, job[0]), (i, work))
    engine.run()
    return result


def test_jobs_take_as_long_as_the_table_says():
    """Two side by side at a half more, so 3 s of work in 4.5 s; a third one more is past the table,
    whose last entry grows with the jobs: 1.5 * 3 / 2.
    """
    assert [slowdown_of((1.0, 1.5), jobs) for jobs in (1, 2, 3, 4)] == [1.0, 1.5, 2.25, 3.0]
    engine, ends = Engine(), []
    shared = SharedCores(engine, (1.0, 1.5))
    for work in (3.0, 3.0):
        shared.after(work, lambda _: ends.append(engine.now), None)
    engine.run()
    assert ends == [4.5, 4.5]


def test_enough_cores_slow_nobody():
    """Two jobs, two cores."""
    assert ends(2, [(0.0, 3.0), (1.0, 1.0)]) == pytest.approx([3.0, 2.0])


def test_jobs_share_evenly():
    """One core: both run at half speed while both run.

    job 0   4 s of work   0 --full-- 1 ----half---- 5 --full-- 6
    job 1   2 s of work              1 ----half---- 5
    """
    assert ends(1, [(0.0, 4.0), (1.0, 2.0)]) == pytest.approx([6.0, 5.0])


def test_three_jobs_on_two_cores():
    """Each gets two thirds of a core."""
    assert ends(2, [(0.0, 2.0)] * 3) == pytest.approx([3.0, 3.0, 3.0])


def test_work_without_seconds_ends_at_once():
    """An empty slice of a micro-batch."""
    assert ends(1, [(1.0, 0.0), (0.0, 3.0)]) == pytest.approx([1.0, 3.0])
