"""Loops and branches that leave work out where a selection is empty, as mixtures of experts do::

    for expert in range(len(self.experts)):
        rows, slot = torch.where(chosen == expert)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, slot, None] * self.experts[expert](x[rows])

They are traced with the work, also for an empty selection. That changes nothing if the work binds
no name that is read elsewhere, which the source shows, and if its calls, as the traced graph shows,
write to tensors from outside only at places of the selection, compute nothing that is read or
returned elsewhere, and nothing infinite of no entries. Otherwise the forward is refused.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from anabranch.graph.flat_program import schema_name, storage, tensors, written
from anabranch.graph.operations import AT_PLACES, COPIES, FINITE, OF_ZEROS, SAME_ENTRIES
from anabranch.graph.tracing.source_questions import (
    COMPARED,
    lines_of_branch,
    lines_of_loop,
    truth_if_compared,
    truth_unless_zero,
)
from anabranch.graph.user_lines import frame_place


class Selection(NamedTuple):
    """Entries of a tensor of which there may be none.

    Attributes:
        number: symbolic number of the entries; None if they are the true ones of a mask.
        keys: keys of the mask, see ``_key``.
        asked: call that asks for the mask's true entries.
    """

    number: Any = None
    keys: tuple[Any, ...] = ()
    asked: fx.Node | None = None


class Work(NamedTuple):
    """Work that is left out where a selection is empty.

    Attributes:
        place: file, line and text of the statement that asks.
        calls: traced calls of the work, in order.
    """

    place: str
    selection: Selection
    calls: list[fx.Node]


class _Traced:
    """A traced forward, and what it returned."""

    def __init__(self, nodes: Sequence[fx.Node], output: Any) -> None:
        self.order = {node: i for i, node in enumerate(nodes)}
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.returned = set(map(traced_node, leaves))
        self.of_key: dict[Any, list[fx.Node]] = defaultdict(list)
        self.of_symbol: dict[Any, list[fx.Node]] = defaultdict(list)
        self.born: dict[int | None, int] = {}
        self.last_write = {storage(t): i for i, node in enumerate(nodes) for t in written(node)}
        for i, node in enumerate(nodes):
            # Parameters are older than their first use.
            self.born.setdefault(storage(node), i if node.op == "call_function" else -1)
            self.of_key[_key(node)].append(node)
            for symbol in _symbols(node):
                self.of_symbol[symbol].append(node)

    def other_effect(self, work: Work) -> tuple[fx.Node, str] | None:
        """Return the first call that may change something if the selection is empty, and how."""
        calls, begin = set(work.calls), self.order[work.calls[0]]
        zeros, sizes = self._zeros(work.selection)
        infinite = self._infinite(zeros, sizes, self.order[work.calls[-1]])
        for call in work.calls:
            reads = call.all_input_nodes if _name(call) in AT_PLACES else []
            for target in written(call):
                is_none = any(_is_empty(node, sizes) for node in (target, *reads))
                is_none |= not zeros.isdisjoint(_masks(call))
                if self.born[storage(target)] < begin and not is_none:
                    return call, "writes to more than the places of the selection"
            is_own = storage(call) is not None and self.born[storage(call)] >= begin
            if is_own and (call in self.returned or not calls.issuperset(call.users)):
                return call, "computes what is read elsewhere"
            if not infinite.isdisjoint((call, *call.all_input_nodes)):
                return call, "computes from the selection what may be infinite"
        return None

    def _zeros(self, selection: Selection) -> tuple[set[fx.Node], set[Any]]:
        """Return values that are zero or false if a selection is empty, and symbols that are 0."""
        masks = [m for key in selection.keys for m in self.of_key[key] if not self._is_changed(m)]
        zeros, sizes, pending = set(masks), set(free_unbacked_symbols(selection.number)), masks
        while pending:
            node = pending.pop()
            sizes |= set() if tensors(node) else _symbols(node)
            for user in node.users:
                if node in _masks(user) and _name(user) not in AT_PLACES:
                    sizes |= _symbols(user).difference(*map(_symbols, user.all_input_nodes))
                elif _name(user) in OF_ZEROS and user not in zeros and not self._is_changed(user):
                    zeros.add(user)
                    pending.append(user)
        return zeros, sizes

    def _infinite(self, zeros: set[fx.Node], sizes: set[Any], last: int) -> set[fx.Node]:
        """Return values, up to the last call of the work, that fail if the selection is empty, or
        may be infinite or have an infinite gradient, which turns a gradient of zeros into NaN.
        """
        infinite, pending = set[fx.Node](), list(zeros)
        pending += (node for size in sizes for node in self.of_symbol[size])
        known = set(pending)
        while pending:
            node = pending.pop()
            is_none, is_infinite = _is_empty(node, sizes), node in infinite
            is_infinite |= isinstance(_value(node), torch.SymFloat)  # such as 1 / n
            for user in node.users:
                name, values = _name(user), tensors(user)
                if not values or self.order[user] > last:
                    continue
                is_zero = name in OF_ZEROS or (name == "div" and user.args[1] is not node)
                is_zero &= not is_none or name != "select"  # there is no first of none
                is_whole = not (is_none or any(value.is_floating_point() for value in values))
                is_fine = is_zero or is_whole or name in FINITE or _is_empty(user, sizes)
                group = infinite if is_infinite or not is_fine else known if is_zero else {user}
                if user not in group:
                    group.add(user)
                    pending.append(user)
        return infinite

    def _is_changed(self, mask: Any) -> bool:
        """True for a mask that is written to through a view of it, or of what it is made of."""
        return any(self.last_write.get(storage(n), -1) > self.order[n] for n in _made_of(mask))


class EmptySelections:
    """Work of a forward that is traced though a plain call may leave it out.

    Attributes:
        places: file, line and text of the statements that may leave it out.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self._asked: dict[FrameType, dict[range, Work]] = {}
        self._work: list[Work] = []

    def note(self, call: fx.Node, frame: FrameType | None) -> None:
        """Note a traced call as part of the work that its frame, or one of its callers, is in."""
        while frame is not None and call.op == "call_function" and self._asked:
            for lines, work in self._asked.get(frame, {}).items():
                if frame.f_lineno in lines:
                    work.calls.append(call)
            frame = frame.f_back

    def forget(self) -> None:
        """Let go of the frames of a forward that has ended."""
        self._work, self._asked = [], {}

    def truth(self, frame: FrameType, asked: Any) -> bool | None:
        """Return the truth with which a statement that asks for an empty selection does its work;
        None for any other statement.
        """
        is_tensor = isinstance(asked, torch.Tensor)
        truth, selection = _of_node(traced_node(asked)) if is_tensor else _of_symbol(asked)
        is_noted = truth is not None and self._note(frame, lines_of_branch(frame, truth), selection)
        return truth if is_noted else None

    def length(self, frame: FrameType, rows: torch.Tensor) -> int | None:
        """Return 1 for a length that decides about work on a selection; None for any other."""
        truth, selection = _of_symbol(rows.shape[0]) if rows.dim() else _NOTHING
        return 1 if truth and self._note(frame, lines_of_branch(frame), selection) else None

    def hits(self, frame: FrameType, hits: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """Return all indices, in place of those at which a mask has an entry
        (``mask.any(1).nonzero()``), for a loop over them; None for other tensors and statements.
        """
        chosen = _call(traced_node(hits))
        is_choice = _name(chosen) in ("nonzero", "where") and len(chosen.args) == 1
        is_column = all(size == 1 for size in hits.shape[1:])
        if not is_choice or not is_column or not free_unbacked_symbols(hits.shape[:1]):
            return None
        vector, (truth, selection) = _value(chosen.args[0]), _of_node(chosen.args[0])
        lines, asked, count = lines_of_loop(frame), selection.asked, vector.numel()
        is_vector = vector.dim() == 1 and isinstance(count, int)
        if lines is None or asked is None or not (truth and is_vector):
            return None
        mask, dims = _stripped(asked.args[0], COPIES), tree_leaves(asked.args[1:2])
        rank = _value(mask).dim()
        kept = {*range(rank)} - {dim % rank for dim in dims}
        if len(kept) != 1:
            return None
        count = min(count, _classes(mask, count))
        entries = [torch.tensor(i).reshape((1,) * (hits.dim() - 1)) for i in range(count)]

        def each() -> Iterator[torch.Tensor]:
            for index, entry in enumerate(entries):
                keys = [("at", mask, *kept, at) for at in (index, _stripped(traced_node(entry)))]
                self._note(frame, lines, Selection(keys=tuple(keys), asked=asked))
                yield entry

        return each()

    def _note(self, frame: FrameType, lines: range | None, selection: Selection) -> bool:
        """Note work on a selection, if a statement has some; return True if it has."""
        if lines is not None:
            work = Work(frame_place(frame), selection, [])
            self.places.add(work.place)
            self._work.append(work)
            self._asked.setdefault(frame, {})[lines] = work
        return lines is not None

    def other_effect(self, output: Any) -> tuple[str, fx.Node, str] | None:
        """Return the place of work that may change something if its selection is empty, the call
        that does, and how; for a forward that was traced and has returned ``output``.
        """
        parts = [work for work in self._work if work.calls]
        traced = _Traced(list(_graph().nodes) if parts else [], output)
        self.forget()
        effects = ((work.place, traced.other_effect(work)) for work in parts)
        return next(((place, *effect) for place, effect in effects if effect is not None), None)


_Found = tuple[bool | None, Selection]
"""Truth of a value if a selection has entries, and the selection; None for the truth of a value
that does not tell."""

_NOTHING: _Found = None, Selection()


def _of_node(node: Any) -> _Found:
    node = _stripped(node)
    name = _name(node)
    if name == "any":
        return True, _of_mask(node)
    truth = truth_if_compared(name, node.args[1]) if name in COMPARED else None
    return _NOTHING if truth is None else _if_counts(truth, node.args[0])


def _of_symbol(number: Any) -> _Found:
    symbols = free_unbacked_symbols(number)
    if len(symbols) != 1 or number.node.expr.free_symbols != symbols:
        return _NOTHING
    (symbol,), expression = symbols, number.node.expr
    sides = expression.args if expression.is_Relational else (expression,)
    if not all(side.diff(symbol).is_number for side in sides):
        return _NOTHING  # n % 4 == 0 is true of more than none
    truth = truth_unless_zero(lambda count: bool(expression.subs(symbol, count)))
    for node in _graph().nodes:
        if _name(node) in ("item", "_local_scalar_dense") and symbol in _symbols(node):
            return _if_counts(truth, node.args[0])
    return truth, Selection(number)


def _if_counts(truth: bool | None, total: Any) -> _Found:
    """Return a truth with a mask's true entries, or those of a class, if ``total`` counts them."""
    total, part = _stripped(total), _call(total)
    counts: Any = _stripped(part.args[0]) if _name(part) in ("select", "unbind") else None
    if _name(counts) == "bincount" and counts.args[1] is None:
        return truth, Selection(keys=(("eq", _key(counts.args[0]), total.args[-1]),))
    is_count = _name(total) == "sum" and _is_mask(total.args[0])
    return (truth, _of_mask(total)) if is_count else _NOTHING


def _of_mask(asked: fx.Node) -> Selection:
    keys, mask = [_key(asked.args[0])], _stripped(asked.args[0])
    while _name(mask) == "any":  # entries of mask.any(1) are those of the mask
        keys.append(_key(mask.args[0]))
        mask = _stripped(mask.args[0])
    return Selection(keys=tuple(keys), asked=asked)


def _is_mask(node: Any) -> bool:
    """Return True for a mask of zeros and ones, or a product of such."""
    node = _stripped(node)
    if _name(node) == "mul":
        return all(map(_is_mask, node.args))
    is_bool = isinstance(node, fx.Node) and _value(node).dtype is torch.bool
    return is_bool or _name(node) == "one_hot"


def _masks(node: fx.Node) -> list[fx.Node]:
    """Return the masks whose true entries a call takes."""
    name, args = _name(node), list(node.args)
    chosen: Any = args[1:2] if name.startswith("masked_") else ()
    if name in ("index", "index_put_"):
        chosen = args[1]
    elif name in ("nonzero", "nonzero_numpy") or (name == "where" and len(args) == 1):
        chosen = args[:1]
    return [mask for mask in chosen if isinstance(mask, fx.Node)]


def _key(node: Any) -> Any:
    """Return a key of how a value was made, equal for values, or parts, with the same entries."""
    node = _stripped(node)
    name, args = _name(node), [_stripped(arg, COPIES) for arg in getattr(node, "args", ())]
    if name == "eq" and not isinstance(args[1], fx.Node):
        return name, _key(args[0]), args[1]
    if name == "select":
        return "at", args[0], args[1] % _value(args[0]).dim(), args[2]
    if name == "index" and [i for i in args[1] if i is not None] == args[1][-1:]:
        at = args[1][-1]
        while _name(at := _stripped(at)) == "select" and _value(at.args[0]).numel() == 1:
            at = at.args[0]
        return "at", args[0], len(args[1]) - 1, at
    return node


def _stripped(node: Any, views: Collection[str] = SAME_ENTRIES) -> Any:
    """Go back from a node through views and copies to the value with the same entries; not through
    casts in which a number other than zero may become zero.
    """
    while _name(node) in views:
        source, dtype = node.args[0], _value(node.args[0]).dtype
        if dtype.is_floating_point and dtype is not _value(node).dtype:
            break
        node = source
    return node


def _made_of(node: Any) -> Iterator[fx.Node]:
    """Generate a mask and the values behind it, of which it is a view, a part or a comparison."""
    while isinstance(node, fx.Node):
        yield node
        node = node.args[0] if _name(node) in {*SAME_ENTRIES, "eq", "select", "index"} else None


def _call(node: Any) -> Any:
    """Return the call that has made a value, perhaps as one of several results, behind views."""
    node = _stripped(node)
    is_part = getattr(node, "target", None) is operator.getitem
    return _stripped(node.args[0]) if is_part else node


def _classes(mask: Any, most: int) -> int:
    """Return how many classes a one-hot mask has: of experts as many as ``topk`` chooses from."""
    mask = _stripped(mask)
    indices = list(_made_of(mask.args[0] if _name(mask) == "one_hot" else mask))
    chosen = _call(indices[-1])
    writes = {storage(target) for node in _graph().nodes for target in written(node)}
    if _name(chosen) != "topk" or not writes.isdisjoint(map(storage, indices)):
        return most
    dim = chosen.args[2] if len(chosen.args) > 2 else -1
    return int(_value(chosen.args[0]).shape[dim])


def _name(node: Any) -> str:
    """Return the name of a call's operation, such as ``index_put_``; empty for anything else."""
    return schema_name(node).partition("::")[2] if isinstance(node, fx.Node) else ""


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _symbols(node: fx.Node) -> set[Any]:
    """Return symbols in a number, or in the sizes of tensors, whose values only a run knows."""
    is_number = isinstance(_value(node), torch.SymInt | torch.SymFloat)
    numbers = [_value(node)] if is_number else [value.shape for value in tensors(node)]
    return set(free_unbacked_symbols(numbers))


def _is_empty(node: fx.Node, sizes: set[Any]) -> bool:
    """Return True for tensors without entries where these sizes are zero."""
    zeros = dict.fromkeys(sizes, 0)
    empty = [
        any(isinstance(size, torch.SymInt) and size.node.expr.subs(zeros) == 0 for size in v.shape)
        for v in tensors(node)
    ]
    return bool(empty) and all(empty)


def _graph() -> fx.Graph:
    mode: Any = get_proxy_mode()
    return cast("fx.Graph", mode.tracer.graph)


def traced_node(value: torch.Tensor | torch.SymBool) -> fx.Node | None:
    """Return the node of a value in the graph that is being traced; None for others."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    if slot is None or isinstance(value, torch.Tensor):
        return None if slot is None else slot.proxy.node
    node: fx.Node = slot.force().node
    return node
