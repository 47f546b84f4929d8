"""From single tensor operations to operators, the units that planners place.

Calls are merged step by step. Except where a step says otherwise, only merges are made that keep the order of
everything else exactly as it was, so that no branch ever waits for another because of the grouping::

    into the producer   p -> v      every other input of v comes from something that p needs anyway
    into the consumer   v -> s      nothing but s reads v

1. What cannot be apart: an operation in place with all that shares its storage; producer and readers of something
   that cannot be sent (not a tensor, a size that depends on the data, a batch folded into another dimension, a value
   that mixes samples). Whatever lies on a path between two merged calls joins them.
2. Calls of one module, at most one heavy call (product, convolution, embedding) in each.
3. Cheap remainders (views, masks, sums) into a neighbour.
4. ``layer``: the calls of one sub-layer, then norms and activations into a neighbour of the same block.
   ``block``: the calls of one entry of a repeated list, where no path leaves and comes back.

Calls that need neither parameters nor gradients are free: they are copied to whoever reads them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn

from anabranch.graph.opgraph import bits
from anabranch.graph.program import (
    BATCH_LEAF,
    BUFFER,
    PARAMETER,
    Program,
    frame,
    schema_name,
    written,
)

Granularity = Literal["operator", "layer", "block"]

FREE = -1
"""The operator of a call that is copied to its readers."""

_HEAVY = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "bilinear", "mv", "addmv", "dot",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "_convolution", "scaled_dot_product_attention", "embedding", "embedding_bag",
    "_embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
}  # fmt: skip
_CHEAP = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "numpy_T", "expand", "expand_as", "unsqueeze",
    "squeeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "unflatten", "flatten", "movedim",
    "narrow", "contiguous", "clone", "detach", "detach_", "alias", "to", "_to_copy", "type_as", "float", "lift_fresh_copy",
    "add", "sub", "rsub", "neg", "mul", "div", "add_", "sub_", "mul_", "div_", "cat", "stack", "concat", "where",
    "masked_fill", "masked_fill_", "dropout", "dropout_", "zeros_like", "ones_like", "full_like", "zeros", "ones", "full",
    "new_zeros", "new_ones", "new_full", "arange", "scalar_tensor", "copy_", "broadcast_tensors", "view_as", "repeat",
    "getitem", "eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not",
    "logical_and", "logical_or", "logical_not", "tril", "triu", "index", "gather", "cumsum", "any", "all", "argmax",
    "argmin", "sum", "mean", "pad", "constant_pad_nd", "abs", "minimum", "maximum", "min", "max", "clamp", "clamp_min",
    "log", "sqrt", "rsqrt", "pow", "square", "floor", "sign", "remainder", "floor_divide", "one_hot", "new_empty",
    "roll", "flip", "isnan", "isinf", "fill_", "zero_", "select_scatter", "linspace", "eye", "meshgrid", "reciprocal", "exp",
}  # fmt: skip
# Cheap enough to be done again by every reader, but work all the same where a parameter is involved.
_NOT_A_REMAINDER = {
    "index", "gather", "cumsum", "pow", "sqrt", "rsqrt", "square", "exp", "log", "one_hot", "abs", "max", "min",
}  # fmt: skip
_RANDOM = ("rand", "bernoulli", "normal", "dropout", "multinomial", "exponential", "poisson")


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


def base_name(node: fx.Node) -> str:
    """Operation without library and overload, such as ``linear``."""
    return schema_name(node).rpartition("::")[2].rpartition(".")[2]


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The value of a node, where it is one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def batch_dim(small: torch.Tensor, large: torch.Tensor, sizes: tuple[int, int]) -> int | None:
    """The dimension that is the samples, None where there is none.

    Args:
        small: the value for ``sizes[0]`` samples.
        large: the value for ``sizes[1]`` samples.
        sizes: two numbers of samples.

    Raises:
        ValueError: if samples are folded into a dimension, occur in several, or the size depends on the data.
    """
    pairs = list(zip(small.shape, large.shape, strict=True))
    if not all(isinstance(n, int) for pair in pairs for n in pair):
        raise ValueError("size depends on the data")
    moving = [d for d, (a, b) in enumerate(pairs) if a != b]
    if not moving:
        return None
    if len(moving) > 1 or pairs[moving[0]] != sizes:
        raise ValueError("samples are folded into other dimensions")
    return moving[0]


class Facts:
    """What the grouping wants to know about each call of a program.

    Args:
        program: propagated, for some number of samples.
        other: the same for another number of samples.
    """

    def __init__(self, program: Program, other: Program) -> None:
        self.program = program
        self.calls = program.calls
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.twins = dict(zip(self.calls, other.calls, strict=True))
        self.sizes = (program.samples, other.samples)
        self.outputs = set(program.outputs)
        self.mutated = {
            tensor_of.meta.get("storage")
            for node in self.calls
            for tensor_of in written(node)
        }
        self.on_parameters: dict[fx.Node, bool] = {}
        self.on_batch: dict[fx.Node, bool] = {}
        self.free: dict[fx.Node, bool] = {}
        for node in program.graph.nodes:
            self._classify(node)
        # What is returned has to be made somewhere.
        for node in reversed(self.calls):
            if node in self.outputs:
                self.free[node] = False

    def _classify(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            source = self.program.sources[node]
            self.on_parameters[node] = source.kind == PARAMETER
            self.on_batch[node] = source.kind == BATCH_LEAF
            self.free[node] = source.kind != PARAMETER and node.meta["storage"] not in self.mutated
        elif node.op in ("call_function", "get_attr"):
            inputs = node.all_input_nodes
            self.on_parameters[node] = any(self.on_parameters[n] for n in inputs)
            self.on_batch[node] = any(self.on_batch[n] for n in inputs)
            self.free[node] = node.op == "get_attr" or (
                all(self.free[n] for n in inputs) and self._copyable(node)
            )

    def _copyable(self, node: fx.Node) -> bool:
        name = base_name(node)
        value = tensor(node)
        return (
            (name in _CHEAP or not self.on_batch[node])
            and not any(word in name for word in _RANDOM)
            and not written(node)
            and (value is None or (not value.requires_grad and value.untyped_storage()._cdata not in self.mutated))
        )

    def sendable(self, node: fx.Node) -> bool:
        """Whether another operator, maybe on another device, can be handed this value for a slice of the samples."""
        here, there = tensor(node), tensor(self.twins[node])
        if here is None or there is None or here.layout is not torch.strided:
            return False
        try:
            dim = batch_dim(here, there, self.sizes)
        except ValueError:
            return False
        # Without a batch dimension but made from the batch: it mixes samples, such as a mean over them.
        return dim is not None or not self.on_batch[node]

    def weight(self, node: fx.Node) -> int:
        """0 for a remainder, 1 for what is worth an operator, 2 for products, convolutions and embeddings."""
        name = base_name(node)
        library = schema_name(node).partition("::")[0]
        if name in _HEAVY or (library not in ("aten", "prims") and name != "getitem"):
            # A table that is looked up at constant places, such as positions, is no more than a parameter.
            return 2 if self.on_batch[node] else 1
        return 0 if name in _CHEAP and name not in _NOT_A_REMAINDER else 1


class Partition:
    """Groups of calls under repeated merging; a group is named by its first member."""

    def __init__(self, facts: Facts) -> None:
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
        self.heavy = {i: int(self.weight[i] == 2) for i in members}
        self.path = {i: frame(facts.calls[i]) for i in members}
        self.above: dict[int, int] = {}
        self.alias: dict[int, int] = {}

    def merge(self, into: int, gone: int) -> None:
        """Join two groups; the first keeps its path unless it is the lighter one."""
        if self.weight[gone] > self.weight[into]:
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
        """Topological order that follows the program: of the groups that may come next, the one that starts first."""
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

    def joins_producer(self, v: int) -> list[int]:
        """Producers that v may be merged into without changing what waits for what."""
        preds = self.pred[v]
        return [p for p in preds if all(q == p or self.needs(p, q) for q in preds)]

    def joins_consumer(self, v: int) -> list[int]:
        """Consumers that v may be merged into without changing what waits for what."""
        return list(self.succ[v]) if len(self.succ[v]) == 1 else []


def group(program: Program, other: Program, module: nn.Module, granularity: Granularity) -> Grouping:
    """Group the calls of a program into operators.

    Args:
        program: propagated, for some number of samples.
        other: the same program for another number of samples, to see which dimensions are samples.
        module: the user's module; the paths of the calls are paths in it.
        granularity: how coarse.
    """
    facts = Facts(program, other)
    partition = Partition(facts)
    _bind(partition, _inseparable(facts))
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


def _inseparable(facts: Facts) -> list[list[int]]:
    """Sets of calls that have to be in one operator."""
    sets: list[list[int]] = []
    for node in facts.calls:
        if not facts.free[node] and not facts.sendable(node):
            readers = [facts.position[user] for user in node.users if user in facts.position]
            sets.append([facts.position[node], *readers])
    sharing: dict[int, list[int]] = defaultdict(list)
    last_write: dict[int, int] = {}
    for i, node in enumerate(facts.calls):
        touched = {n.meta.get("storage") for n in (node, *node.all_input_nodes)}
        for storage in touched & facts.mutated - {None}:
            sharing[storage].append(i)
        for target in written(node):
            last_write[target.meta["storage"]] = i
    for storage, calls in sharing.items():
        # Those who read after the last write see the final value, wherever they are, if it is made by a call.
        owned = facts.calls[calls[0]].meta.get("storage") == storage
        last = last_write[storage]
        sets.append([i for i in calls if i <= last or not owned])
    return sets


def _attach_isolated(partition: Partition) -> None:
    """Put what nobody waits for, such as a count of the batches, with the next call of its module."""
    outputs = {partition.facts.position[node] for node in partition.facts.outputs}
    for g in sorted(partition.members):
        apart = not partition.succ[g] and not partition.pred[g] and not partition.weight[g]
        if not apart or outputs & set(partition.members[g]) or len(partition.members) == 1:
            continue
        others = [h for h in partition.members if h != g]
        same = [h for h in others if partition.path[h] == partition.path[g]]
        partition.merge(min(same or others, key=lambda h: (h < g, abs(h - g))), g)


def _bind(partition: Partition, sets: Iterable[Sequence[int]]) -> None:
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
    for cycle in _cycles(partition.succ):
        keep, *rest = sorted(cycle)
        for g in rest:
            partition.merge(keep, g)


def _cycles(succ: Mapping[int, set[int]]) -> list[list[int]]:
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


def _contract(
    partition: Partition, together: Callable[[int, int], bool], *, one_heavy: bool
) -> None:
    """Merge neighbours that belong together, until nothing changes."""

    def allowed(a: int, b: int) -> bool:
        return together(a, b) and not (one_heavy and partition.heavy[a] and partition.heavy[b])

    changed = True
    while changed:
        changed = False
        for v in sorted(partition.members):
            if v not in partition.members:
                continue
            for p in partition.joins_producer(v):
                if allowed(p, v):
                    partition.merge(p, v)
                    changed = True
                    break
            else:
                for s in partition.joins_consumer(v):
                    if allowed(v, s):
                        partition.merge(s, v)
                        changed = True


def _contract_keys(partition: Partition, key: Callable[[str], str]) -> None:
    keys = {g: key(path) for g, path in partition.path.items()}
    partition.path = dict(keys)
    _contract(partition, lambda a, b: bool(partition.path[a]) and partition.path[a] == partition.path[b], one_heavy=False)


def _absorb(partition: Partition, weight: int, blocks: Blocks) -> None:
    """Merge groups of at most this weight into a neighbour of their block, of any block if they are in none."""
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


def _host(partition: Partition, v: int, blocks: Blocks) -> int | None:
    before, after = partition.joins_producer(v), partition.joins_consumer(v)
    # Where others read what v reads, as a residual sum does beside a norm, v itself need not cross to its consumer.
    shared = any(len(partition.succ[p]) > 1 for p in before)
    nearest = [*after, *before] if shared else [*before, *after]
    block = blocks.block(partition.path[v])
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


def _merge_blocks(partition: Partition, blocks: Blocks) -> None:
    """Merge the connected calls of each block, where no path leaves them and comes back."""
    of_block: dict[str, set[int]] = defaultdict(set)
    for g, path in partition.path.items():
        block = blocks.block(path)
        if block:
            of_block[block].add(g)
    for block, groups in of_block.items():
        for component in _components(partition, groups):
            partition.rank_ancestors()
            if len(component) > 1 and _convex(partition, component):
                keep, *rest = sorted(component)
                for g in rest:
                    partition.merge(keep, g)
                partition.path[keep] = block
    partition.rank_ancestors()


def _components(partition: Partition, groups: set[int]) -> list[set[int]]:
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


def _convex(partition: Partition, component: set[int]) -> bool:
    inside = sum(1 << g for g in component)
    above = 0
    for g in component:
        above |= partition.above[g]
    return not any(partition.above[g] & inside for g in bits(above & ~inside) if g in partition.above)


def _named(partition: Partition, module: nn.Module) -> Grouping:
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


def group_like(program: Program, other: Program, train: Program, grouping: Grouping) -> Grouping:
    """Give the calls of an evaluation program to the operators of the training program.

    A call goes where the same call of the same module went, counted from the first one there; failing that to the operator
    of its latest input, and never before one of its inputs.

    Args:
        program: propagated evaluation program.
        other: the same for another number of samples.
        train: the training program.
        grouping: its operators.
    """
    facts = Facts(program, other)
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
        known = homes[key] or by_frame[key[0]]
        wanted = known[min(seen[key], len(known) - 1)] if known else FREE
        seen[key] += 1
        owner_of[node] = max([wanted, *earlier, 0 if wanted == FREE else wanted])
    partition = Partition(facts)
    sets: dict[int, list[int]] = defaultdict(list)
    for node, owner in owner_of.items():
        if owner != FREE:
            sets[owner].append(facts.position[node])
    _bind(partition, [*sets.values(), *_inseparable(facts)])
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
