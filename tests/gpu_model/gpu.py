"""GPUs of a few ranks in one process, without time: what is given to a device, and what can end.

Operations of a stream run in their order. A device takes them from a bounded number of hardware
queues, which streams share when there are more: what cannot begin holds up what is behind it. A
send, a receive and a sum spin on some multiprocessors from when they begin until their partners on
other devices have begun, too; a computation needs a free multiprocessor. Which of the operations
that could go on does so is drawn.

Hosts are threads, of which one runs at a time; they change at calls, as it is drawn. A host may
wait, at any call, until its device has done all that it was given. When no host and no device can
go on, that is a hang.

Memory is checked meanwhile: of two accesses to a buffer, one of them a write, one must happen
before the other, by streams, events, messages, or the host; and a reader must find what it expects.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

QUEUED, BEGUN, DONE = range(3)


class HangError(Exception):
    """No host and no device can go on."""


class RaceError(Exception):
    """Two accesses to a buffer in no order, or a reader that finds other contents."""


@dataclass(slots=True, eq=False)
class Operation:
    """Work of a device.

    Attributes:
        partners: name of what devices do together, and how many halves it has; none alone.
        past: operations (bits) that happen before it; complete when it is done.
        accesses: buffer, contents, whether they are written; without contents those of a partner.
        payload: contents that a send has for its partner.
    """

    device: Device
    name: str
    bit: int
    past: int
    after: list[Operation]
    blocks: int = 0
    partners: tuple[Hashable, int] | None = None
    accesses: Sequence[tuple[Hashable, Hashable, bool]] = ()
    payload: Hashable = None
    state: int = QUEUED


class Device:
    """The device of a rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.free = world.multiprocessors
        self.last: dict[Hashable, Operation] = {}
        self.queue_of: dict[Hashable, int] = {}
        self.queues: dict[int, deque[Operation]] = defaultdict(deque)

    def give(
        self,
        stream: Hashable,
        name: str,
        after: Iterable[Operation | None] = (),
        *,
        blocks: int = 0,
        partners: tuple[Hashable, int] | None = None,
        accesses: Sequence[tuple[Hashable, Hashable, bool]] = (),
        payload: Hashable = None,
    ) -> Operation:
        """Give the device an operation; no host waits here."""
        world = self.world
        before = [op for op in (self.last.get(stream), *after) if op is not None]
        operation = Operation(
            self, name, world.new_bit(), world.hosts[self.rank].past, before, blocks, partners
        )
        operation.accesses, operation.payload = accesses, payload
        self.last[stream] = operation
        # Streams take the hardware's queues in turn, in the order of their first use.
        queue = self.queue_of.setdefault(stream, len(self.queue_of) % world.num_queues)
        self.queues[queue].append(operation)
        return operation

    def place(self, stream: Hashable) -> Operation | None:
        """Return the last operation of a stream: where an event is recorded."""
        return self.last.get(stream)

    def able(self) -> list[deque[Operation]]:
        """Queues whose first operation can begin."""
        return [
            queue
            for queue in self.queues.values()
            if queue
            and self.free >= queue[0].blocks
            and all(op.state == DONE for op in queue[0].after)
        ]

    @property
    def is_idle(self) -> bool:
        """True if all is done that was given."""
        return all(op.state == DONE for op in self.last.values())


@dataclass(eq=False)
class Host:
    """A host: its thread's turn, what it waits for, and what happens before its next call."""

    rank: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    ready: Callable[[], bool] | None = None
    waits_for: str = ""
    calls: int = 0
    past: int = 0
    is_over: bool = False


