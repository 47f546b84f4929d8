"""One training step of a stage graph, on a clock instead of machines.

Every device goes through its list of actions:

- compute takes the seconds of its slice of the micro-batch;
- a send hands a message over and goes on; a receive waits for its message;
- a message starts when it has been sent, its receive is posted and every port on its way is free,
  first come first served per port; it occupies them for bytes / bandwidth of the slowest link and
  arrives one latency later. Ports are a device's own link in each direction and the network cards
  it shares with the devices of its node;
- when a stage has run its last backward on all replicas, its gradients are summed up; an all-reduce
  goes in pieces, so that messages of other stages get between them;
- the step ends with the last compute or all-reduce.

This is what the runtime does with the same schedule, so that predicted and measured can be
compared.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from anabranch.cost import CostModel
from anabranch.errors import DeadlockError
from anabranch.planner.stages import StageGraph
from anabranch.schedule.check import describe_deadlock
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Action, Schedule
from anabranch.simulator.costs import AllReduce, ModelCosts, StepCosts
from anabranch.simulator.engine import Callback, Engine, SharedCores
from anabranch.simulator.program import Do, Program, compile_schedule
from anabranch.timeline import Span, Timeline

PIECE_BYTES = 25 * 2**20
"""An all-reduce goes in buckets of this size, PyTorch's default."""

MOST_PIECES = 16


def run(graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts) -> Timeline:
    """Simulate one step and record it.

    Args:
        graph: stages with their in-flight counts.
        schedule: actions per device; messages are put in if it has none.
        costs: a cost model for the model of this graph, or seconds per stage.

    Returns:
        The predicted timeline. Messages are spans at both ends, from the start of the transfer to
        the arrival.

    Raises:
        DeadlockError: if the schedule cannot be executed; the message shows what each device waits
            for.
    """
    with _collector_paused():
        return _record(graph, schedule, costs)


def _record(graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts) -> Timeline:
    step = _simulate(graph, schedule, costs, record=True)
    devices = step.program.devices
    base: dict[int, float] = defaultdict(float)
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            base[device] += step.costs.base_bytes(s)
    return Timeline(
        spans=tuple(sorted(step.spans(), key=attrgetter("device", "start", "end"))),
        devices=tuple(sorted(devices)),
        source="predicted",
        step_s=step.end,
        memory={
            device: _memory_curve(base[device], step.memory[d]) for d, device in enumerate(devices)
        },
    )


def step_seconds(graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts) -> float:
    """Seconds of the step that ``run`` would record, in about half the time.

    Raises:
        DeadlockError: as ``run``.
    """
    with _collector_paused():
        return _simulate(graph, schedule, costs, record=False).end


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: all that a step makes lives to its end; looking costs a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _simulate(
    graph: StageGraph, schedule: Schedule, costs: CostModel | StepCosts, *, record: bool
) -> _Step:
    prices = ModelCosts(graph, costs) if isinstance(costs, CostModel) else costs
    if not schedule.is_lowered:
        schedule = lower(
            schedule, graph, gradient_edges=prices.gradient_edges, data_edges=prices.data_edges
        )
    step = _Step(compile_schedule(schedule, graph, prices), prices, record=record)
    step.run()
    stuck = {device: step.position[d] for d, device in enumerate(step.program.devices)}
    if any(at < len(schedule.actions[device]) for device, at in stuck.items()):
        raise DeadlockError(describe_deadlock(schedule, graph, stuck))
    return step


@dataclass(slots=True)
class _Pending:
    """An all-reduce: how many (stage, device) pairs have still to finish, then how many pieces."""

    work: AllReduce
    waits_for: int
    pieces: int
    ports: tuple[int, ...]


