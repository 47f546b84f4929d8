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
is what the step waits for, then forwards, then the rest; W only into a gap that is large enough, or
where memory holds no further micro-batch. Nobody waits for the gradients of a first stage's inputs,
so its backward stays whole.

Stages are taken to be balanced: a forward lasts as long as its micro-batch has samples, a backward
twice as long, of which gradients of weights take the stage's ``weight_share``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush

from anabranch.errors import InvalidScheduleError
from anabranch.plans.in_flight import least_in_flight, with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule.base import Room
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.schedule import Action, Kind, Order, Schedule

_URGENCY = {Kind.INPUT_GRADIENT: 0, Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.WEIGHT_GRADIENT: 3}
"""Order of passes that can start together."""

Pass = tuple[float, int, int, int, Kind]
"""When a pass can start, its urgency, its first sample, its stage, and its kind."""

BACKWARD = 2.0
"""Seconds of a backward in times of its forward."""


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
        least = least_in_flight(graph)
        sizes = [stage.microbatch_size for stage in graph.stages]
        most = self.memory * max(n * size for n, size in zip(least, sizes, strict=True))
        counts: list[int] = []
        for s, size in enumerate(sizes):
            before = (counts[x] * sizes[x] for x in graph.predecessors[s])
            fitting = graph.num_microbatches(s) if room is None else room(s)
            allowed = min([-(-most // size), fitting, *(samples // size for samples in before)])
            counts.append(min(max(allowed, least[s]), graph.num_microbatches(s)))
        return with_in_flight(graph, _scheduled(with_in_flight(graph, counts)).most)

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order in which computes start."""
        lists = _scheduled(graph).lists
        return Schedule({device: Order(actions) for device, actions in lists.items()})


@lru_cache(maxsize=256)
def _scheduled(graph: StageGraph) -> _ListScheduler:
    """Return the simulation of a stage graph at its end; the same with counts that it reaches."""
    scheduler = _ListScheduler(graph)
    scheduler.run()
    return scheduler


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


class _ListScheduler:
    """The state of the simulation.

    Attributes:
        ends: per stage, when its forwards and its gradients of inputs end, of those begun so far.
        done: per stage, micro-batches whose backward is complete.
        most: per stage, micro-batches between forward and backward at most.
        lists: the passes of each device.
    """

    def __init__(self, graph: StageGraph) -> None:
        self.graph = graph
        self.ends: list[dict[Kind, list[float]]] = [
            {Kind.FORWARD: [], Kind.INPUT_GRADIENT: []} for _ in graph.stages
        ]
        self.done = [0] * len(graph)
        self.most = [0] * len(graph)
        self.free = dict.fromkeys(graph.devices, 0.0)
        self.lists: dict[int, list[Action]] = {device: [] for device in graph.devices}
        self.beside = [
            {t for t, other in enumerate(graph.stages) if {*other.devices} & {*stage.devices}}
            for stage in graph.stages
        ]

    def run(self) -> None:
        """Begin all passes."""
        graph = self.graph
        queue: list[Pass] = []
        current: list[Pass | None] = [None] * len(graph)
        changed = set(range(len(graph)))
        while any(n < graph.num_microbatches(s) for s, n in enumerate(self.done)):
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
            changed = {*self.beside[s], *graph.predecessors[s], *graph.successors[s]}

    def next_pass(self, s: int) -> Pass | None:
        """Return start, urgency and kind of the pass that a stage would begin next."""
        free = max(self.free[device] for device in self.graph.stages[s].devices)
        passes = [(max(free, entry[0]), *entry[1:]) for entry in self.ready(s)]
        if self.done[s] == len(self.ends[s][Kind.INPUT_GRADIENT]):
            return min(passes, default=None)
        # There is a gradient of weights to compute.
        size = self.graph.stages[s].microbatch_size * self.length(s, Kind.WEIGHT_GRADIENT)
        others = [p for t in self.beside[s] for p in self.ready(t)]
        gap = min((ready - free for ready, *_ in others), default=size)
        if gap < size:
            return min(passes, default=None)
        ready = max(free, self.ends[s][Kind.INPUT_GRADIENT][self.done[s]])
        return ready, *self.key(s, Kind.WEIGHT_GRADIENT, self.done[s])

    def ready(self, s: int) -> Iterator[Pass]:
        """Generate the next forward and the next gradient of inputs whose turn is known, from when
        all is there that they need.
        """
        graph, ends = self.graph, self.ends[s]
        forwards, gradients = ends[Kind.FORWARD], ends[Kind.INPUT_GRADIENT]
        n = len(forwards)
        if n < graph.num_microbatches(s) and n - self.done[s] < graph.stages[s].in_flight:
            there = self.when(graph.predecessors[s], Kind.FORWARD, graph.interval(s, n)[1])
            if there is not None:
                yield there, *self.key(s, Kind.FORWARD, n)
        n = len(gradients)
        if n < len(forwards):
            there = self.when(graph.successors[s], Kind.INPUT_GRADIENT, graph.interval(s, n)[1])
            if there is not None:
                kind = Kind.INPUT_GRADIENT if graph.predecessors[s] else Kind.BACKWARD
                yield max(there, forwards[n]), *self.key(s, kind, n)

    def length(self, s: int, kind: Kind) -> float:
        """Return the length of a pass for each of its samples."""
        if kind is Kind.FORWARD:
            return 1.0
        share = self.graph.stages[s].weight_share if kind is not Kind.BACKWARD else 0.0
        return BACKWARD * (share if kind is Kind.WEIGHT_GRADIENT else 1.0 - share)

    def when(self, stages: Iterable[int], kind: Kind, samples: int) -> float | None:
        """Return when stages have done so many samples; None if that is not known yet."""
        last = 0.0
        for s in stages:
            index = -(-samples // self.graph.stages[s].microbatch_size) - 1
            if index >= len(self.ends[s][kind]):
                return None
            last = max(last, self.ends[s][kind][index])
        return last

    def key(self, s: int, kind: Kind, microbatch: int) -> tuple[int, int, int, Kind]:
        """Order of passes that can start together: by kind, then samples, then stage."""
        return _URGENCY[kind], self.graph.interval(s, microbatch)[0], s, kind

    def begin(self, s: int, kind: Kind, start: float) -> None:
        """Begin the next pass of a kind."""
        stage = self.graph.stages[s]
        kept = Kind.INPUT_GRADIENT if kind is Kind.BACKWARD else kind
        microbatch = len(self.ends[s][kept]) if kept in self.ends[s] else self.done[s]
        first, last = self.graph.interval(s, microbatch)
        end = start + (last - first) * self.length(s, kind)
        if kept in self.ends[s]:
            self.ends[s][kept].append(end)
        self.done[s] += kind.ends_backward
        self.most[s] = max(self.most[s], len(self.ends[s][Kind.FORWARD]) - self.done[s])
        for device in stage.devices:
            self.free[device] = end
            self.lists[device].append(Action(s, kind, microbatch))
