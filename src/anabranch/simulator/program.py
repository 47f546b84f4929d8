"""A schedule compiled to numbers, before the clock runs.

Every message gets an index that both ends know, so that the event loop reads lists of integers
instead of comparing actions. A device's list, with 40 messages in all::

    0RF3<..  0F3  0SF3>..  0SF3>..
       7     -45     -9      -10        message m >= 0: receive it;  ~m: send it;
                                        ~(40 + u): compute unit u
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anabranch.compiled import Ints
from anabranch.plans.stages import StageGraph
from anabranch.remembered import remembered
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.events import Role
from anabranch.simulator.messages import COMPUTE, UPDATE, Lists, Messages, insertion_point, put_in
from anabranch.simulator.sums import Mark, Sum, final_pieces, gradient_marks, plan_sums, summing_s


class ComputeUnit(NamedTuple):
    """Compute or waiting of a device. Equal units share one number, see ``ComputeUnits``.

    Attributes:
        stage: index of its stage, or -1.
        before: bytes that are taken when it starts.
        after: bytes that are released when it ends.
        group: index of the devices of a gather, or -1.
        marks: its parts, where gradients become final in it.
        posts: messages whose receives a ``BEGIN`` posts.
        ports: ports that a ``GATHER`` occupies.
    """

    stage: int
    seconds: float
    before: float = 0.0
    after: float = 0.0
    group: int = -1
    marks: tuple[Mark, ...] = ()
    role: Role = Role.ACTION
    posts: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()


class ComputeUnits:
    """Numbers of the units of a program.

    Attributes:
        numbers: unit -> its number, ascending.
        groups: (stages, devices) of each gather -> its number, ascending.

    Args:
        besides_s: seconds of each update besides the update itself.
    """

    def __init__(
        self,
        graph: StageGraph,
        costs: StepCosts,
        index: Mapping[int, int],
        sums: Sequence[Sum],
        besides_s: float = 0.0,
    ) -> None:
        self._graph, self._costs, self._besides_s = graph, costs, besides_s
        self._device = index
        self.numbers: dict[ComputeUnit, int] = {}
        self.groups: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._summing_s = summing_s(costs)
        self._pieces = final_pieces(sums)

    def number(self, unit: ComputeUnit) -> int:
        """Return the number of a unit, a new one if it is new."""
        return self.numbers.setdefault(unit, len(self.numbers))

    @cached_property
    def _replica_of(self) -> Mapping[tuple[int, int], int]:
        return {
            (s, device): at
            for s, stage in enumerate(self._graph.stages)
            for at, device in enumerate(stage.devices)
        }

    @cached_property
    def slices(self) -> Mapping[int, list[tuple[int, ...]]]:
        """Device -> (stage, samples of its first slice, of its last) for each of its stages."""
        by_device: dict[int, list[tuple[int, ...]]] = {device: [] for device in self._device}
        for (s, device), replica in self._replica_of.items():
            last = self._graph.num_microbatches(s) - 1
            cuts = (self._graph.slice(s, i, replica) for i in (0, last))
            sizes = (stop - start for start, stop in cuts)
            by_device.setdefault(device, []).append((s, *sizes))
        return by_device

    def has_update(self, stage: int) -> bool:
        """Return True if a stage has gradients to sum, or takes time to update."""
        return stage in self._pieces or self._update_s(stage) > 0

    def _update_s(self, stage: int) -> float:
        return self._costs.update_s(stage) + self._besides_s

    def action(self, action: Action, device: int, is_last: bool) -> int:
        """Return the number of the unit of a compute.

        Args:
            is_last: whether it is the last backward of its stage before an update.
        """
        stage, replica = action.stage, self._replica_of[action.stage, device]
        start, stop = self._graph.slice(stage, action.microbatch, replica)
        return self._priced(stage, action.kind, stop - start, is_last)

    def update(self, stage: int) -> int:
        return self.number(ComputeUnit(stage, self._update_s(stage), role=Role.UPDATE))

    def overhead(self, seconds: float) -> int:
        """Return the number of the unit of a device's time outside actions."""
        return self.number(ComputeUnit(-1, seconds, role=Role.OVERHEAD))

    def agreement(self) -> list[int]:
        """Return the numbers of the units in which devices exchange totals."""
        seconds = self._costs.overheads.agreement_s
        meeting = self.number(ComputeUnit(-1, 0.0, role=Role.AGREEMENT))
        messages = [self.overhead(seconds)] * (seconds > 0)
        return [*messages, meeting, *messages]

    def gathers(self, work: AllReduce) -> list[int]:
        """Return the numbers of the units of the all-gather after an all-reduce."""
        members = tuple(self._device[device] for device in work.devices)
        group = self.groups.setdefault((work.stages, members), len(self.groups))
        unit = ComputeUnit(-1, work.gather_s, group=group, role=Role.GATHER, ports=work.ports)
        return [self.overhead(work.gather_work_s)] * (work.gather_work_s > 0) + [self.number(unit)]

    @remembered
    def _priced(self, stage: int, kind: Kind, samples: int, is_last: bool) -> int:
        seconds = self._costs.pass_s(stage, kind, samples)
        before, after = self._costs.flight_bytes(stage, samples).change(kind)
        if not is_last:
            return self.number(ComputeUnit(stage, seconds, before, after))
        seconds += self._summing_s[stage]
        pieces = self._pieces.get(stage, {})
        marks = gradient_marks(self._costs, pieces, stage, samples, seconds)
        return self.number(ComputeUnit(stage, seconds, before, after, marks=marks))


