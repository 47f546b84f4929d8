"""A worker executes the actions of one device, in order.

It posts, awaits and hands over messages; ``Compute`` does the work between them::

    RF   receipt ---> parts                                        parts ---> receipt   RB
                        |                                            |
    F    assemble -> values -> compute.forward         assemble -> gradients -> compute.backward   B
                                      |                                              |
    SF                           send parts                                     send parts        SB

Between two stages of one device there are no messages: parts are handed over where they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from anabranch.device import accelerator
from anabranch.graph.cutting.split import Port
from anabranch.plans.stages import StageGraph
from anabranch.runtime.compute.outcome import Key, Outcome
from anabranch.runtime.compute.stage_compute import Compute
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.measurement.clocks import Clock
from anabranch.runtime.messages import TOKEN, Item, Layout, assemble
from anabranch.runtime.transport import Receipt, Spec, Transport
from anabranch.schedule.lower import messages as messages_between
from anabranch.schedule.schedule import Action, Kind, Schedule


def executed(schedule: Schedule, graph: StageGraph, device: int) -> tuple[Action, ...]:
    """Return a device's actions without those on an empty slice of a short micro-batch."""
    result = []
    for action in schedule.actions.get(device, ()):
        replica = graph.stages[action.stage].devices.index(device)
        start, stop = graph.slice(action.stage, action.microbatch, replica)
        if start < stop:
            result.append(action)
    return tuple(result)


class Watcher(Protocol):
    """Callbacks on the progress of a training step."""

    def before_last(self, stage: int) -> None:
        """Called before the last backward of a stage here, in which gradients become final."""

    def after_last(self, stage: int) -> None:
        """Called after the last backward of a stage on this device."""


