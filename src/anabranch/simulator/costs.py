"""Prices of one stage graph for the simulator: compute, messages, all-reduces, memory.

``ModelCosts`` prices the stages with a profile on a cluster. ``StageTimes`` has fixed seconds per
stage and links that cost nothing: a step is then the schedule's ideal for measured stage times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, Protocol

from anabranch.cost import CostModel
from anabranch.cost.buckets import cut_into_buckets, piece_bytes, turn
from anabranch.cost.communication import Port, Route
from anabranch.cost.memory import DeviceMemory
from anabranch.cost.sparse import ring_bytes
from anabranch.errors import InvalidPlanError
from anabranch.graph.opgraph import Parameter
from anabranch.plans.edges import EVERY_EDGE, MessageEdges, edge_values, message_edges
from anabranch.plans.rings import Holder, rings
from anabranch.plans.stages import StageGraph, split_evenly
from anabranch.simulator.stage_costs import StageCosts, stage_costs


class Piece(NamedTuple):
    """Gradients that are final together and take their ports together: a bucket, part of a large
    one, so that messages get between, or several small ones.

    Attributes:
        final: per stage of the all-reduce, the operator whose backward is the last that adds to
            them there.
    """

    nbytes: int
    seconds: float
    final: tuple[int, ...]


class _Gradient(NamedTuple):
    """Bytes to be summed, and per stage the operator whose backward is the last that adds to it."""

    nbytes: int
    final: tuple[int, ...]


class AllReduce(NamedTuple):
    """Gradients that devices sum up, piece after piece, each as soon as it is final in the last
    backwards of all of these stages.

    Attributes:
        device_s: what all of it takes of each device's own time.
        gather_s: where the devices share the optimizer's state, seconds in which they send each
            other what they have updated, after the update.
        share_s: what that takes of each device's own time.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ports: tuple[Port, ...]
    device_s: float = 0.0
    gather_s: float = 0.0
    share_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """Of all pieces, one after the other."""
        return sum(piece.seconds for piece in self.pieces)


class StepCosts(Protocol):
    """Prices of one stage graph. Samples are those of one replica's slice of a micro-batch."""

    @property
    def slowdown(self) -> Sequence[float]:
        """How many times as long computing takes while 1, 2, ... devices of a host compute; empty
        where each computes on its own.
        """

    @property
    def cores(self) -> int:
        """Processor cores of a host; 0 where each device has its own."""

    def host(self, device: int) -> int:
        """The host whose processors a device shares."""

    @property
    def message_edges(self) -> MessageEdges:
        """Stage edges along which stages wait for one another."""

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""

    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """Bytes along a stage edge, forward and back."""

    def route(self, a: int, b: int) -> Route:
        """The way from device a to device b."""

    def all_reduces(self) -> Sequence[AllReduce]:
        """The sums of gradients before an update; those of the same devices in their order."""

    def gradient_share(self, stage: int, samples: int, operator: int) -> float:
        """Share of a backward after which an operator has been passed."""

    def update_s(self, stage: int) -> float:
        """Seconds of the update of a stage's parameters, on each of its devices."""

    def message_s(self, nbytes: float) -> tuple[float, float]:
        """Seconds of the devices at both ends of a message: its sender and its receiver."""

    @property
    def crowded_s(self) -> float:
        """How much longer work takes behind a wait where no core is free."""

    @property
    def crowded_work_s(self) -> float:
        """Work in which that is lost: see ``cost.overheads.lost_share``."""

    @property
    def restart_work_s(self) -> float:
        """Work in which restarts are lost."""

    @property
    def restarts(self) -> Sequence[float]:
        """How much longer work takes behind a wait: see ``cost.overheads.restart_s``."""

    @property
    def step_s(self) -> float:
        """Seconds of each device in a step besides its actions, sums and updates."""

    @property
    def read_s(self) -> float:
        """Seconds in which each device reads a batch, before a step."""

    @property
    def agreement_s(self) -> float:
        """Seconds until all devices know that the last one is through its list."""

    def base_bytes(self, stage: int, device: int) -> float:
        """Memory of a device of a stage with nothing in flight."""

    def flight_bytes(self, stage: int, samples: int) -> tuple[float, float]:
        """Memory from a forward to the end of its backward, and on top during the backward."""

    def sum_bytes(self, stage: int) -> float:
        """Memory on top of ``base_bytes`` while its gradients are summed, after all backwards."""


