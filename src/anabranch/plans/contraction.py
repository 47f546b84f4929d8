"""Contraction of a profile: sets of operators become single operators, and can be expanded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.cost.footprint import pass_behind
from anabranch.graph.digraph import strongly_connected, topological_order
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value, bits
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile


@dataclass(frozen=True)
class Contracted:
    """A profile with fewer operators, and their members in the original profile.

    Attributes:
        whole: the original profile.
        profile: the contracted profile.
        masks: bit mask in ``whole`` of the members of each operator of ``profile``.
    """

    whole: Profile
    profile: Profile
    masks: tuple[int, ...]

    def expand(self, graph: StageGraph) -> StageGraph:
        """Convert stages of the contracted model to stages of the original one."""
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
    """Contract each set of operators, a bit mask, to one operator; overlapping sets are merged."""
    graph = profile.graph
    if not any(mask.bit_count() > 1 for mask in sets):
        return Contracted(profile, profile, tuple(1 << i for i in range(len(graph))))
    circles = strongly_connected(_after(graph, _disjoint(len(graph), sets)))
    # Among parts without an order the part with the earliest operator comes first.
    after = _after(graph, [*map(sum, circles)])
    masks = topological_order(after, rank=lambda part: part & -part)
    return Contracted(profile, _joined(profile, masks), tuple(masks))


def in_runs(profile: Profile, most: int) -> Contracted:
    """Contract runs of operators in a row if the model has more than ``most`` operators.

    A run has no more work than one of ``most`` equal parts of the model.
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


def in_a_row(profile: Profile, order: Sequence[int]) -> Profile:
    """Put operators in a topological order, with an edge without bytes from each to the next.

    Stages of such a model are runs of its operators, and every stage follows the one before it.
    """
    row = _joined(profile, [1 << op for op in order])
    links = (Value(i, (i + 1,), 0, grad=False) for i in range(len(order) - 1))
    return replace(row, graph=replace(row.graph, values=(*row.graph.values, *links)))


def _disjoint(count: int, sets: Sequence[int]) -> list[int]:
    """Partition all operators so that every set stays together."""
    parts = [1 << i for i in range(count)]
    for mask in sets:
        touched = [part for part in parts if part & mask]
        parts = [part for part in parts if not part & mask] + [sum(touched)]
    return parts


def _after(graph: OpGraph, parts: Sequence[int]) -> dict[int, set[int]]:
    """Map each part to the parts that read from it."""
    part_of = {op: part for part in parts for op in bits(part)}
    after: dict[int, set[int]] = {part: set() for part in parts}
    for a, b in graph.edges:
        if part_of[a] != part_of[b]:
            after[part_of[a]].add(part_of[b])
    return after


def _joined(profile: Profile, masks: Sequence[int]) -> Profile:
    graph = profile.graph
    part_of = {op: i for i, mask in enumerate(masks) for op in bits(mask)}
    values: list[Value] = []
    for value in graph.values:
        producer = BATCH if value.producer == BATCH else part_of[value.producer]
        consumers = tuple(sorted({part_of[c] for c in value.consumers} - {producer}))
        if consumers or not value.consumers:
            values.append(replace(value, producer=producer, consumers=consumers))
    return replace(
        profile,
        graph=replace(graph, ops=tuple(_op(graph, mask) for mask in masks), values=tuple(values)),
        costs=tuple(_cost(profile, mask) for mask in masks),
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


def _cost(profile: Profile, mask: int) -> OpCost:
    chosen = [profile.costs[i] for i in bits(mask)]
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
        _weight_s(profile, mask),
        sum(cost.kept_fixed_bytes for cost in chosen),
        sum(profile.costs[i].waiting_bytes for i in bits(profile.graph.way_back(mask))),
    )


def _weight_s(profile: Profile, mask: int) -> tuple[float, ...]:
    """Return the seconds of gradients of weights that can wait; empty if unknown for all members.

    Only members on the way back to the inputs can wait; if there is none, all members count.
    """
    if not any(profile.costs[i].weight_s for i in bits(mask)):
        return ()
    waiting = profile.graph.way_back(mask) or mask
    seconds = (profile.costs[i].second_half_s for i in bits(waiting))
    return tuple(map(sum, zip(*seconds, strict=True)))
