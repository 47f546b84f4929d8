"""Groups of calls under repeated merging, in an order that can be executed at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.graph.call_traits import CallTraits
from anabranch.graph.digraph import strongly_connected, topological_order
from anabranch.graph.flat_program import frame
from anabranch.graph.opgraph import bits


class CallGroups:
    """Groups of calls under repeated merging; a group is named by its first member."""

    def __init__(self, traits: CallTraits) -> None:
        self.traits = traits
        members = [i for i, node in enumerate(traits.calls) if not traits.free[node]]
        self.members: dict[int, list[int]] = {i: [i] for i in members}
        self.succ: dict[int, set[int]] = {i: set() for i in members}
        self.pred: dict[int, set[int]] = {i: set() for i in members}
        for i in members:
            for source in traits.calls[i].all_input_nodes:
                j = traits.position.get(source)
                if j is not None and j in self.members:
                    self.succ[j].add(i)
                    self.pred[i].add(j)
        self.weight = {i: traits.weight(traits.calls[i]) for i in members}
        self.heavy = {i: int(traits.transforms(traits.calls[i])) for i in members}
        self.path = {i: frame(traits.calls[i]) for i in members}
        self.above: dict[int, int] = {}
        self.alias: dict[int, int] = {}

    def merge(self, keep: int, gone: int) -> None:
        """Join two groups; the first keeps its path unless it is the lighter one."""
        lighter = self.weight[keep] < self.weight[gone]
        if lighter or (self.weight[keep] == self.weight[gone] and not self.path[keep]):
            self.path[keep] = self.path[gone]
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
        return topological_order(self.succ, lambda group: min(self.members[group]))

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
        """True if the first group depends on the second."""
        return bool(self.above[group] & self.alias[other])

    def neighbours(self, v: int) -> list[int]:
        """Groups that v may be merged with without changing what waits for what, the best first."""
        preds = self.pred[v]
        before = [p for p in preds if all(q == p or self.needs(p, q) for q in preds)]
        after = list(self.succ[v]) if len(self.succ[v]) == 1 else []
        # Where others read what v reads, as a residual sum does beside a norm, v's own result need
        # not be sent as well; nor where v hands on more than it reads, as a norm that casts first
        # does (``x.to(x.dtype)`` is x, which a residual sum then reads of it).
        shared = any(len(self.succ[p]) > 1 for p in before)
        shared = shared or (bool(before and after) and self._spreads(v))
        return [*after, *before] if shared else [*before, *after]

    def _spreads(self, v: int) -> bool:
        """True if a group hands on more values than it reads of other groups."""
        calls, position = self.traits.calls, self.traits.position
        inside = set(self.members[v])
        read, handed = set[int](), 0
        for i in inside:
            read |= {position[n] for n in calls[i].all_input_nodes if n in position} - inside
            handed += any(position.get(user) not in inside for user in calls[i].users)
        return handed > len([i for i in read if not self.traits.free[calls[i]]])


def bind(groups: CallGroups, sets: Iterable[Sequence[int]]) -> None:
    """Merge each set, then everything that lies on a cycle between groups."""
    home = {i: g for g, members in groups.members.items() for i in members}
    for calls in sets:
        chosen = sorted({home[i] for i in calls if i in home})
        for g in chosen[1:]:
            if g == chosen[0]:
                continue
            for i in groups.members[g]:
                home[i] = chosen[0]
            groups.merge(chosen[0], g)
    for cycle in strongly_connected(groups.succ):
        keep, *rest = sorted(cycle)
        for g in rest:
            groups.merge(keep, g)


def components(groups: CallGroups, chosen: set[int]) -> list[list[int]]:
    """Connected components of the chosen groups, whichever way their edges point."""
    beside = {g: (groups.succ[g] | groups.pred[g]) & chosen for g in sorted(chosen)}
    return strongly_connected(beside)


def convex(groups: CallGroups, component: Iterable[int]) -> bool:
    """True if no path leaves the groups and comes back."""
    inside = sum(1 << g for g in component)
    above = 0
    for g in component:
        above |= groups.above[g]
    return not any(groups.above[g] & inside for g in bits(above & ~inside) if g in groups.above)
