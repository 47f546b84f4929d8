"""Loops and branches that leave work out where a selection is empty, as mixtures of experts do::

    for expert in range(len(self.experts)):
        rows, slot = torch.where(chosen == expert)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, slot, None] * self.experts[expert](x[rows])

A trace works on every selection, empty or not. That is the same where the work changes nothing if
its selection is empty: it writes to tensors from outside only at places of the selection, and binds
no name that is read elsewhere. Both are looked at, the names in the source, the tensors in the
traced graph; where that cannot be seen, the forward is refused.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._pytree import tree_leaves

from anabranch.graph.flat_program import written
from anabranch.graph.source_questions import (
    Lines,
    lines_of_branch,
    lines_of_loop,
    place_of,
    truth_of_entries,
)

_AT_PLACES = {
    *("index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_"),
    *("masked_fill_", "masked_scatter_"),
}
"""Writes that change nothing where their index, mask or source is empty."""

_RESHAPES = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose"}
_COPIES = {"alias", "detach", "clone", "to", "_to_copy", "contiguous"}
_ZEROS = {
    *_RESHAPES,
    *_COPIES,
    *("sum", "any", "mul", "select", "slice", "expand", "item", "_local_scalar_dense"),
}
"""Calls that make zeros of zeros, and of no entries."""

_FINITE = {
    *_AT_PLACES,
    *(name.strip("_") for name in _AT_PLACES),
    *("add", "add_", "sub", "rsub", "neg", "clamp", "clamp_min", "maximum", "where", "cat"),
    *("stack", "exp", "sigmoid", "softmax", "tanh", "relu", "linear", "matmul", "zeros_like"),
}
"""Further calls that are finite there, and so are their derivatives."""

_COMPARED: dict[str, Any] = {
    **dict.fromkeys(("gt", "greater"), operator.gt),
    **dict.fromkeys(("ge", "greater_equal"), operator.ge),
    **dict.fromkeys(("lt", "less"), operator.lt),
    **dict.fromkeys(("le", "less_equal"), operator.le),
    **{"eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne},
}


class Selection(NamedTuple):
    """Entries of which there may be none: the symbol of their number, or keys of a mask that has
    them true, as ``_key`` makes them, and the call that counts these.
    """

    size: str = ""
    keys: tuple[Any, ...] = ()
    asked: fx.Node | None = None


@dataclass
class Work:
    """Work that is left out where a selection is empty: the file, line and text of the statement
    that asks, and the calls that were traced of it.
    """

    place: str
    selection: Selection
    calls: list[fx.Node] = field(default_factory=list)


class _Traced:
    """A traced forward, and what it returned."""

    def __init__(self, nodes: Sequence[fx.Node], output: Any) -> None:
        self.order = {node: i for i, node in enumerate(nodes)}
        self.returned = {_node(leaf) for leaf in tree_leaves(output) if _is_tensor(leaf)}
        self.of_key: dict[Any, list[fx.Node]] = defaultdict(list)
        self.of_symbol: dict[str, list[fx.Node]] = defaultdict(list)
        self.born: dict[int | None, int] = {}
        self.last_write = {_storage(t): i for i, node in enumerate(nodes) for t in written(node)}
        for i, node in enumerate(nodes):
            # Parameters are older than their first use.
            self.born.setdefault(_storage(node), i if node.op == "call_function" else -1)
            self.of_key[_key(node)].append(node)
            for symbol in _symbols_of(node):
                self.of_symbol[symbol].append(node)

    def other_effect(self, work: Work) -> tuple[fx.Node, str] | None:
        """The first call that may change something where the selection is empty, and how."""
        calls, begin = set(work.calls), self.order[work.calls[0]]
        zeros, sizes = self._zeros(work.selection)
        infinite = self._infinite(zeros, sizes, self.order[work.calls[-1]])
        for call in work.calls:
            reads = call.all_input_nodes if _name_of(call) in _AT_PLACES else []
            for target in written(call):
                none = any(_is_empty(node, sizes) for node in (target, *reads))
                if self.born[_storage(target)] < begin and not (none or zeros & {*_masks(call)}):
                    return call, "writes to more than the places of the selection"
            is_own = _is_tensor(call.meta.get("val")) and self.born[_storage(call)] >= begin
            if is_own and (call in self.returned or not calls.issuperset(call.users)):
                return call, "computes what is read elsewhere"
            if not infinite.isdisjoint((call, *call.all_input_nodes)):
                return call, "computes from the selection what may be infinite"
        return None

    def _zeros(self, selection: Selection) -> tuple[set[fx.Node], set[str]]:
        """Values that are zero or false where a selection is empty, and symbols of sizes."""
        masks = [m for key in selection.keys for m in self.of_key[key] if not self._is_changed(m)]
        zeros, sizes, pending = set(masks), {selection.size} - {""}, masks
        while pending:
            node = pending.pop()
            sizes |= _symbols(node.meta["val"])
            for user in node.users:
                if node in _masks(user) and _name_of(user) not in _AT_PLACES:
                    known = {s for read in user.all_input_nodes for s in _symbols_of(read)}
                    sizes |= _symbols_of(user) - known
                elif _name_of(user) in _ZEROS and user not in zeros and not self._is_changed(user):
                    zeros.add(user)
                    pending.append(user)
        return zeros, sizes

    def _infinite(self, zeros: set[fx.Node], sizes: set[str], last: int) -> set[fx.Node]:
        """Values that fail, or may be infinite or have such a gradient, where the selection is
        empty, up to the last call of the work: there a gradient of zeros does not remain one.
        """
        infinite, pending = set[fx.Node](), list(zeros)
        pending += (node for size in sizes for node in self.of_symbol[size])
        known = set(pending)
        while pending:
            node = pending.pop()
            is_none, is_infinite = _is_empty(node, sizes), node in infinite
            is_infinite |= isinstance(node.meta["val"], torch.SymFloat)  # such as 1 / n
            for user in node.users:
                name, values = _name_of(user), _values(user)
                if not values or self.order[user] > last:
                    continue
                is_zero = name in _ZEROS or (name == "div" and user.args[1] is not node)
                is_zero &= not is_none or name != "select"  # there is no first of none
                is_whole = all(not v.is_floating_point() for v in values) and not is_none
                is_fine = is_zero or is_whole or name in _FINITE or _is_empty(user, sizes)
                group = infinite if is_infinite or not is_fine else known if is_zero else {user}
                if user not in group:
                    group.add(user)
                    pending.append(user)
        return infinite

    def _is_changed(self, mask: Any) -> bool:
        """True for a mask that is written to through a view of it, or of what it is made of."""
        return any(self.last_write.get(_storage(n), -1) > self.order[n] for n in _made_of(mask))


class EmptySelections:
    """The work of a forward that is traced though a plain call may leave it out.

    Attributes:
        places: file, line and text of the statements that ask.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self._work: list[Work] = []
        self._asked: dict[FrameType, dict[Lines, Work]] = {}

    def note(self, call: fx.Node, frame: FrameType | None) -> None:
        """Note a traced call of a frame, or of one that this has called, as of their work."""
        while frame is not None and call.op == "call_function" and self._asked:
            for (first, last), work in self._asked.get(frame, {}).items():
                if first <= frame.f_lineno <= last:
                    work.calls.append(call)
            frame = frame.f_back

    def forget(self) -> None:
        """Keep no frame of a forward that has ended."""
        self._work, self._asked = [], {}

    def truth(self, frame: FrameType, asked: Any) -> bool | None:
        """The truth with which a statement works that asks whether a selection is empty; None for
        any other statement.
        """
        question = _of_tensor(_node(asked)) if _is_tensor(asked) else _of_symbol(asked)
        if question is None:
            return None
        truth, selection = question
        return truth if self._note(frame, lines_of_branch(frame, truth), selection) else None

    def length(self, frame: FrameType, tensor: torch.Tensor) -> int | None:
        """Likewise one, for a length that a statement compares with none."""
        size: Any = tensor.shape[0] if tensor.dim() else 0
        symbols = _symbols(size)
        if len(symbols) != 1 or _truth(size.node.expr) is None:
            return None
        lines = lines_of_branch(frame, None)
        return 1 if self._note(frame, lines, Selection(symbols.pop())) else None

    def hits(self, frame: FrameType, tensor: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """All indices, in place of those for which a mask has an entry (``mask.any(1).nonzero()``);
        None for any other tensor, and for other statements than a loop over it.
        """
        chosen = _stripped(_whole(_stripped(_node(tensor))))
        if _name_of(chosen) not in ("nonzero", "where") or len(chosen.args) != 1:
            return None
        vector, question = chosen.args[0].meta["val"], _of_tensor(chosen.args[0])
        count = vector.shape[0] if vector.dim() == 1 else None
        is_column = all(size == 1 for size in tensor.shape[1:])
        if question is None or not question[0] or not isinstance(count, int) or not is_column:
            return None
        asked: Any = question[1].asked
        mask, dims = _original(asked.args[0]), asked.args[1]
        rank = mask.meta["val"].dim()
        summed = {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}
        lines, kept = lines_of_loop(frame), set(range(rank)) - summed
        if lines is None or len(kept) != 1:
            return None
        shape, count = (1,) * (tensor.dim() - 1), min(count, _classes(mask, count))
        entries = [torch.tensor(index).reshape(shape) for index in range(count)]

        def each() -> Iterator[torch.Tensor]:
            for index, entry in enumerate(entries):
                keys = [("at", mask, *kept, at) for at in (index, _stripped(_node(entry)))]
                self._note(frame, lines, Selection(keys=tuple(keys), asked=asked))
                yield entry

        return each()

    def _note(self, frame: FrameType, lines: Lines | None, selection: Selection) -> bool:
        if lines is not None:
            work = Work(place_of(frame), selection)
            self.places.add(work.place)
            self._work.append(work)
            self._asked.setdefault(frame, {})[lines] = work
        return lines is not None

    def other_effect(self, output: Any) -> tuple[str, fx.Node, str] | None:
        """The place of work that may change something where its selection is empty, the call that
        does, and how; of a forward that was traced and has returned ``output``.
        """
        parts = [work for work in self._work if work.calls]
        traced = _Traced(list(_graph().nodes) if parts else [], output)
        self.forget()
        for work in parts:
            if (other := traced.other_effect(work)) is not None:
                return work.place, *other
        return None


def _of_tensor(node: Any) -> tuple[bool, Selection] | None:
    """The truth of a traced value where a selection has entries; None where the value says nothing
    of whether there are any.
    """
    node = _stripped(node)
    name = _name_of(node)
    if name == "any":
        return True, _of_mask(node)
    if name == "logical_not" and (found := _of_tensor(node.args[0])):
        return not found[0], found[1]
    if name not in _COMPARED or type(node.args[1]) is not int:
        return None
    total = _stripped(node.args[0])
    truth = truth_of_entries(lambda count: bool(_COMPARED[name](count, node.args[1])))
    return None if truth is None or not _counts(total) else (truth, _of_mask(total))


def _of_symbol(asked: torch.SymBool) -> tuple[bool, Selection] | None:
    """Likewise of a symbol."""
    expression = asked.node.expr
    truth, symbols = _truth(expression), list(expression.free_symbols)
    if truth is None:
        return None
    for node in reversed(_graph().nodes):
        is_number = _name_of(node) in ("item", "_local_scalar_dense")
        if is_number and node.meta["val"].node.expr == symbols[0]:
            total = _stripped(node.args[0])
            return (truth, _of_mask(total)) if _counts(total) else None
    return truth, Selection(str(symbols[0]))


def _truth(expression: Any) -> bool | None:
    """The truth of an expression of one number of entries where there are any."""
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return None
    return truth_of_entries(lambda count: bool(expression.subs(symbols[0], count)))


def _of_mask(asked: fx.Node) -> Selection:
    keys, mask = list[Any](), asked
    while _name_of(mask) == "any" or mask is asked:  # entries of mask.any(1) are those of the mask
        keys.append(_key(mask.args[0]))
        mask = _stripped(mask.args[0])
    return Selection(keys=tuple(keys), asked=asked)


def _counts(total: Any) -> bool:
    """True for a call that counts the true entries of a mask."""
    return _name_of(total) == "sum" and _has_no_negative(total.args[0])


def _has_no_negative(node: Any) -> bool:
    node = _stripped(node)
    is_product = _name_of(node) == "mul" and all(map(_has_no_negative, node.args))
    is_mask = _name_of(node) == "one_hot" or node.meta["val"].dtype is torch.bool
    return is_product or is_mask


def _masks(node: fx.Node) -> list[fx.Node]:
    """Masks of which a call takes the true entries."""
    name, args = _name_of(node), list(node.args)
    if name in ("nonzero", "nonzero_numpy") or (name == "where" and len(args) == 1):
        chosen: Any = args[:1]
    else:
        is_list = name in ("index", "index_put_")
        chosen = args[1] if is_list else args[1:2] if name.startswith("masked_") else ()
    return [mask for mask in chosen if isinstance(mask, fx.Node)]


def _key(node: Any) -> Any:
    """A value as what it has been made of: equal for values, or parts, with the same entries."""
    node = _stripped(node)
    name, args = _name_of(node), [_original(arg) for arg in getattr(node, "args", ())]
    if name == "eq" and not isinstance(args[1], fx.Node):
        return name, _key(args[0]), args[1]
    if name == "select":
        return "at", args[0], args[1] % args[0].meta["val"].dim(), args[2]
    if name == "index" and [i for i in args[1] if i is not None] == args[1][-1:]:
        at = args[1][-1]
        while _name_of(at := _stripped(at)) == "select" and at.args[0].meta["val"].numel() == 1:
            at = at.args[0]
        return "at", args[0], len(args[1]) - 1, at
    return node


def _original(node: Any, ways: Collection[str] = _COPIES) -> Any:
    """The value of which a node has all entries, in the same places."""
    while _name_of(node) in ways and not _loses(node):
        node = node.args[0]
    return node


def _stripped(node: Any) -> Any:
    """The value of which a node shows all entries in another shape, order or type."""
    return _original(node, _RESHAPES | _COPIES)


def _loses(node: fx.Node) -> bool:
    """True for another type, in which numbers may be zero that are not."""
    value, source = node.meta["val"].dtype, node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    return bool(value is not source and source.is_floating_point)


def _made_of(node: Any) -> Iterator[fx.Node]:
    """A mask, and what it shows in another way, or a part of."""
    while isinstance(node, fx.Node):
        yield node
        is_part = _name_of(node) in {*_RESHAPES, *_COPIES, "eq", "select", "index"}
        node = node.args[0] if is_part else None


def _whole(node: Any) -> Any:
    """The call of whose results a node is one."""
    is_part = isinstance(node, fx.Node) and node.target is operator.getitem
    return node.args[0] if is_part else node


def _classes(mask: Any, most: int) -> int:
    """Classes of which a one-hot mask can have entries: of experts those ``topk`` chooses from."""
    mask = _stripped(mask)
    indices = list(_made_of(mask.args[0] if _name_of(mask) == "one_hot" else mask))
    chosen = _whole(indices[-1])
    writes = {_storage(target) for node in _graph().nodes for target in written(node)}
    if _name_of(chosen) != "topk" or not writes.isdisjoint(map(_storage, indices)):
        return most
    dim = chosen.args[2] if len(chosen.args) > 2 else -1
    return int(chosen.args[0].meta["val"].shape[dim])


def _name_of(node: Any) -> str:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else ""


def _symbols(size: Any) -> set[str]:
    """Symbols in a number whose values are known in a run only."""
    expression = size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else None
    names = map(str, getattr(expression, "free_symbols", ()))
    return {name for name in names if name.startswith(("u", "zuf"))}


def _symbols_of(node: fx.Node) -> set[str]:
    """Those of a number, or of the sizes of tensors."""
    numbers = [size for value in _values(node) for size in value.shape]
    return set[str]().union(*map(_symbols, [node.meta.get("val"), *numbers]))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if _is_tensor(value)]


def _is_empty(node: fx.Node, sizes: set[str]) -> bool:
    """True for tensors without entries where these sizes are zero."""

    def is_none(size: Any) -> bool:
        names = {s: 0 for s in size.node.expr.free_symbols if str(s) in sizes}
        return bool(names) and bool(size.node.expr.subs(names) == 0)

    shapes = [value.shape for value in _values(node)]
    is_symbol = torch.SymInt
    return bool(shapes) and all(
        any(is_none(size) for size in shape if isinstance(size, is_symbol)) for shape in shapes
    )


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _graph() -> fx.Graph:
    mode: Any = get_proxy_mode()
    graph: fx.Graph = mode.tracer.graph
    return graph


def _node(tensor: torch.Tensor) -> fx.Node | None:
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node