@dataclass(frozen=True)
class Program:
    """A schedule with its messages and prices.

    Attributes:
        devices: devices as in the schedule; everything else counts devices by their position here.
        entries: lists of all devices as integers, one device after the other.
        first: start in ``entries`` of the list of each device, and the end of the last.
        stages: stages of each device.
        units: units by number.
        groups: devices of each gather.
        sums: all-reduces of one update, by piece; those of one queue in their order.
        updates: number of updates of every stage.
    """

    devices: tuple[int, ...]
    entries: Ints
    first: Ints
    stages: list[tuple[int, ...]]
    units: list[ComputeUnit]
    messages: Messages
    groups: list[tuple[int, ...]]
    sums: list[Sum]
    updates: int = 1

    @property
    def size(self) -> int:
        return len(self.messages)

    @cached_property
    def code(self) -> list[list[int]]:
        """Entries of each device."""
        return [part.tolist() for part in np.split(self.entries, self.first[1:-1])]


def compile_schedule(
    schedule: Schedule, graph: StageGraph, costs: StepCosts, *, per_update: int = 0
) -> Program:
    """Price every action and number the messages.

    Args:
        per_update: number of micro-batches after which a stage updates, behind the last backward of
            these; 0 for a single update, behind everything else.
    """
    schedule = schedule.computes
    orders, devices = schedule.orders, tuple(schedule.actions)
    lists = Lists([len(order) for order in orders.values()])
    messages = put_in(schedule, graph, costs, lists)
    most = max(map(graph.num_microbatches, range(len(graph))))
    updates = most // per_update if per_update else 1
    per_update = per_update if updates > 1 else 0
    finishing = Counter(
        stage for order in orders.values() for stage in {*order.last_backwards(per_update).values()}
    )
    sums = plan_sums(costs, finishing)
    lost = costs.overheads
    # Where updates follow each other, each has the bookkeeping of its batch.
    besides_s = lost.step_s if updates > 1 else 0.0
    index = {device: d for d, device in enumerate(devices)}
    units = ComputeUnits(graph, costs, index, sums, besides_s)
    first_unit = len(messages)
    before, behind = list[int](), list[int]()
    if updates == 1 and lost.step_s:
        before.append(units.overhead(lost.step_s))
    works = costs.all_reduces()
    agreed_s = lost.agreement_s + lost.agreement_latency_s
    priced = agreed_s > 0 or any(map(costs.update_s, range(len(graph))))
    if updates == 1 and (priced or any(work.gather_s for work in works)):
        behind += units.agreement()
    # Replicas share one list; where their slices have the same size, so do their entries.
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for device, order in orders.items():
        alike[id(order), *units.slices[device]].append(device)
    for members in alike.values():
        order = orders[members[0]]
        listed: list[tuple[Sequence[int] | Ints, int, int]] = []  # positions, phase, unit
        listed += (([-1], COMPUTE, number) for number in before)
        for action, is_last, positions in order.computes(per_update):
            listed.append((positions, COMPUTE, units.action(action, members[0], is_last)))
        listed += (([len(order)], COMPUTE, number) for number in behind)
        for position, stage in sorted(order.last_backwards(per_update).items()):
            if units.has_update(stage):
                own = ([position], UPDATE) if per_update else ([len(order)], COMPUTE)
                listed.append((*own, units.update(stage)))
        if listed:
            at = [positions for positions, _, _ in listed]
            phase, unit = np.repeat([x[1:] for x in listed], [*map(len, at)], axis=0).T
            where = np.array([index[device] for device in members])[:, None]
            lists.put(where, insertion_point(np.concatenate(at), phase), ~(first_unit + unit))
    # The next step needs the parameters of the first stages first.
    for work in reversed(works):
        for device in work.devices if work.gather_s else ():
            numbers = np.array(units.gathers(work))
            behind_all = insertion_point(np.full_like(numbers, len(orders[device])), UPDATE)
            lists.put(index[device], behind_all, ~(first_unit + numbers))
    entries, first = lists.joined()
    if messages.table["end"].any():
        entries, first = _with_overheads(entries, first, messages, units)
    return Program(
        devices,
        entries,
        first,
        [order.stages for order in orders.values()],
        [*units.numbers],
        messages,
        [members for *_, members in units.groups],
        sums,
        updates,
    )


