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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from anabranch.graph.flat_program import written
from anabranch.graph.source_questions import (
    Lines,
    lines_of_branch,
    lines_of_loop,
    place_of,
    truth_of_entries,
)

_AT_PLACES = {"index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
"""Writes that change nothing where their index or source is empty."""

_VIEWS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "alias"),
    *("detach", "clone", "to", "_to_copy", "contiguous"),
}
_COMPARED: dict[str, Any] = {
    **dict.fromkeys(("gt", "greater"), operator.gt),
    **dict.fromkeys(("ge", "greater_equal"), operator.ge),
    **dict.fromkeys(("lt", "less"), operator.lt),
    **dict.fromkeys(("le", "less_equal"), operator.le),
    **{"eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne},
}


@dataclass(frozen=True)
class Selection:
    """Entries of a tensor of which there may be none.

    Attributes:
        size: symbol of their number; empty for those that a mask has true.
        mask: the mask.
        is_each: of one index of the mask, in turn.
    """

    size: str = ""
    mask: fx.Node | None = None
    is_each: bool = False

    def sizes(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Symbols of the sizes that are zero where there are none."""
        if self.size:
            return {self.size}
        values = [node.meta["val"] for node in nodes if any(map(self._is_mask, _masks(node)))]
        tensors = [t for v in values for t in (v if isinstance(v, list | tuple) else [v])]
        return {symbol for t in tensors for size in t.shape for symbol in _symbols(size)}

    def _is_mask(self, node: Any) -> bool:
        mask = _stripped(node)
        if self.is_each and _name_of(mask) in ("select", "index"):
            mask = _stripped(mask.args[0])
        return _are_same(mask, self.mask)


@dataclass(frozen=True)
class Work:
    """Work that is left out where a selection is empty.

    Attributes:
        place: file, line and text of the statement that asks.
        lines: of the work, in that file.
        start: number of traced calls before it.
    """

    place: str
    file: str
    lines: Lines
    start: int
    selection: Selection

    def holds(self, node: fx.Node) -> bool:
        """True for a traced call of these lines."""
        traced, lines = node.meta.get("stack_trace") or "", range(self.lines[0], self.lines[1] + 1)
        is_here = any(f'File "{self.file}", line {line}, ' in traced for line in lines)
        return is_here and node.op == "call_function"

    def other_effect(self, calls: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> fx.Node | None:
        """The first of its calls that may change something where the selection is empty."""
        sizes = self.selection.sizes(nodes)
        outside = {_storage(node) for node in set(nodes).difference(calls)}
        for call in calls:
            at_places = _name_of(call) in _AT_PLACES
            for target in written(call):
                read = [call for call in call.all_input_nodes if call is not target and at_places]
                is_own = _storage(target) not in outside
                if not is_own and not any(_is_empty(node, sizes) for node in (target, *read)):
                    return call
        return None


class EmptySelections:
    """The work of a forward that is traced though a plain call may leave it out.

    Attributes:
        places: file, line and text of the statements that ask.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self._work: list[Work] = []

    def truth(self, frame: FrameType, asked: Any) -> bool | None:
        """The truth with which a statement works that asks whether a selection is empty; None for
        any other statement.
        """
        question = (
            _of_tensor(_node(asked)) if isinstance(asked, torch.Tensor) else _of_symbol(asked)
        )
        if question is None:
            return None
        truth, selection = question
        return truth if self._note(frame, lines_of_branch(frame, truth), selection) else None

    def length(self, frame: FrameType, tensor: torch.Tensor) -> int | None:
        """Likewise one, for a length that a statement compares with none."""
        sizes = _symbols(tensor.shape[0]) if tensor.dim() else []
        if len(sizes) != 1:
            return None
        return 1 if self._note(frame, lines_of_branch(frame, None), Selection(sizes[0])) else None

    def hits(self, frame: FrameType, tensor: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """All indices, in place of those for which a mask has an entry (``mask.any(1).nonzero()``);
        None for any other tensor, and for other statements than a loop over it.
        """
        chosen = _stripped(_whole(_stripped(_node(tensor))))
        if _name_of(chosen) not in ("nonzero", "where") or len(chosen.args) != 1:
            return None
        vector, question = chosen.args[0].meta["val"], _of_tensor(chosen.args[0])
        count = vector.shape[0] if vector.dim() == 1 else None
        if question is None or not isinstance(count, int):
            return None
        mask = question[1].mask
        if not self._note(frame, lines_of_loop(frame), Selection(mask=mask, is_each=True)):
            return None
        shape, count = (1,) * (tensor.dim() - 1), min(count, _classes(mask, count))
        return (torch.tensor(index).reshape(shape) for index in range(count))

    def _note(self, frame: FrameType, lines: Lines | None, selection: Selection) -> bool:
        if lines is None:
            return False
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "forward":
            # Of other functions traced calls do not have the lines; those of their caller are more.
            caller = caller.f_back
        if caller is not None and caller is not frame:
            lines = caller.f_lineno, caller.f_lineno
        file, place = (caller or frame).f_code.co_filename, place_of(frame)
        self.places.add(place)
        self._work.append(Work(place, file, lines, len(_graph().nodes), selection))
        return True

    def other_effect(self) -> tuple[str, fx.Node | None] | None:
        """The place of work that may change something where its selection is empty, and the call
        that does, None where its calls cannot be told from others; of a forward that was traced.
        """
        work, self._work = self._work, []
        nodes = list(_graph().nodes) if work else []
        for i, part in enumerate(work):
            # When the statement asks the next time, other work begins.
            ends = (later.start for later in work[i + 1 :] if later.place == part.place)
            calls = [node for node in nodes[part.start : next(ends, None)] if part.holds(node)]
            other = part.other_effect(calls, nodes)
            if other is not None or not calls:
                return part.place, other
        return None


def _of_tensor(node: Any) -> tuple[bool, Selection] | None:
    """The truth of a traced value where a selection has entries; None where the value says nothing
    of whether there are any.
    """
    node = _stripped(node)
    name = _name_of(node)
    if name == "any":
        return True, Selection(mask=_stripped(node.args[0]))
    if name == "logical_not" and (found := _of_tensor(node.args[0])):
        return not found[0], found[1]
    if name not in _COMPARED or type(node.args[1]) is not int:
        return None
    mask = _mask_counted(node.args[0])
    truth = truth_of_entries(lambda count: bool(_COMPARED[name](count, node.args[1])))
    return None if mask is None or truth is None else (truth, Selection(mask=mask))


def _of_symbol(asked: torch.SymBool) -> tuple[bool, Selection] | None:
    """Likewise of a symbol."""
    expression = asked.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return None
    truth = truth_of_entries(lambda count: bool(expression.subs(symbols[0], count)))
    if truth is None:
        return None
    for node in reversed(_graph().nodes):
        is_number = _name_of(node) in ("item", "_local_scalar_dense")
        if is_number and node.meta["val"].node.expr == symbols[0]:
            mask = _mask_counted(node.args[0])
            return None if mask is None else (truth, Selection(mask=mask))
    return truth, Selection(str(symbols[0]))


def _mask_counted(total: Any) -> Any:
    """The mask whose true entries a call counts; None for other calls."""
    total = _stripped(total)
    mask = _stripped(total.args[0]) if _name_of(total) == "sum" else None
    return mask if mask is not None and _has_no_negative(mask) else None


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
        chosen = args[1] if name == "index" else args[1:] if name == "masked_select" else ()
    return [mask for mask in chosen if isinstance(mask, fx.Node)]


def _are_same(one: Any, other: Any) -> bool:
    """True for one value, or one part of it, whose entries are taken in any order."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return bool(one == other)
    one, other = _stripped(one), _stripped(other)
    is_part = one.target is other.target and _name_of(one) in ("select", "eq")
    return one is other or (is_part and all(map(_are_same, one.args, other.args)))


def _stripped(node: Any) -> Any:
    """The value of which a node shows all entries in another shape, order or type."""
    while _name_of(node) in _VIEWS:
        node = node.args[0]
    return node


def _whole(node: Any) -> Any:
    """The call of whose results a node is one."""
    is_part = isinstance(node, fx.Node) and node.target is operator.getitem
    return node.args[0] if is_part else node


def _classes(mask: Any, most: int) -> int:
    """Classes of which a one-hot mask can have entries: of experts those ``topk`` chooses from."""
    chosen = _whole(_stripped(mask.args[0])) if _name_of(mask) == "one_hot" else mask
    if _name_of(chosen) != "topk":
        return most
    dim = chosen.args[2] if len(chosen.args) > 2 else -1
    return int(chosen.args[0].meta["val"].shape[dim])


def _name_of(node: Any) -> str:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else ""


def _symbols(size: Any) -> list[str]:
    """Symbols in a size whose numbers are known in a run only."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return [str(s) for s in getattr(expression, "free_symbols", ()) if str(s).startswith("u")]


def _is_empty(node: fx.Node, sizes: set[str]) -> bool:
    """True for a tensor without entries where these sizes are zero."""
    value = node.meta.get("val")
    shape: Any = value.shape if isinstance(value, torch.Tensor) else ()
    expressions = [size.node.expr for size in shape if isinstance(size, torch.SymInt)]
    return any(e.subs({s: 0 for s in e.free_symbols if str(s) in sizes}) == 0 for e in expressions)


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
