"""Events of a simulated step, compiled.

``simulator.run`` describes the model of a step. A message is an event only for a device that waits
for it: its arrival is known as soon as it starts to move. Slots of events belong to devices (the
awaited message has arrived, or a part of the unit has ended), then to queues of sums (an all-reduce
has ended), then to hosts whose devices share cores (a job has ended).
"""

from __future__ import annotations

import math
from enum import IntEnum

from anabranch.compiled import Table, compiled
from anabranch.simulator.engine import begin_job, end_job, expect, expect_at, next_event
from anabranch.simulator.records import (
    BarrierRecord,
    ClockRecord,
    DeviceRecord,
    PartRecord,
    Tables,
    UnitRecord,
)


class Role(IntEnum):
    """Kinds of units.

    ``UPDATE`` of a stage waits for the sums of its gradients. ``AGREEMENT`` waits for the sums of
    all stages of the device, and then for all devices. ``OVERHEAD`` is time of a device besides its
    actions: for messages, or for the step. In ``GATHER`` devices that share an optimizer's state
    send each other the parameters they have updated. ``BEGIN`` begins a step behind another one.
    """

    ACTION = 0
    OVERHEAD = 1
    AGREEMENT = 2
    UPDATE = 3
    GATHER = 4
    BEGIN = 5


AGREEMENT, UPDATE = int(Role.AGREEMENT), int(Role.UPDATE)
GATHER, BEGIN = int(Role.GATHER), int(Role.BEGIN)


@compiled
def play(step: Tables) -> None:
    """Start every device and go on until nothing happens."""
    clock = step.clock[0]
    devices, queues = len(step.devices), len(step.queues)
    for d in range(devices):
        _advance(d, clock, step)
    while True:
        slot = next_event(clock, step.nodes)
        if slot < 0:
            break
        if slot >= devices + queues:
            slot = end_job(step.hosts[slot - devices - queues], slot, clock, step)
        if slot >= devices:
            _end_sum(slot - devices, clock, step)
        elif step.devices[slot].unit < 0:
            _receive(step.devices[slot], clock, step)
            _advance(slot, clock, step)
        else:
            _end_part(slot, clock, step)


def _advance(d: int, clock: ClockRecord, step: Tables) -> None:
    """Execute the list of one device until it computes or has to wait."""
    device, messages, lists = step.devices[d], step.messages, step.lists
    count = len(messages)
    while device.at < device.stop:
        x = lists[device.at]
        if x >= 0:
            message = messages[x]
            arrival = message.arrival
            if arrival > clock.now or (arrival == clock.now and message.place > clock.place):
                message.waiter, device.message = d, x
                if arrival < math.inf:
                    expect(d, arrival, message.place, step.nodes)
                return
            _post(message.first_release, message.stop_release, clock, step)
        elif ~x < count:
            _meet(~x, clock, step)
        else:
            u = ~x - count
            unit = step.units[u]
            role = unit.role
            if role == BEGIN:
                clock.begun = clock.now
                _post(unit.first, unit.stop, clock, step)
            else:
                device.unit = u
                if role == UPDATE:
                    _await_sums(d, unit.stage, clock, step)
                elif role == AGREEMENT:
                    _agree(d, clock, step)
                elif role == GATHER:
                    _gather(unit, clock, step)
                else:
                    _start(d, clock, step)
                return
        device.at += 1


def _post(first: int, stop: int, clock: ClockRecord, step: Tables) -> None:
    for i in range(first, stop):
        _meet(step.lists[i], clock, step)


def _meet(m: int, clock: ClockRecord, step: Tables) -> None:
    """Note a send or a post; a message moves as soon as it has both."""
    message = step.messages[m]
    if message.ready == 0:
        message.ready = 1
        return
    start = _occupy(message.first, message.stop, message.occupies, clock, step)
    message.freed = start + message.occupies
    message.arrival = message.freed + message.latency
    clock.last_place += 1
    message.place = clock.last_place
    if message.waiter >= 0:
        expect(message.waiter, message.arrival, message.place, step.nodes)


def _occupy(first: int, stop: int, seconds: float, clock: ClockRecord, step: Tables) -> float:
    """Occupy ports for these seconds as soon as all are free; return when that begins."""
    start = clock.now
    for i in range(first, stop):
        start = max(start, step.free[step.lists[i]])
    for i in range(first, stop):
        step.free[step.lists[i]] = start + seconds
    return float(start)


def _receive(device: DeviceRecord, clock: ClockRecord, step: Tables) -> None:
    """Take the message that a device has waited for."""
    message = step.messages[device.message]
    message.waiter = device.message = -1
    _post(message.first_release, message.stop_release, clock, step)
    device.at += 1


def _gather(unit: UnitRecord, clock: ClockRecord, step: Tables) -> None:
    """Join a gather; the last device of the group starts it, on the ports of its all-reduces."""
    group = step.barriers[unit.group]
    group.missing -= 1
    if group.missing > 0:
        return
    group.missing = group.stop - group.first
    start = _occupy(unit.first, unit.stop, unit.seconds, clock, step)
    for i in range(group.first, group.stop):
        d = step.lists[i]
        step.runs[step.devices[d].run].start = start
        expect_at(d, start + unit.seconds, clock, step.nodes)


