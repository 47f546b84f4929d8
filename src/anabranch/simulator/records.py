"""Tables of a simulated step: what compiled code reads and writes.

A table has one record per device, message and so on, with what is known before the clock runs and
what changes while it does. ``first`` and ``stop`` are where a record's part of ``Tables.lists``
begins and ends, unless another table is named; indices are -1 for none, flags 0 or 1.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.compiled import Floats, Ints, Table


class ClockRecord:
    """The clock of a step, and its totals."""

    place: int  # of the current event, among those of the same time
    last_place: int  # the last one that was taken
    agreed: int  # devices that have agreed
    summed: int  # all-reduces that have begun
    stages: int
    now: float
    end: float  # of the last compute, all-reduce or update
    begun: float  # of several steps, when a device last began one
    agreement_s: float


class NodeRecord:
    """A node of the tournament between events; the second half of the nodes are the slots."""

    place: int
    winner: int
    time: float


class DeviceRecord:
    """Position and state of a device in its list."""

    at: int  # in its list
    stop: int  # the end of the list
    run: int  # the next one
    updates: int  # in ``Tables.lists``, updates done of each stage
    first_stage: int
    stop_stage: int
    unit: int  # the current one
    part: int  # of the current unit
    message: int  # that it waits for
    behind: int  # the device that waits behind it for the same thing
    host: int  # if that has a clock of its own
    next_job: int  # the device there whose job ends next
    work: float  # done by a job of the host at the end of its own


class UnitRecord:
    """A unit: computing or waiting of a device at one position of its list."""

    role: int
    stage: int
    group: int
    first: int  # of its parts; of a gather's ports; of receives that a beginning posts
    stop: int
    seconds: float


class PartRecord:
    """A part of a compute, behind which gradients of the pieces in its list are final."""

    first: int
    stop: int
    seconds: float


class MessageRecord:
    """A message, with its ports."""

    first: int
    stop: int
    first_release: int  # messages whose receives are posted when this one has been taken
    stop_release: int
    opener: int  # the message with which its receive is posted
    ready: int  # sent or posted: it moves at the second of the two
    place: int  # of its arrival
    waiter: int  # device that waits for it
    occupies: float
    latency: float
    end: float  # seconds of each of the devices at both ends
    freed: float  # when it leaves its ports
    arrival: float


class BarrierRecord:
    """Something that devices wait for."""

    left: int  # to happen before they can go on
    head: int  # the first device that waits
    tail: int
    first: int  # devices of a group
    stop: int
    missing: int  # devices of the group that have not come yet


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
    turn: int  # the piece that is next, or goes on
    update: int  # of which update
    busy: int


class PieceRecord:
    """A piece in one update."""

    to_come: int  # gradients that it waits for
    begun: int  # all-reduces that had begun before its own
    start: float


class HostRecord:
    """Cores that devices share."""

    jobs: int
    head: int  # the device whose job ends first
    work: float  # that one job would have done
    since: float  # when that was noted


class RunRecord:
    """Start and end of a unit of a device."""

    start: float
    end: float


class Tables(NamedTuple):
    """All of a step.

    Attributes:
        lists: those of the devices, one behind the other, then others.
        barriers: per update and stage, its all-reduces; then per group, its gather.
        pieces: per update and piece.
        free: per port, when it is.
        speeds: of each of 0, 1, 2, ... jobs of a host.
        runs: per device and unit in its list.
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
