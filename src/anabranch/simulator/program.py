"""A schedule as numbers that are looked up once, before the clock runs.

Every message gets an index that both ends know, so that the event loop reads lists of integers
instead of comparing actions. A device's list, with 40 messages in all::

    0RF3<..  0F3  0SF3>..  0SF3>..
       7     -45     -9      -10        message m >= 0: receive it;  ~m: send it;
                                        ~(40 + u): compute unit u
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import NamedTuple

from anabranch.cost.communication import Port
from anabranch.errors import InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import Channel, channel
from anabranch.schedule.lower import Overlap, device_pairs, directions, lower, patterns
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import AllReduce, StepCosts
from anabranch.simulator.events import Role


class Price(NamedTuple):
    """What a message costs: seconds that it occupies its ports, seconds from then until it has
    arrived, indices of the ports on its way, seconds of the devices at both ends.
    """

    occupies_s: float
    latency_s: float
    ports: tuple[int, ...]
    send_s: float = 0.0
    receive_s: float = 0.0


@dataclass(slots=True)
class MessageTable:
    """Every message, by index; lists of equal length.

    Attributes:
        price: seconds and ports.
        is_posted: whether its receive is posted before anything has been received.
        releases: messages whose receives are posted when this one has been taken.
    """

    price: list[Price] = field(default_factory=list)
    is_posted: list[bool] = field(default_factory=list)
    releases: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, prices: Sequence[Price]) -> int:
        """Put in messages of these prices, in this order; the index of the first."""
        first = len(self.price)
        self.price += prices
        self.is_posted += [True] * len(prices)
        self.releases += [()] * len(prices)
        return first

    def post(self, groups: Sequence[Sequence[int]], slots: int) -> None:
        """Decide when the receives of one channel are posted: when those of all but the latest
        ``slots`` micro-batches, its own included, have been taken.
        """
        for opener, opened in zip(groups, groups[slots:], strict=False):
            self.releases[opener[-1]] = tuple(opened)
            for message in opened:
                self.is_posted[message] = False


class Mark(NamedTuple):
    """Seconds of a compute, from the mark before, after which gradients of these pieces are
    final.
    """

    seconds: float
    pieces: tuple[int, ...]


class ComputeUnit(NamedTuple):
    """Compute that many steps have in common.

    Attributes:
        stage: index, or -1.
        before: bytes that are taken when it starts.
        after: bytes that are released when it ends.
        group: index of the devices that start it together, or -1.
        marks: where gradients become final in it.
        rest: seconds after the last mark.
        final: pieces whose gradients are final at its end.
        posts: receives that a ``BEGIN`` posts.
        ports: that a ``GATHER`` takes.
        stages: that read what a ``GATHER`` brings.
    """

    stage: int
    seconds: float
    before: float = 0.0
    after: float = 0.0
    group: int = -1
    marks: tuple[Mark, ...] = ()
    rest: float = 0.0
    final: tuple[int, ...] = ()
    role: Role = Role.ACTION
    posts: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()


class Sum(NamedTuple):
    """The all-reduce of a piece.

    Attributes:
        queue: index of the queue of its devices; their sums go one after the other.
        final: per stage, the operator whose backward is the last that adds to its gradients.
        waits_for: gradients that it needs, of one stage on one device each.
        nbytes: of gradients.
    """

    queue: int
    stages: tuple[int, ...]
    final: tuple[int, ...]
    devices: tuple[int, ...]
    waits_for: int
    nbytes: int
    seconds: float
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule with its messages and prices.

    Attributes:
        devices: as in the schedule; everything else counts devices by their position in here.
        code: per device, its actions as integers, and the units of other roles.
        groups: devices that compute together, each being one replica.
        sums: the all-reduces of one update, by piece; those of a queue in their order.
        updates: of every stage.
    """

    devices: tuple[int, ...]
    code: list[list[int]]
    units: list[ComputeUnit]
    messages: MessageTable
    ports: dict[tuple[str, int, int], int]
    groups: list[tuple[int, ...]]
    sums: list[Sum]
    updates: int = 1


