"""Groups of calls under repeated merging, always in an order that can be executed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from anabranch.graph.call_traits import CallTraits
from anabranch.graph.flat_program import frame
from anabranch.graph.opgraph import bits


class CallGroups:
    """Groups of calls under repeated merging; a group is named by its first member."""

    def __init__(self, facts: CallTraits) -> None:
        self.facts = facts
        members = [i for i, node in enumerate(facts.calls) if not facts.free[node]]
        self.members: dict[int, list[int]] = {i: [i] for i in members}
        self.succ: dict[int, set[int]] = {i: set() for i in members}
        self.pred: dict[int, set[int]] = {i: set() for i in members}
        for i in members:
            for source in facts.calls[i].all_input_nodes:
                j = facts.position.get(source)
                if j is not None and j in self.members:
                    self.succ[j].add(i)
                    self.pred[i].add(j)
        self.weight = {i: facts.weight(facts.calls[i]) for i in members}
        self.heavy = {i: int(facts.transforms(facts.calls[i])) for i in members}
        self.path = {i: frame(facts.calls[i]) for i in members}
        self.above: dict[int, int] = {}
        self.alias: dict[int, int] = {}

    def merge(self, into: int, gone: int) -> None:
        """Join two groups; the first keeps its path unless it is the lighter one."""
        lighter = self.weight[into] < self.weight[gone]
        if lighter or (self.weight[into] == self.weight[gone] and not self.path[into]):
            self.path[into] = self.path[gone]
        keep = into
        self.members[keep] += self.members.pop(gone)
        self.weight[keep] = max(self.weight[keep], self.weight.pop(gone))
        self.heavy[keep] += self.heavy.pop(gone)
        self.path.pop(gone)
        for these, those in ((self.succ, self.pred), (self.pred, self.succ)):
            for n in these.pop(gone):
                those[n].discard(gone)
                if n != keep:
                    these[keep].add(n)
                    those[n].add(keep)
            these[keep].discard(gone)
        if self.above:
            bit = 1 << gone
            mask = (self.above[keep] | self.above.pop(gone)) & ~bit & ~(1 << keep)
            self.above[keep] = mask
            # A group is found in the masks of those below it under all the names it has had.
            self.alias[keep] |= self.alias.pop(gone)

    def order(self) -> list[int]:
        """Topological order: of the groups that may come next, the one that starts first."""
        waiting = {g: len(p) for g, p in self.pred.items()}
        first = {g: min(m) for g, m in self.members.items()}
        ready = [(first[g], g) for g, n in waiting.items() if n == 0]
        heapq.heapify(ready)
        result = []
        while ready:
            _, g = heapq.heappop(ready)
            result.append(g)
            for s in self.succ[g]:
                waiting[s] -= 1
                if waiting[s] == 0:
                    heapq.heappush(ready, (first[s], s))
        return result

    def rank_ancestors(self) -> None:
        """Compute for every group the mask of the groups above it."""
        self.above = {}
        self.alias = {g: 1 << g for g in self.members}
        for g in self.order():
            mask = 0
            for p in self.pred[g]:
                mask |= self.above[p] | 1 << p
            self.above[g] = mask

    def needs(self, group: int, other: int) -> bool:
        """Whether the first group depends on the second."""
        return bool(self.above[group] & self.alias[other])

    def neighbours(self, v: int) -> list[int]:
        """Groups that v may be merged with without changing what waits for what, the best first."""
        preds = self.pred[v]
        before = [p for p in preds if all(q == p or self.needs(p, q) for q in preds)]
        after = list(self.succ[v]) if len(self.succ[v]) == 1 else []
        # Where others read what v reads, as a residual sum does beside a norm, v's own result need
        # not be sent as well.
        shared = any(len(self.succ[p]) > 1 for p in before)
        return [*after, *before] if shared else [*before, *after]


def bind(partition: CallGroups, sets: Iterable[Sequence[int]]) -> None:
    """Merge each set, then everything that lies on a cycle between groups."""
    home = {i: g for g, members in partition.members.items() for i in members}
    for each in sets:
        chosen = sorted({home[i] for i in each if i in home})
        for g in chosen[1:]:
            if g == chosen[0]:
                continue
            for i in partition.members[g]:
                home[i] = chosen[0]
            partition.merge(chosen[0], g)
    for cycle in cycles(partition.succ):
        keep, *rest = sorted(cycle)
        for g in rest:
            partition.merge(keep, g)


def cycles(succ: Mapping[int, set[int]]) -> list[list[int]]:
    """Strongly connected components of more than one group (Tarjan 1972, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in succ:
        if root in index:
            continue
        work = [(root, iter(succ[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    component, stack[at:] = stack[at:], []
                    on_stack.difference_update(component)
                    if len(component) > 1:
                        found.append(component)
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter(succ[following])))
            elif following in on_stack:
                low[node] = min(low[node], index[following])
    return found


def components(partition: CallGroups, groups: set[int]) -> list[set[int]]:
    left, found = set(groups), []
    while left:
        front = [left.pop()]
        component = set(front)
        while front:
            g = front.pop()
            near = (partition.succ[g] | partition.pred[g]) & left
            left -= near
            component |= near
            front += near
        found.append(component)
    return found


def convex(partition: CallGroups, component: set[int]) -> bool:
    inside = sum(1 << g for g in component)
    above = 0
    for g in component:
        above |= partition.above[g]
    return not any(
        partition.above[g] & inside for g in bits(above & ~inside) if g in partition.above
    )