@dataclass(frozen=True)
class ModelCosts:
    """Prices from a profile and a cluster.

    Attributes:
        versions: per stage, versions of its weights that are held; empty for one everywhere.
        slower: device -> how many times as long it computes as the profile says, where it does; a
            stage takes as long as the slowest of its devices.

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

    @property
    def slowdown(self) -> Sequence[float]:
        """The cluster's."""
        return self.cost.cluster.slowdown

    @property
    def cores(self) -> int:
        """The cluster's."""
        return self.cost.cluster.cores

    def host(self, device: int) -> int:
        """The innermost group of the cluster."""
        return device // self.cost.cluster.levels[0].size

    @cached_property
    def message_edges(self) -> MessageEdges:
        """Those that carry a value, or only order two stages."""
        return message_edges(self.graph, self.cost.graph)

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        """See ``StageCosts``."""
        forward_s, backward_s = self._stages[stage].compute_s(samples)
        times = self._slower[stage] if self.slower else 1.0
        return forward_s * times, backward_s * times

    @cached_property
    def _slower(self) -> tuple[float, ...]:
        stages = self.graph.stages
        return tuple(max(self.slower.get(d, 1.0) for d in stage.devices) for stage in stages)

    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """All values of the edge; those without a batch dimension go with every message."""
        values = self._values.get((source, target), ())
        return self.cost.forward_bytes(values, samples), self.cost.backward_bytes(values, samples)

    def route(self, a: int, b: int) -> Route:
        """The slowest link on the way, and every port."""
        return self.cost.route(a, b)

    def all_reduces(self) -> Sequence[AllReduce]:
        """One per set of stages that read the same parameters, over its ``plans.rings``."""
        return self._all_reduces

    @cached_property
    def _all_reduces(self) -> tuple[AllReduce, ...]:
        tied = {
            tuple(s for s, stage in enumerate(self._stages) if stage.mask & users)
            for users, parameter in self.cost.tied
            if parameter.trainable
        }
        groups = {(s,) for s in range(len(self.graph))} | tied
        works = (work for stages in groups for work in self._sums(stages))
        return tuple(sorted(works, key=lambda work: turn(work.devices, work.stages)))

    def _sums(self, stages: tuple[int, ...]) -> Iterator[AllReduce]:
        """Those of the parameters that these stages read, and no others."""
        holders = tuple(self._stages[s] for s in stages)
        devices = tuple(self.graph.stages[s].devices for s in stages)
        known: dict[Hashable, tuple[AllReduce, ...]] = self.cost.memo.setdefault(AllReduce, {})
        if (holders, devices) not in known:
            known[holders, devices] = tuple(_sums(self.cost, holders, devices))
        return (work._replace(stages=stages) for work in known[holders, devices])

    def gradient_share(self, stage: int, samples: int, operator: int) -> float:
        """See ``StageCosts``."""
        return self._stages[stage].gradient_share(samples, operator)

    def update_s(self, stage: int) -> float:
        """See ``StageCosts``."""
        return self._stages[stage].update_s

    def message_s(self, nbytes: float) -> tuple[float, float]:
        """As calibrated."""
        return self.cost.message_s(nbytes)

    @property
    def crowded_s(self) -> float:
        """As calibrated."""
        calibration = self.cost.cluster.calibration
        return calibration.crowded_s if calibration else 0.0

    @property
    def crowded_work_s(self) -> float:
        """As calibrated."""
        calibration = self.cost.cluster.calibration
        return calibration.crowded_work_s if calibration else 0.0

    @property
    def restart_work_s(self) -> float:
        """As calibrated."""
        calibration = self.cost.cluster.calibration
        return calibration.restart_work_s if calibration else 0.0

    @property
    def restarts(self) -> Sequence[float]:
        """As calibrated."""
        return self.cost.restarts

    @property
    def step_s(self) -> float:
        """As calibrated."""
        return self.cost.step_s

    @property
    def read_s(self) -> float:
        """As profiled."""
        return self.cost.profile.read_sample_s * self.graph.batch_size

    @cached_property
    def agreement_s(self) -> float:
        """As calibrated, by the number of devices."""
        return self.cost.agreement_s(len(self.graph.devices))

    def base_bytes(self, stage: int, device: int) -> float:
        """Weights, gradients, optimizer state and receive buffers."""
        planned = self.graph.stages[stage]
        replica = sorted(planned.devices).index(device) // planned.tensor
        return float(self.held(stage, replica).resident)

    def sum_bytes(self, stage: int) -> float:
        """Terms of other replicas."""
        return float(self.held(stage).sums)

    def held(self, stage: int, replica: int | None = None) -> DeviceMemory:
        """Bytes of a replica of a stage, or of the fullest."""
        return self._stages[stage].held(self.versions[stage] if self.versions else 1, replica)

    def flight_bytes(self, stage: int, samples: int) -> tuple[float, float]:
        """See ``StageCosts``."""
        return self._stages[stage].flight_bytes(samples)

    def peak_bytes(self, in_flight: Iterable[int]) -> float:
        """Of the fullest device, with so many micro-batches of its stage in flight."""
        return max(float(self.held(s).peak(count)) for s, count in enumerate(in_flight))


