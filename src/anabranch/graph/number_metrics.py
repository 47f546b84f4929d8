"""Metrics that a forward returns as numbers, as the tensors that these are of.

A number such as ``hits.sum().item() / len(y)`` stops what computes it until the value is there, and
planning has no values. So the arithmetic is done with tensors.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from anabranch.errors import CaptureError
from anabranch.graph.export import user_line
from anabranch.graph.flat_program import FlatProgram

_aten = torch.ops.aten
_ARITHMETIC = {
    operator.add: _aten.add.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.truediv: _aten.div.Tensor,
}
_COMMUTE = (operator.add, operator.mul)


def numbers_as_tensors(program: FlatProgram, names: tuple[str, ...]) -> FlatProgram:
    """The same program with tensors in place of the numbers that are returned; ``names`` of what is
    returned.

    Raises:
        CaptureError: if a number is computed otherwise than with + - * /.
    """
    for name, output in zip(names, program.outputs, strict=True):
        if output.target is _aten.scalar_tensor.default and isinstance(output.args[0], fx.Node):
            with program.graph.inserting_before(output):
                output.args = (_tensor(output.args[0], name, output), torch.float32)
            output.target, output.kwargs = _aten.to.dtype, {}
    program.drop_dead()
    return program


def _tensor(number: Any, metric: str, output: fx.Node) -> fx.Node:
    """The tensor that a number is of, computed just before the output."""
    if number.target is _aten.item.default:
        asked: fx.Node = number.args[0]
        return asked
    left, *right = number.args
    if number.target in _COMMUTE and not isinstance(left, fx.Node):
        left, right = right[0], [left]
    if number.target not in _ARITHMETIC or not isinstance(left, fx.Node):
        raise CaptureError(
            f"the module's forward computes the metric {metric} from numbers that it asks tensors "
            f"for ({user_line(number)}); leave .item() out there and compute it with tensors: a "
            "metric may be a scalar tensor"
        )
    operands = [_tensor(n, metric, output) if isinstance(n, fx.Node) else n for n in (left, *right)]
    found = output.graph.call_function(_ARITHMETIC[number.target], tuple(operands))
    found.meta.update(output.meta)
    return found
