r"""Objectives of planning: the shortest step with a flush, or the shortest period without one.

One judge (``simulator.judge``) serves both. They differ in how a proposal runs, how long that
takes, and which of two equally quick plans is the better one:

    ===========================  ==================================  ===========================
    \                            ``ShortestStep``                    ``ShortestPeriod``
    ===========================  ==================================  ===========================
    in flight                    by each of several schedules, as    by asynchronous 1F1B
                                 far as memory allows
    versions of the weights      1                                   by the weight policy
    seconds                      of one step                         from mini-batch to mini-batch
    as good as the best          within 1e-9                         within 1e-3
    then better                  less recomputation, memory, warm-up  less depth, then likewise
    ===========================  ==================================  ===========================
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph, split_evenly
from anabranch.plans.whole_batch import fitted
from anabranch.remembered import remembered
from anabranch.schedule import LISTS, SPLIT_BACKWARDS, asynchronous, compute_order, rule_named
from anabranch.schedule.schedule import Kind
from anabranch.simulator import stream
from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import ModelCosts, StepCosts, with_lengths
from anabranch.simulator.run import step_seconds
from anabranch.simulator.staleness import versions_of
from anabranch.simulator.sums import least_sum_s
from anabranch.weights import WeightPolicy

ScheduledGraph = tuple[StageGraph, str]
"""Stages with their in-flight counts, and a key of ``schedule.SCHEDULES``."""


@dataclass(frozen=True, slots=True)
class ScheduledProposal:
    """A proposal as it would run.

    Attributes:
        graph: stages with their in-flight counts, see ``ScheduledGraph``, also for the schedule.
        least_s: lower bound of its seconds.
        peak_bytes: most bytes on the fullest device.
    """

    proposal: StageGraph
    graph: StageGraph
    schedule: str
    costs: ModelCosts
    least_s: float
    peak_bytes: float

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions per stage; empty for one everywhere."""
        return self.costs.versions

    @property
    def num_recomputing(self) -> int:
        """Stages that recompute."""
        return sum(stage.recompute for stage in self.graph.stages)


@dataclass(frozen=True)
class ShortestStep:
    """The shortest step with a flush after every batch.

    Attributes:
        schedules: keys of ``schedule.SCHEDULES`` to try with every proposal, least memory first.
        warm_up_gain: how much longer than the best, as a share, a step with one warm-up may be for
            the others to be simulated as well. At 1 % a plan for a slow network was 19 % longer; at
            50 % searches took up to half as much time again, and found nothing shorter.
        equal: times that differ by less, as a share, are the same.
        kept: number of stage graphs whose prices are kept.
        suits: phrase of the error message: what refused proposals fail to do.
        held: phrase of the error message: what is held in memory besides the usual.
        remedy: phrase of the error message: what helps against too little memory.
    """

    cost: CostModel
    schedules: tuple[str, ...]
    warm_up_gain: float = 0.1

    equal: ClassVar[float] = 1e-9
    kept: ClassVar[int] = 128
    suits: ClassVar[str] = "can be priced"
    remedy: ClassVar[str] = (
        "use devices with that much memory, more devices, a smaller micro-batch or an optimizer "
        "with less state"
    )

    @property
    def held(self) -> str:
        if not LISTS.issuperset(self.schedules):
            return ""
        names = " and ".join(self.schedules)
        return f" with gradients of weights that wait under {names} (1f1b needs less)"

    def prices(self, proposal: StageGraph) -> ModelCosts:
        """Return the prices of a proposal; an error if it cannot run. The last ones are kept, since
        a proposal is judged under one schedule after the other.
        """
        known: dict[StageGraph, ModelCosts] = self.cost.memo.setdefault(ModelCosts, {})
        if (costs := known.get(proposal)) is None:
            while len(known) >= self.kept:
                del known[next(iter(known))]
            costs = known[proposal] = ModelCosts(fitted(proposal, self.cost.graph), self.cost)
        return costs

    def runs(self, costs: ModelCosts) -> Iterator[ScheduledGraph]:
        """Generate every way to run these stages, the one with least memory first."""
        for schedule in self.schedules:
            graph = with_lengths(costs) if schedule in LISTS else costs.graph
            yield rule_named(schedule).warm_up(graph, partial(self._room, costs)), schedule

    def peak_bytes(self, costs: ModelCosts, graph: StageGraph, schedule: str) -> float:
        """Return the most bytes on the fullest device, see the function ``peak_bytes``."""
        return peak_bytes(costs, graph, schedule)

    def _room(self, costs: ModelCosts, s: int) -> int:
        """Return how many micro-batches in flight fit into the memory of a stage's devices."""
        return costs.most_in_flight(s, self.cost.cluster.memory_bytes)

    def least_s(self, costs: ModelCosts, enough: float) -> float:
        """Return a lower bound of the seconds under any schedule; an error if a stage has no price.
        A bound above ``enough`` is not made any tighter.
        """
        split = not SPLIT_BACKWARDS.isdisjoint(self.schedules)
        return least_step_s(costs.graph, costs, enough, split=split)

    def measure(self, candidate: ScheduledProposal) -> tuple[float, int]:
        """Return the seconds, and the micro-batches times devices that were simulated for them.
        Simulations are remembered: baselines of a comparison were often simulated by the search.
        """
        known: dict[ScheduledGraph, tuple[float, int]] = self.cost.memo.setdefault(ShortestStep, {})
        run = graph, _ = candidate.graph, candidate.schedule
        if run not in known:
            known[run] = step_seconds(graph, compute_order(*run), candidate.costs), _work(graph)
        return known[run]

    def rank(self, candidate: ScheduledProposal, seconds: float) -> tuple[float, ...]:
        """Return the rank among plans with equal times; the least wins. Recomputation counts first,
        so that nothing is computed twice for memory that is not needed.
        """
        in_flight = sum(stage.in_flight for stage in candidate.graph.stages)
        return candidate.num_recomputing, candidate.peak_bytes, in_flight