def _with_overheads(
    entries: Ints, first: Ints, messages: Messages, units: ComputeUnits
) -> tuple[Ints, Ints]:
    """Insert behind each send and receive the seconds that it takes of the device."""
    at = np.flatnonzero(entries >= -len(messages))
    x = entries[at]
    taken = messages.table["end"][np.where(x < 0, ~x, x)]
    at, taken = at[taken > 0], taken[taken > 0]
    seconds, which = np.unique(taken, return_inverse=True)
    numbers = np.array([units.overhead(s) for s in seconds.tolist()])
    entries = np.insert(entries, at + 1, ~(len(messages) + numbers[which]))
    return entries, first + np.searchsorted(at, first)


def in_a_row(program: Program, count: int, read_s: float) -> Program:
    """Return the program of ``count`` steps in a row. A device begins a step when it has ended the
    one before and read a batch, which takes ``read_s``; devices agree on nothing in between.
    """
    size, units = program.size, [*program.units]
    roles = np.array([unit.role for unit in units])
    read = [len(units)] if read_s else []
    units += [ComputeUnit(-1, read_s, role=Role.OVERHEAD) for _ in read]
    code, first = [], [0]
    for listed in np.split(program.entries, program.first[1:-1]):
        unit = np.maximum(~listed - size, -1)  # -1 for messages
        listed, unit = (
            part[roles[unit] * (unit >= 0) != Role.AGREEMENT] for part in (listed, unit)
        )
        posted = listed[listed >= 0]
        posted = posted[program.messages.table["ready"][posted] > 0]
        for step in range(count):
            begin = [len(units)] if step else []
            posts = tuple((posted + step * size).tolist())
            units += [ComputeUnit(-1, 0.0, role=Role.BEGIN, posts=posts) for _ in begin]
            shift = np.where(listed >= 0, step, -step) * size
            row = np.where(unit >= 0, ~(count * size + unit), listed + shift)
            code += [~(count * size + np.array(begin + read, np.int64)), row]
        first.append(sum(map(len, code)))
    return replace(
        program,
        entries=np.concatenate(code),
        first=np.array(first),
        units=units,
        messages=program.messages.repeated(count),
        updates=count,
    )
