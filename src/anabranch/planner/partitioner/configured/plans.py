"""From stages with micro-batch sizes of their own to stage graphs with an estimate.

Devices that a search left over go to the slowest stage that can use them: twice as many replicas,
one more, or the stage cut in two; then to any stage that can have them. Replicas of a stage lie in
one node where possible (``partitioner.place``), in two orders: branch after branch, and from the
sink backwards.

The estimate, with everything per sample because micro-batches differ::

    pace      max over s of (F + B) / b, over ports of the seconds that they are busy,
              and of  around / held
    around(s) F + B + max over y of (transfers + around(y)),  in y's micro-batch if it is larger
    held(s)   samples in flight at twice the increase of Table 2
    start(y)  max over x of  start(x) + F_x * max(1, b_y / b_x) + transfer
    end(s)    max(start + (batch - b) * pace + F + B,
                  max over y of  end(y) + transfer + B_s * max(1, b_y / b_s))
    step      max over s of (end + all-reduce)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from anabranch.cost import CostModel, Port
from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.configured.trace import Chosen
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.place import place
from anabranch.planner.toolkit.prices import Mode
from anabranch.plans.check import check, stage_bytes
from anabranch.plans.in_flight import in_flight_samples, least_in_flight
from anabranch.plans.slices import priced
from anabranch.plans.stages import Stage, StageGraph


@dataclass(frozen=True)
class Finisher:
    """Turns chosen stages into stage graphs.

    Attributes:
        cost: prices them.
        order: operators, branch after branch.
        batch_size: samples of one step.
        max_replicas: replicas per stage at most.
    """

    cost: CostModel
    order: tuple[int, ...]
    batch_size: int
    max_replicas: int

    def candidates(self, stages: Sequence[Chosen]) -> Iterator[Candidate]:
        """Stage graphs of these stages on all devices; none if none is in memory."""
        spread = self._use_rest(list(stages))
        if spread is None:
            return
        ordered, pairs = self._arrange(spread)
        seen = set()
        for devices in self._places(ordered, pairs):
            graph = self._stage_graph(ordered, devices, pairs)
            if graph not in seen and not check(graph, self.cost):
                seen.add(graph)
                pace = max(self._pace(each) for each in ordered)
                largest = max(each.microbatch_size for each in ordered)
                yield Candidate(graph, step_s(graph, self.cost), pace * largest)

    def _use_rest(self, stages: list[Chosen]) -> list[Chosen] | None:
        """Stages that use all devices."""
        left = self.cost.cluster.num_devices - sum(each.mode.devices for each in stages)
        while left:
            change = next(self._changes(stages, left, helpful=True), None)
            change = change or next(self._changes(stages, left, helpful=False), None)
            if change is None:
                return None
            before, after = change
            stages = [each for each in stages if each != before] + after
            left -= sum(each.mode.devices for each in after) - before.mode.devices
        return stages

    def _changes(
        self, stages: Sequence[Chosen], left: int, *, helpful: bool
    ) -> Iterator[tuple[Chosen, list[Chosen]]]:
        """Ways to use some of the devices left, those for the slowest stage first."""
        for stage in sorted(stages, key=lambda each: (-self._pace(each), each.mask)):
            pace = self._pace(stage)
            for replicas in (2 * stage.mode.replicas, stage.mode.replicas + 1):
                more = replace(stage, mode=replace(stage.mode, replicas=replicas))
                possible = more.mode.devices - stage.mode.devices <= left and self._may(more)
                if possible and (not helpful or self._pace(more) < pace):
                    yield stage, [more]
            if stage.mode.devices <= left:
                halves = self._halves(stage)
                if halves and (not helpful or max(map(self._pace, halves)) < pace):
                    rest = [each for each in stages if each != stage]
                    if self._fits([*rest, *halves]):
                        yield stage, halves

    def _may(self, stage: Chosen) -> bool:
        size, replicas = stage.microbatch_size, stage.mode.replicas
        possible = replicas <= min(size, self.max_replicas)
        return possible and priced(self.cost, self.batch_size, size, replicas)

    def _halves(self, stage: Chosen) -> list[Chosen]:
        """The stage cut in two, each with as many replicas, so that the slower is quickest."""
        ops = sorted(bits(stage.mask), key=self.order.index)
        cuts = []
        first = 0
        for op in ops[:-1]:
            first |= 1 << op
            cuts.append([replace(stage, mask=first), replace(stage, mask=stage.mask & ~first)])
        return min(cuts, key=lambda halves: max(map(self._pace, halves)), default=[])

    def _pace(self, stage: Chosen) -> float:
        """Seconds of compute per sample."""
        forward, backward = compute_s(self.cost, stage.mask, stage.microbatch_size, stage.mode)
        return (forward + backward) / stage.microbatch_size

    def _fits(self, stages: Sequence[Chosen]) -> bool:
        """Whether every stage has memory, wherever its devices are."""
        ordered, pairs = self._arrange(stages)
        devices = place([each.mode.devices for each in ordered], self.cost.cluster.group_sizes)
        graph = self._stage_graph(ordered, devices, pairs)
        held = least_in_flight(graph)
        limit = self.cost.cluster.memory_bytes
        return all(
            stage_bytes(graph, self.cost, s, in_flight=held[s]) <= limit for s in range(len(graph))
        )

    def _arrange(self, stages: Sequence[Chosen]) -> tuple[list[Chosen], list[tuple[int, int]]]:
        """Stages in topological order, branch after branch, and the edges between them."""
        home = {op: s for s, stage in enumerate(stages) for op in bits(stage.mask)}
        pairs = {(home[a], home[b]) for a, b in self.cost.graph.edges if home[a] != home[b]}
        position = {op: at for at, op in enumerate(self.order)}
        key = [min(position[op] for op in bits(stage.mask)) for stage in stages]
        waits = [sum(y == s for _, y in pairs) for s in range(len(stages))]
        ready = [(key[s], s) for s in range(len(stages)) if not waits[s]]
        heapq.heapify(ready)
        at: dict[int, int] = {}
        while ready:
            _, s = heapq.heappop(ready)
            at[s] = len(at)
            for x, y in pairs:
                if x == s:
                    waits[y] -= 1
                    if not waits[y]:
                        heapq.heappush(ready, (key[y], y))
        assert len(at) == len(stages), "convex stages along a series-parallel order are acyclic"
        return [stages[s] for s in at], sorted((at[x], at[y]) for x, y in pairs)

    def _places(
        self, stages: Sequence[Chosen], pairs: Sequence[tuple[int, int]]
    ) -> Iterator[list[list[int]]]:
        """Devices of the stages, in two orders."""
        height = [0] * len(stages)
        for x, y in sorted(pairs, reverse=True):
            height[x] = max(height[x], height[y] + 1)
        forward = list(range(len(stages)))
        for order in (forward, sorted(forward, key=lambda s: (height[s], s))):
            sizes = self.cost.cluster.group_sizes
            devices = place([stages[s].mode.devices for s in order], sizes)
            yield [devices[order.index(s)] for s in forward]

    def _stage_graph(
        self,
        stages: Sequence[Chosen],
        devices: Sequence[Sequence[int]],
        pairs: Sequence[tuple[int, int]],
    ) -> StageGraph:
        return StageGraph(
            tuple(
                Stage(
                    self.cost.graph.names(stage.mask),
                    tuple(where),
                    stage.microbatch_size,
                    k=stage.k,
                    recompute=stage.mode.recompute,
                    tensor=stage.mode.tensor,
                )
                for stage, where in zip(stages, devices, strict=True)
            ),
            tuple(pairs),
            self.batch_size,
        )


def compute_s(cost: CostModel, mask: int, microbatch_size: int, mode: Mode) -> tuple[float, float]:
    """Forward and backward seconds of a micro-batch on the fullest replica."""
    ops = list(bits(mask))
    n = -(-microbatch_size // mode.replicas)
    there = cost.forward_s(ops, n, tensor=mode.tensor)
    return there, cost.backward_s(ops, n, recompute=mode.recompute, tensor=mode.tensor)


def step_s(graph: StageGraph, cost: CostModel) -> float:
    """About how long a step takes; the formula at the head of this file."""
    masks = [cost.graph.mask(stage.operators) for stage in graph.stages]
    sizes = [stage.microbatch_size for stage in graph.stages]
    compute = [
        compute_s(
            cost,
            mask,
            stage.microbatch_size,
            Mode(stage.replicas, stage.recompute, stage.tensor),
        )
        for mask, stage in zip(masks, graph.stages, strict=True)
    ]
    busy: dict[Port, float] = {}
    transfers = {(x, y): _transfer_s(graph, cost, masks, x, y, busy) for x, y in graph.edges}
    pace = max(
        _round_pace(graph, compute, transfers),
        *(sum(each) / b for each, b in zip(compute, sizes, strict=True)),
        *busy.values(),
    )
    start = [0.0] * len(graph)
    for x, y in graph.edges:
        gather = compute[x][0] * max(1.0, sizes[y] / sizes[x])
        start[y] = max(start[y], start[x] + gather + transfers[x, y][0])
    end = [0.0] * len(graph)
    step = 0.0
    for s in reversed(range(len(graph))):
        b = min(sizes[s], graph.batch_size)
        end[s] = start[s] + (graph.batch_size - b) * pace + sum(compute[s])
        for y in graph.successors[s]:
            back = compute[s][1] * max(1.0, sizes[y] / sizes[s]) + transfers[s, y][1]
            end[s] = max(end[s], end[y] + back)
        stage = graph.stages[s]
        trainable = cost.parameter_bytes(bits(masks[s]), trainable=True, tensor=stage.tensor)
        step = max(step, end[s] + cost.allreduce_s(trainable, stage.devices[:: stage.tensor]))
    return step


def _round_pace(
    graph: StageGraph,
    compute: Sequence[tuple[float, float]],
    transfers: dict[tuple[int, int], tuple[float, float]],
) -> float:
    """Seconds per sample that the way to the sink and back allows with what is in flight."""
    held = [0] * len(graph)
    around = [0.0] * len(graph)
    pace = 0.0
    for s in reversed(range(len(graph))):
        stage = graph.stages[s]
        b, k = stage.microbatch_size, stage.k
        held[s], around[s] = k * b, sum(compute[s])
        for y in graph.successors[s]:
            after = graph.stages[y]
            more = in_flight_samples(k, b, after.k, after.microbatch_size, 0)
            held[s] = max(held[s], held[y] + 2 * more)
            gather = sum(compute[s]) * max(1.0, after.microbatch_size / b)
            around[s] = max(around[s], gather + sum(transfers[s, y]) + around[y])
        if held[s] < graph.batch_size:
            pace = max(pace, around[s] / held[s])
    return pace


def _transfer_s(
    graph: StageGraph,
    cost: CostModel,
    masks: Sequence[int],
    x: int,
    y: int,
    busy: dict[Port, float],
) -> tuple[float, float]:
    """Seconds of a transfer of the larger micro-batch, forward and back; adds to ``busy``, per
    sample.
    """
    source, target = graph.stages[x], graph.stages[y]
    b = max(source.microbatch_size, target.microbatch_size)
    values = cost.crossing(masks[x], masks[y])
    there, back = cost.forward_bytes(values, b), cost.backward_bytes(values, b)
    pairs = source.replicas * target.replicas
    slowest = latency = 0.0
    for i in source.devices:
        for j in target.devices:
            way, home, per_byte, delay = cost.way(i, j)
            slowest, latency = max(slowest, per_byte), max(latency, delay)
            for ports, nbytes in ((way, there), (home, back)):
                for port in ports:
                    busy[port] = busy.get(port, 0.0) + nbytes * per_byte / pairs / b
    fewest = min(source.replicas, target.replicas)
    return (
        latency + there * slowest / fewest,
        (latency + back * slowest / fewest) * (back > 0),
    )