@dataclass(frozen=True)
class ShortestPeriod:
    """The shortest time from one mini-batch to the next without a flush.

    Many plans have the same period: the slowest stage decides it, however many stages follow. Of
    these the plan whose longest way to the sink is shortest is the best, because its weights are
    the least stale.

    Attributes:
        last_update: see ``weights.versions_held``.
        in_turns: replicas take whole mini-batches in turn.
        weighs_updates: a period in turns counts ``sqrt(R)``-fold if every stage has R replicas or
            more. Decided: the whole model then makes at most one update for R mini-batches, a less
            noisy one, which is taken for that share of the progress. By the period alone plain data
            parallelism in turns won by a few percent; a third of the updates cost 2.0 and 18.1
            points of accuracy (``benchmarks.convergence.depths``), a pipeline under ``2bw-ef`` 0.4
            and 10.1.
        whole: returns the prices of the same stages with every operator by itself, since the memory
            of a pass depends on their order; None if ``cost`` joins no operators into one.
    """

    cost: CostModel
    policy: WeightPolicy
    batch_size: int
    last_update: bool = False
    in_turns: bool = False
    weighs_updates: bool = True
    whole: Callable[[ModelCosts], ModelCosts] | None = None

    equal: ClassVar[float] = 1e-3
    warm_up_gain: ClassVar[float] = 0.0
    remedy: ClassVar[str] = (
        "use a policy that holds fewer versions (2bw, pipeoptim), a smaller batch, more devices or "
        "devices with that much memory, or an optimizer with less state"
    )

    @property
    def suits(self) -> str:
        """See ``ShortestStep``, as for all methods."""
        return f"suits policy {self.policy.name}"

    @property
    def held(self) -> str:
        return f" with the weight versions of policy {self.policy.name}"

    def prices(self, proposal: StageGraph) -> ModelCosts:
        sized = replace(proposal, batch_size=self.batch_size)
        graph = asynchronous.warm_up(fitted(sized, self.cost.graph))
        order_of = asynchronous.round_robin if self.in_turns else asynchronous.split_batches
        order = order_of(graph)
        versions = versions_of(order, self.policy, last_update=self.last_update)
        return ModelCosts(order.graph, self.cost, versions)

    def order(self, graph: StageGraph) -> asynchronous.AsynchronousOrder:
        """Return the order of mini-batches of a graph from ``prices``; in turns, one round."""
        if self.in_turns:
            return asynchronous.AsynchronousOrder(graph, 1, True)
        return asynchronous.split_batches(graph)

    def runs(self, costs: ModelCosts) -> Iterator[ScheduledGraph]:
        yield costs.graph, asynchronous.ORDER

    def peak_bytes(self, costs: ModelCosts, graph: StageGraph, schedule: str) -> float:
        return peak_bytes(self.whole(costs) if self.whole else costs, graph, schedule)

    def least_s(self, costs: ModelCosts, enough: float) -> float:
        minibatches = costs.graph.batch_size // self.batch_size
        return stream.least_period_s(costs.graph, costs) / minibatches * self._weight(costs.graph)

    def measure(self, candidate: ScheduledProposal) -> tuple[float, int]:
        graph = candidate.graph
        steady = stream.steady(self.order(graph), candidate.costs)
        microbatches = max(map(graph.num_microbatches, range(len(graph))))
        seconds = steady.period_s * self._weight(graph)
        return seconds, steady.simulated * microbatches

    def _weight(self, graph: StageGraph) -> float:
        fewest = min(stage.replicas for stage in graph.stages)
        return math.sqrt(fewest) if self.in_turns and self.weighs_updates else 1.0

    def rank(self, candidate: ScheduledProposal, seconds: float) -> tuple[float, ...]:
        depth = candidate.graph.depth
        return depth, candidate.num_recomputing, candidate.peak_bytes, seconds


Objective = ShortestStep | ShortestPeriod


