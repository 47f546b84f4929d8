"""A schedule as numbers that are looked up once, before the clock runs.

Every message gets an index that both ends know, so that the event loop reads lists of integers
instead of comparing actions. A device's list, with 40 messages in all::

    0RF3<..  0F3  0SF3>..  0SF3>..
       7     -45     -9      -10        message m >= 0: receive it;  ~m: send it;
                                        ~(40 + u): compute unit u
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.communication import Port
from anabranch.errors import InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import Channel, channel
from anabranch.schedule.lower import Overlap, device_pairs, directions, lower, patterns
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import AllReduce, StepCosts
from anabranch.simulator.events import Role

Ints = NDArray[np.int64]

T = TypeVar("T", int, Ints)


class Price(NamedTuple):
    """What a message costs: seconds that it occupies its ports, seconds from then until it has
    arrived, indices of the ports on its way, seconds of the devices at both ends.
    """

    occupies_s: float
    latency_s: float
    ports: tuple[int, ...]
    send_s: float = 0.0
    receive_s: float = 0.0


@dataclass(frozen=True)
class Messages:
    """Every message, by index.

    Attributes:
        prices: different ones.
        price: which of them.
        opener: the message with which its receive is posted, -1 for none.
        is_posted: whether its receive is posted before anything has been received.
    """

    prices: list[Price]
    price: Ints
    opener: Ints
    is_posted: NDArray[np.bool_]


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


@dataclass(frozen=True)
class Program:
    """A schedule with its messages and prices.

    Attributes:
        devices: as in the schedule; everything else counts devices by their position in here.
        entries: their actions as integers, and the units of other roles, one device's behind the
            other's.
        first: where those of a device begin, and the end.
        stages: of each device.
        groups: devices that compute together, each being one replica.
        sums: the all-reduces of one update, by piece; those of a queue in their order.
        updates: of every stage.
    """

    devices: tuple[int, ...]
    entries: Ints
    first: Ints
    stages: list[tuple[int, ...]]
    units: list[ComputeUnit]
    messages: Messages
    ports: dict[tuple[str, int, int], int]
    groups: list[tuple[int, ...]]
    sums: list[Sum]
    updates: int = 1

    @property
    def size(self) -> int:
        """Number of messages."""
        return len(self.messages.price)

    @cached_property
    def code(self) -> list[list[int]]:
        """Entries per device."""
        return [part.tolist() for part in np.split(self.entries, self.first[1:-1])]


class _Lists:
    """Lists of devices as they are put together: each entry has a position in an original list, and
    a phase there: receives, a compute, sends, an update.

    Args:
        lengths: of the original lists; before each and behind it is room for more.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._begin = 4 * np.cumsum([0, *(length + 2 for length in lengths)])
        self._keys: list[Ints] = []
        self._values: list[Ints] = []

    def put(self, devices: Ints | int, places: Ints, values: Ints) -> None:
        """Put entries at these places (``_place``), behind those that are there already."""
        self._keys.append(self._begin[devices] + places)
        self._values.append(values)

    def joined(self) -> tuple[Ints, Ints]:
        """All entries, and where those of each device begin and end."""
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")
        return np.concatenate(self._values)[order], np.searchsorted(keys[order], self._begin)


_RECEIVES, _COMPUTE, _SENDS, _UPDATE = range(4)


def _place(position: T, phase: int) -> T:
    """A place in the list of a device; position -1 is before all that the list has."""
    return 4 * (position + 1) + phase


