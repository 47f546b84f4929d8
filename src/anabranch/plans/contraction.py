"""Smaller models: some sets of operators as one operator each, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.cost.passes import pass_behind
from anabranch.graph.digraph import strongly_connected, topological_order
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value, bits
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile, Sharded


@dataclass(frozen=True)
class Contracted:
    """A profile with fewer operators, and the way back.

    Attributes:
        profile: with every set of operators as one.
        masks: per operator of ``profile``, which of ``whole`` it stands for.
    """

    whole: Profile
    profile: Profile
    masks: tuple[int, ...]

    def expand(self, graph: StageGraph) -> StageGraph:
        """Stages of the smaller model as stages of the whole one."""
        if self.profile is self.whole:
            return graph
        at = self.profile.graph.index
        stages = []
        for stage in graph.stages:
            mask = 0
            for name in stage.operators:
                mask |= self.masks[at[name]]
            stages.append(replace(stage, operators=self.whole.graph.names(mask)))
        return replace(graph, stages=tuple(stages))


def contract(profile: Profile, sets: Sequence[int]) -> Contracted:
    """The profile with every set of operators, a bit mask, as one; overlapping sets become one."""
    graph = profile.graph
    if not any(mask.bit_count() > 1 for mask in sets):
        return Contracted(profile, profile, tuple(1 << i for i in range(len(graph))))
    masks = in_order(graph, _acyclic(graph, _disjoint(len(graph), sets)))
    return Contracted(profile, _joined(profile, masks), tuple(masks))


def in_runs(profile: Profile, most: int) -> Contracted:
    """The profile of a model with more than ``most`` operators made smaller: those that follow one
    another are one, as long as that has no more work than each of ``most`` equal parts.
    """
    graph = profile.graph
    work = [cost.forward_s[-1] + cost.backward_s[-1] for cost in profile.costs]
    share = sum(work) / most if len(graph) > most else 0.0
    group, weight = [1 << i for i in range(len(graph))], list(work)
    head = list(range(len(graph)))
    for i, before in enumerate(graph.predecessors):
        if before.bit_count() == 1 and graph.successors[before.bit_length() - 1] == 1 << i:
            first = head[before.bit_length() - 1]
            if weight[first] + work[i] <= share:
                head[i] = first
                group[first] |= 1 << i
                weight[first] += work[i]
    return contract(profile, [group[i] for i in range(len(graph)) if head[i] == i])


def _disjoint(count: int, sets: Sequence[int]) -> list[int]:
    """A partition of all operators that keeps every set together."""
    parts = [1 << i for i in range(count)]
    for mask in sets:
        touched = [part for part in parts if part & mask]
        parts = [part for part in parts if not part & mask] + [sum(touched)]
    return parts


def _acyclic(graph: OpGraph, parts: Sequence[int]) -> list[int]:
    """The parts with those on a circle as one."""
    return [sum(circle) for circle in strongly_connected(_after(graph, parts))]


def in_order(graph: OpGraph, parts: Sequence[int]) -> list[int]:
    """The parts in topological order, of those that may come next the first of the model."""
    return topological_order(_after(graph, parts), rank=lambda part: part & -part)


def _after(graph: OpGraph, parts: Sequence[int]) -> dict[int, set[int]]:
    """Part -> the parts that read from it."""
    home = {op: part for part in parts for op in bits(part)}
    after: dict[int, set[int]] = {part: set() for part in parts}
    for a, b in graph.edges:
        if home[a] != home[b]:
            after[home[a]].add(home[b])
    return after


def _joined(profile: Profile, masks: Sequence[int]) -> Profile:
    graph = profile.graph
    home = {op: i for i, mask in enumerate(masks) for op in bits(mask)}
    values: list[Value] = []
    for value in graph.values:
        producer = BATCH if value.producer == BATCH else home[value.producer]
        consumers = tuple(sorted({home[c] for c in value.consumers} - {producer}))
        if consumers or not value.consumers:
            values.append(replace(value, producer=producer, consumers=consumers))
    return replace(
        profile,
        graph=OpGraph(
            tuple(_op(graph, mask) for mask in masks),
            tuple(values),
            graph.parameters,
            graph.name,
            graph.granularity,
        ),
        costs=tuple(_cost(profile.costs, mask) for mask in masks),
        sharded=tuple(
            Sharded(
                sharded.degree,
                tuple(_cost(sharded.costs, mask) for mask in masks),
                tuple(sum(sharded.parameter_bytes[i] for i in bits(mask)) for mask in masks),
            )
            for sharded in profile.sharded
        ),
    )


def _op(graph: OpGraph, mask: int) -> Op:
    first, *others = (graph.ops[i] for i in bits(mask))
    if not others:
        return first
    names = (name for op in (first, *others) for name in op.parameters)
    return Op(
        f"{first.name} and {len(others)} more",
        tuple(dict.fromkeys(names)),
        first.kind,
        first.whole_batch or any(op.whole_batch for op in others),
    )


def _cost(costs: Sequence[OpCost], mask: int) -> OpCost:
    chosen = [costs[i] for i in bits(mask)]
    if len(chosen) == 1:
        return chosen[0]
    working = 0.0
    for cost in chosen:
        working = pass_behind(working, cost.kept_bytes, cost.working_bytes)
    return OpCost(
        tuple(map(sum, zip(*(cost.forward_s for cost in chosen), strict=True))),
        tuple(map(sum, zip(*(cost.backward_s for cost in chosen), strict=True))),
        sum(cost.kept_bytes for cost in chosen),
        int(working),
    )
