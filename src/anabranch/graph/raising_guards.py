"""Checks of the data that do nothing but raise, which a captured program goes without.

``if labels.max() >= 10: raise`` needs the value of a tensor in Python, so it has no graph; but only
one of its branches goes on. While a module is traced, the truth of a tensor in such a check is what
lets the forward go on, found in the source line that asks::

    if not x.isfinite().all():      the branch raises     ->  the test is false, so what is inside
        raise ValueError                                      of ``not`` is true
    assert (a < b).all()                                  ->  the test is true

A test that chooses between two ways to go on is left alone: the operations would differ from batch
to batch.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_TORCH = torch.__path__[0]


@contextlib.contextmanager
def without_raising_guards(left_out: set[str]) -> Iterator[None]:
    """Inside, traced forwards go past checks that raise; ``left_out`` gets file and line of each.

    A number that a tensor is asked for (``item``) is compared with numbers, so its truth is asked
    of a symbol.
    """
    tensors: Any = torch.Tensor
    symbols: Any = torch.SymBool
    tensor_truth, symbol_truth = tensors.__bool__, symbols.__bool__

    def truth_of_tensor(tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor) and not _is_in_torch(sys._getframe(1)):
            chosen = _goes_on(sys._getframe(1), left_out)
            if chosen is not None:
                return chosen
        return bool(tensor_truth(tensor))

    def truth_of_symbol(symbol: torch.SymBool) -> bool:
        chosen = None
        if not _is_in_torch(sys._getframe(1)) and _depends_on_data(symbol):
            chosen = _goes_on(sys._getframe(1), left_out)
        return bool(symbol_truth(symbol)) if chosen is None else chosen

    tensors.__bool__, symbols.__bool__ = truth_of_tensor, truth_of_symbol
    try:
        yield
    finally:
        del tensors.__bool__  # inherited
        symbols.__bool__ = symbol_truth


def _is_in_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)


def _depends_on_data(symbol: Any) -> bool:
    """True for a symbol whose number the tracer does not know."""
    free = getattr(symbol.node.expr, "free_symbols", ())
    return any(str(name).startswith(("u", "zuf", "zf")) for name in free)


def _goes_on(frame: FrameType, left_out: set[str]) -> bool | None:
    """The truth with which the statement that a frame is at goes on, None where both do."""
    code, line = frame.f_code, frame.f_lineno
    lines = _test_lines(code, line)
    jump = _jump(code, frame.f_lasti)
    if lines is None or jump is None:
        return None
    instructions, i = jump
    ends = {truth: _ends(instructions, i, truth, lines) for truth in (True, False)}
    # Best is what only goes on, then what may.
    chosen = min(ends, key=lambda truth: ("goes on" not in ends[truth], "raises" in ends[truth]))
    if ends[True] == ends[False] or "goes on" not in ends[chosen]:
        return None
    place, text = f"{code.co_filename}:{line}", linecache.getline(code.co_filename, line).strip()
    left_out.add(f"{place} ({text})" if text else place)
    return chosen


def _test_lines(code: CodeType, line: int) -> range | None:
    """The lines of the test around a line, of a statement that may raise."""
    try:
        source, _ = inspect.findsource(code)
        tree = ast.parse("".join(source))
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert):
            lines = range(node.lineno, (node.test.end_lineno or node.lineno) + 1)
            if line in lines:
                return lines
    return None


def _jump(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int] | None:
    """The instructions of code, and the place of the jump that asks for the truth at an offset."""
    instructions = list(dis.get_instructions(code))
    first = next(i for i, instruction in enumerate(instructions) if instruction.offset >= offset)
    for i, instruction in enumerate(instructions[first : first + 3], first):
        if _condition(instruction) is not None:
            return instructions, i
        if instruction.opname not in ("TO_BOOL", "PRECALL", "CALL", "CACHE", "NOP"):
            return None
    return None


def _condition(instruction: dis.Instruction) -> bool | None:
    """The truth at which an instruction jumps, None for one that does not ask."""
    name = instruction.opname
    if not (name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    return name.endswith("TRUE")


def _ends(instructions: list[dis.Instruction], i: int, truth: bool, lines: range) -> frozenset[str]:
    """Possible ends of a test, ``raises`` and ``goes on``, when a jump is answered with a truth."""
    at = {instruction.offset: k for k, instruction in enumerate(instructions)}
    i = at[instructions[i].argval] if _condition(instructions[i]) is truth else i + 1
    while i < len(instructions):
        instruction = instructions[i]
        line = instruction.positions.lineno if instruction.positions is not None else None
        if instruction.opname == "RAISE_VARARGS":
            return frozenset(("raises",))
        if _condition(instruction) is not None or instruction.opname.startswith("RETURN"):
            if _condition(instruction) is None or line not in lines:
                return frozenset(("goes on",))
            either = (_ends(instructions, i, answer, lines) for answer in (True, False))
            return frozenset[str]().union(*either)
        if instruction.opname.startswith("JUMP_BACKWARD") or "FOR_ITER" in instruction.opname:
            return frozenset(("goes on",))
        i = at[instruction.argval] if instruction.opname.startswith("JUMP") else i + 1
    return frozenset(("goes on",))
