"""A clock with events, and processor cores that several jobs share; compiled.

Nothing in here knows of stages, messages or networks. Each source of events has at most one event
at a time and a slot for it; the next event is the winner of a tournament between the slots::

    winners        3
                3     0           when a slot changes, only the winners above it
    slots      2 3   0 1          can change

Events at the same time are ordered by their places, numbers that are taken in ascending order, so a
run is repeatable to the last bit. A place can be taken early and the event put in later or never.
"""

from __future__ import annotations

import math

from anabranch.compiled import Table
from anabranch.simulator.records import ClockRecord, HostRecord, NodeRecord, Tables


def tournament(slots: int) -> list[tuple[int, int, float]]:
    """Return the ``NodeRecord`` rows of a number of slots, all without events."""
    winners = [*range(-slots, slots)]
    for node in range(slots - 1, -1, -1):
        winners[node] = winners[2 * node] if node else 0
    return [(0, winner, math.inf) for winner in winners]


def expect(slot: int, time: float, place: int, nodes: Table[NodeRecord]) -> None:
    """Set the time of a slot's event, whatever it was before; infinity for never."""
    slots = len(nodes) >> 1
    at = slots + slot
    event = nodes[at]
    event.time, event.place = time, place
    at >>= 1
    while at > 0:
        slot = nodes[2 * at].winner
        other = nodes[2 * at + 1].winner
        first, second = nodes[slots + slot], nodes[slots + other]
        if second.time < first.time or (second.time == first.time and second.place < first.place):
            slot = other
        nodes[at].winner = slot
        at >>= 1


def expect_at(slot: int, time: float, clock: ClockRecord, nodes: Table[NodeRecord]) -> None:
    """Set the time of a slot's event, behind all events that are at that time so far."""
    clock.last_place += 1
    expect(slot, time, clock.last_place, nodes)


def next_event(clock: ClockRecord, nodes: Table[NodeRecord]) -> int:
    """Go on to the next event and return its slot, or -1 if there is none."""
    slot = nodes[1].winner
    event = nodes[(len(nodes) >> 1) + slot]
    if event.time == math.inf:
        return -1
    clock.now, clock.place = event.time, event.place
    expect(slot, math.inf, 0, nodes)
    return int(slot)


def begin_job(
    host: HostRecord, slot: int, d: int, seconds: float, clock: ClockRecord, step: Tables
) -> None:
    """Begin a job of a device that takes one core ``seconds`` alone; the more jobs a host has, the
    longer each takes. Only the job that ends next has an event, in the slot of the host.

    Jobs are listed in the order in which they end, by the ``HostRecord.work`` at their ends.
    """
    devices = step.devices
    if host.jobs > 0:
        host.work += (clock.now - host.since) * step.speeds[host.jobs]
    host.since = clock.now
    host.jobs += 1
    device = devices[d]
    device.work = host.work + seconds
    before, after = -1, host.head
    while after >= 0 and devices[after].work <= device.work:
        before, after = after, devices[after].next_job
    device.next_job = after
    if before < 0:
        host.head = d
    else:
        devices[before].next_job = d
    _expect_end(host, slot, clock, step)


def end_job(host: HostRecord, slot: int, clock: ClockRecord, step: Tables) -> int:
    """End the first job of a host and return its device."""
    d = host.head
    host.since, host.work = clock.now, step.devices[d].work
    host.jobs -= 1
    host.head = step.devices[d].next_job
    _expect_end(host, slot, clock, step)
    return int(d)


def _expect_end(host: HostRecord, slot: int, clock: ClockRecord, step: Tables) -> None:
    if host.jobs > 0:
        left = max(step.devices[host.head].work - host.work, 0.0)
        expect_at(slot, clock.now + left / step.speeds[host.jobs], clock, step.nodes)
