"""Classes of ``torch.autograd.Function`` as operators, so that a trace keeps their backward.

A trace sees what a forward calls, so the backward would be that of the forward's operations. As an
operator of a library the class is one call, which runs its forward and backward as they are::

    y = Rounded.apply(x, 8)        ->        y = torch.ops.autograd_function.Rounded(x, 8)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.graph.flat_program import is_random

_LIBRARY: Any = torch.library.Library("autograd_function", "DEF")  # type: ignore[no-untyped-call]
_TYPES: dict[str, Any] = {"Tensor": torch.Tensor, "SymInt": int | torch.SymInt, "float": float}
_FIXED = (bool, str, type(None), torch.dtype, torch.device)
"""Types of arguments that are fixed in an operator, so each value has an operator of its own."""

_operators: dict[Any, Callable[..., Any]] = {}


def _is_fixed(value: Any) -> bool:
    are_numbers = isinstance(value, tuple) and all(isinstance(v, int | float) for v in value)
    return are_numbers or isinstance(value, _FIXED)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for calls that draw random numbers, which have to be calls of the program."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= is_random(func)
        return func(*args, **(kwargs or {}))


def operator_of(
    function: Any, arguments: tuple[Any, ...], run: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Return a callable that runs a class of functions as an operator; None if it cannot be one: it
    takes or returns something else than tensors and numbers, writes to tensors that it takes, needs
    their values, or draws random numbers.

    Args:
        run: ``apply`` of the class itself.
    """
    fixed = {i: value for i, value in enumerate(arguments) if _is_fixed(value)}
    passed = [value for i, value in enumerate(arguments) if i not in fixed]
    types = [next((t for t, kind in _TYPES.items() if isinstance(v, kind)), "") for v in passed]
    key = function, *types, repr(fixed)  # in which 2, 2.0 and True differ, and 0.0 and -0.0
    if key in _operators or "" in types:
        return _operators.get(key)
    tensors = [value for value in passed if isinstance(value, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    draws = _Draws()  # type: ignore[no-untyped-call]
    try:
        with disable_proxy_modes_tracing(), draws:
            results = run(*arguments)
    except Exception:  # such as kernels that read memory, which tensors of a trace lack
        return None
    outputs = results if isinstance(results, tuple) else (results,)
    is_own = [isinstance(r, torch.Tensor) and all(r is not t for t in tensors) for r in outputs]
    if draws.seen or not all(is_own) or before != [tensor._version for tensor in tensors]:
        return None
    places = [i for i in range(len(arguments)) if i not in fixed]

    def kernel(*values: Any) -> Any:
        by_place = fixed | dict(zip(places, values, strict=True))
        return run(*(by_place[i] for i in range(len(by_place))))

    plain = re.sub(r"\W", "_", function.__name__, flags=re.ASCII)
    names = (plain + f"_{i}" * (i > 1) for i in count(1))
    name = next(n for n in names if not hasattr(torch.ops.autograd_function, n))
    returns = ", ".join("Tensor" for _ in outputs)
    schema = ", ".join(f"{kind} x{i}" for i, kind in zip(places, types, strict=True))
    _LIBRARY.define(f"{name}({schema}) -> " + (f"({returns})" if results is outputs else returns))
    for dispatch_key in ("Autograd", "CompositeExplicitAutograd"):
        _LIBRARY.impl(name, kernel, dispatch_key)
    operator = getattr(torch.ops.autograd_function, name).default
    _operators[key] = lambda *values: operator(*(values[i] for i in places))
    return _operators[key]
