"""Prices of one stage graph for the simulator: compute, messages, all-reduces, memory.

``ModelCosts`` prices the stages with a profile on a cluster. ``StageTimes`` has fixed seconds per
stage and links that cost nothing: a step is then the schedule's ideal for measured stage times.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from anabranch.cost import CostModel
from anabranch.cost.buckets import all_reduce_order
from anabranch.cost.communication import Route
from anabranch.cost.memory import DeviceMemory
from anabranch.cost.overheads import agreement_s
from anabranch.errors import InvalidPlanError
from anabranch.plans.edges import EVERY_EDGE, MessageEdges, edge_values, message_edges
from anabranch.plans.in_flight import least_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.remembered import remembered
from anabranch.schedule.schedule import Kind, Order
from anabranch.simulator.all_reduces import AllReduce, all_reduce_of
from anabranch.simulator.stage_costs import FlightBytes, StageCosts, stage_costs


@dataclass(frozen=True)
class Overheads:
    """Calibrated seconds of devices besides their work.

    Attributes:
        slowdown: how many times as long computing takes while 1, 2, ... devices of a host compute;
            empty where devices do not slow each other down.
        message_s: seconds that a message takes of the device at each end.
        step_s: seconds of each device in a step besides its actions, sums and updates.
        read_s: seconds in which each device reads a batch, before a step.
        agreement_s: seconds of each device in the exchange of a step's totals, once before
            ``agreement_latency_s`` and once behind it.
    """

    slowdown: Sequence[float] = ()
    message_s: float = 0.0
    step_s: float = 0.0
    read_s: float = 0.0
    agreement_s: float = 0.0
    agreement_latency_s: float = 0.0


class StepCosts(Protocol):
    """Prices of one stage graph; a price that a subclass does not define is zero. ``samples`` are
    those of one replica's slice of a micro-batch.
    """

    @property
    def overheads(self) -> Overheads:
        """Seconds of devices besides their work."""
        return Overheads()

    def host(self, device: int) -> int:
        """Return the host whose processors a device shares."""
        return 0

    @property
    def message_edges(self) -> MessageEdges:
        """Stage edges along which stages wait for one another."""
        return EVERY_EDGE

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward."""

    def weight_share(self, stage: int, samples: int) -> float:
        """Return the share of a backward that gradients of weights take, where it is split."""
        return 0.5

    def pass_s(self, stage: int, kind: Kind, samples: int) -> float:
        """Return the seconds of a forward, a backward or one of its halves."""
        forward_s, backward_s = self.compute_s(stage, samples)
        if kind is Kind.FORWARD:
            return forward_s
        share = self.weight_share(stage, samples) if kind is not Kind.BACKWARD else 0.0
        return backward_s * (share if kind is Kind.WEIGHT_GRADIENT else 1.0 - share)

    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """Return the bytes along a stage edge, forward and back."""
        return 0.0, 0.0

    def route(self, a: int, b: int) -> Route:
        """Return the way from device a to device b."""
        return Route(0.0, 0.0, ())

    def all_reduces(self) -> Sequence[AllReduce]:
        """Return the all-reduces before an update; those of the same devices in their order."""
        return ()

    def tied_stages(self) -> Collection[tuple[int, ...]]:
        """Sets of stages that read the same trainable parameters, however small."""
        return ()

    def gradient_share(self, stage: int, samples: int, operator: int) -> float:
        """Share of a backward's seconds that have passed when an operator's backward has ended."""
        return 1.0

    def update_s(self, stage: int) -> float:
        """Return the seconds of the update of a stage's parameters, on each of its devices."""
        return 0.0

    def held_bytes(self, stage: int, device: int) -> tuple[float, float]:
        """Return the bytes of a stage on a device with nothing in flight, and bytes on top while
        its gradients are summed, after all backwards.
        """
        return 0.0, 0.0

    def flight_bytes(self, stage: int, samples: int) -> FlightBytes:
        """Return the bytes of a micro-batch in flight."""
        return FlightBytes(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelCosts(StepCosts):
    """Prices from a profile and a cluster.

    Attributes:
        versions: versions of its weights that each stage holds; empty for one everywhere.
        slower: device -> how many times as long as in the profile it computes; 1 where it is
            missing. A stage takes as long as the slowest of its devices.

    Raises:
        InvalidPlanError: if the stages do not hold each operator of the model exactly once, or
            there are devices that the cluster lacks.
    """

    graph: StageGraph
    cost: CostModel
    versions: tuple[int, ...] = ()
    slower: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [name for stage in self.graph.stages for name in stage.operators]
        if len(names) != len(self.cost.graph) or set(names) != set(self.cost.graph.index):
            wrong = sorted(set(names) ^ set(self.cost.graph.index)) or sorted(
                {name for name in names if names.count(name) > 1}
            )
            raise InvalidPlanError(
                f"the stages do not hold each operator of the model exactly once; see {wrong[0]!r} "
                f"and {len(wrong) - 1} more; plan again for this model and granularity"
            )
        if self.graph.devices[-1] >= self.cost.cluster.num_devices:
            raise InvalidPlanError(
                f"the plan uses device {self.graph.devices[-1]}, but {self.cost.cluster.name} has "
                f"{self.cost.cluster.num_devices} devices; plan for this cluster"
            )

    @cached_property
    def _stages(self) -> tuple[StageCosts, ...]:
        size = self.graph.batch_size
        return tuple(stage_costs(self.cost, stage, size) for stage in self.graph.stages)

    @cached_property
    def _values(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        return edge_values(self.graph, self.cost.graph)

    @cached_property
    def overheads(self) -> Overheads:
        cost = self.cost
        device_s, latency_s = agreement_s(cost.cluster, len(self.graph.devices))
        return Overheads(
            cost.cluster.slowdown,
            message_s=cost.calibration.message_s,
            step_s=cost.calibration.step_s,
            read_s=cost.profile.read_sample_s * self.graph.batch_size,
            agreement_s=device_s,
            agreement_latency_s=latency_s,
        )

    def host(self, device: int) -> int:
        """Return the innermost group of the cluster to which a device belongs."""
        return device // self.cost.cluster.levels[0].size

    @cached_property
    def message_edges(self) -> MessageEdges:
        """Edges that carry a value, or only order two stages."""
        return message_edges(self.graph, self.cost.graph)

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        forward_s, backward_s = self._stages[stage].compute_s(samples)
        times = self._slower[stage] if self.slower else 1.0
        return forward_s * times, backward_s * times

    def weight_share(self, stage: int, samples: int) -> float:
        return self._stages[stage].weight_share(samples)

    def pass_s(self, stage: int, kind: Kind, samples: int) -> float:
        """Seconds of a pass; gradients of weights also have the fixed seconds of any pass."""
        seconds = super().pass_s(stage, kind, samples)
        if kind is Kind.WEIGHT_GRADIENT and samples:
            seconds += self.cost.calibration.pass_s * (self._slower[stage] if self.slower else 1.0)
        return seconds

    @cached_property
    def _slower(self) -> tuple[float, ...]:
        stages = self.graph.stages
        return tuple(max(self.slower.get(d, 1.0) for d in stage.devices) for stage in stages)

    @remembered
    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """All values of the edge; those without a batch dimension go with every message."""
        values = self._values.get((source, target), ())
        return self.cost.message_bytes(values, samples)

    def route(self, a: int, b: int) -> Route:
        return self.cost.route(a, b)

    def tied_stages(self) -> Collection[tuple[int, ...]]:
        read = (
            tuple(s for s, stage in enumerate(self._stages) if stage.mask & readers)
            for readers in self.cost.graph.tied.values()
        )
        return {stages for stages in read if len(stages) > 1}

    @remembered
    def all_reduces(self) -> Sequence[AllReduce]:
        """Return an all-reduce per set of stages with common parameters, over all their devices."""
        groups = {(s,) for s in range(len(self.graph))} | {*self.tied_stages()}
        works = (work for work in map(self._sum, groups) if work)
        return tuple(sorted(works, key=lambda work: all_reduce_order(work.devices, work.stages)))

    def _sum(self, stages: tuple[int, ...]) -> AllReduce | None:
        """Return the all-reduce of the parameters that exactly these stages read."""
        holders = tuple(self._stages[s] for s in stages)
        devices = tuple(self.graph.stages[s].devices for s in stages)
        known: dict[Hashable, AllReduce | None] = self.cost.memo.setdefault(AllReduce, {})
        if (holders, devices) not in known:
            known[holders, devices] = all_reduce_of(self.cost, holders, devices)
        work = known[holders, devices]
        return work and work._replace(stages=stages)

    def gradient_share(self, stage: int, samples: int, operator: int) -> float:
        return self._stages[stage].gradient_share(samples, operator)

    def update_s(self, stage: int) -> float:
        return self._stages[stage].update_s

    def held_bytes(self, stage: int, device: int) -> tuple[float, float]:
        held = self.held(stage, sorted(self.graph.stages[stage].devices).index(device))
        return float(held.resident), float(held.sums)

    def _most(self, stage: int) -> int:
        """Return the samples of a micro-batch on the fullest replica."""
        return max(self.graph.slice_sizes(stage))

    def held(self, stage: int, replica: int | None = None) -> DeviceMemory:
        """Return the bytes of a replica of a stage, or of the fullest."""
        return self._stages[stage].held(self.versions[stage] if self.versions else 1, replica)

    def flight_bytes(self, stage: int, samples: int) -> FlightBytes:
        return self._stages[stage].flight_bytes(samples)

    def peak_bytes(
        self, in_flight: Iterable[int], *, split: bool = False, waiting: bool = False
    ) -> float:
        """Return the peak of the fullest device; stages of one device are taken to be at their
        peaks together.

        Args:
            in_flight: micro-batches in flight of each stage.
            split: backwards are in two halves.
            waiting: the gradients of weights of all but one wait, the most in a list schedule.
        """
        peaks = list[float]()
        for s, count in enumerate(in_flight):
            nbytes = self.flight_bytes(s, self._most(s))
            more = nbytes.first_half - nbytes.backward if split else 0.0
            more += (count - 1) * nbytes.waiting * waiting
            peaks.append(float(self.held(s).peak(count)) + more)
        return max(sum(peaks[s] for s in stages) for stages in self.graph.stages_of.values())

    def peak_along(self, order: Order) -> float:
        """Return the peak of a device that computes in this order. While gradients of weights wait
        to be computed, bytes of their backward stay (``FlightBytes.waiting``).
        """
        resident = 0.0
        changes = np.zeros((1 + max(order.stages, default=0), len(Kind), 2))
        for s in order.stages:
            resident += float(self.held(s).resident)
            for kind in Kind:
                taken, released = self.flight_bytes(s, self._most(s)).change(kind)
                changes[s, kind.number] = taken, -released
        stages, kinds, _ = order.columns
        return float(np.cumsum([resident, *changes[stages, kinds].flat]).max())

    @cached_property
    def _least_in_flight(self) -> list[int]:
        return least_in_flight(self.graph)

    def most_in_flight(self, stage: int, capacity: float) -> int:
        """Return how many micro-batches of a stage fit into ``capacity`` bytes of its devices.
        Stages of one device share the memory that is left when each holds its fewest.
        """
        held, most = self.held(stage), self.graph.num_microbatches(stage)
        together = {t for d in self.graph.stages[stage].devices for t in self.graph.stages_of[d]}
        if len(together) == 1:
            return int(held.most_in_flight(capacity, most))
        least = self._least_in_flight
        left = capacity - sum(float(self.held(t).peak(least[t])) for t in together)
        share = max(left, 0.0) / len(together)
        return min(most, least[stage] + int(share / (held.flight or share or 1.0)))


def with_lengths(costs: ModelCosts) -> StageGraph:
    """Return the stages with lengths for list schedules, per sample in units of the slowest one."""
    graph, stages = costs.graph, list[Stage]()
    slices = [costs._most(s) for s in range(len(graph))]
    seconds = [costs.compute_s(s, samples) for s, samples in enumerate(slices)]
    sizes = [stage.microbatch_size for stage in graph.stages]
    slowest_s = max(sum(pair) / size for pair, size in zip(seconds, sizes, strict=True)) or 1.0
    for s, stage in enumerate(graph.stages):
        forward_s, backward_s = seconds[s]
        message_s = max((_message_s(costs, s, t) for t in graph.successors[s]), default=0.0)
        factor = backward_s / forward_s if forward_s else 2.0
        changed = replace(
            stage,
            load=round((forward_s + backward_s) / sizes[s] / slowest_s, 3),
            backward_factor=round(factor, 3),
            weight_share=round(costs.weight_share(s, slices[s]), 3),
            message=round(message_s / sizes[s] / slowest_s, 3),
        )
        stages.append(changed)
    return replace(graph, stages=tuple(stages))


def _message_s(costs: ModelCosts, s: int, t: int) -> float:
    """Return the seconds of the first message of a stage edge on idle links."""
    graph = costs.graph
    if not costs.message_edges.goes_forward((s, t)):
        return 0.0
    samples = min(max(graph.slice_sizes(x)) for x in (s, t))
    route = costs.route(graph.stages[s].devices[0], graph.stages[t].devices[0])
    nbytes = costs.message_bytes(s, t, samples)[0]
    ends_s = 2 * costs.overheads.message_s * (nbytes > 0)
    return route.latency_s + nbytes * route.per_byte_s + ends_s


@dataclass(frozen=True)
class StageTimes(StepCosts):
    """Seconds per stage, links that cost nothing, no memory.

    Attributes:
        forward_s: per stage, {samples of one device's slice: seconds of a forward}. A count that is
            missing is taken in proportion to the nearest one.
        backward_s: the same for a backward.
        message_edges: stage edges along which stages wait for one another.
    """

    forward_s: Sequence[Mapping[int, float]]
    backward_s: Sequence[Mapping[int, float]]
    message_edges: MessageEdges = EVERY_EDGE

    def __post_init__(self) -> None:
        for what, stages in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            for s, seconds in enumerate(stages):
                if not seconds or min(seconds) < 1:
                    raise ValueError(f"{what} of stage {s} needs a time for at least one sample")

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        return _at(self.forward_s[stage], samples), _at(self.backward_s[stage], samples)


def _at(seconds: Mapping[int, float], samples: int) -> float:
    if samples == 0:
        return 0.0
    if samples in seconds:
        return seconds[samples]
    nearest = min(seconds, key=lambda n: (abs(n - samples), n))
    return seconds[nearest] * samples / nearest