class World:
    """All ranks.

    Args:
        injected: whether a host waits for its device at a call, by rank and number of the call.
        lag: share of the calls at which devices do nothing, so that hosts run ahead.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        seed: int = 0,
        num_queues: int = 32,
        multiprocessors: int = 40,
        injected: Callable[[int, int], bool] = lambda rank, call: False,
        lag: float = 0.7,
    ) -> None:
        self.draws = random.Random(seed)
        self.num_queues, self.multiprocessors = num_queues, multiprocessors
        self.injected, self.lag = injected, lag
        self._bits = 0
        self.hosts = [Host(rank) for rank in range(num_ranks)]
        self.devices = [Device(self, rank) for rank in range(num_ranks)]
        self._halves: defaultdict[Hashable, list[Operation]] = defaultdict(list)
        self._touched: defaultdict[Hashable, list[tuple[Operation, bool]]] = defaultdict(list)
        self._contents: dict[Hashable, Hashable] = {}
        self.error: BaseException | None = None

    def new_bit(self) -> int:
        self._bits += 1
        return 1 << self._bits

    # Devices

    def advance(self, most: int = 1 << 30) -> bool:
        """Let devices make drawn moves, as many as they can at most; return whether any could."""
        moved = False
        for _ in range(most):
            able = [queue for device in self.devices for queue in device.able()]
            if not able:
                break
            operation = self.draws.choice(able).popleft()
            operation.device.free -= operation.blocks
            moved = True
            if operation.partners is None:
                self._end([operation])
                continue
            operation.state = BEGUN
            name, count = operation.partners
            halves = self._halves[name]
            halves.append(operation)
            if len(halves) == count:
                self._end(halves)
                del self._halves[name]
        return moved

    def _end(self, operations: list[Operation]) -> None:
        past, payload = 0, None
        for operation in operations:
            payload = operation.payload or payload
            past |= operation.past | operation.bit
            for before in operation.after:
                past |= before.past | before.bit
        for operation in operations:
            operation.device.free += operation.blocks
            operation.state, operation.past = DONE, past
            operation.after = []
            for buffer, contents, writes in operation.accesses:
                self._check(operation, buffer, contents or payload, writes)

    def _check(
        self, operation: Operation, buffer: Hashable, contents: Hashable, writes: bool
    ) -> None:
        touched = self._touched[buffer]
        for other, wrote in touched:
            if (writes or wrote) and not operation.past & other.bit:
                raise RaceError(f"{operation.name} and {other.name} touch {buffer} in no order")
        if writes:
            touched.clear()
            self._contents[buffer] = contents
        elif self._contents.get(buffer, contents) != contents:
            raise RaceError(
                f"{operation.name} finds {self._contents[buffer]} where {contents} should be"
            )
        touched.append((operation, writes))

    # Hosts

    def call(self, rank: int, what: str) -> None:
        """Begin a call of a host: it may wait for its device, and others may take their turn."""
        host = self.hosts[rank]
        host.calls += 1
        if self.draws.random() >= self.lag:
            self.advance(self.draws.randrange(1, 8))
        if self.injected(rank, host.calls):
            self.synchronize(rank, what)
        elif self.draws.random() < 0.3:
            self.wait(rank, lambda: True, what)

    def synchronize(self, rank: int, what: str = "a look") -> None:
        """Wait until a device has done all that it was given."""
        device = self.devices[rank]
        self.advance(self.draws.randrange(1, 8))
        if not device.is_idle:
            self.wait(rank, lambda: device.is_idle, f"its device, in {what}")
        for operation in device.last.values():
            self.hosts[rank].past |= operation.past | operation.bit

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others have their turn until something is so."""
        host = self.hosts[rank]
        host.ready, host.waits_for = ready, what
        while True:
            chosen = self._next()
            if chosen is not host:
                chosen.turn.release()
                host.turn.acquire()
                if self.error is not None:
                    raise self.error
            if ready():
                break
        host.ready = None

    def _next(self) -> Host:
        while True:
            able = [h for h in self.hosts if not h.is_over and (h.ready is None or h.ready())]
            if able:
                return self.draws.choice(able)
            if not self.advance(8):
                waiting = [f"rank {h.rank} waits for {h.waits_for}" for h in self.hosts if h.ready]
                raise HangError("; ".join(waiting))

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run a function on each host, then let all devices come to an end."""

        def work(host: Host) -> None:
            host.turn.acquire()
            try:
                if self.error is None:
                    works[host.rank]()
                host.is_over = True
                if self.error is None and not all(h.is_over for h in self.hosts):
                    self._next().turn.release()
            except BaseException as error:
                host.is_over = True
                self.error = self.error or error
                for other in self.hosts:
                    if not other.is_over and other.turn.locked():
                        other.turn.release()

        for host in self.hosts:
            host.turn.acquire()
        threads = [threading.Thread(target=work, args=(host,)) for host in self.hosts]
        for thread in threads:
            thread.start()
        self.draws.choice(self.hosts).turn.release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.advance()
        if not all(device.is_idle for device in self.devices):
            raise HangError("devices do not come to an end")
