"""A schedule as numbers: what to look up once, before the clock runs.

Every message gets an index that both ends know, so that the event loop reads lists instead of
comparing actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from anabranch.errors import InvalidScheduleError
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
    """

    occupies_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    ports: list[tuple[int, ...]] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)
    opens: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    in_channel: list[list[int]] = field(default_factory=list)


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


def compile_schedule(schedule: Schedule, graph: StageGraph, costs: StepCosts) -> Program:
    """Price every action and pair up the messages of a lowered schedule.

    Raises:
        InvalidScheduleError: if a send has no receive, or a receive no send.
    """
    ports: dict[tuple[str, int, int], int] = {}
    channels: dict[Channel, int] = {}
    devices = tuple(schedule.actions)
    messages = _number_messages(schedule, devices, costs, channels, ports)
    sent = [0] * len(channels)
    received = [0] * len(channels)
    priced = _Compute(graph, costs)
    steps = []
    for device in devices:
        actions = schedule.actions[device]
        last = {a.stage: at for at, a in enumerate(actions) if a.kind in _BACKWARDS}
        mine = []
        for at, action in enumerate(actions):
            if action.peer < 0:
                ends = action.stage if last.get(action.stage) == at else -1
                mine.append(priced.step(action, device, ends))
                continue
            key = channel(action, device)
            do, counts = (Do.SEND, sent) if action.kind in _SENDS else (Do.RECEIVE, received)
            index = channels.get(key, -1)
            if index < 0 or counts[index] == len(messages.in_channel[index]):
                raise InvalidScheduleError(f"device {device}: nobody receives {action}")
            message = messages.in_channel[index][counts[index]]
            counts[index] += 1
            mine.append(Step(do, message, 0.0, 0.0, 0.0, -1, action))
        steps.append(tuple(mine))
    return Program(devices, tuple(steps), messages, ports)


def _number_messages(
    schedule: Schedule,
    devices: Sequence[int],
    costs: StepCosts,
    channels: dict[Channel, int],
    ports: dict[tuple[str, int, int], int],
) -> Messages:
    """Number the messages by their receives; fills ``channels`` and ``ports``."""
    table = Messages()
    prices: dict[tuple[Channel, int], tuple[float, float, tuple[int, ...]]] = {}
    for d, device in enumerate(devices):
        # Channel -> (micro-batch, messages taken when it starts) of the latest micro-batches.
        recent: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for action in schedule.actions[device]:
            if action.kind not in _RECEIVES:
                continue
            key = channel(action, device)
            index = channels.setdefault(key, len(channels))
            if index == len(table.in_channel):
                table.in_channel.append([])
            samples = action.stop - action.start
            if (key, samples) not in prices:
                prices[key, samples] = _price(key, samples, costs, ports)
            occupies, latency, way = prices[key, samples]
            starts = recent[index]
            if not starts or starts[-1][0] != action.microbatch:
                starts.append((action.microbatch, len(table.in_channel[index])))
            table.in_channel[index].append(len(table.channel))
            table.channel.append(index)
            table.occupies_s.append(occupies)
            table.latency_s.append(latency)
            table.ports.append(way)
            table.target.append(d)
            # Its receive is posted when those of all but the latest ``slots`` micro-batches,
            # its own included, have been taken.
            table.opens.append(starts[max(len(starts) - schedule.slots, 0)][1])
    return table


def _price(
    key: Channel, samples: int, costs: StepCosts, ports: dict[tuple[str, int, int], int]
) -> tuple[float, float, tuple[int, ...]]:
    source, target, a, b, forward = key
    if forward:
        nbytes = costs.message_bytes(source, target, samples)[0]
    else:
        nbytes = costs.message_bytes(target, source, samples)[1]
    way = costs.route(a, b)
    indices = tuple(ports.setdefault(port, len(ports)) for port in way.ports)
    return nbytes / way.bandwidth, way.latency_s, indices


class _Compute:
    """Prices of compute; each (stage, samples) is asked for once."""

    def __init__(self, graph: StageGraph, costs: StepCosts) -> None:
        self._costs = costs
        self._samples = {
            (s, device): [
                stop - start
                for start, stop in (graph.slice(s, i, r) for i in range(graph.num_microbatches(s)))
            ]
            for s, stage in enumerate(graph.stages)
            for r, device in enumerate(stage.devices)
        }
        self._known: dict[tuple[int, int], tuple[float, float, float, float]] = {}

    def step(self, action: Action, device: int, ends: int) -> Step:
        """One compute step; ``ends`` is the stage whose last backward it is, or -1."""
        key = action.stage, self._samples[action.stage, device][action.microbatch]
        if key not in self._known:
            self._known[key] = (*self._costs.compute_s(*key), *self._costs.flight_bytes(*key))
        forward, backward, held, inside = self._known[key]
        if action.kind is Kind.FORWARD:
            return Step(Do.COMPUTE, -1, forward, held, 0.0, ends, action)
        if action.kind is Kind.BACKWARD:
            return Step(Do.COMPUTE, -1, backward, inside, inside + held, ends, action)
        # Profiles do not tell the halves apart; on matrix products they cost the same.
        if action.kind is Kind.INPUT_GRADIENT:
            return Step(Do.COMPUTE, -1, backward / 2, inside, 0.0, ends, action)
        return Step(Do.COMPUTE, -1, backward / 2, 0.0, inside + held, ends, action)


_SENDS = frozenset((Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
_RECEIVES = frozenset((Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD))
_BACKWARDS = frozenset((Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
