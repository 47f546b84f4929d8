"""Worker: executes the actions of one device, in order.

Messages are posted, awaited and handed over here; what happens between them is ``Compute``'s::

    RF   receipt ---> parts                                        parts ---> receipt   RB
                        |                                            |
    F    assemble -> values -> compute.forward         assemble -> gradients -> compute.backward   B
                                      |                                              |
    SF                           send parts                                     send parts        SB
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.graph.split import Port
from anabranch.planner.stages import StageGraph
from anabranch.runtime.compute import Compute, Key, Outcome
from anabranch.runtime.failure import POSITION
from anabranch.runtime.messages import TOKEN, Item, Layout, assemble
from anabranch.runtime.transport import Receipt, Transport
from anabranch.schedule.schedule import Action, Kind, Schedule

_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


def executed(schedule: Schedule, graph: StageGraph, device: int) -> tuple[Action, ...]:
    """A device's actions without those on an empty slice of a short micro-batch."""
    result = []
    for action in schedule.actions.get(device, ()):
        replica = graph.stages[action.stage].devices.index(device)
        start, stop = graph.slice(action.stage, action.microbatch, replica)
        if start < stop:
            result.append(action)
    return tuple(result)


class Worker:
    """One device's part of one batch size.

    Args:
        layout: the tensors of this device's messages.
        graph: stages and sample intervals.
        schedule: lowered.
        device: whose actions.
        compute: what happens between messages.
        transport: to the other ranks; None where there are none.
        rank_of: device -> rank.
        place: where the tensors live.
    """

    def __init__(
        self,
        layout: Layout,
        graph: StageGraph,
        schedule: Schedule,
        device: int,
        compute: Compute,
        transport: Transport | None,
        rank_of: Mapping[int, int],
        *,
        place: torch.device,
    ) -> None:
        self.layout, self.graph, self.schedule = layout, graph, schedule
        self.actions = executed(schedule, graph, device)
        self._compute, self._transport, self._place = compute, transport, place
        self._items = {a: layout.items(a) for a in self.actions if not a.kind.is_compute}
        # Worked out once: a step has hundreds of messages.
        self._specs = {a: [(i.shape, i.dtype) for i in items] for a, items in self._items.items()}
        self._ends = {a: (rank_of[a.peer], layout.tag(a)) for a in self._items}

    def run(self, leaves: Mapping[str, Tensor], step: int, *, train: bool = True) -> Outcome:
        """Execute all actions once.

        Args:
            leaves: the whole batch, by the names of its leaves.
            step: number of the step, for messages and random numbers.
            train: False leaves out backwards, and gradients with them.

        Raises:
            PeerLostError: if another rank is gone.
        """
        return _Run(self, step, train).execute(leaves)


class _Run:
    """The mutable state of one execution: receipts, and parts that have arrived."""

    def __init__(self, worker: Worker, step: int, train: bool) -> None:
        self.worker, self.step, self.train = worker, step, train
        self.actions = [a for a in worker.actions if train or a.kind in _FORWARD_ONLY]
        self.receipts: dict[Action, Receipt] = {}
        self.completes: set[Action] = set()  # the last message of a channel's micro-batch
        self.channels: dict[tuple[int, int, int, Kind], deque[Action]] = defaultdict(deque)
        self.values: defaultdict[Key, dict[int, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.gradients: defaultdict[Key, dict[Port, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.made: dict[int, dict[int, Tensor]] = {}
        self.returned: dict[int, dict[Port, Tensor]] = {}

    def execute(self, leaves: Mapping[str, Tensor]) -> Outcome:
        worker = self.worker
        outcome = worker._compute.begin(leaves, self.step, train=self.train)
        last: dict[tuple[object, int], Action] = {}
        for action in self.actions:
            if action.kind in _RECEIVES:
                self.channels[_channel(action)].append(action)
                last[_channel(action), action.microbatch] = action
        self.completes = set(last.values())
        for channel in self.channels.values():
            for _ in range(worker.schedule.slots):
                self.post(channel)
        for action in self.actions:
            POSITION.enter(self.step, action)
            start = time.perf_counter()
            _DO[action.kind](self, action)
            outcome.times.append((start, time.perf_counter()))
        POSITION.begin(self.step)
        if worker._transport is not None:
            worker._transport.flush()
        return outcome

    def post(self, channel: deque[Action]) -> None:
        """Post the receives of a channel's next micro-batch, which may come in several messages."""
        worker = self.worker
        microbatch = channel[0].microbatch if channel else -1
        while channel and channel[0].microbatch == microbatch:
            action = channel.popleft()
            assert worker._transport is not None
            rank, tag = worker._ends[action]
            self.receipts[action] = worker._transport.receive(
                worker._specs[action], worker._place, rank, tag
            )

    def receive(self, action: Action) -> None:
        key = action.stage, action.microbatch
        tensors = self.receipts.pop(action).wait()
        for item, tensor in zip(self.worker._items[action], tensors, strict=True):
            if item is TOKEN:
                continue
            if item.port is None:
                self.values[key].setdefault(item.value, []).append((item, tensor))
            else:
                self.gradients[key].setdefault(item.port, []).append((item, tensor))
        if action in self.completes:
            self.post(self.channels[_channel(action)])

    def send(self, action: Action) -> None:
        worker = self.worker
        assert worker._transport is not None
        tensors = []
        for item in worker._items[action]:
            if item is TOKEN:
                whole = torch.zeros(item.shape, dtype=item.dtype)
            elif item.port is None:
                whole = self.made[action.stage][item.value]
            else:
                whole = self.returned[action.stage][item.port]
            tensors.append(item.part(whole))
        rank, tag = worker._ends[action]
        worker._transport.send(tensors, rank, tag)

    def forward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        values = {value: assemble(parts) for value, parts in self.values.pop(key, {}).items()}
        self.made[action.stage] = self.worker._compute.forward(key, values)

    def backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        arrived = {port: assemble(parts) for port, parts in self.gradients.pop(key, {}).items()}
        self.returned[action.stage] = self.worker._compute.backward(key, arrived)


_DO = {
    Kind.FORWARD: _Run.forward,
    Kind.BACKWARD: _Run.backward,
    Kind.SEND_FORWARD: _Run.send,
    Kind.SEND_BACKWARD: _Run.send,
    Kind.RECEIVE_FORWARD: _Run.receive,
    Kind.RECEIVE_BACKWARD: _Run.receive,
}
_FORWARD_ONLY = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


def _channel(action: Action) -> tuple[int, int, int, Kind]:
    return action.stage, action.peer_stage, action.peer, action.kind
