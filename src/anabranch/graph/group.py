"""Grouping of tensor operations into operators, the units that planners place.

Calls are merged step by step. Except where a step says otherwise, a merge keeps the order of
everything else, so that no branch ever waits for another because of the grouping::

    into the producer   p -> v      every other input of v comes from something that p needs anyway
    into the consumer   v -> s      nothing but s reads v

1. What cannot be apart: an operation in place with all that shares its storage; producer and
   readers of what cannot be sent (not a tensor, a size that depends on the data, folded or mixed
   samples). Calls on a path between two merged calls join them.
2. Calls of one module, at most one product, convolution or embedding with parameters in each.
3. Cheap remainders (views, masks, sums) into a neighbour.
4. ``layer``: the calls of one sub-layer, then norms and activations into a neighbour of the block.
   ``block``: the calls of one entry of a repeated list, where no path leaves and comes back.

Calls that need neither parameters nor gradients are free: they are copied to whoever reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from anabranch.graph.call_traits import CallTraits, base_name
from anabranch.graph.digraph import strongly_connected, topological_order
from anabranch.graph.flat_program import FlatProgram, frame
from anabranch.graph.opgraph import Granularity, bits
from anabranch.graph.samples.batch_statistics import WHOLE_BATCH_LOSS

FREE = -1
"""The operator of a call that is copied to its readers."""


@dataclass(frozen=True)
class Grouping:
    """Operators in topological order; ``owners`` has each call's operator or ``FREE``."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    owners: tuple[int, ...]

    def owner_of(self, program: FlatProgram) -> dict[fx.Node, int]:
        """Per call of a program, the index of its operator, or ``FREE`` for calls to copy."""
        return dict(zip(program.calls, self.owners, strict=True))


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

    def join(self, groups: Iterable[int]) -> int:
        """Merge groups into the first of them, and return that."""
        keep, *rest = sorted(groups)
        for group in rest:
            self.merge(keep, group)
        return keep

    def order(self) -> list[int]:
        """Return a topological order; of groups that may come next, the one that starts first."""
        return topological_order(self.succ, lambda group: min(self.members[group]))

    def owners(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return, per call, the place of its group in an order, or ``FREE``."""
        place = {call: i for i, g in enumerate(order) for call in self.members[g]}
        return tuple(place.get(call, FREE) for call in range(len(self.traits.calls)))

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
        """Return True if the first group depends on the second."""
        return bool(self.above[group] & self.alias[other])

    def neighbours(self, v: int) -> list[int]:
        """Return groups that v may be merged with without new waits of others, best first."""
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
        """Return True if a group hands on more values than it reads of other groups."""
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
        groups.join(cycle)


def components(groups: CallGroups, chosen: set[int]) -> list[list[int]]:
    """Return connected components of the chosen groups, whichever way their edges point."""
    beside = {g: (groups.succ[g] | groups.pred[g]) & chosen for g in sorted(chosen)}
    return strongly_connected(beside)


def convex(groups: CallGroups, component: Iterable[int]) -> bool:
    """Return True if no path leaves the groups and comes back."""
    inside = sum(1 << g for g in component)
    above = 0
    for g in component:
        above |= groups.above[g]
    return not any(groups.above[g] & inside for g in bits(above & ~inside) if g in groups.above)


def group(traits: CallTraits, module: nn.Module, granularity: Granularity) -> Grouping:
    """Group the calls of a program into operators."""
    groups = CallGroups(traits)
    bind(groups, _inseparable(traits))
    _attach_isolated(groups)
    blocks = Blocks(module)
    groups.rank_ancestors()
    _contract(groups, one_heavy=True)
    _absorb(groups, 0, blocks)
    if granularity != "operator":
        groups.path = {g: blocks.layer(path) for g, path in groups.path.items()}
        _contract(groups, one_heavy=False)
        _absorb(groups, 1, blocks)
    if granularity == "block":
        _merge_blocks(groups, blocks)
        _absorb(groups, 1, blocks)
    return _named(groups, module)


def _inseparable(traits: CallTraits) -> list[list[int]]:
    """Return sets of calls that have to be in one operator."""
    sets: list[list[int]] = []
    for node in traits.calls:
        if not traits.free[node] and not traits.sendable(node):
            readers = [traits.position[user] for user in node.users if user in traits.position]
            sets.append([traits.position[node], *readers])
    placed = {node.meta.get("storage") for node in traits.program.sources}
    sharing: dict[int | None, list[int]] = defaultdict(list)
    for i, node in enumerate(traits.calls):
        near = (node, *node.all_input_nodes)
        for storage in {n.meta.get("storage") for n in near} & traits.last_writes.keys():
            sharing[storage].append(i)
    for storage, calls in sharing.items():
        # Calls that read after the last write see the final value in any operator, if a call has
        # made the memory.
        owned, last = storage not in placed, traits.last_writes[storage]
        sets.append([i for i in calls if i <= last or not owned])
    return sets


def _attach_isolated(groups: CallGroups) -> None:
    """Merge calls without neighbours, such as a count of batches, with the next of their module."""
    for g in sorted(groups.members):
        apart = not groups.succ[g] and not groups.pred[g] and not groups.weight[g]
        if not apart or len(groups.members) == 1:
            continue
        others = [h for h in groups.members if h != g]
        same = [h for h in others if groups.path[h] == groups.path[g]]
        groups.merge(min(same or others, key=lambda h: (h < g, abs(h - g))), g)


def _merge_all(
    groups: CallGroups, host_of: Callable[[int], int | None], *, keep_path: bool = False
) -> None:
    """Merge every group into its host, until none has one; the host keeps its path if asked to."""
    changed = True
    while changed:
        changed = False
        for v in sorted(groups.members):
            host = host_of(v) if v in groups.members else None
            if host is not None:
                path = groups.path[host]
                groups.merge(host, v)
                groups.path[host] = path if keep_path else groups.path[host]
                changed = True


def _contract(groups: CallGroups, *, one_heavy: bool) -> None:
    """Merge neighbours of one path: with at most one heavy call each, or all of one module."""

    def host_of(v: int) -> int | None:
        path, heavy = groups.path[v], one_heavy and groups.heavy[v]
        beside = groups.neighbours(v) if path or one_heavy else []
        same = (h for h in beside if groups.path[h] == path and not (heavy and groups.heavy[h]))
        return next(same, None)

    _merge_all(groups, host_of)


def _absorb(groups: CallGroups, weight: int, blocks: Blocks) -> None:
    """Merge groups of at most this weight into a neighbour, of their own block if they have one."""

    def host_of(v: int) -> int | None:
        if groups.weight[v] > weight:
            return None
        block = blocks.block(groups.path[v])
        nearest = [g for g in groups.neighbours(v) if groups.path[g] != WHOLE_BATCH_LOSS]
        choices = [g for g in nearest if blocks.block(groups.path[g]) == block]
        if not choices and (not block or groups.weight[v] == 0):
            choices = nearest
        return choices[0] if choices else None

    groups.rank_ancestors()
    _merge_all(groups, host_of, keep_path=True)


class Blocks:
    """The repeated entries of a module's lists, such as the layers of a transformer."""

    def __init__(self, module: nn.Module) -> None:
        self.paths: set[str] = set()
        self.lists: set[str] = set()
        for path, parent in module.named_modules():
            if isinstance(parent, nn.ModuleList | nn.ModuleDict):
                self.lists.add(path)
            if not isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                continue
            classes = [type(child) for child in parent.children()]
            for name, child in parent.named_children():
                composed = any(True for _ in child.children())
                if composed and classes.count(type(child)) > 1:
                    self.paths.add(f"{path}.{name}" if path else name)

    def block(self, path: str) -> str:
        """Return the innermost block that holds this path; empty without one."""
        parts = path.split(".")
        for n in range(len(parts), 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.paths:
                return prefix
        return ""

    def layer(self, path: str) -> str:
        """Cut a path one module below its block; leave it outside of blocks, and for a branch that
        a rewrite has made, as in ``layers.0.mlp[0:512]``.
        """
        block = self.block(path)
        if not block or path == block or path.endswith("]"):
            return path
        taken = block
        for part in path[len(block) + 1 :].split("."):
            taken = f"{taken}.{part}"
            if taken not in self.lists:
                break
        return taken


def _merge_blocks(groups: CallGroups, blocks: Blocks) -> None:
    """Merge the connected calls of each block, where no path leaves them and comes back."""
    of_block: dict[str, set[int]] = defaultdict(set)
    for g, path in groups.path.items():
        block = blocks.block(path)
        if block:
            of_block[block].add(g)
    for block, members in of_block.items():
        for component in components(groups, members):
            groups.rank_ancestors()
            if len(component) > 1 and convex(groups, component):
                groups.path[groups.join(component)] = block
    groups.rank_ancestors()


def _named(groups: CallGroups, module: nn.Module) -> Grouping:
    order = groups.order()
    names: list[str] = []
    kinds: list[str] = []
    taken: dict[str, int] = defaultdict(int)
    modules = dict(module.named_modules())
    for g in order:
        path, members = groups.path[g], groups.members[g]
        main = max(members, key=lambda m: (groups.traits.weight(groups.traits.calls[m]), -m))
        operation = base_name(groups.traits.calls[main])
        name = path or operation
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
        kinds.append(type(modules[path]).__name__ if path and path in modules else operation)
    return Grouping(tuple(names), tuple(kinds), groups.owners(order))


def group_like(traits: CallTraits, train: FlatProgram, grouping: Grouping) -> Grouping:
    """Give an evaluation program's calls to the operators of the training program.

    A call goes where the same call of its module went, else to the operator of its latest input;
    never before one of its inputs. Where its module makes as many such calls in both programs, its
    number tells which one it is, and otherwise its name in the trace.
    """
    by_name: dict[tuple[str, str, str], int] = {}
    homes: dict[tuple[str, str], list[int]] = defaultdict(list)
    by_frame: dict[str, list[int]] = defaultdict(list)
    for node, owner in grouping.owner_of(train).items():
        if owner != FREE:
            homes[frame(node), base_name(node)].append(owner)
            by_frame[frame(node)].append(owner)
            by_name[node.name, frame(node), base_name(node)] = owner
    seen: dict[tuple[str, str], int] = defaultdict(int)
    made = Counter((frame(node), base_name(node)) for node in traits.calls if not traits.free[node])
    owner_of: dict[fx.Node, int] = {}
    for node in traits.calls:
        if traits.free[node]:
            owner_of[node] = FREE
            continue
        key = (frame(node), base_name(node))
        earlier = [owner_of.get(n, FREE) for n in node.all_input_nodes]
        known = homes[key] or by_frame[key[0]] or [0]
        wanted = known[min(seen[key], len(known) - 1)]
        if made[key] != len(homes[key]):
            wanted = by_name.get((node.name, *key), wanted)
        seen[key] += 1
        owner_of[node] = max(wanted, *earlier) if earlier else wanted
    groups = CallGroups(traits)
    sets: dict[int, list[int]] = defaultdict(list)
    for node, owner in owner_of.items():
        if owner != FREE:
            sets[owner].append(traits.position[node])
    bind(groups, [*sets.values(), *_inseparable(traits)])
    homes_of = {g: min(owner_of[traits.calls[i]] for i in m) for g, m in groups.members.items()}
    order = sorted(groups.members, key=lambda g: homes_of[g])
    return Grouping(
        tuple(grouping.names[homes_of[g]] for g in order),
        tuple(grouping.kinds[homes_of[g]] for g in order),
        groups.owners(order),
    )
