"""Loops and branches that leave work out where a selection is empty, as mixtures of experts do::

    for expert in range(len(self.experts)):
        rows, slot = torch.where(chosen == expert)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, slot, None] * self.experts[expert](x[rows])

They are traced with the work, also for an empty selection. That changes nothing if the work writes
to tensors from outside only at places of the selection, which the traced graph shows, and binds no
name that is read elsewhere, which the source shows. Otherwise the forward is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from anabranch.graph.flat_program import storage, written
from anabranch.graph.source_questions import (
    COMPARED,
    lines_of_branch,
    lines_of_loop,
    place_of,
    truth_if_compared,
    truth_unless_zero,
)

_AT_PLACES = {"index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
"""Writes that change nothing where their index or source is empty."""

_VIEWS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "alias"),
    *("detach", "clone", "to", "_to_copy", "contiguous"),
}


class Work(NamedTuple):
    """Work that is left out where a selection is empty.

    Attributes:
        place: file, line and text of the statement that asks.
        file: where the work is, or the line of a ``forward`` that calls it.
        lines: of the work, in that file.
        start: number of traced calls before it.
        selection: the mask whose true entries it is, or a symbol with their number.
        is_each: the mask has several selections, one for each index of a dimension.
    """

    place: str
    file: str
    lines: range
    start: int
    selection: Any
    is_each: bool

    def calls(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Those of some nodes that are calls of these lines."""
        places = [f'File "{self.file}", line {line}, ' for line in self.lines]
        traces = ((node, node.meta.get("stack_trace") or "") for node in nodes)
        here = [node for node, trace in traces if any(place in trace for place in places)]
        return [node for node in here if node.op == "call_function"]

    def other_effect(self, calls: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> fx.Node | None:
        """The first of its calls that may change something where the selection is empty."""
        sizes = self._sizes(nodes)
        outside = {storage(node) for node in set(nodes).difference(calls)}
        for call in calls:
            at_places = _name(call) in _AT_PLACES
            for target in written(call):
                places = [node for node in call.all_input_nodes if node is not target and at_places]
                is_own = storage(target) not in outside
                if not is_own and not any(_is_empty(node, sizes) for node in (target, *places)):
                    return call
        return None

    def _sizes(self, nodes: Sequence[fx.Node]) -> set[Any]:
        """Symbols that are zero where the selection is empty."""
        if not isinstance(self.selection, fx.Node):
            return set(free_unbacked_symbols(self.selection))
        sizes: set[Any] = set()
        for node in nodes:
            if any(map(self._has_selection, _masks(node))):
                inputs = [source.meta.get("val") for source in node.all_input_nodes]
                sizes |= free_unbacked_symbols(node.meta["val"]) - free_unbacked_symbols(inputs)
        return sizes

    def _has_selection(self, mask: Any) -> bool:
        mask = _stripped(mask)
        if self.is_each and _name(mask) in ("select", "index"):
            mask = _stripped(mask.args[0])
        return _are_same(mask, self.selection)


class EmptySelections:
    """Work of a forward that is traced though a plain call may leave it out.

    Attributes:
        places: file, line and text of the statements that ask for it.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self._work: list[Work] = []

    def truth(self, frame: FrameType, asked: Any) -> bool | None:
        """The truth with which a statement works that asks whether a selection is empty; None for
        any other statement.
        """
        is_tensor = isinstance(asked, torch.Tensor)
        truth, selection = _of_node(traced_node(asked)) if is_tensor else _of_symbol(asked)
        if truth is None or not self._note(frame, lines_of_branch(frame, truth), selection):
            return None
        return truth

    def length(self, frame: FrameType, rows: torch.Tensor) -> int | None:
        """One for a length on which a statement works; None for any other length."""
        truth, selection = _of_symbol(rows.shape[0]) if rows.dim() else (None, None)
        return 1 if truth and self._note(frame, lines_of_branch(frame), selection) else None

    def hits(self, frame: FrameType, hits: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """All indices, in place of those for which a mask has an entry (``mask.any(1).nonzero()``);
        None for any other tensor, and for other statements than a loop over it.
        """
        chosen = _call(traced_node(hits))
        is_choice = _name(chosen) in ("nonzero", "where") and len(chosen.args) == 1
        if not is_choice or not free_unbacked_symbols(hits.shape[:1]):
            return None
        (count, *others), (truth, mask) = chosen.args[0].meta["val"].shape, _of_node(chosen.args[0])
        if others or not truth or not isinstance(count, int):
            return None
        if not self._note(frame, lines_of_loop(frame), mask, is_each=True):
            return None
        routed = _call(mask.args[0]) if _name(mask) == "one_hot" else mask
        if _name(routed) == "topk":  # a mask may have more classes than there are experts
            dim = routed.args[2] if len(routed.args) > 2 else -1
            count = min(count, routed.args[0].meta["val"].shape[dim])
        return (torch.tensor(i).reshape((1,) * (hits.dim() - 1)) for i in range(count))

    def _note(
        self, frame: FrameType, lines: range | None, selection: Any, *, is_each: bool = False
    ) -> bool:
        """True for work on a selection that is to be traced, which is noted."""
        if lines is None or selection is None:
            return False
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "forward":
            caller = caller.f_back
        if caller is not None and caller is not frame:
            # Traced calls have the lines of forwards alone.
            lines = range(caller.f_lineno, caller.f_lineno + 1)
        file, place = (caller or frame).f_code.co_filename, place_of(frame)
        self.places.add(place)
        self._work.append(Work(place, file, lines, len(_graph().nodes), selection, is_each))
        return True

    def other_effect(self) -> tuple[str, fx.Node | None] | None:
        """After a trace, the place of work that may change something where its selection is empty,
        and the call that does; None for a call if those of the work cannot be told from others.
        """
        work, self._work = self._work, []
        nodes = list(_graph().nodes) if work else []
        for i, part in enumerate(work):
            # When the statement asks the next time, other work begins.
            ends = (later.start for later in work[i + 1 :] if later.place == part.place)
            calls = part.calls(nodes[part.start : next(ends, None)])
            other = part.other_effect(calls, nodes)
            if other is not None or not calls:
                return part.place, other
        return None


_Found = tuple[bool | None, Any]
"""The truth that a value has where a selection has entries, and the selection, see ``Work``; None
for a value that says nothing of that."""


def _of_node(node: Any) -> _Found:
    node = _stripped(node)
    name = _name(node)
    if name == "any":
        return True, _stripped(node.args[0])
    if name == "logical_not":
        truth, mask = _of_node(node.args[0])
        return None if truth is None else not truth, mask
    if name not in COMPARED:
        return None, None
    return truth_if_compared(name, node.args[1]), _mask_counted(node.args[0])


def _of_symbol(value: Any) -> _Found:
    symbols = free_unbacked_symbols(value)
    if len(symbols) != 1 or value.node.expr.free_symbols != symbols:
        return None, None
    (symbol,), expression = symbols, value.node.expr
    sides = expression.args if expression.is_Relational else (expression,)
    if not all(side.diff(symbol).is_number for side in sides):
        return None, None  # n % 4 == 0 is true of more than none
    truth = truth_unless_zero(lambda count: bool(expression.subs(symbol, count)))
    for node in _graph().nodes:
        is_number = _name(node) in ("item", "_local_scalar_dense")
        if is_number and symbol in free_unbacked_symbols(node.meta["val"]):
            return truth, _mask_counted(node.args[0])
    return truth, value


def _mask_counted(total: Any) -> Any:
    """The mask whose true entries a call counts; None for other calls."""
    total = _stripped(total)
    mask = _stripped(total.args[0]) if _name(total) == "sum" else None
    return mask if _is_mask(mask) else None


def _is_mask(node: Any) -> bool:
    """True for a mask of zeros and ones, or a product of such."""
    node = _stripped(node)
    if _name(node) == "mul":
        return all(map(_is_mask, node.args))
    is_bool = isinstance(node, fx.Node) and node.meta["val"].dtype is torch.bool
    return is_bool or _name(node) == "one_hot"


def _masks(node: fx.Node) -> list[fx.Node]:
    """Masks of which a call takes the true entries."""
    name, args = _name(node), list(node.args)
    chosen: Any = args[1] if name == "index" else args[1:] if name == "masked_select" else ()
    if name in ("nonzero", "nonzero_numpy") or (name == "where" and len(args) == 1):
        chosen = args[:1]
    return [mask for mask in chosen if isinstance(mask, fx.Node)]


def _are_same(one: Any, other: Any) -> bool:
    """True for one value, or one part of it, whose entries are taken in any order."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return bool(one == other)
    one, other = _stripped(one), _stripped(other)
    is_part = one.target is other.target and _name(one) in ("select", "eq")
    return one is other or (is_part and all(map(_are_same, one.args, other.args)))


def _stripped(node: Any) -> Any:
    """The value of which a node shows all entries in another shape, order or type."""
    while _name(node) in _VIEWS:
        node = node.args[0]
    return node


def _call(node: Any) -> Any:
    """The call that has made a value, which may be one of several results, up to its shape."""
    node = _stripped(node)
    is_part = getattr(node, "target", None) is operator.getitem
    return _stripped(node.args[0]) if is_part else node


def _name(node: Any) -> str:
    """Name of a call's operation, such as ``index_put_``; empty for anything else."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else ""


def _is_empty(node: fx.Node, sizes: set[Any]) -> bool:
    """True for a tensor without entries where these sizes are zero."""
    shape, zeros = getattr(node.meta.get("val"), "shape", ()), dict.fromkeys(sizes, 0)
    return any(isinstance(n, torch.SymInt) and n.node.expr.subs(zeros) == 0 for n in shape)


def _graph() -> fx.Graph:
    mode: Any = get_proxy_mode()
    graph: fx.Graph = mode.tracer.graph
    return graph


def traced_node(value: torch.Tensor) -> fx.Node | None:
    """The node of a tensor in the graph that is being traced; None for others."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    return None if slot is None else slot.proxy.node