class _Step:
    """The state of one simulated step; the hot loop reads plain lists."""

    def __init__(self, program: Program, costs: StepCosts, *, record: bool) -> None:
        count = len(program.devices)
        self.program = program
        self.costs = costs
        self.record = record
        self.end = 0.0
        self.position = [0] * count
        self.memory: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self._engine = Engine()
        self._compute = self._clock(costs.cores)
        self._started = [0.0] * count
        self._waits_for = [-1] * count
        self._messages = program.messages
        self._is_sent = [False] * len(program.messages.channel)
        self._has_arrived = [False] * len(program.messages.channel)
        self._taken = [0] * len(program.messages.in_channel)
        self._posted = [0] * len(program.messages.in_channel)
        self._transfers: list[tuple[int, float, float]] = []
        self._computed: list[tuple[int, float, float, Action]] = []
        self._all_reduces = self._plan_all_reduces()
        self._free_at = [0.0] * len(program.ports)

    def _clock(self, cores: int) -> Callable[[float, Callback, int], None]:
        if 0 < cores < len(self.program.devices):
            return SharedCores(self._engine, cores).after
        return self._engine.after

    def _plan_all_reduces(self) -> list[list[_Pending]]:
        """Per stage, the all-reduces that wait for it."""
        by_stage: dict[int, list[_Pending]] = defaultdict(list)
        ends = [s.last for steps in self.program.steps for s in steps if s.last >= 0]
        for work in self.costs.all_reduces():
            pieces = min(max(-(-work.nbytes // PIECE_BYTES), 1), MOST_PIECES)
            ports = self.program.ports
            indices = tuple(ports.setdefault(port, len(ports)) for port in work.ports)
            pending = _Pending(work, sum(ends.count(s) for s in work.stages), pieces, indices)
            for s in work.stages:
                by_stage[s].append(pending)
        return [by_stage[s] for s in range(max(ends, default=-1) + 1)]

    def run(self) -> None:
        """Start every device and go on until nothing happens."""
        for channel in range(len(self._posted)):
            self._post(channel)
        for d in range(len(self.position)):
            self._advance(d)
        self._engine.run()

    def _advance(self, d: int) -> None:
        """Go through the list of one device until it computes or has to wait."""
        steps = self.program.steps[d]
        at = self.position[d]
        while at < len(steps):
            do, message, seconds, before, _, _, _ = steps[at]
            if do is Do.COMPUTE:
                self.position[d] = at
                self._started[d] = self._engine.now
                if self.record and before:
                    self.memory[d].append((self._engine.now, before))
                self._compute(seconds, self._computed_one, d)
                return
            if do is Do.SEND:
                self._is_sent[message] = True
                channel = self._messages.channel[message]
                if self._messages.opens[message] <= self._taken[channel]:
                    self._transfer(message)
            elif self._has_arrived[message]:
                channel = self._messages.channel[message]
                self._taken[channel] += 1
                self._post(channel)
            else:
                self._waits_for[d] = message
                self.position[d] = at
                return
            at += 1
        self.position[d] = at

    def _computed_one(self, d: int) -> None:
        _, _, _, _, after, last, action = self.program.steps[d][self.position[d]]
        now = self._engine.now
        if now > self.end:
            self.end = now
        if self.record:
            self._computed.append((d, self._started[d], now, action))
            if after:
                self.memory[d].append((now, -after))
        self.position[d] += 1
        self._advance(d)
        if last >= 0:
            # After the messages of this backward, which other stages wait for.
            self._finish_stage(last)

    def _post(self, channel: int) -> None:
        """Post the receives that have become due; what was sent before starts to move."""
        messages, opens = self._messages.in_channel[channel], self._messages.opens
        at = self._posted[channel]
        while at < len(messages) and opens[messages[at]] <= self._taken[channel]:
            if self._is_sent[messages[at]]:
                self._transfer(messages[at])
            at += 1
        self._posted[channel] = at

    def _transfer(self, message: int) -> None:
        end = self._occupy(self._messages.ports[message], self._messages.occupies_s[message])
        arrival = end + self._messages.latency_s[message]
        if self.record:
            start = end - self._messages.occupies_s[message]
            self._transfers.append((message, start, arrival))
        self._engine.at(arrival, self._arrive, message)

    def _occupy(self, ports: tuple[int, ...], seconds: float) -> float:
        """Take all ports as soon as the last of them is free; when they are free again."""
        start = self._engine.now
        for port in ports:
            if self._free_at[port] > start:
                start = self._free_at[port]
        for port in ports:
            self._free_at[port] = start + seconds
        return start + seconds

    def _arrive(self, message: int) -> None:
        self._has_arrived[message] = True
        d = self._messages.target[message]
        if self._waits_for[d] == message:
            self._waits_for[d] = -1
            self._advance(d)

    def _finish_stage(self, stage: int) -> None:
        for pending in self._all_reduces[stage]:
            pending.waits_for -= 1
            if pending.waits_for == 0:
                self._sum_piece((pending, pending.pieces))

    def _sum_piece(self, state: tuple[_Pending, int]) -> None:
        pending, left = state
        self.end = max(self.end, self._engine.now)
        if left:
            end = self._occupy(pending.ports, pending.work.seconds / pending.pieces)
            self._engine.at(end, self._sum_piece, (pending, left - 1))

    def spans(self) -> list[Span]:
        """Everything that was recorded; messages at both ends."""
        devices = self.program.devices
        spans = [Span(devices[d], start, end, action) for d, start, end, action in self._computed]
        times = {message: (start, end) for message, start, end in self._transfers}
        for d, steps in enumerate(self.program.steps):
            spans += [
                Span(devices[d], *times[s.message], s.action) for s in steps if s.message >= 0
            ]
        return spans


def _memory_curve(base: float, changes: list[tuple[float, float]]) -> tuple[tuple[float, int], ...]:
    """Bytes in use from each time on; changes at one time are one, releases first."""
    curve = [(0.0, base)]
    for time, change in changes:
        before = curve[-1][1]
        if curve[-1][0] == time:
            curve.pop()
        curve.append((time, before + change))
    return tuple((time, round(nbytes)) for time, nbytes in curve)
