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
from anabranch.graph.flat_program import FlatProgram, insert

_aten = torch.ops.aten
_ARITHMETIC: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.truediv: _aten.div.Tensor,
    operator.neg: _aten.neg.default,
}
_BEHIND: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.sub: _aten.rsub.Scalar,
}
"""The same where the first operand is a plain number, which is then the second."""


def numbers_as_tensors(program: FlatProgram, names: tuple[str, ...]) -> FlatProgram:
    """The same program with tensors in place of the numbers that are returned; ``names`` of what is
    returned.

    Raises:
        CaptureError: if a number is computed otherwise than with + - * /.
    """
    for name, output in zip(names, program.outputs, strict=True):
        if output.target is _aten.scalar_tensor.default and isinstance(output.args[0], fx.Node):
            number = _tensor(output.args[0], name, output)
            output.replace_all_uses_with(insert(output, _aten.to.dtype, number, torch.float32))
    program.drop_dead()
    return program


def _tensor(number: Any, metric: str, output: fx.Node) -> fx.Node:
    """The tensor that a number is of, computed just before the output."""
    if number.target is _aten.item.default:
        # One number, which neither overflows nor is as coarse as those of small types.
        return insert(output, _aten.sum.default, *number.args, dtype=torch.float64)
    terms, known = list(number.args), _ARITHMETIC
    if not isinstance(terms[0], fx.Node):
        terms, known = terms[::-1], _BEHIND
    if number.target not in known:
        raise CaptureError(
            f"the module's forward computes the metric {metric} from numbers that it asks tensors "
            f"for ({user_line(number)}); leave .item() out there and compute it with tensors: a "
            "metric may be a scalar tensor"
        )
    operands = [_tensor(n, metric, output) if isinstance(n, fx.Node) else n for n in terms]
    return insert(output, known[number.target], *operands)