@dataclass(frozen=True)
class StageTimes:
    """Seconds per stage, links that cost nothing, no memory.

    Attributes:
        forward_s: per stage, {samples of one device's slice: seconds}. A count that is missing is
            taken in proportion to the nearest one.
        backward_s: likewise.
        cores: processor cores that all devices share; 0 where each computes on its own.
        message_edges: stage edges along which stages wait for one another.
    """

    forward_s: Sequence[Mapping[int, float]]
    backward_s: Sequence[Mapping[int, float]]
    cores: int = 0
    message_edges: MessageEdges = EVERY_EDGE
    step_s: float = field(default=0.0, init=False)
    read_s: float = field(default=0.0, init=False)
    agreement_s: float = field(default=0.0, init=False)
    restarts: Sequence[float] = field(default=(), init=False)
    restart_work_s: float = field(default=0.0, init=False)
    crowded_s: float = field(default=0.0, init=False)
    crowded_work_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        for what, stages in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            for s, seconds in enumerate(stages):
                if not seconds or min(seconds) < 1:
                    raise ValueError(f"{what} of stage {s} needs a time for at least one sample")

    @property
    def slowdown(self) -> Sequence[float]:
        """None up to the cores."""
        return (1.0,) * self.cores

    def host(self, device: int) -> int:
        """One for all."""
        return 0

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        """The given seconds."""
        return _at(self.forward_s[stage], samples), _at(self.backward_s[stage], samples)

    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """Nothing."""
        return 0.0, 0.0

    def route(self, a: int, b: int) -> Route:
        """Free."""
        return Route(0.0, 0.0, ())

    def all_reduces(self) -> Sequence[AllReduce]:
        """None."""
        return ()

    def gradient_share(self, stage: int, samples: int, operator: int) -> float:
        """At its end."""
        return 1.0

    def update_s(self, stage: int) -> float:
        """Nothing."""
        return 0.0

    def message_s(self, nbytes: float) -> tuple[float, float]:
        """Nothing."""
        return 0.0, 0.0

    def base_bytes(self, stage: int, device: int) -> float:
        """Nothing."""
        return 0.0

    def flight_bytes(self, stage: int, samples: int) -> tuple[float, float]:
        """Nothing."""
        return 0.0, 0.0

    def sum_bytes(self, stage: int) -> float:
        """Nothing."""
        return 0.0


def least_sum_s(costs: StepCosts, work: AllReduce, stage: int, samples: Collection[int]) -> float:
    """A lower bound of the seconds from the end of a stage's last backward to the end of its sums.

    Args:
        samples: of the last backward, on each device.
    """
    at, bound = work.stages.index(stage), math.inf
    for n in set(samples):
        backward, left, longest = costs.compute_s(stage, n)[1], 0.0, 0.0
        for piece in reversed(work.pieces):
            left += piece.seconds
            share = costs.gradient_share(stage, n, piece.final[at])
            longest = max(longest, left - (1 - share) * backward)
        bound = min(bound, longest)
    return bound