def peak_bytes(costs: ModelCosts, graph: StageGraph, schedule: str) -> float:
    """Return the most bytes on the fullest device; for a list schedule an upper bound, which is
    quicker, if that fits.
    """
    in_flight = [stage.in_flight for stage in graph.stages]
    is_list = schedule in LISTS
    peak = costs.peak_bytes(in_flight, split=schedule in SPLIT_BACKWARDS, waiting=is_list)
    if not is_list or peak <= costs.cost.cluster.memory_bytes:
        return peak
    orders = {id(order): order for order in compute_order(graph, schedule).orders.values()}
    return max(costs.peak_bytes(in_flight), *map(costs.peak_along, orders.values()))


def _work(graph: StageGraph) -> int:
    """Return micro-batches times devices."""
    return sum(
        graph.num_microbatches(s) * len(stage.devices) for s, stage in enumerate(graph.stages)
    )


class _StageSeconds(NamedTuple):
    """Seconds of a stage in a step: of its busiest replica, or of the replica with least to do.

    Attributes:
        busy: seconds of all passes, on the busiest replica.
        returned: seconds of its passes until the last gradients of inputs are there.
        fewest_busy: ``busy`` of the replica with least to do, for devices with several stages.
        fewest_returned: ``returned`` of the replica with least to do.
        first: seconds of a forward of the smallest slice. This and the next two are of the smallest
            slice, as the bound must not assume which slice a neighbour waits for.
        last: seconds of the gradients of inputs.
        rest: seconds of the gradients of weights behind them.
        samples: sizes of the slices of the last micro-batch.
    """

    busy: float
    returned: float
    fewest_busy: float
    fewest_returned: float
    first: float
    last: float
    rest: float
    samples: set[int]


@remembered
def _stage_seconds(costs: StepCosts, graph: StageGraph, split: bool) -> list[_StageSeconds]:
    """Return the seconds of all stages, for split backwards or whole ones."""
    result: list[_StageSeconds] = []
    for s, stage in enumerate(graph.stages):
        final = graph.num_microbatches(s) - 1
        cut = (split_evenly(*graph.interval(s, i), stage.replicas) for i in (0, final))
        slices = {(b - a, d - c) for (a, b), (c, d) in zip(*cut, strict=True)}
        seconds = {n: costs.compute_s(s, n) for pair in slices for n in pair}
        half = Kind.INPUT_GRADIENT if split and graph.predecessors[s] else Kind.BACKWARD
        back = {n: costs.pass_s(s, half, n) for n in seconds}
        busy = [final * sum(seconds[n]) + sum(seconds[z]) for n, z in slices]
        ways = {n: seconds[n][0] + back[n] for n in seconds}
        returned = [final * ways[n] + ways[z] for n, z in slices]
        passes = [(seconds[n][0], back[n], seconds[n][1] - back[n]) for n in seconds if n]
        most, least = (max(busy), max(returned)), (min(busy), min(returned))
        first, last, rest = map(min, zip(*passes, strict=True))
        samples = {z for _, z in slices}
        result.append(_StageSeconds(*most, *least, first, last, rest, samples))
    return result


def least_step_s(
    graph: StageGraph, costs: StepCosts, enough: float = math.inf, *, split: bool = False
) -> float:
    """Return a lower bound of the seconds of a step under any schedule.

    The busiest stage works through its micro-batches. Before its first forward there is at least
    one forward of each stage on the way to it. After its last backward there is one backward of
    each stage on the way back, and the part of a stage's all-reduce that its backwards cannot hide,
    before the update and after it. With ``split`` backwards gradients of weights may be computed
    meanwhile, except in stages without predecessors. Messages are left out, and all-reduces, which
    take longest to price, where the bound is more than ``enough`` without.
    """
    count, stages = len(graph), _stage_seconds(costs, graph, split)
    together = {stages for stages in graph.stages_of.values() if len(stages) > 1}

    def longest(behind: Sequence[float]) -> float:
        head, tail = [0.0] * count, [0.0] * count
        for x, y in graph.edges:
            stage = stages[x]
            if costs.message_edges.goes_forward((x, y)):
                head[y] = max(head[y], head[x] + stage.first)
            if costs.message_edges.comes_back((x, y)):
                tail[y] = max(tail[y], stage.last + max(stage.rest + behind[x], tail[x]))
        ends = zip(head, stages, behind, tail, strict=True)
        longest_s = max(h + max(s.busy + after, s.returned + t) for h, s, after, t in ends)
        for held in together:
            busy = sum(stages[s].fewest_busy for s in held) + min(behind[s] for s in held)
            returned = sum(stages[s].fewest_returned for s in held) + min(tail[s] for s in held)
            longest_s = max(longest_s, min(head[s] for s in held) + max(busy, returned))
        return longest_s

    behind = [costs.update_s(s) for s in range(count)]
    if (least_s := longest(behind)) > enough:
        return least_s
    works: dict[int, list[AllReduce]] = defaultdict(list)
    for work in costs.all_reduces():
        for s in work.stages:
            works[s].append(work)
    for s in works:
        behind[s] += max(least_sum_s(costs, work, s, stages[s].samples) for work in works[s])
        behind[s] += max(work.gather_s for work in works[s])
    return longest(behind) if works else least_s
