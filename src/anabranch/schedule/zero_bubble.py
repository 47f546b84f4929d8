"""Split backwards in a list schedule: gradients of inputs first, those of weights in the gaps.

A stage waits for the gradients of inputs (I) of the stages behind it, and nobody for those of
weights (W). So W can wait until a device has nothing else to do, and the pipeline drains sooner. A
chain of four equal stages whose memory holds four micro-batches, I and W as long as F::

    stage 0  F0 F1 F2 F3  .  .  .  B0 -- F4 B1 -- ...
    stage 1  .  F0 F1 F2  .  . I0 F3 W0 I1 F4 W1 ...
    stage 2  .  .  F0 F1  . I0 F2 I1 F3 W0 ...
    stage 3  .  .  .  F0 I0 F1 I1 F2 I2 W0 ...

(Qi et al., *Zero Bubble Pipeline Parallelism*, 2024, sections 2 and 3, on a chain, with schedules
H1 and H2 by hand and a heuristic.) Here the computes of any stage graph are simulated once, in the
order of their start. A device takes the gradients of inputs that are due first, since the way back
is what the step waits for, then forwards, then the rest; W only into a gap that is long enough, or
where memory holds no further micro-batch. Nobody waits for the gradients of a first stage's inputs,
so its backward stays whole. Then passes are moved once more (``schedule.justify``). ``Stage`` says
how long passes and messages take; the best of three lists is taken.

Of 100 drawn stage graphs of up to 6 stages and 8 micro-batches (``python -m benchmarks.schedules``)
100 lists are the shortest where stages are alike, and 95 where passes take 1 to 3 s; without the
moves and with W only into gaps of its length 88 and 82.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush

from anabranch.errors import InvalidScheduleError
from anabranch.plans.in_flight import least_in_flight, with_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.base import Room
from anabranch.schedule.justify import justified
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.schedule import Action, Kind, Order, Schedule

_URGENCY = {Kind.INPUT_GRADIENT: 0, Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.WEIGHT_GRADIENT: 3}
"""Order of passes that can start together."""

Lengths = Sequence[Mapping[Kind, float]]
"""Per stage, seconds of each kind of pass for a sample."""

Pass = tuple[float, int, int, int, Kind]
"""When a pass can start, its urgency, its first sample, its stage, and its kind."""

SECONDS = 3.0
"""Seconds of a sample at the slowest stage: 1 s of them are its forward, by default."""


@dataclass(frozen=True)
class ZeroBubble:
    """A list schedule with split backwards.

    Attributes:
        memory: samples that a stage may hold, in times of the fullest stage's under 1F1B: 1 is H1,
            2 is H2 on a chain.
    """

    memory: int = 1

    @property
    def per_hop(self) -> int:
        return 0

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set how many micro-batches are between a forward and the end of its backward at most."""
        counts = self.most_in_flight(graph, room)
        return with_in_flight(graph, _scheduled(with_in_flight(graph, counts)).most)

    def most_in_flight(self, graph: StageGraph, room: Room | None = None) -> list[int]:
        """Return the micro-batches that each stage may hold."""
        least = least_in_flight(graph)
        sizes = [stage.microbatch_size for stage in graph.stages]
        most = self.memory * max(n * size for n, size in zip(least, sizes, strict=True))
        counts: list[int] = []
        for s, size in enumerate(sizes):
            before = (counts[x] * sizes[x] for x in graph.predecessors[s])
            fitting = graph.num_microbatches(s) if room is None else room(s)
            allowed = min([-(-most // size), fitting, *(samples // size for samples in before)])
            counts.append(min(max(allowed, least[s]), graph.num_microbatches(s)))
        return counts

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order in which computes start."""
        return Schedule(_scheduled(graph).orders)


@lru_cache(maxsize=256)
def _scheduled(graph: StageGraph) -> _ListScheduler:
    """Return the best of some simulations at its end: with the lengths of passes as they are, and
    as if stages were alike, which makes regular lists.
    """
    own = [_lengths(stage) for stage in graph.stages]
    halves = [_lengths(replace(ALIKE, weight_share=s.weight_share)) for s in graph.stages]
    alike = [_lengths(ALIKE)] * len(graph)
    schedulers = []
    for lengths, gap in ((own, 0.25), (alike, 0.25), (halves, 1.0))[: 1 if own == alike else 3]:
        schedulers.append(_ListScheduler(graph, lengths, gap))
        schedulers[-1].run()
        schedulers[-1].justify(lengths)
        schedulers[-1].justify(own)
    return min(schedulers, key=lambda scheduler: scheduler.end)


@dataclass(frozen=True)
class InputsFirst:
    """1F1B whose backwards are split: gradients of inputs, which are sent, then those of weights.

    Attributes:
        increase: of the warm-up per stage edge, see ``KFKB.per_hop``.
    """

    increase: int = 1

    @property
    def per_hop(self) -> int:
        return 0

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set in-flight counts as 1F1B does."""
        return KFKB(self.increase).warm_up(graph, room)

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order of 1F1B with both halves of a backward in its place."""

        def halves(action: Action) -> tuple[Action, ...]:
            if action.kind is Kind.FORWARD or not graph.predecessors[action.stage]:
                return (action,)
            kinds = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
            return tuple(replace(action, kind=kind) for kind in kinds)

        whole = KFKB(self.increase).order(graph).actions
        return Schedule(
            {
                device: Order(half for action in actions for half in halves(action))
                for device, actions in whole.items()
            }
        )


def _lengths(stage: Stage) -> dict[Kind, float]:
    """Return seconds of each kind of pass for a sample."""
    forward_s = stage.load * SECONDS / (1 + stage.backward_factor)
    backward_s = forward_s * stage.backward_factor
    weights_s = backward_s * stage.weight_share
    return {
        Kind.FORWARD: forward_s,
        Kind.BACKWARD: backward_s,
        Kind.INPUT_GRADIENT: backward_s - weights_s,
        Kind.WEIGHT_GRADIENT: weights_s,
    }


ALIKE = Stage(("any",), (0,), 1)


class _ListScheduler:
    """The state of the simulation.

    Attributes:
        ends: per stage, when its forwards and its gradients of inputs end, of those begun so far.
        done: per stage, micro-batches whose backward is complete.
        length: lengths of passes; those of all lists in times of a forward of the slowest stage.
        gap: share of their length that a gap must have for gradients of weights to begin in it.
        stages_of: per device, its stages.
        beside: per stage, others on its devices.
        samples: per stage, those of each micro-batch, from the first to behind the last.
        begun: all passes in their order, with their ends.
        entries: per stage, what ``ready`` says of it.
    """

    def __init__(self, graph: StageGraph, length: Lengths, gap: float) -> None:
        self.graph, self.length, self.gap = graph, length, gap
        self.ends: list[dict[Kind, list[float]]] = [
            {Kind.FORWARD: [], Kind.INPUT_GRADIENT: []} for _ in graph.stages
        ]
        self.done = [0] * len(graph)
        self.free = dict.fromkeys(graph.devices, 0.0)
        self.begun: list[tuple[Action, float]] = []
        self.entries: list[list[Pass]] = [[] for _ in graph.stages]
        self.stages_of = graph.stages_of
        self.beside = [
            {t for t, other in enumerate(graph.stages) if {*other.devices} & {*stage.devices}} - {s}
            for s, stage in enumerate(graph.stages)
        ]
        self.samples = [
            [graph.interval(s, i) for i in range(graph.num_microbatches(s))]
            for s in range(len(graph))
        ]

    @property
    def end(self) -> float:
        """The end of the step."""
        return max(end for _, end in self.begun)

    @property
    def orders(self) -> dict[int, Order]:
        """The passes of each device; replicas share one object."""
        lists: dict[tuple[int, ...], list[Action]] = {x: [] for x in self.stages_of.values()}
        holders = [[x for x in lists if s in x] for s in range(len(self.graph))]
        for action, _ in self.begun:
            for stages in holders[action.stage]:
                lists[stages].append(action)
        orders = {stages: Order(actions) for stages, actions in lists.items()}
        return {device: orders[stages] for device, stages in self.stages_of.items()}

    @property
    def most(self) -> list[int]:
        """Per stage, micro-batches between forward and backward at most."""
        held, most = [0] * len(self.graph), [0] * len(self.graph)
        for action, _ in self.begun:
            held[action.stage] += (action.kind is Kind.FORWARD) - action.kind.ends_backward
            most[action.stage] = max(most[action.stage], held[action.stage])
        return most

    def run(self) -> None:
        """Begin all passes."""
        graph = self.graph
        queue: list[Pass] = []
        current: list[Pass | None] = [None] * len(graph)
        changed = touched = set(range(len(graph)))
        count = sum(
            len(self.samples[s]) * (3 if graph.predecessors[s] else 2) for s in range(len(graph))
        )
        while len(self.begun) < count:
            for s in touched:
                self.entries[s] = [*self.ready(s)]
            for s in changed:
                current[s] = self.next_pass(s)
                if (waiting := current[s]) is not None:
                    heappush(queue, waiting)
            while queue and queue[0] != current[queue[0][3]]:
                heappop(queue)  # another pass of the stage goes first now
            if not queue:
                raise InvalidScheduleError(
                    "stages wait for each other, as one of them may hold too few micro-batches for "
                    "those behind it; leave in_flight out of all stages of the plan"
                )
            start, _, _, s, kind = heappop(queue)
            self.begin(s, kind, start)
            touched = {s, *graph.predecessors[s], *graph.successors[s]}
            changed = touched | self.beside[s]

    def next_pass(self, s: int) -> Pass | None:
        """Return start, urgency and kind of the pass that a stage would begin next."""
        free = max(self.free[device] for device in self.graph.stages[s].devices)
        entries = self.entries[s]
        passes = [(max(free, entry[0]), *entry[1:]) for entry in entries]
        if self.done[s] == len(self.ends[s][Kind.INPUT_GRADIENT]):
            return min(passes, default=None)
        # There is a gradient of weights to compute.
        size = self.graph.stages[s].microbatch_size * self.length[s][Kind.WEIGHT_GRADIENT]
        entries = entries + [entry for t in self.beside[s] for entry in self.entries[t]]
        if min((entry[0] - free for entry in entries), default=size) < self.gap * size:
            return min(passes, default=None)
        ready = max(free, self.ends[s][Kind.INPUT_GRADIENT][self.done[s]])
        return ready, *self.key(s, Kind.WEIGHT_GRADIENT, self.done[s])

    def ready(self, s: int) -> Iterator[Pass]:
        """Generate the next forward and the next gradient of inputs whose turn is known, from when
        all is there that they need.
        """
        graph, ends, samples = self.graph, self.ends[s], self.samples[s]
        forwards, gradients = ends[Kind.FORWARD], ends[Kind.INPUT_GRADIENT]
        n = len(forwards)
        if n < len(samples) and n - self.done[s] < graph.stages[s].in_flight:
            there = self.when(s, Kind.FORWARD, samples[n][1])
            if there is not None:
                yield there, *self.key(s, Kind.FORWARD, n)
        n = len(gradients)
        if n < len(forwards):
            there = self.when(s, Kind.INPUT_GRADIENT, samples[n][1])
            if there is not None:
                kind = Kind.INPUT_GRADIENT if graph.predecessors[s] else Kind.BACKWARD
                yield max(there, forwards[n]), *self.key(s, kind, n)

    def seconds(self, action: Action) -> float:
        """Return the length of a pass."""
        first, last = self.samples[action.stage][action.microbatch]
        return (last - first) * self.length[action.stage][action.kind]

    def when(self, s: int, kind: Kind, samples: int) -> float | None:
        """Return when so many samples have come to a stage; None if that is not known yet."""
        graph, last = self.graph, 0.0
        for t in graph.predecessors[s] if kind is Kind.FORWARD else graph.successors[s]:
            index = -(-samples // graph.stages[t].microbatch_size) - 1
            if index >= len(self.ends[t][kind]):
                return None
            last = max(last, self.ends[t][kind][index] + self.message(t, s))
        return last

    def message(self, a: int, b: int) -> float:
        """Return the seconds of a message from one stage to another, forward or back."""
        stage = self.graph.stages[min(a, b)]
        if {*stage.devices} == {*self.graph.stages[max(a, b)].devices}:
            return 0.0
        return stage.message * stage.microbatch_size * SECONDS

    def key(self, s: int, kind: Kind, microbatch: int) -> tuple[int, int, int, Kind]:
        """Order of passes that can start together: by kind, then samples, then stage."""
        return _URGENCY[kind], self.samples[s][microbatch][0], s, kind

    def begin(self, s: int, kind: Kind, start: float) -> None:
        """Begin the next pass of a kind."""
        kept = Kind.INPUT_GRADIENT if kind is Kind.BACKWARD else kind
        microbatch = len(self.ends[s][kept]) if kept in self.ends[s] else self.done[s]
        action = Action(s, kind, microbatch)
        end = start + self.seconds(action)
        if kept in self.ends[s]:
            self.ends[s][kept].append(end)
        self.done[s] += kind.ends_backward
        self.begun.append((action, end))
        for device in self.graph.stages[s].devices:
            self.free[device] = end

    def justify(self, length: Lengths) -> None:
        """Give passes these lengths, and move them if the step is shorter then."""
        self.length, order = length, [action for action, _ in self.begun]
        number = {(a.stage, a.kind, a.microbatch): n for n, a in enumerate(order)}
        waits = [
            [(number[key], self.message(key[0], a.stage)) for key in self.earlier(a)] for a in order
        ]
        alike = {stages: device for device, stages in self.stages_of.items()}
        lanes = [[alike[x] for x in alike if a.stage in x] for a in order]
        seconds = [self.seconds(action) for action in order]
        ends, free = list[float](), dict.fromkeys(alike.values(), 0.0)
        for earlier, used, taken in zip(waits, lanes, seconds, strict=True):
            start = max([ends[n] + between for n, between in earlier] + [free[x] for x in used])
            ends.append(start + taken)
            free |= dict.fromkeys(used, ends[-1])
        starts = justified(ends, seconds, waits, lanes)
        self.begun = list(zip(order, ends, strict=True))
        moved = [start + taken for start, taken in zip(starts, seconds, strict=True)]
        if max(moved) < self.end:
            by_start = sorted(range(len(order)), key=lambda n: (starts[n], n))
            self.begun = [(order[n], moved[n]) for n in by_start]

    def earlier(self, action: Action) -> Iterator[tuple[int, Kind, int]]:
        """Generate stage, kind and micro-batch of passes that one waits for."""
        graph, s, kind, i = self.graph, action.stage, action.kind, action.microbatch
        if i:
            yield s, kind, i - 1
        if kind is Kind.WEIGHT_GRADIENT:
            yield s, Kind.INPUT_GRADIENT, i
            return
        neighbours = graph.predecessors[s]
        if kind is not Kind.FORWARD:
            yield s, Kind.FORWARD, i
            neighbours = graph.successors[s]
        elif i >= graph.stages[s].in_flight:
            last = Kind.WEIGHT_GRADIENT if neighbours else Kind.BACKWARD
            yield s, last, i - graph.stages[s].in_flight
        for t in neighbours:
            gradient = Kind.INPUT_GRADIENT if graph.predecessors[t] else Kind.BACKWARD
            there = Kind.FORWARD if kind is Kind.FORWARD else gradient
            yield t, there, -(-self.samples[s][i][1] // graph.stages[t].microbatch_size) - 1
