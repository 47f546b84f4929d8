"""Stages whose replicas take mini-batches in turn: how many each holds, who sends to whom, memory.

PipeDream, section 3 (1F1B-RR): mini-batch i since the pipeline was last empty goes whole to replica
i mod R of a stage with R replicas, forward and backward alike. R mini-batches in a row are a round;
when all replicas have had their backward of it, the mean of its gradients makes one update::

    stage 0, replica 0   F0 F2    B0    * F4    B2    * F6      * a sum and an update, of both
             replica 1   F1 F3       B1 *    F5    B3 *    F7
    stage 1                 F0 B0* F1 B1* F2 B2* F3 B3* ...

So a stage counts its versions in rounds: unit u of its weights is round u.

Rounds in flight: let M be the devices on the way from a stage to a sink that has most of them, its
own included. A replica holds ``ceil(M / R)`` rounds. At the input stage of a chain that is the
paper's NOAM, the devices divided by those of the input stage, rounded up.

No stage waits for itself. A backward of mini-batch m at stage t, with w in flight, comes after the
forward of m + (w - 1) R there, which needs the same forward at a stage s before t; and that waits
for the sum of the round w' before its own, where s has w' in flight. So m must not be in that round
or an earlier one: ``w' - 1 >= ceil((w - 1) R / R')``. The counts above fulfil it, because s has at
least R' more mini-batches on its way to a sink than t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InvalidScheduleError
from anabranch.graph.capture import Captured
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.estimate import estimate
from anabranch.runtime.messages import tag_of
from anabranch.runtime.transport import Channel
from anabranch.weights import WeightPolicy, versions_held


@dataclass(frozen=True)
class RoundRobin:
    """A stage graph whose replicas take mini-batches in turn.

    Attributes:
        in_flight: per stage, rounds of which a replica has a mini-batch between forward and
            backward at most.

    Raises:
        InvalidScheduleError: if stages would wait for each other.
    """

    graph: StageGraph
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.in_flight) != len(self.graph) or min(self.in_flight) < 1:
            raise ValueError(f"{self.in_flight} are no counts for {len(self.graph)} stages")
        replicas, held = self.replicas, self.in_flight
        for s, t in self.graph.edges:
            least = 1 - (held[t] - 1) * replicas[t] // -replicas[s]
            if held[s] < least:
                raise InvalidScheduleError(
                    f"stage {t} takes mini-batches in turn on {replicas[t]} replicas with "
                    f"{held[t]} rounds in flight each, and stage {s} before it on {replicas[s]} "
                    f"with {held[s]}: it would wait for gradients that take another of its "
                    f"forwards; let it have {least} or more in flight"
                )

    @staticmethod
    def of(graph: StageGraph, per_hop: int = 1) -> RoundRobin:
        """With as few in flight as keep everybody busy; ``per_hop`` 2 hides transfers."""
        replicas = [stage.replicas for stage in graph.stages]
        held = _minibatches(graph, per_hop)
        return RoundRobin(graph, tuple(-(-m // r) for m, r in zip(held, replicas, strict=True)))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per stage, mini-batches of a full round."""
        return tuple(stage.replicas for stage in self.graph.stages)

    @property
    def late(self) -> int:
        """After so many more mini-batches no stage has to wait to have learned from one."""
        return max((w + 1) * r - 1 for w, r in zip(self.in_flight, self.replicas, strict=True))

    def deepest(self, stage: int) -> int:
        """Mini-batches in flight where there are most, in rounds of a stage; see ``Unit``."""
        minibatches = [w * r for w, r in zip(self.in_flight, self.replicas, strict=True)]
        return max(minibatches) // self.replicas[stage]

    def one(self, turn: int, samples: int) -> StageGraph:
        """The stages of one mini-batch, each the replica whose turn it is."""
        stages = tuple(
            replace(
                stage,
                devices=(stage.devices[turn % stage.replicas],),
                microbatch_size=samples,
                in_flight=1,
            )
            for stage in self.graph.stages
        )
        return replace(self.graph, stages=stages, batch_size=samples)

    def channels(self) -> list[Channel]:
        """Between all ranks that ever send to each other, the same on every rank."""
        rank_of = self.graph.rank_of
        found = set()
        for x, y in self.graph.edges:
            source, target = self.graph.stages[x].devices, self.graph.stages[y].devices
            for turn in range(lcm(len(source), len(target))):
                a, b = rank_of[source[turn % len(source)]], rank_of[target[turn % len(target)]]
                found.add(Channel(a, b, tag_of(x, y, len(self.graph), back=False)))
                found.add(Channel(b, a, tag_of(x, y, len(self.graph), back=True)))
        return sorted(found)


def _minibatches(graph: StageGraph, per_hop: int) -> list[int]:
    """Per stage M, mini-batches on the way to a sink."""
    result = [0] * len(graph)
    for s in reversed(range(len(graph))):
        replicas = graph.stages[s].replicas
        after = (result[t] + per_hop * replicas for t in graph.successors[s])
        result[s] = max(after, default=replicas)
    return result


def budgeted(
    plan: Plan,
    rounds: RoundRobin,
    captured: Captured,
    policy: WeightPolicy,
    *,
    last_update: bool = False,
) -> Plan:
    """The plan with the peaks of whole mini-batches; one that predicts no peaks stays as it is."""
    if plan.predicted is None or not any(plan.predicted.device_peak_bytes):
        return plan
    size, whole = plan.stage_graph.batch_size, rounds.one(0, plan.stage_graph.batch_size)
    cluster = plan.machines or Cluster.preset(f"local:{len(plan.stage_graph.devices)}")
    cost = CostModel(estimate(captured, samples=(size,)), cluster)
    peaks: dict[int, int] = {}
    for s, stage in enumerate(plan.stage_graph.stages):
        held, deepest = rounds.in_flight[s], rounds.deepest(s)
        versions = versions_held(policy, in_flight=held, deepest=deepest, last_update=last_update)
        nbytes = stage_bytes(whole, cost, s, in_flight=held, versions=versions)
        peaks |= dict.fromkeys(stage.devices, int(nbytes))
    ordered = tuple(peaks[device] for device in plan.stage_graph.devices)
    return replace(plan, predicted=replace(plan.predicted, device_peak_bytes=ordered))