class _Passes:
    """What the lists of a schedule have, each looked at once: replicas share one.

    Attributes:
        at: per list, by its ``id``, stage and whether it is a forward: positions of the computes
            that have messages.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.at: dict[int, dict[tuple[int, bool], list[int]]] = {}
        for actions in schedule.actions.values():
            if id(actions) not in self.at:
                found: dict[tuple[int, bool], list[int]] = defaultdict(list)
                for position, action in enumerate(actions):
                    if action.kind.has_messages:
                        found[action.stage, action.kind.is_forward].append(position)
                self.at[id(actions)] = found

    def stages(self, device: int) -> tuple[int, ...]:
        """Of a device, ascending."""
        return tuple(sorted({stage for stage, _ in self.at[id(self._schedule.actions[device])]}))

    def positions(
        self, graph: StageGraph, stage: int, forward: bool, index: Mapping[int, int]
    ) -> tuple[Ints, Ints]:
        """Where devices have the micro-batches of a stage: rows of positions, and which one of them
        a device has, by its index.
        """
        devices = graph.stages[stage].devices
        lists = {id(self._schedule.actions[device]): 0 for device in devices}
        rows = {listed: row for row, listed in enumerate(lists)}
        row_of = np.zeros(len(index), np.int64)
        for device in devices if len(rows) > 1 else ():
            row_of[index[device]] = rows[id(self._schedule.actions[device])]
        return np.array([self.at[listed][stage, forward] for listed in rows]), row_of


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
    has_messages = schedule.is_lowered
    if not has_messages and not _is_in_order(schedule, graph):
        schedule, has_messages = lower(schedule, graph, costs.message_edges), True
    prices = MessagePrices(graph, costs, tuple(schedule.actions))
    lists = _Lists([len(actions) for actions in schedule.actions.values()])
    passes = _Passes(schedule)
    if has_messages:
        messages = _number(schedule, prices, lists)
    else:
        messages = _put_in(passes, schedule.slots, graph, costs.message_edges, prices, lists)
    sums = plan_sums(costs, prices.indices)
    # Where updates follow each other, each has the bookkeeping of its batch.
    units = ComputeUnits(graph, costs, prices.index, sums, costs.step_s if updates > 1 else 0.0)
    first_unit = len(messages.price)
    agrees = updates == 1 and (costs.agreement_s > 0 or any(map(costs.update_s, range(len(graph)))))
    # What the first stages read is needed first.
    shared = [work for work in reversed(costs.all_reduces()) if work.gather_s]
    per_update = [graph.num_microbatches(s) // updates for s in range(len(graph))]
    last: dict[int, dict[int, int]] = {}
    alike: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    for d, (device, actions) in enumerate(schedule.actions.items()):
        if id(actions) not in last:  # replicas share one list
            last[id(actions)] = _last_backwards(actions, per_update if updates > 1 else ())
        ends = last[id(actions)]
        at, numbers = units.of_list(actions, device, ends)
        key = id(actions), id(numbers)
        if key not in alike:
            more = list[tuple[int, int]]()
            if updates == 1 and costs.step_s:
                more.append((_place(-1, _COMPUTE), units.overhead(costs.step_s)))
            behind = _place(len(actions), _COMPUTE)
            if agrees:
                more.append((behind, units.agreement()))
            for position, stage in sorted(ends.items()):
                # Behind the messages of the backward.
                while position + 1 < len(actions) and actions[position + 1].kind.is_send:
                    position += 1
                if units.has_update(stage):
                    place = behind if updates == 1 else _place(position, _UPDATE)
                    more.append((place, units.update(stage)))
            places, others = np.array(more, np.int64).reshape(-1, 2).T
            alike[key] = (
                np.concatenate([_place(at, _COMPUTE), places]),
                ~(first_unit + np.concatenate([numbers, others])),
            )
        lists.put(d, *alike[key])
        gathers = list[int]()
        for work in shared:
            if device in work.devices:
                gathers += [units.overhead(work.share_s)] if work.share_s else []
                gathers.append(units.gather(work, prices.indices(work.ports)))
        if gathers:
            behind = _place(len(actions), _UPDATE)
            lists.put(d, np.full(len(gathers), behind), ~(first_unit + np.array(gathers)))
    entries, first = lists.joined()
    if prices.take_time:
        entries, first = _with_overheads(entries, first, messages, units)
    finishing = Counter(stage for stage, _ in units.finishing)
    sums = [work._replace(waits_for=sum(finishing[s] for s in work.stages)) for work in sums]
    return Program(
        prices.devices,
        entries,
        first,
        [passes.stages(device) for device in prices.devices],
        units.known,
        messages,
        prices.ports,
        units.groups,
        sums,
        updates,
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


def _with_overheads(
    entries: Ints, first: Ints, messages: Messages, units: ComputeUnits
) -> tuple[Ints, Ints]:
    """The lists with the time that devices take for messages behind each of them."""
    size = len(messages.price)
    taken = [
        [size + units.overhead(seconds) if seconds else -1 for seconds in price[3:]]
        for price in messages.prices
    ]
    moved = np.flatnonzero(entries >= -size)
    x = entries[moved]
    found = np.array(taken)[messages.price[np.where(x < 0, ~x, x)], (x >= 0).astype(int)]
    moved, found = moved[found >= 0], found[found >= 0]
    entries = np.insert(entries, moved + 1, ~found)
    return entries, first + np.searchsorted(moved, first)


def in_a_row(program: Program, count: int, read_s: float) -> Program:
    """So many steps, one after the other: a device begins the next when it has ended one and read a
    batch, which takes ``read_s``, and they agree on nothing in between. What others have updated is
    there when a stage that reads it has its first forward.
    """
    table, size = program.messages, program.size
    units, code = [*program.units], list[int]()
    first = [0]
    read = [~(count * size + len(units))] if read_s else []
    units += [ComputeUnit(-1, read_s, role=Role.OVERHEAD) for _ in read]
    share: dict[int, int] = {}
    shared: dict[int, int] = {}
    for u, unit in enumerate(program.units):
        if unit.role is Role.GATHER:
            share[~(size + u)] = ~(count * size + len(units))
            shared[~(size + u)] = share[~(size + u)] - 1
            units += [unit._replace(role=role) for role in (Role.SHARE, Role.SHARED)]
    later = np.arange(count)[:, None] * size
    messages = Messages(
        table.prices,
        np.tile(table.price, count),
        np.where(table.opener >= 0, table.opener + later, -1).ravel(),
        np.concatenate([table.is_posted, np.zeros((count - 1) * size, np.bool_)]),
    )
    for listed in program.code:
        mine = [x for x in listed if ~x < size or units[~x - size].role is not Role.AGREEMENT]
        posted = [x for x in mine if x >= 0 and table.is_posted[x]]
        awaited = _awaited(mine, program.units, size)
        for step in range(count):
            if step:
                code.append(~(count * size + len(units)))
                posts = tuple(message + step * size for message in posted)
                units.append(ComputeUnit(-1, 0.0, role=Role.BEGIN, posts=posts))
            code += read
            for at, x in enumerate(mine):
                if step:
                    code += (shared[gather] for gather in awaited.get(at, ()))
                code.append(share.get(x, _shifted(x, size, step, count)))
        first.append(len(code))
    return replace(
        program,
        entries=np.array(code, np.int64),
        first=np.array(first),
        units=units,
        messages=messages,
        updates=count,
    )


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
    whole: dict[int, Collection[tuple[int, Kind]]] = {}
    # Replicas share one list.
    for actions in {id(actions): actions for actions in schedule.actions.values()}.values():
        done: dict[tuple[int, Kind], int] = defaultdict(int)
        for action in actions:
            if action.microbatch != done[action.stage, action.kind]:
                return False
            done[action.stage, action.kind] += 1
        if any(count != graph.num_microbatches(stage) for (stage, _), count in done.items()):
            return False
        whole[id(actions)] = done
    # What misses a stage, or a direction of it, is a list by hand as well.
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            kinds = {
                kind
                for other, kind in whole.get(id(schedule.actions.get(device)), ())
                if other == s
            }
            if Kind.FORWARD not in kinds or kinds.isdisjoint({Kind.BACKWARD, Kind.INPUT_GRADIENT}):
                return False
    return True


def _number(schedule: Schedule, prices: MessagePrices, lists: _Lists) -> Messages:
    """Number the messages of a lowered schedule by their receives, and list them."""
    received: dict[Channel, list[int]] = defaultdict(list)
    groups: dict[Channel, dict[int, list[int]]] = defaultdict(dict)
    price: list[int] = []
    for device, actions in schedule.actions.items():
        for action in actions:
            if action.kind.is_receive:
                key = channel(action, device)
                received[key].append(len(price))
                groups[key].setdefault(action.microbatch, []).append(len(price))
                price.append(prices.number(*key, action.stop - action.start))
    opener = np.full(len(price), -1)
    for microbatches in groups.values():
        of_channel = list(microbatches.values())
        for before, opened in zip(of_channel, of_channel[schedule.slots :], strict=False):
            opener[opened] = before[-1]
    left: dict[tuple[Channel, bool], Iterator[int]] = {}
    for d, (device, actions) in enumerate(schedule.actions.items()):
        at, entries = list[int](), list[int]()
        for position, action in enumerate(actions):
            if action.peer < 0:
                continue
            key, sends = channel(action, device), action.kind.is_send
            message = next(left.setdefault((key, sends), iter(received[key])), None)
            if message is None:
                raise InvalidScheduleError(f"device {device}: nobody receives {action}")
            at.append(position)
            entries.append(~message if sends else message)
        places = _place(np.array(at, np.int64), _COMPUTE)
        lists.put(d, places, np.array(entries, np.int64))
    return Messages(prices.known, np.array(price, np.int64), opener, opener < 0)


def _put_in(
    passes: _Passes,
    slots: int,
    graph: StageGraph,
    edges: MessageEdges,
    prices: MessagePrices,
    lists: _Lists,
) -> Messages:
    """Number the messages that ``lower`` would put in, those of each stage edge in a row, and list
    them before and behind the computes.
    """
    positions = {
        (s, forward): passes.positions(graph, s, forward, prices.index)
        for s in range(len(graph))
        for forward in (True, False)
    }
    found: list[Ints] = [np.zeros((7, 0), np.int64)]
    for number, (source, target, forward) in enumerate(directions(graph, edges)):
        made_of, needed_of = (graph.stages[s].microbatch_size for s in (source, target))
        x, y = (source, target) if forward else (target, source)
        sent, sent_row = positions[source, forward]
        taken, taken_row = positions[target, forward]
        for overlaps, first, unit, times in patterns(graph, x, y):
            of_one = list(_pattern_messages(overlaps, graph, source, target, forward, prices))
            a, b, i, j, price = np.array(of_one, np.int64).reshape(-1, 5).T
            # Every how many micro-batches the same comes again; what is left comes once.
            again = np.arange(times)[:, None]
            i = i + first // made_of + again * max(unit // made_of, 1)
            j = j + first // needed_of + again * max(unit // needed_of, 1)
            columns = np.empty((7, *i.shape), np.int64)
            columns[0], columns[1] = a, sent[sent_row[a], i]
            columns[2], columns[3] = b, taken[taken_row[b], j]
            columns[4], columns[5] = j, price
            columns[6] = (number * len(prices.devices) + a) * len(prices.devices) + b
            found.append(columns.reshape(7, -1))
    a, at, b, needed_at, microbatch, price, way = np.concatenate(found, axis=1)
    numbers = np.arange(len(price))
    lists.put(a, _place(at, _SENDS), ~numbers)
    lists.put(b, _place(needed_at, _RECEIVES), numbers)
    opener = _openers(way, microbatch, slots)
    return Messages(prices.known, price, opener, opener < 0)


def _openers(way: Ints, microbatch: Ints, slots: int) -> Ints:
    """Per message, with which one its receive is posted: when those of all but the latest ``slots``
    micro-batches on its way, its own included, have been taken; -1 for at once.
    """
    opener = np.full(len(way), -1)
    if not len(way):
        return opener
    order = np.argsort(way, kind="stable")
    way, microbatch = way[order], microbatch[order]
    begins = np.flatnonzero(np.diff(way, prepend=-1) | np.diff(microbatch, prepend=-1))
    last = np.append(begins[1:], len(way)) - 1
    # Of each micro-batch on a way, the one ``slots`` before it.
    before = np.full(len(begins), -1)
    if len(begins) > slots:
        on_way = way[begins[slots:]] == way[begins[:-slots]]
        before[slots:] = np.where(on_way, order[last[:-slots]], -1)
    opener[order] = np.repeat(before, last - begins + 1)
    return opener


def _pattern_messages(
    overlaps: Iterable[Overlap],
    graph: StageGraph,
    source: int,
    target: int,
    forward: bool,
    prices: MessagePrices,
) -> Iterator[tuple[int, int, int, int, int]]:
    """Sender and receiver by their index, micro-batch of the one and of the other, price."""
    sender, receiver = graph.stages[source], graph.stages[target]
    index = prices.index
    for i, r, j, q, start, stop in overlaps:
        k, m = (i, j) if forward else (j, i)
        for a, b in device_pairs(sender, *((r, receiver, q) if forward else (q, receiver, r))):
            price = prices.number(source, target, a, b, forward, stop - start)
            yield index[a], index[b], k, m, price


class MessagePrices:
    """Prices of messages; each is asked for once.

    Attributes:
        known: those of different ways and sizes.
    """

    def __init__(self, graph: StageGraph, costs: StepCosts, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self.index = {device: d for d, device in enumerate(devices)}
        self.ports: dict[tuple[str, int, int], int] = {}
        self._costs = costs
        self._ways: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {}
        self._bytes: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._ends: dict[float, tuple[float, float]] = {}
        self._numbers: dict[tuple[int, int, float], int] = {}
        self.known: list[Price] = []

    def number(self, source: int, target: int, a: int, b: int, forward: bool, samples: int) -> int:
        """Which of the known prices so many samples have from stage ``source`` on device a to
        ``target`` on device b.
        """
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
        number = self._numbers.setdefault((a, b, nbytes), len(self.known))
        if number == len(self.known):
            ends = self._ends[nbytes]
            self.known.append(Price(nbytes * per_byte_s, latency_s, indices, *ends))
        return number

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
        self._of_list: dict[tuple[int, tuple[tuple[int, ...], ...]], tuple[Ints, Ints]] = {}

    def of_list(
        self, actions: Sequence[Action], device: int, ends: Mapping[int, int]
    ) -> tuple[Ints, Ints]:
        """Positions of the computes of a device in its list, and their units.

        Args:
            ends: where the last backwards of its stages stand; position -> stage.
        """
        self.finishing.update((stage, device) for stage in ends.values())
        # Replicas with slices of the same size do the same.
        key = id(actions), tuple(self._slices[device])
        if key not in self._of_list:
            at = [at for at, action in enumerate(actions) if action.peer < 0]
            last = [self._graph.num_microbatches(s) - 1 for s in range(len(self._graph))]
            known: dict[tuple[int, Kind, bool, bool], int] = {}
            units = []
            for i in at:
                a = actions[i]
                kind = a.stage, a.kind, a.microbatch == last[a.stage], i in ends
                unit = known.get(kind)
                if unit is None:
                    unit = known[kind] = self._unit_of(a, device, i in ends)
                units.append(unit)
            self._of_list[key] = np.array(at, np.int64), np.array(units, np.int64)
        return self._of_list[key]

    def _unit_of(self, action: Action, device: int, is_last: bool) -> int:
        replica = self._replica_of[action.stage, device]
        start, stop = self._graph.slice(action.stage, action.microbatch, replica)
        return self._unit(action.stage, action.kind, stop - start, replica, is_last)

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
