"""Statements of the source that ask for the truth or the entries of what a frame computes."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch

Lines = tuple[int, int]
"""The first line and the last."""

_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt},
    **{ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le},
}
_LEAVES = (
    *(ast.Return, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Match),
)
"""Statements that end a function, or bind names that are none of the nodes."""


_KEPT = (list, dict, set)


class Question(NamedTuple):
    """A statement, the part of it that asks, whether that stands behind ``not``, and the parents of
    all nodes of the file.
    """

    statement: Any
    operand: ast.expr
    is_negated: bool
    parents: dict[ast.AST, ast.AST]


def place_of(frame: FrameType) -> str:
    """File, line and text of the line that a frame is at."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({text})" if text else "")


def passing_truth(frame: FrameType) -> bool | None:
    """The truth with which a statement goes on whose other branch raises; None for others."""
    for question in _questions(frame, ast.If, ast.Assert):
        statement = question.statement
        raises = not isinstance(statement, ast.Assert) and _raises(statement.body)
        if isinstance(statement, ast.Assert) or raises != _raises(statement.orelse):
            return raises == question.is_negated
    return None


def lines_of_branch(frame: FrameType, nonempty: bool | None) -> Lines | None:
    """Lines of the work that a statement leaves out where a selection is empty: its branch, or what
    follows a ``continue`` in its loop. None for statements that do anything else.

    Args:
        nonempty: the truth of what is asked where there are entries; None for their number, of
            which the source says it.
    """
    for statement, operand, is_negated, parents in _questions(frame, ast.If):
        truth = _of_entries(operand) if nonempty is None else nonempty
        loop: Any = parents[statement]
        work, works = statement.body, True
        if isinstance(work[0], ast.Continue):
            if not isinstance(loop, ast.For) or statement not in loop.body:
                continue
            work, works = loop.body[loop.body.index(statement) + 1 :], False
        elif any(isinstance(node, ast.Continue) for part in work for node in ast.walk(part)):
            continue
        is_all = operand in (statement.test, getattr(statement.test, "operand", None))
        if statement.orelse or not is_all or truth is None or works == (truth == is_negated):
            continue
        if _is_closed(work, parents, frame):
            return work[0].lineno, work[-1].end_lineno
    return None


def lines_of_loop(frame: FrameType) -> Lines | None:
    """Lines of a loop over the entries of what a frame has just computed; None for others."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "GET_ITER":
        for statement, _, _, parents in _questions(frame, ast.For):
            if _is_closed([statement], parents, frame):
                return statement.lineno, statement.end_lineno
    return None


@lru_cache(maxsize=4)
def _parsed(source: str) -> tuple[ast.Module, dict[ast.AST, ast.AST]]:
    tree = ast.parse(source)
    return tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _questions(frame: FrameType, *kinds: type[ast.stmt]) -> Iterator[Question]:
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
                left = getattr(operand, "left", None)  # of len(x) == 0
                is_length = isinstance(left, ast.Call) and _name(left.func) == "len"
                part: Any = left if is_length else operand
                place = part.lineno, part.end_lineno, part.col_offset, part.end_col_offset
                if place in asked:
                    yield Question(statement, operand, is_negated, parents)


def _operands(test: ast.expr, is_negated: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """Parts of a test whose truth Python asks for, each with whether it stands behind ``not``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not is_negated)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _operands(operand, is_negated)
    else:
        yield test, is_negated


def _raises(branch: list[ast.stmt]) -> bool:
    """True for a branch that has no other end than an exception."""
    inside = (node for statement in branch for node in ast.walk(statement))
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in inside)
    return bool(branch) and isinstance(branch[-1], ast.Raise) and not leaves


def _of_entries(operand: ast.expr) -> bool | None:
    """The truth of a length, or of its comparison with a number, that one and more have, if none
    has another.
    """
    if not isinstance(operand, ast.Compare):
        return True
    number = getattr(operand.comparators[0], "value", None)
    compare = _COMPARED.get(type(operand.ops[0]))
    if compare is None or type(number) is not int or len(operand.ops) > 1:
        return None
    return truth_of_entries(lambda count: compare(count, number))


def truth_of_entries(truth: Callable[[int], bool]) -> bool | None:
    """The truth that any number of entries has but none; None if they differ."""
    none, *some = map(truth, (0, 1, 2, 3, 720_720))  # the last for remainders
    return some[0] if len({*some}) == 1 and some[0] != none else None


def _is_closed(work: list[ast.stmt], parents: dict[ast.AST, ast.AST], frame: FrameType) -> bool:
    """True if work does not end its function, and nothing else reads a name that it binds, an
    attribute or an entry. Writes to a tensor are in the graph.
    """
    function: Any = work[0] if work else None
    while function is not None and not isinstance(function, ast.FunctionDef):
        function = parents.get(function)
    if function is None:
        return False
    if any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(function)):
        return False
    inside = {node for statement in work for node in ast.walk(statement)}
    tensors = {name for name, v in frame.f_locals.items() if isinstance(v, torch.Tensor)}
    bound: set[str] = set()
    for node in inside:
        is_kept = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if isinstance(node, _LEAVES) or (is_kept and isinstance(node, ast.Attribute)):
            return False
        if isinstance(node, ast.Subscript) and is_kept and _name(node.value) not in tensors:
            return False
        if isinstance(node, ast.Expr) and not _is_in_place(node.value):
            return False
        owner = getattr(getattr(node, "func", None), "value", None)  # of parts.append(y)
        if isinstance(owner, ast.Name) and isinstance(frame.f_locals.get(owner.id), _KEPT):
            return False
        if isinstance(node, ast.Name) and is_kept:
            # ``out += y`` of a tensor writes to it.
            in_place = isinstance(parents[node], ast.AugAssign) and node.id in tensors
            bound.update(() if in_place else (node.id,))
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in bound]
    elsewhere = {n.id for n in names if n not in inside}
    elsewhere |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    loaded = [n for n in names if isinstance(n.ctx, ast.Load)]
    return not any(n not in inside or n.id in elsewhere for n in loaded)


def _name(value: ast.expr) -> str:
    return value.id if isinstance(value, ast.Name) else ""


def _is_in_place(value: ast.expr) -> bool:
    """True for a call ``x.add_(y)``, and for a text."""
    called = value.func if isinstance(value, ast.Call) else None
    is_method = isinstance(called, ast.Attribute) and called.attr.endswith("_")
    return is_method or isinstance(value, ast.Constant)
