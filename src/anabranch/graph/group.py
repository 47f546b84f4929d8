"""From single tensor operations to operators, the units that planners place.

Calls are merged step by step. Except where a step says otherwise, only merges are made that keep
the order of everything else exactly as it was, so that no branch ever waits for another because of
the grouping::

    into the producer   p -> v      every other input of v comes from something that p needs anyway
    into the consumer   v -> s      nothing but s reads v

1. What cannot be apart: an operation in place with all that shares its storage; producer and
   readers of something that cannot be sent (not a tensor, a size that depends on the data, a batch
   folded into another dimension, a value that mixes samples). Whatever lies on a path between two
   merged calls joins them.
2. Calls of one module, at most one product, convolution or embedding with parameters in each.
3. Cheap remainders (views, masks, sums) into a neighbour.
4. ``layer``: the calls of one sub-layer, then norms and activations into a neighbour of the same
   block.
   ``block``: the calls of one entry of a repeated list, where no path leaves and comes back.

Calls that need neither parameters nor gradients are free: they are copied to whoever reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx, nn

from anabranch.graph.call_groups import CallGroups, bind, components, convex
from anabranch.graph.call_traits import CallTraits, base_name
from anabranch.graph.flat_program import FlatProgram, frame, written
from anabranch.graph.opgraph import Granularity

FREE = -1
"""The operator of a call that is copied to its readers."""


@dataclass(frozen=True)
class Grouping:
    """Operators of a program.

    Attributes:
        names: of the operators, in topological order.
        kinds: what each is called in a report.
        owners: per call of the program, in program order, the index of its operator or ``FREE``.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    owners: tuple[int, ...]


def group(
    program: FlatProgram, other: FlatProgram, module: nn.Module, granularity: Granularity
) -> Grouping:
    """Group the calls of a program into operators.

    Args:
        program: propagated, for some number of samples.
        other: the same program for another number of samples, to see which dimensions are samples.
        module: the user's module; the paths of the calls are paths in it.
        granularity: how coarse.
    """
    facts = CallTraits(program, other)
    partition = CallGroups(facts)
    bind(partition, _inseparable(facts))
    _attach_isolated(partition)
    blocks = Blocks(module)
    partition.rank_ancestors()
    _contract(partition, lambda a, b: partition.path[a] == partition.path[b], one_heavy=True)
    _absorb(partition, 0, blocks)
    if granularity != "operator":
        _contract_keys(partition, blocks.layer)
        _absorb(partition, 1, blocks)
    if granularity == "block":
        _merge_blocks(partition, blocks)
        _absorb(partition, 1, blocks)
    return _named(partition, module)


def _inseparable(facts: CallTraits) -> list[list[int]]:
    """Sets of calls that have to be in one operator."""
    sets: list[list[int]] = []
    for node in facts.calls:
        if not facts.free[node] and not facts.sendable(node):
            readers = [facts.position[user] for user in node.users if user in facts.position]
            sets.append([facts.position[node], *readers])
    sharing: dict[int, list[int]] = defaultdict(list)
    last_write: dict[int, int] = {}
    for i, node in enumerate(facts.calls):
        near = (node, *node.all_input_nodes)
        touched = {n.meta["storage"] for n in near if "storage" in n.meta}
        for storage in touched & facts.mutated:
            sharing[storage].append(i)
        for target in written(node):
            last_write[target.meta.get("storage", 0)] = i
    for storage, calls in sharing.items():
        # Those who read after the last write see the final value, wherever they are, if it is made
        # by a call.
        owned = facts.calls[calls[0]].meta.get("storage") == storage
        last = last_write[storage]
        sets.append([i for i in calls if i <= last or not owned])
    return sets


def _attach_isolated(partition: CallGroups) -> None:
    """Put what nobody waits for, such as a count of batches, with the next call of its module."""
    for g in sorted(partition.members):
        apart = not partition.succ[g] and not partition.pred[g] and not partition.weight[g]
        if not apart or len(partition.members) == 1:
            continue
        others = [h for h in partition.members if h != g]
        same = [h for h in others if partition.path[h] == partition.path[g]]
        partition.merge(min(same or others, key=lambda h: (h < g, abs(h - g))), g)


def _contract(
    partition: CallGroups, together: Callable[[int, int], bool], *, one_heavy: bool
) -> None:
    """Merge neighbours that belong together, until nothing changes."""
    changed = True
    while changed:
        changed = False
        for v in sorted(partition.members):
            for host in partition.neighbours(v) if v in partition.members else ():
                heavy = one_heavy and partition.heavy[host] and partition.heavy[v]
                if together(host, v) and not heavy:
                    partition.merge(host, v)
                    changed = True
                    break


def _contract_keys(partition: CallGroups, key: Callable[[str], str]) -> None:
    keys = {g: key(path) for g, path in partition.path.items()}
    partition.path = dict(keys)
    _contract(
        partition,
        lambda a, b: bool(partition.path[a]) and partition.path[a] == partition.path[b],
        one_heavy=False,
    )


def _absorb(partition: CallGroups, weight: int, blocks: Blocks) -> None:
    """Merge groups of at most this weight into a neighbour, of their own block if they have one."""
    partition.rank_ancestors()
    changed = True
    while changed:
        changed = False
        for v in sorted(partition.members):
            if v not in partition.members or partition.weight[v] > weight:
                continue
            host = _host(partition, v, blocks)
            if host is not None:
                path = partition.path[host]
                partition.merge(host, v)
                partition.path[host] = path
                changed = True


