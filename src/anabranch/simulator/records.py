"""Tables of a simulated step: what compiled code reads and writes.

A table has one record per device, message and so on; some fields are set before the clock runs,
the others change while it does. ``first`` and ``stop`` are the start and the end of a record's part
of ``Tables.lists``, unless another table is named; indices are -1 for none, flags 0 or 1.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.compiled import Floats, Ints, Table


class ClockRecord:
    """The clock of a step, and its totals."""

    place: int  # of the current event, among events at the same time
    last_place: int  # last place that was taken
    agreed: int  # devices that have agreed
    summed: int  # all-reduces that have begun
    stages: int
    now: float
    end: float  # of the last compute, all-reduce or update
    begun: float  # latest start of a step by a device, where steps follow each other
    agreement_s: float


class NodeRecord:
    """A node of the tournament between events; the second half of the nodes are the slots."""

    place: int
    winner: int
    time: float


class DeviceRecord:
    """Position and state of a device in its list."""

    at: int  # index in ``Tables.lists`` of the entry that is next or goes on
    stop: int  # end of its list
    run: int  # row of ``Tables.runs`` of the current or next unit
    updates: int  # start in ``Tables.lists`` of its numbers of updates, one per stage
    first_stage: int
    stop_stage: int
    unit: int  # the current one
    part: int  # of the current unit
    message: int  # message that it waits for
    behind: int  # next device in the queue of the same barrier
    host: int  # row of ``Tables.hosts``; -1 where computing is never slowed down
    next_job: int  # device of the same host whose job ends next
    work: float  # ``HostRecord.work`` at the end of its job


class UnitRecord:
    """A unit: computing or waiting of a device at one position of its list."""

    role: int
    stage: int
    group: int
    first: int  # of its rows in ``Tables.parts``; of a gather's ports; of receives that BEGIN posts
    stop: int
    seconds: float


class PartRecord:
    """A part of a unit; when it ends, gradients of the pieces in its list are final."""

    first: int
    stop: int
    seconds: float


class MessageRecord:
    """A message, with its ports."""

    first: int
    stop: int
    first_release: int  # messages whose receives are posted when this one has been taken
    stop_release: int
    opener: int  # message after which its receive is posted; -1: from the start
    ready: int  # 1 once it is sent or posted; it moves at the second of the two
    place: int  # of its arrival, among events at the same time
    waiter: int  # device that waits for it
    occupies: float  # seconds on its ports
    latency: float
    end: float  # seconds that it takes of the device at each end
    freed: float  # time at which it leaves its ports
    arrival: float


class BarrierRecord:
    """All-reduces or devices that devices wait for."""

    left: int  # all-reduces to end before devices can go on
    head: int  # first device that waits
    tail: int  # last device that waits
    first: int  # devices of a group
    stop: int
    missing: int  # devices of the group that have not arrived


class SumRecord:
    """An all-reduce of a piece, with its ports and stages."""

    queue: int
    first: int
    stop: int
    first_stage: int
    stop_stage: int
    seconds: float


class QueueRecord:
    """Pieces that are all-reduced one after the other."""

    first: int
    stop: int
    turn: int  # index in ``Tables.lists`` of the piece that is next, or goes on
    update: int  # number of the update to which that piece belongs
    busy: int  # 1 while an all-reduce goes on


class PieceRecord:
    """A piece in one update."""

    to_come: int  # gradients that are not final yet, one per stage and device
    begun: int  # number of all-reduces that began before its own
    start: float  # of its all-reduce


class HostRecord:
    """Cores that devices share."""

    jobs: int  # number of running jobs
    head: int  # device whose job ends first
    work: float  # seconds of work that a job running all along would have done by ``since``
    since: float  # time of the last change


class RunRecord:
    """Start and end of a unit of a device."""

    start: float
    end: float


class Tables(NamedTuple):
    """Tables of a step.

    Attributes:
        lists: lists of the devices, one after the other, then the lists of other records.
        barriers: one per update and stage, for its all-reduces; then one per group, for its gather.
        pieces: one per update and piece.
        free: time from which each port is free.
        speeds: speed of each job of a host that has 0, 1, 2, ... jobs.
        runs: one per device and unit in its list.
    """

    clock: Table[ClockRecord]
    lists: Ints
    nodes: Table[NodeRecord]
    devices: Table[DeviceRecord]
    units: Table[UnitRecord]
    parts: Table[PartRecord]
    messages: Table[MessageRecord]
    barriers: Table[BarrierRecord]
    sums: Table[SumRecord]
    queues: Table[QueueRecord]
    pieces: Table[PieceRecord]
    hosts: Table[HostRecord]
    free: Floats
    speeds: Floats
    runs: Table[RunRecord]