def _wait(d: int, barrier: BarrierRecord, devices: Table[DeviceRecord]) -> None:
    """Put a device at the end of the queue of a barrier."""
    devices[d].behind = -1
    if barrier.head < 0:
        barrier.head = d
    else:
        devices[barrier.tail].behind = d
    barrier.tail = d


def _start(d: int, clock: ClockRecord, step: Tables) -> None:
    device = step.devices[d]
    step.runs[device.run].start = clock.now
    device.part = step.units[device.unit].first
    _compute(d, clock, step)


def _compute(d: int, clock: ClockRecord, step: Tables) -> None:
    """Start a part of a unit."""
    device = step.devices[d]
    seconds = step.parts[device.part].seconds
    if device.host < 0:
        expect_at(d, clock.now + seconds, clock, step.nodes)
    else:
        slot = len(step.devices) + len(step.queues) + device.host
        begin_job(step.hosts[device.host], slot, d, seconds, clock, step)


def _end_part(d: int, clock: ClockRecord, step: Tables) -> None:
    """End a part of a unit, after which gradients may be final; the last part ends the unit."""
    device = step.devices[d]
    unit = step.units[device.unit]
    stage, part = unit.stage, device.part
    if part >= 0 and part + 1 < unit.stop:
        device.part = part + 1
        _compute(d, clock, step)
    else:
        clock.end = max(clock.end, clock.now)
        step.runs[device.run].end = clock.now
        device.run += 1
        device.unit = device.part = -1
        if unit.role == UPDATE:
            step.lists[device.updates + stage] += 1
        device.at += 1
        _advance(d, clock, step)
    if part >= 0:
        # Behind the messages of the backward, because other stages wait for these.
        _give(device.updates + stage, step.parts[part], clock, step)


def _give(updates: int, part: PartRecord, clock: ClockRecord, step: Tables) -> None:
    """Count the gradients of one device as final, for all pieces of a part."""
    lists = step.lists
    for i in range(part.first, part.stop):
        piece = step.pieces[lists[updates] * len(step.sums) + lists[i]]
        piece.to_come -= 1
        if piece.to_come == 0:
            _sum_next(step.sums[lists[i]].queue, clock, step)


def _sum_next(q: int, clock: ClockRecord, step: Tables) -> None:
    """Start the next all-reduce of a queue, if it can."""
    queue = step.queues[q]
    number = step.lists[queue.turn]
    at = queue.update * len(step.sums) + number
    if queue.busy > 0 or at >= len(step.pieces) or step.pieces[at].to_come > 0:
        return
    queue.busy = 1
    piece, work = step.pieces[at], step.sums[number]
    piece.start = _occupy(work.first, work.stop, work.seconds, clock, step)
    piece.begun = clock.summed
    clock.summed += 1
    expect_at(len(step.devices) + q, piece.start + work.seconds, clock, step.nodes)


def _end_sum(q: int, clock: ClockRecord, step: Tables) -> None:
    """End an all-reduce: start the next of its queue, and let devices go on that waited for it."""
    clock.end = max(clock.end, clock.now)
    queue, lists = step.queues[q], step.lists
    work, update = step.sums[lists[queue.turn]], queue.update
    queue.busy = 0
    queue.turn += 1
    if queue.turn == queue.stop:
        queue.turn = queue.first
        queue.update += 1
    _sum_next(q, clock, step)
    for i in range(work.first_stage, work.stop_stage):
        barrier = step.barriers[update * clock.stages + lists[i]]
        barrier.left -= 1
        if barrier.left > 0:
            continue
        d, barrier.head = barrier.head, -1
        while d >= 0:
            device = step.devices[d]
            after = device.behind
            if step.units[device.unit].role == UPDATE:
                _start(d, clock, step)
            else:
                _agree(d, clock, step)
            d = after


def _await_sums(d: int, stage: int, clock: ClockRecord, step: Tables) -> None:
    """Update a stage as soon as all of its gradients are summed."""
    update = step.lists[step.devices[d].updates + stage]
    barrier = step.barriers[update * clock.stages + stage]
    if barrier.left == 0:
        _start(d, clock, step)
    else:
        _wait(d, barrier, step.devices)


def _agree(d: int, clock: ClockRecord, step: Tables) -> None:
    """Wait for the sums of all stages of a device; the last device that has them lets all go on."""
    devices = step.devices
    for i in range(devices[d].first_stage, devices[d].stop_stage):
        barrier = step.barriers[step.lists[i]]
        if barrier.left > 0:
            _wait(d, barrier, devices)
            return
    clock.agreed += 1
    if clock.agreed == len(devices):
        for other in range(len(devices)):
            step.runs[devices[other].run].start = clock.now
            expect_at(other, clock.now + clock.agreement_s, clock, step.nodes)
