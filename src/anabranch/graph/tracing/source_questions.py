"""Statements of the source that ask for the truth or the entries of what a frame computes."""

from __future__ import annotations

import ast
import dis
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

COMPARED: dict[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("Eq", "eq"), operator.eq),
    **dict.fromkeys(("NotEq", "ne", "not_equal"), operator.ne),
    **dict.fromkeys(("Gt", "gt", "greater"), operator.gt),
    **dict.fromkeys(("GtE", "ge", "greater_equal"), operator.ge),
    **dict.fromkeys(("Lt", "lt", "less"), operator.lt),
    **dict.fromkeys(("LtE", "le", "less_equal"), operator.le),
}
"""Comparisons by their names in Python's syntax trees and in torch."""

_SWAPPED = {"Gt": "Lt", "GtE": "LtE", "Lt": "Gt", "LtE": "GtE"}

_LEAVES = (
    *(ast.Return, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Match),
)
"""Statements that leave a function, or bind names that are no ``ast.Name``."""


@dataclass(frozen=True, slots=True)
class Question:
    """A statement at which a frame may be.

    Attributes:
        asking: the part of its test or of its iterable that asks.
        is_negated: whether that part is behind ``not``.
        parents: the parent of every node of the file.
    """

    statement: Any
    asking: ast.expr
    is_negated: bool
    parents: dict[ast.AST, ast.AST]


def passing_truth(frame: FrameType) -> bool | None:
    """Return the truth with which a statement goes on if its other branch raises, or None."""
    for question in _questions(frame, ast.If, ast.Assert):
        statement = question.statement
        raises = not isinstance(statement, ast.Assert) and _raises(statement.body)
        if isinstance(statement, ast.Assert) or raises != _raises(statement.orelse):
            return raises == question.is_negated
    return None


def lines_of_branch(frame: FrameType, nonempty: bool | None = None) -> range | None:
    """Return lines of the work that a statement leaves out where a selection is empty: its branch,
    or the rest of its loop after ``continue``. None for statements that do anything else.

    Args:
        nonempty: the truth of what is asked if there are entries; None if their number is asked.
    """
    for question in _questions(frame, ast.If):
        statement, asking = question.statement, question.asking
        truth = _truth_of_length(asking) if nonempty is None else nonempty
        work, works, loop = statement.body, True, question.parents[statement]
        if isinstance(work[0], ast.Continue) and isinstance(loop, ast.For):
            works = False
            work = [part for part in loop.body if part.lineno > statement.lineno]
        elif any(isinstance(node, ast.Continue) for part in work for node in ast.walk(part)):
            continue
        is_all = asking in (statement.test, getattr(statement.test, "operand", None))
        is_asked = is_all and truth is not None and works == (truth != question.is_negated)
        if not is_asked or not _adds_nothing(statement.orelse):
            continue
        if _is_closed(work, question.parents, frame):
            return range(work[0].lineno, work[-1].end_lineno + 1)
    return None


def lines_of_loop(frame: FrameType) -> range | None:
    """Return lines of a loop over entries of a value that a frame has just computed, or None."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "GET_ITER":
        for question in _questions(frame, ast.For):
            loop = question.statement
            if _is_closed([loop], question.parents, frame):
                return range(loop.lineno, loop.end_lineno + 1)
    return None


@lru_cache(maxsize=4)
def _parsed(source: str) -> tuple[ast.Module, dict[ast.AST, ast.AST]]:
    tree = ast.parse(source)
    return tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _questions(frame: FrameType, *kinds: type[ast.stmt]) -> Iterator[Question]:
    """Generate the statements of these kinds at which a frame may be, once for each operand."""
    code = frame.f_code
    try:
        tree, parents = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError):
        return
    # A call of ``bool`` or ``all`` asks itself, a jump for what the instruction before it computed.
    positions, at = list(code.co_positions()), frame.f_lasti // 2
    asked = positions[max(at - 1, 0) : at + 1]
    for statement in ast.walk(tree):
        if isinstance(statement, kinds):
            test: Any = getattr(statement, "iter" if isinstance(statement, ast.For) else "test")
            for operand, is_negated in _operands(test):
                sides = (getattr(operand, "left", None), *getattr(operand, "comparators", ()))
                part: Any = next(filter(_is_length, sides), operand)
                position = part.lineno, part.end_lineno, part.col_offset, part.end_col_offset
                if position in asked:
                    yield Question(statement, operand, is_negated, parents)


def _operands(test: ast.expr, is_negated: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """Generate parts of a test whose truth Python asks for, and whether each is behind ``not``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not is_negated)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _operands(operand, is_negated)
    else:
        yield test, is_negated


