"""Numbers in the programs of one module for several numbers of samples.

A model that cannot be captured for any number of samples is traced for each. The operations are
compared; their numbers have to follow the samples in one way as well::

    x.mean() * 2                           the same for all
    x.sum() / len(x)                       a power of the samples, or a multiple and a constant
    x.mean() * (2 if len(x) > 5 else 1)    jumps: slices of a batch would have another loss than it

Sizes are left out: they have to fit the tensors, or nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from anabranch.graph.flat_program import FlatProgram

_ROUNDING = 1e-6


def jump(
    program: FlatProgram, twice: FlatProgram, other: FlatProgram
) -> tuple[fx.Node, Any, Any] | None:
    """The first call of ``other`` with a number that does not follow from the programs for some
    samples and for twice as many; with the number of the first of them that it contradicts.
    """
    ratio = other.samples / program.samples
    for calls in zip(program.calls, twice.calls, other.calls, strict=True):
        numbers = [tree_leaves(list(_values(call))) for call in calls]
        if len({len(values) for values in numbers}) > 1:
            continue  # lists of tensors
        for a, b, value in zip(*numbers, strict=True):
            if not _follows(a, b, value, ratio):
                return calls[2], a if value != a else b, value
    return None


def _values(call: fx.Node) -> Iterator[Any]:
    """Arguments that are neither tensors nor sizes."""
    schema = getattr(call.target, "_schema", None)
    named = [] if schema is None else schema.arguments
    kinds = {argument.name: str(argument.real_type) for argument in named}
    positional = zip([argument.name for argument in named], call.args, strict=False)
    for name, value in (*positional, *call.kwargs.items()):
        if "SymInt" not in kinds[name] and not isinstance(value, fx.Node | torch.device):
            yield value


def _follows(a: Any, b: Any, value: Any, ratio: float) -> bool:
    if any(isinstance(number, fx.Node | torch.device) for number in (a, b, value)):
        return True
    if not all(type(number) in (int, float) for number in (a, b, value)):
        return bool(a == b == value)
    if a == b:
        return bool(value == a)
    expected = [a + (b - a) * (ratio - 1)]
    if a * b > 0:
        expected.append(a * ratio ** math.log2(b / a))
    is_law = any(math.isclose(value, number, rel_tol=_ROUNDING) for number in expected)
    return is_law or value not in (a, b)  # other laws, 1 / (n - 1), do not say a number twice
