"""Tables of a simulated step: what compiled code reads and writes.

A table has one record per device, message and so on, with what is known before the clock runs and
what changes while it does. ``first`` and ``stop`` are where a record's part of ``Tables.lists``
begins and ends, unless another table is named; indices are -1 for none, flags 0 or 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Table = Any
"""An array of records or of numbers."""

Record = Any
"""An entry of a table of records: what is assigned to a field is in the table."""


def _record(whole: str, real: str = "") -> np.dtype[np.void]:
    """A record with these fields for whole numbers and for others."""
    fields = [(name, np.int64) for name in whole.split()]
    return np.dtype([*fields, *((name, np.float64) for name in real.split())], align=True)


# The place of an event among those of the same time: of the current one, and the last that was
# taken. Devices that have agreed; sums that have begun. Stages. When the last thing ended; of
# several steps, when a device last began one. Of an agreement.
CLOCK = _record("place last_place agreed summed stages", "now end begun agreement_s")

# A node of the tournament between events, with its winner. Its second half are the slots.
NODE = _record("place winner", "time")

# Where a device stands in its list, and the end of that; its next run; updates of stages that it
# has done; stages that it has. The current unit, the part of it, and the message that it waits for.
# Steps begun behind the first. Who waits behind it for the same thing. Its host, if that has a
# clock of its own; the job there that ends next, and the work done by its own end.
DEVICE = _record(
    "at stop run updates first_stage stop_stage unit part message begun behind host next_job",
    "work",
)

# Parts of a compute; ports of a gather; receives that a beginning posts.
UNIT = _record("role stage group first stop", "seconds")

# Pieces whose gradients are final behind it.
PART = _record("first stop", "seconds")

# Ports; messages whose receives are posted when this one has been taken. Ready is one that has been
# sent or posted: it moves at the second of the two. Then when it leaves its ports, when it arrives
# and the place of that; the device that waits for it.
MESSAGE = _record(
    "first stop first_release stop_release ready place waiter", "occupies latency freed arrival"
)

# What is left to happen before those who wait can go on; the first and the last of them. Of a
# group, its devices, and how many have not come yet.
BARRIER = _record("left head tail first stop missing")

# An all-reduce of a piece: ports, stages.
SUM = _record("queue first stop first_stage stop_stage", "seconds")

# Pieces that are summed one after the other: which is next or goes on, of which update.
QUEUE = _record("first stop turn update busy")

# Gradients that a piece waits for, in one update; when its sum began, behind how many others.
PIECE = _record("to_come begun", "start")

# Cores that devices share: running jobs, the one that ends first. The work that one of them would
# have done, and when that was noted.
HOST = _record("jobs head", "work since")

# A unit of a device.
RUN = _record("", "start end")


class Tables(NamedTuple):
    """All of a step.

    Attributes:
        lists: those of the devices, one behind the other, then others.
        barriers: per update and stage, its sums; then per group, its gathers of all steps.
        pieces: per update and piece.
        free: per port, when it is.
        speeds: of each of 0, 1, 2, ... jobs of a host.
        runs: per device and unit in its list.
    """

    clock: Table
    lists: Table
    nodes: Table
    devices: Table
    units: Table
    parts: Table
    messages: Table
    barriers: Table
    sums: Table
    queues: Table
    pieces: Table
    hosts: Table
    free: Table
    speeds: Table
    runs: Table