@dataclass(eq=False)
class Worker:
    """One device's part of batches of one size; ``transport`` is None without other ranks."""

    layout: Layout
    graph: StageGraph
    schedule: Schedule
    device: int
    compute: Compute
    transport: Transport | None
    rank_of: Mapping[int, int]
    torch_device: torch.device
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        return executed(self.schedule, self.graph, self.device)

    def run(
        self,
        leaves: Mapping[str, Tensor],
        step: int,
        *,
        train: bool = True,
        watcher: Watcher | None = None,
    ) -> Outcome:
        """Execute all actions once; messages may still be on their way afterwards.

        Without ``train`` there are no backwards, and the watcher is not called.
        """
        tasks = self._training if train else self._evaluation
        phase = Phase.STEP if train else Phase.EVALUATION
        POSITION.begin(step, phase)
        seen = watcher if train else None
        run = BatchRun(self, self.compute, tasks, leaves, step, seen, train=train)
        run.expect(Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
        run.execute(tasks.tasks)
        if self.transport is not None:
            self.transport.settle()
        POSITION.begin(step, phase)
        return run.outcome

    def begin(self, leaves: Mapping[str, Tensor], number: int, watcher: Watcher) -> BatchRun:
        """Begin to train on a batch whose passes the caller orders, beside others in flight.

        Messages of one channel come in the order in which batches ``expect`` them.
        """
        # ``Compute.begin`` sets all that belongs to one batch, so a copy serves another batch.
        compute = copy.copy(self.compute)
        return BatchRun(self, compute, self._training, leaves, number, watcher, train=True)

    @property
    def last_backwards(self) -> tuple[int, ...]:
        """Stages with a backward here, in the order of their last ones."""
        return self._training.last_backwards

    @cached_property
    def _training(self) -> _Tasks:
        return _tasks(self, self.actions)

    @cached_property
    def _evaluation(self) -> _Tasks:
        return _tasks(self, [a for a in self.actions if a.kind.is_forward])


@dataclass(frozen=True, slots=True)
class _Handover:
    """Values or gradients that one stage hands to another on the same device."""

    sent: tuple[Item, ...]
    received: tuple[Item, ...]
    key: Key


@dataclass(eq=False, slots=True)
class _Task:
    """One action, with everything about it that is known before the first step.

    Attributes:
        following: receives of the channel's next micro-batch, posted after the last message of
            this one.
        completes: whether this is the last message with results of a pass.
    """

    action: Action
    do: Callable[[BatchRun, _Task], None]
    key: Key
    is_last: bool = False
    handovers: tuple[_Handover, ...] = ()
    items: tuple[Item, ...] = ()
    specs: tuple[Spec, ...] = ()
    rank: int = -1
    tag: int = -1
    following: Sequence[_Task] = ()
    completes: bool = False


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The actions of a step; ``first``: receives of every channel's first micro-batch."""

    tasks: tuple[_Task, ...]
    first: tuple[_Task, ...]
    last_backwards: tuple[int, ...]
    passes: Mapping[tuple[Kind, int], Sequence[_Task]]


def _tasks(worker: Worker, actions: Sequence[Action]) -> _Tasks:
    lasts = {a.stage: a for a in actions if a.kind.ends_backward}
    receives: defaultdict[tuple[object, ...], dict[int, list[_Task]]] = defaultdict(dict)
    sends: dict[tuple[int, Kind, int], _Task] = {}
    handovers = _handovers(worker)
    tasks = []
    for action in actions:
        task = _Task(action, _DO[action.kind], (action.stage, action.microbatch))
        task.is_last = lasts.get(action.stage) == action
        task.handovers = tuple(handovers.get(action, ()))
        if not action.kind.is_compute:
            task.items = worker.layout.items(action)
            task.specs = tuple((item.shape, item.dtype) for item in task.items)
            task.rank, task.tag = worker.rank_of[action.peer], worker.layout.tag(action)
        if action.kind.is_send:
            sends[action.stage, action.kind, action.microbatch] = task
        if action.kind.is_receive:
            channel = receives[action.stage, action.peer_stage, action.peer, action.kind]
            channel.setdefault(action.microbatch, []).append(task)
        tasks.append(task)
    for task in sends.values():
        task.completes = True
    for channel in receives.values():
        for before, after in pairwise(channel.values()):
            before[-1].following = after
    passes: defaultdict[tuple[Kind, int], list[_Task]] = defaultdict(list)
    for task in tasks:
        kind = Kind.FORWARD if task.action.kind.is_forward else Kind.BACKWARD
        passes[kind, task.action.microbatch].append(task)
    return _Tasks(
        tuple(tasks),
        tuple(task for channel in receives.values() for task in next(iter(channel.values()))),
        tuple(t.action.stage for t in tasks if t.is_last),
        passes,
    )


def _handovers(worker: Worker) -> Mapping[Action, Sequence[_Handover]]:
    """Map a compute to the tensors that its stage hands to other stages of this device."""
    handovers: defaultdict[Action, list[_Handover]] = defaultdict(list)
    graph, items, me = worker.graph, worker.layout.items, worker.device
    split = worker.schedule.split_stages
    for x, y in graph.edges:
        if me not in graph.stages[x].devices or me not in graph.stages[y].devices:
            continue
        for i, device, j, _, start, stop in messages_between(graph, x, y, inside_devices=True):
            if device != me:
                continue
            there, back = (i, y, me, start, stop), (j, x, me, start, stop)
            sent = items(Action(x, Kind.SEND_FORWARD, *there))
            if sent == (TOKEN,):
                continue
            received = items(Action(y, Kind.RECEIVE_FORWARD, *back))
            handovers[Action(x, Kind.FORWARD, i)].append(_Handover(sent, received, (y, j)))
            sent = items(Action(y, Kind.SEND_BACKWARD, *back))
            received = items(Action(x, Kind.RECEIVE_BACKWARD, *there))
            kind = Kind.INPUT_GRADIENT if y in split else Kind.BACKWARD
            handovers[Action(y, kind, j)].append(_Handover(sent, received, (x, i)))
    return handovers


class BatchRun:
    """One batch on its way through a device: its random numbers, activations and receives."""

    def __init__(
        self,
        worker: Worker,
        compute: Compute,
        tasks: _Tasks,
        leaves: Mapping[str, Tensor],
        number: int,
        watcher: Watcher | None,
        *,
        train: bool,
    ) -> None:
        self.number = number
        self.outcome = compute.begin(leaves, number, train=train)
        self.compute, self.transport = compute, worker.transport
        self.torch_device = worker.torch_device
        self.clock = worker.clock
        self.tasks, self.watcher = tasks, watcher
        self.receipts: dict[_Task, Receipt] = {}
        self.values: defaultdict[Key, dict[int, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.gradients: defaultdict[Key, dict[Port, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.made: dict[int, dict[int, Tensor]] = {}
        self.returned: dict[int, dict[Port, Tensor]] = {}

    def expect(self, *kinds: Kind) -> None:
        """Post the receives of the first micro-batch on every channel of these kinds."""
        self.post([task for task in self.tasks.first if task.action.kind in kinds])

    def do(self, kind: Kind, microbatch: int) -> None:
        """Do a forward or a backward with its messages, if there is one here."""
        self.execute(self.tasks.passes.get((kind, microbatch), ()))

    def execute(self, tasks: Sequence[_Task]) -> None:
        times, mark = self.outcome.times, self.clock.mark
        for task in tasks:
            POSITION.enter(self.number, task.action)
            start = mark()
            task.do(self, task)
            times.append((task.action, (start, mark())))

    def post(self, tasks: Sequence[_Task]) -> None:
        for task in tasks:
            if task.items:
                assert self.transport is not None
                receipt = self.transport.receive(task.specs, self.torch_device, task.rank, task.tag)
                self.receipts[task] = receipt

    def receive(self, task: _Task) -> None:
        # Nothing travels where all values of an edge are whole and went with an earlier message.
        if task.items:
            self.take(task.key, task.items, self.receipts.pop(task).wait())
        self.post(task.following)

    def take(self, key: Key, items: Sequence[Item], tensors: Sequence[Tensor]) -> None:
        """Keep received tensors for a micro-batch."""
        values, gradients = self.values[key], self.gradients[key]
        for item, tensor in zip(items, tensors, strict=True):
            if item is TOKEN:
                continue
            if item.port is None:
                values.setdefault(item.value, []).append((item, tensor))
            else:
                gradients.setdefault(item.port, []).append((item, tensor))

    def send(self, task: _Task) -> None:
        assert self.transport is not None
        if task.items:
            tensors = self.parts(task.action.stage, task.items)
            self.transport.send(tensors, task.rank, task.tag)
        if task.completes:
            # A stage keeps what enters it, and what its operators need for their backwards.
            made = self.made if task.action.kind.is_forward else self.returned
            made.pop(task.action.stage, None)

    def parts(self, stage: int, items: Sequence[Item]) -> list[Tensor]:
        """Return the parts of a stage's last outputs that a message carries."""
        tensors = []
        for item in items:
            if item is TOKEN:
                tensors.append(_nothing(self.torch_device))
            elif item.port is not None:
                tensors.append(item.part(self.returned[stage][item.port]))
            elif item.batched:
                tensors.append(item.part(self.made[stage][item.value]))
            else:
                # It may be a view of a parameter, which may be updated before the message is read.
                tensors.append(self.made[stage][item.value].clone())
        return tensors

    def forward(self, task: _Task) -> None:
        arrived = self.values.pop(task.key, None) or {}
        values = {value: assemble(parts) for value, parts in arrived.items()}

        self.made.pop(task.action.stage, None)  # still there if no message has sent it
        self.made[task.action.stage] = self.compute.forward(task.key, values)
        self.hand_over(task)

    def backward(self, task: _Task) -> None:
        arrived = self.gradients.pop(task.key, None) or {}
        gradients = {port: assemble(parts) for port, parts in arrived.items()}
        stage = task.action.stage
        with self.watched(task):
            self.returned.pop(stage, None)
            self.returned[stage] = self.compute.backward(task.key, gradients)
        self.hand_over(task)

    def weight_gradients(self, task: _Task) -> None:
        with self.watched(task):
            self.compute.weight_gradients(task.key)

    @contextmanager
    def watched(self, task: _Task) -> Iterator[None]:
        """Tell the watcher of the compute in which gradients become final."""
        watcher = self.watcher if task.is_last else None
        if watcher is not None:
            watcher.before_last(task.action.stage)
        yield
        if watcher is not None:
            watcher.after_last(task.action.stage)

    def hand_over(self, task: _Task) -> None:
        for handover in task.handovers:
            self.take(handover.key, handover.received, self.parts(task.action.stage, handover.sent))


@cache
def _nothing(device: torch.device) -> Tensor:
    """Return the tensor of a token, pinned so that a copy to a GPU does not block."""
    return accelerator.pinned(torch.zeros(TOKEN.shape, dtype=TOKEN.dtype), device)


_DO: dict[Kind, Callable[[BatchRun, _Task], None]] = {
    Kind.FORWARD: BatchRun.forward,
    Kind.BACKWARD: BatchRun.backward,
    Kind.INPUT_GRADIENT: BatchRun.backward,
    Kind.WEIGHT_GRADIENT: BatchRun.weight_gradients,
    Kind.SEND_FORWARD: BatchRun.send,
    Kind.SEND_BACKWARD: BatchRun.send,
    Kind.RECEIVE_FORWARD: BatchRun.receive,
    Kind.RECEIVE_BACKWARD: BatchRun.receive,
}