def compile_schedule(
    schedule: Schedule, graph: StageGraph, costs: StepCosts, *, updates: int = 1
) -> Program:
    """Price every action and number the messages.

    Args:
        updates: per stage; each is behind the last backward of its share of the micro-batches. A
            single one is behind everything else.

    Raises:
        InvalidScheduleError: if a send has no receive.
    """
    if not schedule.is_lowered and not _is_in_order(schedule, graph):
        schedule = lower(schedule, graph, costs.message_edges)
    prices, table = MessagePrices(graph, costs, tuple(schedule.actions)), MessageTable()
    lowered = schedule.is_lowered
    before: _Rows = {}
    after: _Rows = {}
    if not lowered:
        before, after = _put_in(schedule, graph, costs.message_edges, prices, table)
    number = _numbering(schedule, prices, table) if lowered else None
    sums = plan_sums(costs, prices.indices)
    # Where updates follow each other, each has the bookkeeping of its batch.
    units = ComputeUnits(graph, costs, prices.index, sums, costs.step_s if updates > 1 else 0.0)
    first_unit = len(table.price)
    agrees = updates == 1 and (costs.agreement_s > 0 or any(map(costs.update_s, range(len(graph)))))
    # What the first stages read is needed first.
    shared = [work for work in reversed(costs.all_reduces()) if work.gather_s]
    per_update = [graph.num_microbatches(s) // updates for s in range(len(graph))]
    last: dict[int, dict[int, int]] = {}
    code = []
    for device, actions in schedule.actions.items():
        if id(actions) not in last:  # replicas share one list
            last[id(actions)] = _last_backwards(actions, per_update if updates > 1 else ())
        ends = last[id(actions)]
        mine: list[int] = []
        due = -1
        for at, (action, unit) in enumerate(
            zip(actions, units.of_list(actions, device, ends), strict=True)
        ):
            if due >= 0 and not action.kind.is_send:
                mine.append(~(first_unit + units.update(due)))
                due = -1
            if unit < 0:
                assert number is not None
                mine.append(number(action, device))
                continue
            if updates > 1 and at in ends and units.has_update(action.stage):
                due = action.stage
            if lowered or not action.kind.has_messages:
                mine.append(~(first_unit + unit))
                continue
            row = action.stage, device, action.kind.is_forward
            mine += before[row][action.microbatch]
            mine.append(~(first_unit + unit))
            mine += after[row][action.microbatch]
        if prices.take_time:
            mine = _with_overheads(mine, table.price, units)
        if updates == 1 and costs.step_s:
            mine.insert(0, ~(first_unit + units.overhead(costs.step_s)))
        if agrees:
            mine.append(~(first_unit + units.agreement()))
        behind = [due] if updates > 1 else [stage for _, stage in sorted(ends.items())]
        mine += [~(first_unit + units.update(s)) for s in behind if s >= 0 and units.has_update(s)]
        for work in shared:
            if device in work.devices:
                if work.share_s:
                    mine.append(~(first_unit + units.overhead(work.share_s)))
                mine.append(~(first_unit + units.gather(work, prices.indices(work.ports))))
        code.append(mine)
    sums = [
        work._replace(waits_for=sum(stage in work.stages for stage, _ in units.finishing))
        for work in sums
    ]
    return Program(
        prices.devices, code, units.known, table, prices.ports, units.groups, sums, updates
    )


def _last_backwards(actions: Sequence[Action], per_update: Sequence[int]) -> dict[int, int]:
    """Where the last backward of each update of a stage stands: position -> stage.

    Args:
        per_update: micro-batches by stage; empty for one update.
    """
    last = {
        (a.stage, a.microbatch // per_update[a.stage] if per_update else 0): at
        for at, a in enumerate(actions)
        if a.kind.ends_backward
    }
    return {at: stage for (stage, _), at in last.items()}


def _with_overheads(code: list[int], price: Sequence[Price], units: ComputeUnits) -> list[int]:
    """The code of a device with the time that it takes for messages behind each of them."""
    count = len(price)
    result: list[int] = []
    for x in code:
        result.append(x)
        message = x if x >= 0 else ~x
        if message < count:
            seconds = price[message].receive_s if x >= 0 else price[message].send_s
            if seconds:
                result.append(~(count + units.overhead(seconds)))
    return result


def in_a_row(program: Program, count: int, read_s: float) -> Program:
    """So many steps, one after the other: a device begins the next when it has ended one and read a
    batch, which takes ``read_s``, and they agree on nothing in between. What others have updated is
    there when a stage that reads it has its first forward.
    """
    table, size = program.messages, len(program.messages.price)
    messages, units, code = MessageTable(), [*program.units], []
    read = [~(count * size + len(units))] if read_s else []
    units += [ComputeUnit(-1, read_s, role=Role.OVERHEAD) for _ in read]
    share: dict[int, int] = {}
    shared: dict[int, int] = {}
    for u, unit in enumerate(program.units):
        if unit.role is Role.GATHER:
            share[~(size + u)] = ~(count * size + len(units))
            shared[~(size + u)] = share[~(size + u)] - 1
            units += [unit._replace(role=role) for role in (Role.SHARE, Role.SHARED)]
    for step in range(count):
        first = messages.add(table.price)
        for message, released in enumerate(table.releases):
            messages.releases[first + message] = tuple(other + first for other in released)
            messages.is_posted[first + message] = step == 0 and table.is_posted[message]
    for listed in program.code:
        mine = [x for x in listed if ~x < size or units[~x - size].role is not Role.AGREEMENT]
        posted = [x for x in mine if x >= 0 and table.is_posted[x]]
        awaited = _awaited(mine, program.units, size)
        result: list[int] = []
        for step in range(count):
            if step:
                result.append(~(count * size + len(units)))
                posts = tuple(message + step * size for message in posted)
                units.append(ComputeUnit(-1, 0.0, role=Role.BEGIN, posts=posts))
            result += read
            for at, x in enumerate(mine):
                if step:
                    result += (shared[gather] for gather in awaited.get(at, ()))
                result.append(share.get(x, _shifted(x, size, step, count)))
        code.append(result)
    return replace(program, code=code, units=units, messages=messages, updates=count)


def _awaited(code: Sequence[int], units: Sequence[ComputeUnit], size: int) -> dict[int, list[int]]:
    """Where a device needs what its gathers of the step before bring: position -> entries of these.

    Args:
        size: number of messages.
    """
    gathers = {x: units[~x - size].stages for x in code if ~x >= size}
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for at, x in enumerate(code):
        unit = units[~x - size] if ~x >= size else None
        if unit is not None and unit.role is Role.ACTION and unit.stage not in seen:
            seen.add(unit.stage)
            found[at] = [gather for gather, stages in gathers.items() if unit.stage in stages]
    return found


def _shifted(x: int, size: int, step: int, count: int) -> int:
    """An entry of a device's list where it stands ``step`` lists later, among ``count``."""
    if x >= 0:
        return x + step * size
    return x - step * size if ~x < size else x - (count - 1) * size


def plan_sums(costs: StepCosts, indices: Callable[[Sequence[Port]], tuple[int, ...]]) -> list[Sum]:
    """The pieces of all all-reduces, by the numbers of their ports; nobody is waited for yet."""
    sums: list[Sum] = []
    queues: dict[tuple[int, ...], int] = {}
    for work in costs.all_reduces():
        queue = queues.setdefault(work.devices, len(queues))
        ports = indices(work.ports)
        for nbytes, seconds, final in work.pieces:
            sums.append(Sum(queue, work.stages, final, work.devices, 0, nbytes, seconds, ports))
    return sums


def summing_s(costs: StepCosts) -> Mapping[int, float]:
    """Per stage, how much longer the last backward is for the sums that begin in it; those of
    several stages begin in the last one of them.
    """
    found: defaultdict[int, float] = defaultdict(float)
    for work in costs.all_reduces():
        found[work.stages[0]] += work.device_s
    return found


def gradient_marks(
    costs: StepCosts, sums: Sequence[Sum], stage: int, samples: int, backward_s: float
) -> tuple[tuple[Mark, ...], tuple[int, ...]]:
    """Where the last backward of a stage leaves final gradients, and those that are so at its end.

    Args:
        samples: on the device.
        backward_s: its seconds.
    """
    found: dict[float, list[int]] = defaultdict(list)
    for piece, work in enumerate(sums):
        if stage in work.stages:
            operator = work.final[work.stages.index(stage)]
            share = costs.gradient_share(stage, samples, operator)
            found[min(share * backward_s, backward_s)].append(piece)
    final = tuple(found.pop(backward_s, ()))
    marks, passed = [], 0.0
    for seconds, pieces in sorted(found.items()):
        marks.append(Mark(seconds - passed, tuple(pieces)))
        passed = seconds
    return tuple(marks), final


def _is_in_order(schedule: Schedule, graph: StageGraph) -> bool:
    """Whether every stage takes all of its micro-batches in turn, as an order by hand may not."""
    # Replicas share one list.
    for actions in {id(actions): actions for actions in schedule.actions.values()}.values():
        done: dict[tuple[int, Kind], int] = defaultdict(int)
        for action in actions:
            if action.microbatch != done[action.stage, action.kind]:
                return False
            done[action.stage, action.kind] += 1
        if any(count != graph.num_microbatches(stage) for (stage, _), count in done.items()):
            return False
    return True


def _numbering(
    schedule: Schedule, prices: MessagePrices, table: MessageTable
) -> Callable[[Action, int], int]:
    """Number the messages of a lowered schedule by their receives; the code of each action."""
    received: dict[Channel, list[int]] = defaultdict(list)
    groups: dict[Channel, dict[int, list[int]]] = defaultdict(dict)
    for device, actions in schedule.actions.items():
        for action in actions:
            if action.kind.is_receive:
                key = channel(action, device)
                message = table.add([prices.price(*key, action.stop - action.start)])
                received[key].append(message)
                groups[key].setdefault(action.microbatch, []).append(message)
    for microbatches in groups.values():
        table.post(list(microbatches.values()), schedule.slots)
    left: dict[tuple[Channel, bool], Iterator[int]] = {}

    def code(action: Action, device: int) -> int:
        key, sends = channel(action, device), action.kind.is_send
        message = next(left.setdefault((key, sends), iter(received[key])), None)
        if message is None:
            raise InvalidScheduleError(f"device {device}: nobody receives {action}")
        return ~message if sends else message

    return code


_Rows = dict[tuple[int, int, bool], list[list[int]]]
"""(stage, device, whether forward) -> per micro-batch, the code of its messages."""


def _put_in(
    schedule: Schedule,
    graph: StageGraph,
    edges: MessageEdges,
    prices: MessagePrices,
    table: MessageTable,
) -> tuple[_Rows, _Rows]:
    """Number the messages that ``lower`` would put in, those of each stage edge in a row; what
    comes before a compute and what comes after it.
    """
    before, after = _no_rows(graph), _no_rows(graph)
    for source, target, forward in directions(graph, edges):
        made_of, needed_of = (graph.stages[s].microbatch_size for s in (source, target))
        channels: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        x, y = (source, target) if forward else (target, source)
        for overlaps, first, unit, times in patterns(graph, x, y):
            found = list(_pattern_messages(overlaps, graph, source, target, forward, prices))
            at = table.add([price for _, _, _, _, price in found] * times)
            # Every how many micro-batches the same comes again; what is left comes once.
            sent, received = max(unit // made_of, 1), max(unit // needed_of, 1)
            for number, (a, b, i, j, _) in enumerate(found, at):
                ids = range(number, number + times * len(found), len(found))
                made = after[source, a, forward][first // made_of + i :: sent]
                needed = before[target, b, forward][first // needed_of + j :: received]
                for message, out, into in zip(ids, made, needed, strict=False):
                    out.append(~message)
                    into.append(message)
                channels[a, b] += zip(ids, count(first // needed_of + j, received), strict=False)
        for messages in channels.values():
            groups: dict[int, list[int]] = defaultdict(list)
            for message, microbatch in sorted(messages):
                groups[microbatch].append(message)
            table.post(list(groups.values()), schedule.slots)
    return before, after


def _no_rows(graph: StageGraph) -> _Rows:
    return {
        (s, device, forward): [[] for _ in range(graph.num_microbatches(s))]
        for s, stage in enumerate(graph.stages)
        for device in stage.devices
        for forward in (True, False)
    }


def _pattern_messages(
    overlaps: Iterable[Overlap],
    graph: StageGraph,
    source: int,
    target: int,
    forward: bool,
    prices: MessagePrices,
) -> Iterator[tuple[int, int, int, int, Price]]:
    """Sender and receiver, micro-batch of the one and of the other, price."""
    sender, receiver = graph.stages[source], graph.stages[target]
    for i, r, j, q, start, stop in overlaps:
        k, m = (i, j) if forward else (j, i)
        for a, b in device_pairs(sender, *((r, receiver, q) if forward else (q, receiver, r))):
            price = prices.price(source, target, a, b, forward, stop - start)
            yield a, b, k, m, price


class MessagePrices:
    """Prices of messages; each is asked for once."""

    def __init__(self, graph: StageGraph, costs: StepCosts, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self.index = {device: d for d, device in enumerate(devices)}
        self.ports: dict[tuple[str, int, int], int] = {}
        self._costs = costs
        self._ways: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {}
        self._bytes: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._ends: dict[float, tuple[float, float]] = {}

    def price(self, source: int, target: int, a: int, b: int, forward: bool, samples: int) -> Price:
        """Price of so many samples from stage ``source`` on device a to ``target`` on device b."""
        way = self._ways.get((a, b))
        if way is None:
            route = self._costs.route(a, b)
            ports = self.indices(route.ports)
            way = self._ways[a, b] = route.per_byte_s, route.latency_s, ports
        per_byte_s, latency_s, indices = way
        edge = (source, target, samples) if forward else (target, source, samples)
        if edge not in self._bytes:
            self._bytes[edge] = self._costs.message_bytes(*edge)
        nbytes = self._bytes[edge][not forward]
        if nbytes not in self._ends:
            self._ends[nbytes] = self._costs.message_s(nbytes)
        return Price(nbytes * per_byte_s, latency_s, indices, *self._ends[nbytes])

    @property
    def take_time(self) -> bool:
        """Whether messages take time of the devices at their ends."""
        return any(map(any, self._ends.values()))

    def indices(self, ports: Iterable[Port]) -> tuple[int, ...]:
        """Numbers of ports; those that are new get one."""
        return tuple(self.ports.setdefault(port, len(self.ports)) for port in ports)


class ComputeUnits:
    """Compute units; each is priced once.

    Attributes:
        finishing: stages with the devices that run a last backward of them.

    Args:
        besides_s: seconds of each update besides its own.
    """

    def __init__(
        self,
        graph: StageGraph,
        costs: StepCosts,
        index: dict[int, int],
        sums: Sequence[Sum],
        besides_s: float = 0.0,
    ) -> None:
        self._graph, self._costs, self._besides_s = graph, costs, besides_s
        self._overheads: dict[float, int] = {}
        self._agreement = -1
        self.known: list[ComputeUnit] = []
        self.groups: list[tuple[int, ...]] = []
        self.finishing: set[tuple[int, int]] = set()
        self._group_of: dict[tuple[int, int], int] = {}
        for s, stage in enumerate(graph.stages):
            for first in range(0, len(stage.devices), stage.tensor) if stage.tensor > 1 else ():
                self._group_of[s, first // stage.tensor] = len(self.groups)
                members = stage.devices[first : first + stage.tensor]
                self.groups.append(tuple(index[device] for device in members))
        self._replica_of = {
            (s, device): at // stage.tensor
            for s, stage in enumerate(graph.stages)
            for at, device in enumerate(stage.devices)
        }
        self._index: dict[tuple[int, int, Kind, bool, int], int] = {}
        self._updates: dict[int, int] = {}
        self._gathers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._device = index
        self._sums = sums
        self._summing_s = summing_s(costs)
        self._summing = {stage for work in sums for stage in work.stages}
        self._of_list: dict[tuple[int, tuple[tuple[int, ...], ...]], list[int]] = {}
        self._of_action: dict[tuple[int, int, Kind, bool, bool], int] = {}

    def of_list(
        self, actions: Sequence[Action], device: int, ends: Mapping[int, int]
    ) -> Sequence[int]:
        """Units of the scheduled actions of a device, -1 for messages.

        Args:
            ends: where the last backwards of its stages stand; position -> stage.
        """
        self.finishing.update((stage, device) for stage in ends.values())
        # Replicas with slices of the same size do the same.
        key = id(actions), tuple(self._slices[device])
        if key not in self._of_list:
            self._of_list[key] = [
                -1 if action.peer >= 0 else self._unit_of(action, device, at in ends)
                for at, action in enumerate(actions)
            ]
        return self._of_list[key]

    def _unit_of(self, action: Action, device: int, is_last: bool) -> int:
        s = action.stage
        is_short = action.microbatch == self._graph.num_microbatches(s) - 1
        key = s, device, action.kind, is_short, is_last
        if key not in self._of_action:
            replica = self._replica_of[s, device]
            start, stop = self._graph.slice(s, action.microbatch, replica)
            self._of_action[key] = self._unit(s, action.kind, stop - start, replica, is_last)
        return self._of_action[key]

    @cached_property
    def _slices(self) -> Mapping[int, list[tuple[int, ...]]]:
        """Per device, of its stages: index, samples of the first and the last slice, group."""
        found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for (s, device), replica in self._replica_of.items():
            last = self._graph.num_microbatches(s) - 1
            cuts = (self._graph.slice(s, i, replica) for i in (0, last))
            sizes = (stop - start for start, stop in cuts)
            found[device].append((s, *sizes, self._group_of.get((s, replica), -1)))
        return found

    def has_update(self, stage: int) -> bool:
        """Whether a stage has gradients to sum, or takes time to update."""
        return stage in self._summing or self._update_s(stage) > 0

    def _update_s(self, stage: int) -> float:
        return self._costs.update_s(stage) + self._besides_s

    def gather(self, work: AllReduce, ports: tuple[int, ...]) -> int:
        """Unit in which the devices of an all-reduce send each other what they have updated."""
        key = work.devices, work.stages
        if key not in self._gathers:
            self._gathers[key] = len(self.known)
            self.known.append(
                ComputeUnit(
                    -1,
                    work.gather_s,
                    group=len(self.groups),
                    role=Role.GATHER,
                    ports=ports,
                    stages=work.stages,
                )
            )
            self.groups.append(tuple(self._device[device] for device in work.devices))
        return self._gathers[key]

    def update(self, stage: int) -> int:
        """Unit of the update of a stage."""
        if stage not in self._updates:
            self._updates[stage] = len(self.known)
            self.known.append(ComputeUnit(stage, self._update_s(stage), role=Role.UPDATE))
        return self._updates[stage]

    def overhead(self, seconds: float) -> int:
        """Unit of a device's time that no action takes."""
        if seconds not in self._overheads:
            self._overheads[seconds] = len(self.known)
            self.known.append(ComputeUnit(-1, seconds, role=Role.OVERHEAD))
        return self._overheads[seconds]

    def agreement(self) -> int:
        """Unit that all devices wait for together."""
        if self._agreement < 0:
            self._agreement = len(self.known)
            self.known.append(ComputeUnit(-1, 0.0, role=Role.AGREEMENT))
        return self._agreement

    def _unit(self, stage: int, kind: Kind, samples: int, replica: int, is_last: bool) -> int:
        group = self._group_of.get((stage, replica), -1)
        key = stage, samples, kind, is_last, group
        if key not in self._index:
            self._index[key] = len(self.known)
            seconds, before, after = self._price(stage, kind, samples)
            if is_last:
                seconds += self._summing_s[stage]
            unit = ComputeUnit(stage, seconds, before, after, group)
            self.known.append(self._with_marks(unit, samples) if is_last else unit)
        return self._index[key]

    def _with_marks(self, unit: ComputeUnit, samples: int) -> ComputeUnit:
        """A last backward, with where it leaves final gradients."""
        marks, final = gradient_marks(self._costs, self._sums, unit.stage, samples, unit.seconds)
        rest = unit.seconds - sum(mark.seconds for mark in marks)
        return unit._replace(marks=marks, rest=rest, final=final)

    def _price(self, stage: int, kind: Kind, samples: int) -> tuple[float, float, float]:
        forward, backward = self._costs.compute_s(stage, samples)
        held, inside = self._costs.flight_bytes(stage, samples)
        if kind is Kind.FORWARD:
            return forward, held, 0.0
        if kind is Kind.BACKWARD:
            return backward, inside, inside + held
        # Profiles do not tell the halves apart; on matrix products they cost the same.
        if kind is Kind.INPUT_GRADIENT:
            return backward / 2, inside, 0.0
        return backward / 2, 0.0, inside + held