def _sums(
    cost: CostModel, holders: Sequence[StageCosts], devices: Sequence[tuple[int, ...]]
) -> Iterator[AllReduce]:
    """Those of the parameters that all of some stages read, and no others, which are numbered from
    0 here; one for each of their ``plans.rings``.
    """
    union = sum(holder.mask for holder in holders)
    names = {
        name
        for name in holders[0].readers
        if all(name in holder.readers for holder in holders) and not cost.users[name] & ~union
    }
    owned = [p for p in reversed(cost.graph.parameters) if p.name in names and p.nbytes]
    stages, whole_bytes = tuple(range(len(holders))), sum(parameter.nbytes for parameter in owned)
    held_by = [
        Holder(held, holder.stage.tensor, holder.shard)
        for held, holder in zip(devices, holders, strict=True)
    ]
    samples = max(holder.most_samples for holder in holders)
    for _, ring, held in rings({stages: whole_bytes}, held_by) if owned else ():
        share = held / whole_bytes
        # Tables whose rows are exchanged come last, as in the runtime.
        whole: list[_Gradient] = []
        by_rows: list[_Gradient] = []
        for parameter in owned:
            summed = _summed_bytes(cost, share, samples, len(ring), parameter)
            final = tuple(holder.readers[parameter.name] for holder in holders)
            is_whole = summed == _held_bytes(share, parameter)
            (whole if is_whole else by_rows).append(_Gradient(summed, final))
        buckets = [
            _bucket(cost, gradients, ring)
            for kind in (whole, by_rows)
            for gradients in cut_into_buckets(kind, attrgetter("nbytes"))
        ]
        total = sum(gradient.nbytes for gradient in whole + by_rows)
        own_s = cost.sum_s(len(owned), total, len(ring))
        ports = _ring_ports(cost, ring)
        work = AllReduce(stages, ring, _pieces(buckets), ports, own_s)
        if cost.shard_optimizer:
            work = _sharded(work, cost.share_s(len(owned), total, len(ring)))
        yield work


def _summed_bytes(
    cost: CostModel, share: float, samples: int, holders: int, parameter: Parameter
) -> int:
    """Bytes of a gradient in a ring, or those of a ring that takes as long as its rows.

    Args:
        samples: of a batch on the fullest device.
    """
    held = _held_bytes(share, parameter)
    if parameter.table is None or not cost.has_rows(parameter) or share < 1:
        return held
    return min(held, ring_bytes(parameter.table, samples, holders))


def _bucket(cost: CostModel, gradients: Sequence[_Gradient], devices: tuple[int, ...]) -> Piece:
    nbytes = sum(gradient.nbytes for gradient in gradients)
    final = tuple(map(min, zip(*(gradient.final for gradient in gradients), strict=True)))
    return Piece(nbytes, cost.bucket_s(nbytes, devices), final)


def _ring_ports(cost: CostModel, devices: tuple[int, ...]) -> tuple[Port, ...]:
    after = devices[1:] + devices[:1]
    ports = (p for a, b in zip(devices, after, strict=True) for p in cost.route(a, b).ports)
    return tuple(dict.fromkeys(ports))


def _held_bytes(share: float, parameter: Parameter) -> int:
    return math.ceil(parameter.nbytes * share)


def _sharded(work: AllReduce, share_s: float) -> AllReduce:
    """A sum that one device of the ring has, and its way to the others: half of the ring each."""
    pieces = tuple(piece._replace(seconds=piece.seconds / 2) for piece in work.pieces)
    return work._replace(pieces=pieces, gather_s=work.seconds / 2, share_s=share_s)


def _pieces(buckets: Sequence[Piece]) -> tuple[Piece, ...]:
    """Small buckets together, large ones cut, by ``piece_bytes``."""
    left = sum(bucket.nbytes for bucket in buckets)
    before, count = 0, 1
    pieces: list[Piece] = []
    for bucket in buckets:
        size = piece_bytes(before, left)
        if pieces and count == 1 and pieces[-1].nbytes + bucket.nbytes <= size:
            last = pieces.pop()
            final = tuple(map(min, zip(last.final, bucket.final, strict=True)))
            seconds = last.seconds + bucket.seconds
            pieces.append(Piece(last.nbytes + bucket.nbytes, seconds, final))
        else:
            count = max(round(bucket.nbytes / size), 1)
            seconds = bucket.seconds / count
            parts = split_evenly(0, bucket.nbytes, count)
            pieces += [Piece(stop - start, seconds, bucket.final) for start, stop in parts]
        before, left = before + bucket.nbytes, left - bucket.nbytes
    return tuple(pieces)


def _at(seconds: Mapping[int, float], samples: int) -> float:
    if samples == 0:
        return 0.0
    if samples in seconds:
        return seconds[samples]
    nearest = min(seconds, key=lambda n: (abs(n - samples), n))
    return seconds[nearest] * samples / nearest