def _host(partition: CallGroups, v: int, blocks: Blocks) -> int | None:
    block = blocks.block(partition.path[v])
    nearest = partition.neighbours(v)
    choices = [g for g in nearest if blocks.block(partition.path[g]) == block]
    if not choices and (not block or partition.weight[v] == 0):
        choices = nearest
    return choices[0] if choices else None


class Blocks:
    """The repeated entries of a module's lists, such as the layers of a transformer."""

    def __init__(self, module: nn.Module) -> None:
        self.paths: set[str] = set()
        self.lists: set[str] = set()
        for path, each in module.named_modules():
            if isinstance(each, nn.ModuleList | nn.ModuleDict):
                self.lists.add(path)
            if not isinstance(each, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                continue
            classes = [type(child) for child in each.children()]
            for name, child in each.named_children():
                composed = any(True for _ in child.children())
                if composed and classes.count(type(child)) > 1:
                    self.paths.add(f"{path}.{name}" if path else name)

    def block(self, path: str) -> str:
        """The innermost block that holds this path, or nothing."""
        parts = path.split(".")
        for n in range(len(parts), 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.paths:
                return prefix
        return ""

    def layer(self, path: str) -> str:
        """The path cut one module below its block; unchanged outside of blocks."""
        block = self.block(path)
        if not block or path == block:
            return path
        rest = path[len(block) + 1 :].split(".")
        taken = block
        for part in rest:
            taken = f"{taken}.{part}"
            if taken not in self.lists:
                break
        return taken


def _merge_blocks(partition: CallGroups, blocks: Blocks) -> None:
    """Merge the connected calls of each block, where no path leaves them and comes back."""
    of_block: dict[str, set[int]] = defaultdict(set)
    for g, path in partition.path.items():
        block = blocks.block(path)
        if block:
            of_block[block].add(g)
    for block, groups in of_block.items():
        for component in components(partition, groups):
            partition.rank_ancestors()
            if len(component) > 1 and convex(partition, component):
                keep, *rest = sorted(component)
                for g in rest:
                    partition.merge(keep, g)
                partition.path[keep] = block
    partition.rank_ancestors()


def _named(partition: CallGroups, module: nn.Module) -> Grouping:
    order = partition.order()
    owners = [FREE] * len(partition.facts.calls)
    names: list[str] = []
    kinds: list[str] = []
    taken: dict[str, int] = defaultdict(int)
    modules = dict(module.named_modules())
    for i, g in enumerate(order):
        members = sorted(partition.members[g])
        for call in members:
            owners[call] = i
        path = partition.path[g]
        main = max(members, key=lambda m: (partition.facts.weight(partition.facts.calls[m]), -m))
        operation = base_name(partition.facts.calls[main])
        name = path or operation
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
        kinds.append(type(modules[path]).__name__ if path and path in modules else operation)
    return Grouping(tuple(names), tuple(kinds), tuple(owners))


def group_like(
    program: FlatProgram, other: FlatProgram, train: FlatProgram, grouping: Grouping
) -> Grouping:
    """Give the calls of an evaluation program to the operators of the training program.

    A call goes where the same call of the same module went, counted from the first one there;
    failing that to the operator of its latest input, and never before one of its inputs.

    Args:
        program: propagated evaluation program.
        other: the same for another number of samples.
        train: the training program.
        grouping: its operators.
    """
    facts = CallTraits(program, other)
    homes: dict[tuple[str, str], list[int]] = defaultdict(list)
    by_frame: dict[str, list[int]] = defaultdict(list)
    for node, owner in zip(train.calls, grouping.owners, strict=True):
        if owner != FREE:
            homes[frame(node), base_name(node)].append(owner)
            by_frame[frame(node)].append(owner)
    seen: dict[tuple[str, str], int] = defaultdict(int)
    owner_of: dict[fx.Node, int] = {}
    for node in facts.calls:
        if facts.free[node]:
            owner_of[node] = FREE
            continue
        key = (frame(node), base_name(node))
        earlier = [owner_of.get(n, FREE) for n in node.all_input_nodes]
        known = homes[key] or by_frame[key[0]] or [0]
        wanted = known[min(seen[key], len(known) - 1)]
        seen[key] += 1
        owner_of[node] = max(wanted, *earlier) if earlier else wanted
    partition = CallGroups(facts)
    sets: dict[int, list[int]] = defaultdict(list)
    for node, owner in owner_of.items():
        if owner != FREE:
            sets[owner].append(facts.position[node])
    bind(partition, [*sets.values(), *_inseparable(facts)])
    homes_of = {g: min(owner_of[facts.calls[i]] for i in m) for g, m in partition.members.items()}
    order = sorted(partition.members, key=lambda g: homes_of[g])
    owners = [FREE] * len(facts.calls)
    for i, g in enumerate(order):
        for call in partition.members[g]:
            owners[call] = i
    return Grouping(
        tuple(grouping.names[homes_of[g]] for g in order),
        tuple(grouping.kinds[homes_of[g]] for g in order),
        tuple(owners),
    )