def _raises(branch: list[ast.stmt]) -> bool:
    """Return True for a branch that can only end in an exception."""
    inside = (node for statement in branch for node in ast.walk(statement))
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in inside)
    return bool(branch) and isinstance(branch[-1], ast.Raise) and not leaves


def _adds_nothing(branch: list[ast.stmt]) -> bool:
    """Return True for no statements, and for those that add zeros alone, as ``y += 0 * p.sum()``
    does to give parameters that nothing reaches a gradient.
    """
    for part in branch:
        if isinstance(part, ast.If):
            if not (_adds_nothing(part.body) and _adds_nothing(part.orelse)):
                return False
            continue
        value = getattr(part, "value", None)
        is_product = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)
        factors = [getattr(value, side, None) for side in ("left", "right")]
        is_zero = any(isinstance(f, ast.Constant) and f.value == 0 for f in factors)
        is_added = isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Add)
        if not (is_added and is_product and is_zero):
            return False
    return True


def _truth_of_length(operand: ast.expr) -> bool | None:
    """Return the truth that a length, or its comparison, has for all lengths but zero, or None."""
    if not isinstance(operand, ast.Compare):
        return True
    name, number = type(operand.ops[0]).__name__, operand.comparators[0]
    if _is_length(number):  # 0 < len(x)
        name, number = _SWAPPED.get(name, name), operand.left
    is_one = len(operand.ops) == 1
    return truth_if_compared(name, getattr(number, "value", None)) if is_one else None


def _is_length(part: Any) -> bool:
    return isinstance(part, ast.Call) and _name(part.func) == "len"


def truth_if_compared(name: str, number: Any) -> bool | None:
    """Return the truth that a comparison with a number has for all counts but zero, or None."""
    if name not in COMPARED or type(number) is not int:
        return None
    return truth_unless_zero(lambda count: COMPARED[name](count, number))


def truth_unless_zero(truth: Callable[[int], bool]) -> bool | None:
    """Return the truth that all counts but zero have, if zero has the other one; else None."""
    zero, *more = map(truth, (0, 1, 2, 3))
    return more[0] if len({*more}) == 1 and more[0] != zero else None


def _is_closed(work: list[ast.stmt], parents: dict[ast.AST, ast.AST], frame: FrameType) -> bool:
    """Return True if work does not leave its function, and nothing else reads a name, an attribute
    or an entry that it assigns to. Writes to tensors are left to the traced graph.
    """
    function: Any = work[0] if work else None
    while function is not None and not isinstance(function, ast.FunctionDef):
        function = parents.get(function)
    if function is None:
        return False
    everywhere = list(ast.walk(function))
    if any(isinstance(node, ast.Global | ast.Nonlocal) for node in everywhere):
        return False
    inside = {node for statement in work for node in ast.walk(statement)}
    tensors = {name for name, v in frame.f_locals.items() if isinstance(v, torch.Tensor)}
    assigned = set()
    for node in inside:
        is_call = isinstance(node, ast.Expr) and not _is_in_place(node.value)
        owner = getattr(getattr(node, "func", None), "value", None)  # of parts.append(y)
        is_kept = isinstance(owner, ast.Name) and isinstance(
            frame.f_locals.get(owner.id), list | dict | set
        )
        if is_call or is_kept or isinstance(node, _LEAVES):
            return False
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            changed: Any = node.value if isinstance(node, ast.Subscript) else node
            is_write = changed is not node or isinstance(parents[node], ast.AugAssign)
            if is_write and _name(changed) in tensors:
                continue  # out[rows] = y, out += y
            if isinstance(node, ast.Subscript | ast.Attribute):
                return False
            assigned.add(_name(node))
    names = [node for node in everywhere if isinstance(node, ast.Name)]
    elsewhere = {name.id for name in names if name not in inside}
    elsewhere |= {node.arg for node in everywhere if isinstance(node, ast.arg)}
    read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    return not assigned & elsewhere & read


def _name(value: ast.AST) -> str:
    return value.id if isinstance(value, ast.Name) else ""


def _is_in_place(value: ast.expr) -> bool:
    """Return True for a call ``x.add_(y)``, and for a text."""
    called = value.func if isinstance(value, ast.Call) else None
    is_method = isinstance(called, ast.Attribute) and called.attr.endswith("_")
    return is_method or isinstance(value, ast.Constant)
