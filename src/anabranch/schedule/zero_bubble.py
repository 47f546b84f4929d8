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
how long passes and messages take; the best of two lists is taken.

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
from anabranch.schedule.justify import justified, those_after
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.schedule import Action, Kind, Order, Schedule

_URGENCY = {Kind.INPUT_GRADIENT: 0, Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.WEIGHT_GRADIENT: 3}
"""Order of passes that can start together."""

GAP = 0.25
"""Share of their length that a gap must have for gradients of weights to begin in it."""

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
    alike = [_lengths(ALIKE)] * len(graph)
    passes, schedulers = _Passes(graph), []
    for lengths in (own, alike)[: 1 if own == alike else 2]:
        schedulers.append(_ListScheduler(passes, lengths))
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


class _Passes:
    """The passes of a stage graph, by number, and what they wait for.

    Attributes:
        actions: by stage, then kind, then micro-batch.
        first: per stage and kind, the number of the first.
        samples: per stage, those of each micro-batch, from the first to behind the last.
        lanes: per stage, one of those of its devices that have the same stages.
        beside: per stage, others on its devices.
        sources: per stage and kind of pass that others wait for, the stages that it comes from, the
            samples of their micro-batches, and the seconds of a message.
        waits: per pass, those that it waits for, and the seconds in between.
        after: per pass, those that wait for it.
    """

    def __init__(self, graph: StageGraph) -> None:
        self.graph, count = graph, len(graph)
        self.actions: list[Action] = []
        self.first: list[dict[Kind, int]] = []
        for s, before in enumerate(graph.predecessors):
            halves = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if before else (Kind.BACKWARD,)
            self.first.append({})
            for kind in (Kind.FORWARD, *halves):
                self.first[s][kind] = len(self.actions)
                self.actions += [Action(s, kind, i) for i in range(graph.num_microbatches(s))]
        self.samples = [
            [graph.interval(s, i) for i in range(graph.num_microbatches(s))] for s in range(count)
        ]
        alike = {stages: device for device, stages in graph.stages_of.items()}
        self.lanes = [[alike[x] for x in alike if s in x] for s in range(count)]
        self.beside = [{t for x in alike if s in x for t in x} - {s} for s in range(count)]
        self.sources = [
            {
                Kind.FORWARD: [self._source(s, t) for t in graph.predecessors[s]],
                Kind.INPUT_GRADIENT: [self._source(s, t) for t in graph.successors[s]],
            }
            for s in range(count)
        ]
        self.waits = [list(self._earlier(action)) for action in self.actions]
        self.after = those_after(self.waits)

    def seconds(self, lengths: Lengths) -> list[float]:
        """Return the length of each pass."""
        intervals = (self.samples[a.stage][a.microbatch] for a in self.actions)
        return [
            (last - first) * lengths[action.stage][action.kind]
            for action, (first, last) in zip(self.actions, intervals, strict=True)
        ]

    def _source(self, s: int, t: int) -> tuple[int, int, float]:
        """Return a neighbour t of a stage as ``sources`` has it."""
        a, b = (self.graph.stages[x] for x in (min(s, t), max(s, t)))
        is_sent = {*a.devices} != {*b.devices}
        message_s = a.message * a.microbatch_size * SECONDS if is_sent else 0.0
        return t, self.graph.stages[t].microbatch_size, message_s

    def _earlier(self, action: Action) -> Iterator[tuple[int, float]]:
        """Generate the passes that one waits for, and the seconds of the message in between."""
        s, kind, i = action.stage, action.kind, action.microbatch
        graph, own = self.graph, self.first[s]
        if i:
            yield own[kind] + i - 1, 0.0
        if kind is Kind.WEIGHT_GRADIENT:
            yield own[Kind.INPUT_GRADIENT] + i, 0.0
            return
        if kind is not Kind.FORWARD:
            yield own[Kind.FORWARD] + i, 0.0
        elif i >= graph.stages[s].in_flight:
            yield max(own.values()) + i - graph.stages[s].in_flight, 0.0
        kept = _kept(kind)
        for t, size, message_s in self.sources[s][kept]:
            there = kept if kept in self.first[t] else Kind.BACKWARD
            number = -(-self.samples[s][i][1] // size) - 1
            yield self.first[t][there] + number, message_s


def _kept(kind: Kind) -> Kind:
    """Return the kind of a pass that other stages wait for: a whole backward is for them a gradient
    of inputs.
    """
    return Kind.INPUT_GRADIENT if kind is Kind.BACKWARD else kind


class _ListScheduler:
    """The state of the simulation.

    Attributes:
        length: lengths of passes, in times of a forward of the slowest stage.
        order: numbers of the passes begun so far, in their order.
        ends: when each of them ends.
        came: per stage, when its forwards and its gradients of inputs end, of those begun so far.
        done: per stage, micro-batches whose backward is complete.
        free: per lane, when it has nothing to do.
    """

    def __init__(self, passes: _Passes, length: Lengths) -> None:
        self.passes, self.graph, self.length = passes, passes.graph, length
        self.seconds = passes.seconds(length)
        self.order: list[int] = []
        self.ends = [0.0] * len(passes.actions)
        self.came: list[dict[Kind, list[float]]] = [
            {Kind.FORWARD: [], Kind.INPUT_GRADIENT: []} for _ in self.graph.stages
        ]
        self.done = [0] * len(self.graph)
        self.free = dict.fromkeys((x for lanes in passes.lanes for x in lanes), 0.0)

    @property
    def end(self) -> float:
        """The end of the step."""
        return max(self.ends)

    @property
    def actions(self) -> list[Action]:
        """The passes in their order."""
        return [self.passes.actions[number] for number in self.order]

    @property
    def orders(self) -> dict[int, Order]:
        """The passes of each device; those with the same stages share one object."""
        lists: dict[int, list[Action]] = {lane: [] for lane in self.free}
        for action in self.actions:
            for lane in self.passes.lanes[action.stage]:
                lists[lane].append(action)
        stages_of = self.graph.stages_of
        orders = {stages_of[lane]: Order(actions) for lane, actions in lists.items()}
        return {device: orders[stages] for device, stages in stages_of.items()}

    @property
    def most(self) -> list[int]:
        """Per stage, micro-batches between forward and backward at most."""
        held, most = [0] * len(self.graph), [0] * len(self.graph)
        for action in self.actions:
            held[action.stage] += (action.kind is Kind.FORWARD) - action.kind.ends_backward
            most[action.stage] = max(most[action.stage], held[action.stage])
        return most

    def run(self) -> None:
        """Begin all passes."""
        graph = self.graph
        queue: list[Pass] = []
        current: list[Pass | None] = [None] * len(graph)
        changed = set(range(len(graph)))
        while len(self.order) < len(self.ends):
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
            changed = {s, *(graph.successors[s] if kind is Kind.FORWARD else ())}
            if _kept(kind) is Kind.INPUT_GRADIENT:
                changed.update(graph.predecessors[s])
            changed = changed.union(*(self.passes.beside[t] for t in changed))

    def next_pass(self, s: int) -> Pass | None:
        """Return start, urgency and kind of the pass that a stage would begin next."""
        free = max([self.free[lane] for lane in self.passes.lanes[s]])
        entries = self.ready(s)
        passes = [(max(free, entry[0]), *entry[1:]) for entry in entries]
        if self.done[s] == len(self.came[s][Kind.INPUT_GRADIENT]):
            return min(passes, default=None)
        # There is a gradient of weights to compute.
        size = self.graph.stages[s].microbatch_size * self.length[s][Kind.WEIGHT_GRADIENT]
        entries += [entry for t in self.passes.beside[s] for entry in self.ready(t)]
        if min([entry[0] - free for entry in entries], default=size) < GAP * size:
            return min(passes, default=None)
        ready = max(free, self.came[s][Kind.INPUT_GRADIENT][self.done[s]])
        return self.entry(ready, s, Kind.WEIGHT_GRADIENT, self.done[s])

    def ready(self, s: int) -> list[Pass]:
        """Return the next forward and the next gradient of inputs whose turn is known, from when
        all is there that they need.
        """
        graph, came, samples = self.graph, self.came[s], self.passes.samples[s]
        forwards, gradients = came[Kind.FORWARD], came[Kind.INPUT_GRADIENT]
        entries: list[Pass] = []
        n = len(forwards)
        if n < len(samples) and n - self.done[s] < graph.stages[s].in_flight:
            there = self.when(s, Kind.FORWARD, samples[n][1])
            if there is not None:
                entries.append(self.entry(there, s, Kind.FORWARD, n))
        n = len(gradients)
        if n < len(forwards):
            there = self.when(s, Kind.INPUT_GRADIENT, samples[n][1])
            if there is not None:
                kind = Kind.INPUT_GRADIENT if graph.predecessors[s] else Kind.BACKWARD
                entries.append(self.entry(max(there, forwards[n]), s, kind, n))
        return entries

    def when(self, s: int, kind: Kind, samples: int) -> float | None:
        """Return when so many samples have come to a stage; None if that is not known yet."""
        last = 0.0
        for t, size, message_s in self.passes.sources[s][kind]:
            came = self.came[t][kind]
            index = -(-samples // size) - 1
            if index >= len(came):
                return None
            last = max(last, came[index] + message_s)
        return last

    def entry(self, start: float, s: int, kind: Kind, microbatch: int) -> Pass:
        """Return a pass; of those that can start together the least is by kind, samples, stage."""
        return start, _URGENCY[kind], self.passes.samples[s][microbatch][0], s, kind

    def begin(self, s: int, kind: Kind, start: float) -> None:
        """Begin the next pass of a kind."""
        came = self.came[s].get(_kept(kind))
        number = self.passes.first[s][kind] + (self.done[s] if came is None else len(came))
        end = self.ends[number] = start + self.seconds[number]
        if came is not None:
            came.append(end)
        self.done[s] += kind.ends_backward
        self.order.append(number)
        for lane in self.passes.lanes[s]:
            self.free[lane] = end

    def justify(self, length: Lengths) -> None:
        """Give passes these lengths, and move them if the step is shorter then."""
        passes, seconds, ends = self.passes, self.passes.seconds(length), self.ends
        lanes = [passes.lanes[action.stage] for action in passes.actions]
        free = dict.fromkeys(self.free, 0.0)
        for n in self.order:
            before = [ends[other] + between for other, between in passes.waits[n]]
            ends[n] = max([*before, *[free[lane] for lane in lanes[n]]]) + seconds[n]
            for lane in lanes[n]:
                free[lane] = ends[n]
        starts = justified(self.order, ends, seconds, passes.waits, passes.after, lanes)
        moved = [start + taken for start, taken in zip(starts, seconds, strict=True)]
        if max(moved) < self.end:
            self.order, self.ends = sorted(self.order, key=starts.__getitem__), moved
