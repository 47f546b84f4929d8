"""A schedule as numbers: what to look up once, before the clock runs.

Every message gets an index that both ends know, so that the event loop reads lists instead of comparing actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from anabranch.planner.stages import StageGraph
from anabranch.schedule.check import Channel, channel
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import StepCosts


class Do(IntEnum):
    """What a step does."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


class Step(NamedTuple):
    """One action of one device.

    Attributes:
        do: compute, send or receive.
        message: index of the message, or -1.
        seconds: of compute.
        before: bytes that are taken when it starts.
        after: bytes that are released when it ends.
        last: index of its stage if it is the stage's last backward on this device, else -1.
        action: as scheduled.
    """

    do: Do
    message: int
    seconds: float
    before: float
    after: float
    last: int
    action: Action


@dataclass(slots=True)
class Messages:
    """Every message, by index; lists of equal length.

    Attributes:
        occupies_s: seconds that it occupies its ports.
        latency_s: seconds from then until it has arrived.
        ports: indices of the ports on its way.
        channel: index of its channel.
        opens: how many messages of its channel have been taken when its receive is posted.
        target: index of the receiving device.
        in_channel: channel index -> its messages in order.
        num_ports: how many ports there are.
    """

    occupies_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    ports: list[tuple[int, ...]] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)
    opens: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    in_channel: list[list[int]] = field(default_factory=list)
    num_ports: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered schedule with its prices.

    Attributes:
        devices: as in the schedule; everything else counts devices by their position in here.
        steps: per device.
        messages: what they exchange.
        ports: port -> index.
    """

    devices: tuple[int, ...]
    steps: tuple[tuple[Step, ...], ...]
    messages: Messages
    ports: dict[tuple[str, int, int], int]
