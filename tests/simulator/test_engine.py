"""Clock, events and shared cores."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from anabranch.compiled import records
from anabranch.cost.overheads import slowdown_of
from anabranch.simulator.engine import begin_job, end_job, expect, expect_at, next_event, tournament
from anabranch.simulator.records import ClockRecord, DeviceRecord, HostRecord, NodeRecord, Tables


def tables(slots: int, speeds: tuple[float, ...] = ()) -> Tables:
    """A clock with as many slots, and devices on one host."""
    made = dict.fromkeys(Tables._fields, np.zeros(0))
    made["clock"], made["devices"] = records(ClockRecord, 1), records(DeviceRecord, slots)
    made["nodes"] = records(NodeRecord, tournament(slots))
    made["hosts"], made["speeds"] = records(HostRecord, [(0, -1, 0.0, 0.0)]), np.array(speeds)
    return Tables(**made)


@dataclass
class Clock:
    """Events as Python has them."""

    slots: int
    seen: list = field(default_factory=list)

    def __post_init__(self):
        self.step = tables(self.slots)
        self.state, self.nodes = self.step.clock[0], self.step.nodes

    def at(self, slot: int, time: float):
        expect_at(slot, time, self.state, self.nodes)

    def run(self, happens=lambda slot: None) -> list[tuple[float, int]]:
        while (slot := next_event(self.state, self.nodes)) >= 0:
            self.seen.append((self.state.now, slot))
            happens(slot)
        return self.seen


def test_events_happen_in_the_order_of_time():
    """Also those that an event puts in while the clock runs."""
    clock = Clock(3)
    clock.at(2, 3.0)
    clock.at(0, 1.0)
    seen = clock.run(lambda slot: clock.at(1, 2.5) if slot == 0 else None)
    assert seen == [(1.0, 0), (2.5, 1), (3.0, 2)]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_a_later_word_on_an_event_counts(slots):
    """The event of a slot is put off, called off, and put in again."""
    clock = Clock(slots)
    for slot in range(slots):
        clock.at(slot, 1.0 + slot)
    clock.at(0, 9.0)
    expect(slots - 1, math.inf, 0, clock.nodes)
    kept = [(1.0 + slot, slot) for slot in range(1, slots - 1)]
    assert clock.run() == ([*kept, (9.0, 0)] if slots > 1 else [])
    clock.at(0, 10.0)
    assert clock.run()[-1] == (10.0, 0)


def test_events_at_one_time_keep_their_order():
    """Otherwise two runs of one schedule could differ."""
    clock = Clock(3)
    for slot in (2, 0, 1):
        clock.at(slot, 1.0)
    assert clock.run() == [(1.0, 2), (1.0, 0), (1.0, 1)]


def test_a_place_is_kept_for_an_event_that_is_put_in_later():
    """Slot 1 took its place before 2 came; 0 happens first and knows that 1 is still to come."""
    clock = Clock(3)
    clock.at(0, 1.0)
    clock.state.last_place += 1
    place = clock.state.last_place
    clock.at(2, 1.0)

    def happens(slot):
        if slot == 0:
            assert clock.state.place < place
            expect(1, 1.0, place, clock.nodes)

    assert [slot for _, slot in clock.run(happens)] == [0, 1, 2]


def ends(slowdown: tuple[float, ...], jobs: list[tuple[float, float]]) -> list[float]:
    """When each (start, seconds of work) ends: a slot for each, and the last one for their host."""
    host = len(jobs)
    speeds = [1 / slowdown_of(slowdown, count + 1) for count in range(len(jobs))]
    step = tables(host + 1, (0.0, *speeds))
    clock, result = step.clock[0], [0.0] * len(jobs)
    for job, (start, _) in enumerate(jobs):
        expect_at(job, start, clock, step.nodes)
    while (slot := next_event(clock, step.nodes)) >= 0:
        if slot < host:
            begin_job(step.hosts[0], host, slot, jobs[slot][1], clock, step)
        else:
            result[end_job(step.hosts[0], host, clock, step)] = clock.now
    return result


def test_jobs_take_as_long_as_the_table_says():
    """Two side by side at a half more, so 3 s of work in 4.5 s; a third one more is past the table,
    whose last entry grows with the jobs: 1.5 * 3 / 2.
    """
    assert [slowdown_of((1.0, 1.5), jobs) for jobs in (1, 2, 3, 4)] == [1.0, 1.5, 2.25, 3.0]
    assert ends((1.0, 1.5), [(0.0, 3.0), (0.0, 3.0)]) == [4.5, 4.5]


def test_enough_cores_slow_nobody():
    """Two jobs, two cores."""
    assert ends((1.0, 1.0), [(0.0, 3.0), (1.0, 1.0)]) == pytest.approx([3.0, 2.0])


def test_jobs_share_evenly():
    """One core: both run at half speed while both run.

    job 0   4 s of work   0 --full-- 1 ----half---- 5 --full-- 6
    job 1   2 s of work              1 ----half---- 5
    """
    assert ends((1.0,), [(0.0, 4.0), (1.0, 2.0)]) == pytest.approx([6.0, 5.0])


def test_three_jobs_on_two_cores():
    """Each gets two thirds of a core."""
    assert ends((1.0, 1.0), [(0.0, 2.0)] * 3) == pytest.approx([3.0, 3.0, 3.0])


def test_work_without_seconds_ends_at_once():
    """An empty slice of a micro-batch."""
    assert ends((1.0,), [(1.0, 0.0), (0.0, 3.0)]) == pytest.approx([1.0, 3.0])
